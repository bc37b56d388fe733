"""The notebooks of ``examples/`` run from start to end, and a notebook's stop button saves the run."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from jupyter_client.manager import KernelManager
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
CELL = """
import vissl_zero

words = {"config.NEAREST_NEIGHBOR.USE_KNN": False, "config.DISTRIBUTED.NUM_PROC_PER_NODE": 1}
run = vissl_zero.train("quickstart/swav_digits", {**words, "config.CHECKPOINT.DIR": "run", **MORE})
outcome = (run.exit_code, run.is_complete, run.summary.get("num_steps"))
"""


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_without_what_it_printed(path: Path) -> None:
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    assert cells and not any(cell.outputs or cell.execution_count for cell in cells)


@pytest.fixture
def _package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let kernels find this checkout, and show pictures as they do for people."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.delenv("MPLBACKEND", raising=False)


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("_package")
@pytest.mark.parametrize(
    ("name", "last"),
    [
        pytest.param("first_run", "MiB of tensors", marks=pytest.mark.slow),
        pytest.param("your_photos", "'knn_top1'", marks=pytest.mark.slow),
        # The tutorial of this name runs the same code.
        pytest.param("your_own_loop", "level 3, 2 ranks", marks=pytest.mark.soak),
    ],
)
def test_a_notebook_runs(name: str, last: str, tmp_path: Path) -> None:
    notebook = nbformat.read(ROOT / f"examples/{name}.ipynb", as_version=4)
    NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert last in str(notebook.cells[-1].outputs)
    assert not [output.text for output in outputs if output.get("name") == "stderr"]


def test_every_notebook_is_run() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["first_run", "your_own_loop", "your_photos"]


@pytest.fixture
def kernel(tmp_path: Path, _package: None) -> Iterator[tuple[KernelManager, Any]]:
    """A kernel as a notebook starts it, and the client that gives it cells."""
    manager = KernelManager()
    manager.start_kernel(cwd=str(tmp_path))
    client = manager.blocking_client()
    client.start_channels()
    client.wait_for_ready(timeout=60)
    yield manager, client
    client.stop_channels()
    manager.shutdown_kernel(now=True)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_stop_button_saves_and_the_same_cell_resumes(tmp_path: Path, kernel: tuple[KernelManager, Any]) -> None:
    manager, client = kernel
    asked = client.execute("MORE = {}\n" + CELL, user_expressions={"outcome": "outcome"})
    metrics = tmp_path / "run/metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.exists() and metrics.read_text().count("\n") >= 3) and time.monotonic() < deadline:
        time.sleep(0.1)
    manager.interrupt_kernel()
    assert outcome(client, asked) == "(130, False, None)"
    num_steps = metrics.read_text().count("\n") + 3
    more = {"config.TRAINER.MAX_STEPS": num_steps}
    asked = client.execute(f"MORE = {more}\n{CELL}", user_expressions={"outcome": "outcome"})
    assert outcome(client, asked) == f"(0, True, {num_steps})"
    assert metrics.read_text().count("\n") == num_steps


def outcome(client: Any, asked: str) -> str:
    """Wait for the cell's end; what its last variable holds."""
    while (reply := client.get_shell_msg(timeout=200))["parent_header"]["msg_id"] != asked:
        pass
    assert reply["content"]["status"] == "ok", reply["content"]
    return str(reply["content"]["user_expressions"]["outcome"]["data"]["text/plain"])
