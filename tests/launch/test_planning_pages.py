"""The commands about planning that the pages print are accepted as printed; none of them trains."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.command_line import run_command
from vissl_zero.config.compose import compose

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ("plan.md", "fits.md", "scale.md", "cluster.md", "tutorials/when_memory_is_short.md")


def commands(page: str) -> list[str]:
    """List the commands of a page's blocks that plan, or that a dry run can rehearse; placeholders are filled in."""
    text = (DOCS / page).read_text().replace("\\\n", " ")
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    lines = [line for word, block in blocks if word in ("", "bash") for line in block.splitlines()]
    found = [line.replace("<recipe>", "digits/supervised") for line in lines if line.startswith("vissl-zero ")]
    return [line for line in found if line.split()[1] == "plan" or line.split()[1].startswith(("config=", "-m"))]


def test_pages_print_commands():
    assert [page for page in PAGES if not commands(page)] == ["scale.md"], "pages without commands"


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("line", [line for page in PAGES for line in commands(page)])
def test_planning_commands_are_accepted_as_printed(line, tmp_path):
    for folder in ("runs/last", "scratch"):
        (tmp_path / folder).mkdir(parents=True)
    for file in ("runs/last/config.user.yaml", "mine.yaml"):
        (tmp_path / file).write_text(compose("digits/swav", []).user_yaml())
    _, *words = shlex.split(line)
    if words[0] != "plan" and "--dry-run" not in words:
        words.append("--dry-run")
    done = run_command(*words, cwd=tmp_path, returncodes=(0, 1))  # 1: it does not fit
    assert "Traceback" not in done.stderr, line + done.stderr[-2000:]
