"""The tutorials work as printed: every command and every program of ``docs/tutorials`` runs, for two steps."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs/tutorials").glob("*.md"))
SHORT = "config.TRAINER.MAX_STEPS=2 config.NEAREST_NEIGHBOR.USE_KNN=false"
SOAKED = ("first_run", "your_photos", "when_memory_is_short")
TRAINING = re.compile(r"vissl-zero (-m )?config=(?!benchmark/knn)(?!.*--dry-run)")


def blocks(page: Path, language: str) -> list[str]:
    """Texts of the code blocks of a language ("" for commands)."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    return [text for word, text in found if word == language]


def commands(page: Path) -> list[str]:
    """The command lines of a page, in order."""
    return [line for block in blocks(page, "") for line in block.splitlines()]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with photos, with labeled images, and with the two commands on its PATH."""
    for path in ("photos", "train/cat", "train/dog", "test/cat", "test/dog"):
        (tmp_path / path).mkdir(parents=True)
        for index in range(64 if path == "photos" else 8):
            Image.new("RGB", (64, 64), (3 * index, 90, 0)).save(tmp_path / path / f"{index}.png")
    (tmp_path / "bin").mkdir()
    for name, module in (("vissl-zero", "vissl_zero.cli"), ("torchrun", "torch.distributed.run")):
        (tmp_path / "bin" / name).write_text(f'#!/bin/sh\nexec {sys.executable} -m {module} "$@"\n')
        (tmp_path / "bin" / name).chmod(0o755)
    return tmp_path


def write_files(page: Path, folder: Path) -> None:
    """The files that a page shows; their first or second line names them."""
    for text in [*blocks(page, "python"), *blocks(page, "yaml")]:
        if match := re.match(r"(?:# @package _global_\n)?# ([\w/]+\.(?:py|yaml))\b", text):
            (folder / match[1]).parent.mkdir(parents=True, exist_ok=True)
            (folder / match[1]).write_text(text)
    for text in blocks(page, "json"):
        (folder / "configs/config/dataset_catalog.json").write_text(text)


def start(line: str, folder: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "HOME": str(folder), "PATH": f"{folder}/bin:{os.environ['PATH']}"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    shown = subprocess.PIPE
    return subprocess.Popen(
        ["bash", "-ec", line], cwd=folder, env=environment, stdout=shown, stderr=subprocess.STDOUT, text=True
    )


def finish(line: str, process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0 and "Traceback" not in output, f"{line}\n{output[-3000:]}"
    return output


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "page",
    # The slow tests run the README's first lines, two notebooks and the commands about planning instead.
    [pytest.param(page, marks=pytest.mark.soak if page.stem in SOAKED else pytest.mark.slow) for page in PAGES],
    ids=lambda page: page.stem,
)
def test_a_tutorial_runs_as_printed(page, folder):
    write_files(page, folder)
    machines = []
    said = {}
    for line in commands(page):
        typed = f"{line} {SHORT}" if TRAINING.match(line) else line
        if re.search(r"node_id=\d", line):  # the machines of one run wait for each other
            machines.append((line, start(typed, folder)))
            continue
        said[line] = finish(line, start(typed, folder))
    for line, process in machines:
        said[line] = finish(line, process)
    for text in blocks(page, "python"):
        if text.startswith("import"):
            (folder / "snippet.py").write_text(text)
            finish(text, start(f"{sys.executable} snippet.py", folder))
    if page.stem == "your_own_loop":
        assert "equal: 4 steps in float64" in said["torchrun --nproc-per-node 2 prove.py"]
        parts = [said[f"torchrun --nproc-per-node {ranks} complete.py {until}"] for ranks, until in ((2, 2), (1, 4))]
        shutil.rmtree(folder / "runs/own")
        line = "torchrun --nproc-per-node 2 complete.py 4"
        epochs = [re.findall(r"epoch \d: loss .*", text) for text in (*parts, finish(line, start(line, folder)))]
        assert epochs[0] + epochs[1] == epochs[2] and len(epochs[0]) == len(epochs[1]) == 2
    for line, output in said.items():
        if "--dry-run" in line:
            assert "nothing was started" in output, line


def test_the_tutorials_have_commands_to_run():
    assert len(PAGES) == 6 and all(commands(page) for page in PAGES)
