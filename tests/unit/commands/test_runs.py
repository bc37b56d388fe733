from __future__ import annotations

import json
import os
import shutil
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from tests.unit.reporting.example_run import make_plan, make_record
from vissl_zero.cli import main
from vissl_zero.launch.run_folder import RunLock
from vissl_zero.reporting.comparison import estimate, grouped, names_of, page, read_run
from vissl_zero.reporting.metrics_file import line
from vissl_zero.resolve.resolve import save_resolved


def make(
    root: Path, name: str, steps: int = 5, summary: dict[str, Any] | None = None, level: int = 0, seed: int = 0
) -> Path:
    """A run folder with real files."""
    folder = root / name
    folder.mkdir(parents=True)
    plan = make_plan(folder)
    plan.config.ZERO.LEVEL, plan.config.SEED_VALUE = level, seed
    save_resolved(plan, folder / "config.resolved.yaml")
    command = "vissl-zero config=quickstart/swav_digits config.ZERO.LEVEL=3"
    (folder / "config.user.yaml").write_text(f"config: {{}}\n# command: {command}\n")
    (folder / "metrics.jsonl").write_text("".join(f"{line(make_record(step))}\n" for step in range(1, steps + 1)))
    if summary is not None:
        content = {"recipe": "quickstart/swav_digits", "num_steps": steps, "loss_last": 1.5, **summary}
        (folder / "summary.json").write_text(json.dumps(content))
    return folder


def rows(root: Path, capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    assert main(["runs", str(root), "--json", *words]) == 0
    return list(json.loads(capsys.readouterr().out))


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    """One run of each state."""
    make(tmp_path, "done", summary={"knn_top1_after": 0.9})
    (make(tmp_path, "stopped") / "checkpoints/step_4").mkdir(parents=True)
    (make(tmp_path, "diverged") / "diverged.json").write_text('{"step": 4, "loss": "nan"}')
    killed = {"host": socket.gethostname(), "pid": os.getpid(), "born": "0", "job": ""}
    (make(tmp_path, "killed") / "run.lock").write_text(json.dumps(killed))
    waiting = make(tmp_path, "waiting", steps=0)
    (waiting / "slurm.json").write_text("{}")
    return tmp_path


def test_the_state_of_every_run_is_known(folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = {Path(row["folder"]).name: row for row in rows(folders, capsys)}
    assert {name: row["state"] for name, row in found.items()} == {
        "done": "done",
        "stopped": "stopped",
        "diverged": "failed",
        "killed": "failed",
        "waiting": "waiting",
    }
    assert found["diverged"]["why"] == "loss nan at step 4"
    assert "killed" in found["killed"]["why"]
    assert found["done"]["figures"] == {"loss_last": 1.5, "knn_top1_after": 0.9} and found["done"]["resume"] == ""
    assert found["stopped"]["step"] == 5
    assert found["stopped"]["resume"] == (
        f"vissl-zero config=quickstart/swav_digits config.ZERO.LEVEL=3 config.CHECKPOINT.DIR={folders / 'stopped'}"
    )


def test_a_run_whose_process_lives_is_running(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make(tmp_path, "alive")
    child = os.fork()
    if not child:
        RunLock(folder)
        (folder / "ready").touch()
        time.sleep(60)
        os._exit(0)
    try:
        while not (folder / "ready").exists():
            time.sleep(0.01)
        (row,) = rows(tmp_path, capsys)
        assert row["state"] == "running" and str(child) in row["why"] and row["resume"] == ""
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
    (row,) = rows(tmp_path, capsys)
    assert row["state"] == "failed"


def test_filters_and_order(folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert {row["state"] for row in rows(folders, capsys, "--state", "failed")} == {"failed"}
    assert rows(folders, capsys, "--recipe=no_such") == []
    best_first = rows(folders, capsys, "--sort", "knn_top1_after")
    assert Path(best_first[0]["folder"]).name == "done"
    assert main(["runs", str(folders)]) == 0
    assert "resume: vissl-zero" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["--stat", "done"], ["--state", "dead"], ["/no/such/folder"]])
def test_a_wrong_word_is_one_sentence(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", *words]) == 2
    assert words[0].strip("-")[:4] in capsys.readouterr().err


def six(root: Path) -> list[Path]:
    return [
        make(
            root,
            f"{level}-{seed}",
            summary={"knn_top1_after": 0.8 + level / 100 + seed / 1000, "images_per_s": 100.0},
            level=level,
            seed=seed,
        )
        for level in (0, 3)
        for seed in (0, 1, 2)
    ]


def test_seeds_of_a_recipe_are_joined(tmp_path: Path) -> None:
    groups = grouped([read_run(folder) for folder in six(tmp_path)])
    assert [(group.name, len(group.runs)) for group in groups] == [("LEVEL=0", 3), ("LEVEL=3", 3)]


def test_what_watches_a_run_makes_no_other_experiment(tmp_path: Path) -> None:
    runs = [read_run(folder) for folder in six(tmp_path)]
    for run in runs[::2]:
        run.config["HOOKS.LOGGERS.0"] = "csv"
    assert [(group.name, len(group.runs)) for group in grouped(runs)] == [("LEVEL=0", 3), ("LEVEL=3", 3)]


def test_the_interval_holds_the_mean_and_stays_within_the_values() -> None:
    found = estimate([1.0, 2.0, 6.0])
    assert found.low is not None and found.high is not None
    assert 1.0 <= found.low < found.mean == 3.0 < found.high <= 6.0
    assert estimate([1.0, 2.0, 6.0]) == found
    assert estimate([4.0]).low is None


def test_compare_prints_what_differs_and_writes_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    six(tmp_path)
    shutil.copy(Path(__file__).parents[3] / "docs/pictures/report.png", tmp_path / "0-0/report.png")
    out = tmp_path / "page.html"
    assert main(["compare", str(tmp_path), "--html", str(out)]) == 0
    text = capsys.readouterr().out
    assert "ZERO.LEVEL" in text and "SEED_VALUE" in text and "LOG_FREQUENCY" not in text
    assert "80.1 % [80.0 %, 80.2 %]" in text
    written = out.read_text()
    assert "data:image/png;base64," in written
    assert "http" not in written.replace("http://www.w3.org/2000/svg", "")


def test_the_page_joins_seeds_in_a_curve_and_stays_readable_on_small_and_dark_screens(tmp_path: Path) -> None:
    written = page([read_run(folder) for folder in six(tmp_path)])
    data = json.loads(written.split('id="data">')[1].split("</script>")[0])
    assert [group["name"] for group in data["groups"]] == ["LEVEL=0 (3 seeds)", "LEVEL=3 (3 seeds)"]
    assert [curve["name"] for curve in data["groups"][1]["curves"]] == ["seed 0", "seed 1", "seed 2"]
    assert all(len(curve["points"]) == 5 for group in data["groups"] for curve in group["curves"])
    assert "<span>80.1 %</span> <span class=interval>[80.0 %, 80.2 %]</span>" in written
    assert "<td><span>100</span></td>" in written  # equal in all seeds: no interval
    assert "width=device-width" in written and "prefers-color-scheme:dark" in written and "svg.clientWidth" in written
    assert "$" not in written.replace("$title", "")  # nothing is left to fill in


def test_runs_that_differ_in_much_are_named_by_their_folders(tmp_path: Path) -> None:
    folders = [make(tmp_path / "a", "run", summary={}, level=0), make(tmp_path / "b", "run", summary={}, level=3)]
    runs = [read_run(folder) for folder in folders]
    assert [group.name for group in grouped(runs)] == ["LEVEL=0", "LEVEL=3"]
    runs[1].config.update({f"DATA.TRAIN.KEY_{index}": "x" * 20 for index in range(4)})
    assert names_of(runs) == ["a/run", "b/run"] == [group.name for group in grouped(runs)]


def test_a_name_cannot_leave_the_page(tmp_path: Path) -> None:
    runs = [read_run(make(tmp_path, name, summary={})) for name in ("<script>x<", "b")]
    assert "<script>x" not in page(runs)


def test_compare_needs_two_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = make(tmp_path, "one", summary={})
    for names in ([tmp_path], [one, one], [one, tmp_path]):
        assert main(["compare", *map(str, names)]) == 2
        assert "needs two runs" in capsys.readouterr().err
