"""The commands about planning that the pages print are accepted as printed; none of them trains."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

from vissl_zero.cli import main
from vissl_zero.config.compose import compose

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ("plan.md", "fits.md", "scale.md", "cluster.md")  # test_tutorials.py runs those of the tutorials


def printed(page: str) -> list[tuple[str, str]]:
    """List the commands of a page's blocks that plan, or that a dry run can rehearse, each with the output shown.

    Placeholders are filled in. The output is that of the block after a block of one command; empty: none is shown.
    """
    text = (DOCS / page).read_text().replace("\\\n", " ")
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    found: list[tuple[str, str]] = []
    for index, (word, block) in enumerate(blocks):
        if word in ("", "bash"):
            lines = [line.replace("<recipe>", "digits/supervised") for line in block.splitlines()]
            own = [line for line in lines if line.startswith("vissl-zero ")]
            after = blocks[index + 1] if index + 1 < len(blocks) else ("", "")
            shown = after[1] if after[0] == "text" and len(own) == 1 else ""
            found += [(line, shown) for line in own]
    kept = ("plan", "config=", "-m")
    # A search needs figures of training, so that no dry run can rehearse it.
    return [(line, shown) for line, shown in found if line.split()[1].startswith(kept) and "sweeper=" not in line]


def test_pages_print_commands():
    assert [page for page in PAGES if not printed(page)] == ["scale.md"], "pages without commands"


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("line", "shown"),
    # Plans of large transformers take up to a minute.
    [
        pytest.param(*pair, marks=pytest.mark.soak if "/vit_" in pair[0] else pytest.mark.slow)
        for page in PAGES
        for pair in printed(page)
    ],
)
def test_planning_commands_are_accepted_and_answer_as_printed(line, shown, tmp_path, monkeypatch, capsys):
    for folder in ("runs/last", "scratch"):
        (tmp_path / folder).mkdir(parents=True)
    for file in ("runs/last/config.user.yaml", "mine.yaml"):
        (tmp_path / file).write_text(compose("digits/swav", []).user_yaml())
    modules = re.findall(
        r"^```python\n# (\w+\.py)\n(.*?)^```$", (DOCS / "fits.md").read_text(), re.DOTALL | re.MULTILINE
    )
    for name, text in modules:
        (tmp_path / name).write_text(text)
    _, *words = shlex.split(line)
    if words[0] != "plan" and "--dry-run" not in words:
        words.append("--dry-run")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])  # the command adds its folder
    code = main(words)
    out, err = capsys.readouterr()
    assert code in (0, 1), out + err  # 1: it does not fit
    assert "Traceback" not in err, line + err[-2000:]
    for piece in re.split(r"\n|\.\.\.", shown):  # "...": more is printed there
        assert _plain(piece) in _plain(out), f"{line}\nanswers no more: {piece}\n{out[-2000:]}"


def _plain(text: str) -> str:
    """Join words by single blanks, and lines that a backslash continues."""
    return " ".join(text.replace("\\\n", " ").split())
