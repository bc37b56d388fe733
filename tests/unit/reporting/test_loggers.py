"""Each logger is read back through its own library: every step once, whatever a kill has lost or left over."""

from __future__ import annotations

import csv
import json
import math
import multiprocessing
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer.record_writer import RecordWriter

from tests.unit.reporting.example_run import make_record, make_run, play
from vissl_zero.engine.hook import Run, StepRecord
from vissl_zero.errors import RegistryError
from vissl_zero.registry import LOGGERS
from vissl_zero.reporting.hooks import Logging
from vissl_zero.reporting.loggers.logger import LoggedRun, Logger, run_id
from vissl_zero.reporting.loggers.tensorboard_events import EventFile
from vissl_zero.reporting.metrics_file import MetricsFile
from vissl_zero.reporting.summary import summarize


def events() -> Logging:
    return Logging(["tensorboard"])


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard would show: tag -> (step, value)."""
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_every_figure_of_every_step(run: Run, records: list[StepRecord]) -> None:
    run.results["knn_top1_before"] = 0.5
    play(run, events(), records)
    written = scalars(run.folder)
    assert [step for step, _ in written["train/loss"]] == list(range(1, 21))
    assert [value for _, value in written["train/loss"]] == pytest.approx([record.loss for record in records])
    assert written["memory/optimizer"][0] == (1, float(records[0].bytes.optimizer))
    assert written["watch/effective_rank"][-1] == (20, 6.0)
    assert written["evaluation/knn_top1_before"] == [(0, 0.5)]


def test_the_table_begins_with_what_was_measured_before_training(run: Run, records: list[StepRecord]) -> None:
    run.results |= {"knn_top1_before": 0.5, "memory_before_bytes": 7}
    hook = Logging(["csv"])
    play(run, hook, records)
    first, second, *_ = table(run.folder)
    assert {tag: text for tag, text in first.items() if text} == {
        "step": "0",
        "evaluation/knn_top1_before": "0.5",
        "evaluation/memory_before_bytes": "7.0",
    }
    assert second["step"] == "1" and second["train/loss"] and not second["evaluation/knn_top1_before"]


def test_a_table_of_step_0_alone_is_filled_up_without_repeating_it(tmp_path: Path) -> None:
    """Killed before its second row, with a checkpoint of another place: step 0 is in the checkpoint too."""
    run = make_run(tmp_path)
    hook = Logging(["csv"])
    run.results["knn_top1_before"] = 0.5
    play(run, hook, [make_record(1)])
    path = tmp_path / "metrics.csv"
    path.write_text("step,evaluation/knn_top1_before\n0,0.5\n")
    (tmp_path / "metrics.jsonl").unlink(missing_ok=True)
    part(tmp_path, "csv", range(2, 4), hook.state_dict())
    assert [row["step"] for row in table(tmp_path)] == ["0", "2", "3"]


def test_the_page_names_the_numbers_of_the_summary_that_are_not_logged(run: Run, records: list[StepRecord]) -> None:
    run.results["knn_top1_before"] = 0.5
    play(run, Logging(["csv"]), records)
    numbers = {name for name, value in summarize(run).items() if isinstance(value, int | float)}
    logged = {tag.removeprefix("evaluation/") for tag in table(run.folder)[0]}
    page = (Path(__file__).parents[3] / "docs" / "loggers.md").read_text(encoding="utf-8")
    named = page.split("Of the numbers there, ")[1].split(" are not logged")[0]
    assert set(re.findall(r"`(\w+)`", named)) == numbers - logged


def test_skipped_and_not_finite_figures_are_left_out(run: Run) -> None:
    skipped = make_record(1, loss=None, grad_norm=None, skipped=True)
    play(run, events(), [skipped, make_record(2, grad_norm=math.inf)])
    written = scalars(run.folder)
    assert [step for step, _ in written["train/loss"]] == [2]
    assert "train/grad_norm" not in written


def table(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def from_csv(folder: Path) -> dict[int, float]:
    rows = table(folder)
    assert len({row["step"] for row in rows}) == len(rows)
    return {int(row["step"]): float(row["train/loss"]) for row in rows if row["train/loss"]}


def from_events(folder: Path) -> dict[int, float]:
    found = scalars(folder)["train/loss"]
    assert len(dict(found)) == len(found)
    return dict(found)


def from_mlflow(folder: Path) -> dict[int, float]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{folder / 'mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name("vissl_zero").experiment_id])
    found = [(metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, "train/loss")]
    assert len(dict(found)) == len(found)
    return dict(found)


def from_wandb(folder: Path) -> dict[int, float]:
    """What ``wandb sync`` would upload; the library reads its files in Go alone, so the records are found here."""
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = (folder / "wandb").glob(f"offline-run-*/run-{run_id(folder)}.wandb")
    found = []
    for data in log_records(path.read_bytes()):
        record = Record.FromString(data)
        row = {"/".join(item.nested_key) or item.key: item.value_json for item in record.history.item}
        if "train/loss" in row:
            found.append((record.history.step.num, float(row["train/loss"])))
    assert len(dict(found)) == len(found)
    return dict(found)


def log_records(data: bytes, block: int = 32768) -> Iterator[bytes]:
    """The records of a LevelDB log after a header of 7 bytes; each chunk has its checksum, length and kind."""
    assert data[:4] == b":W&B"
    place, record = 7, b""
    while place + 7 <= len(data):
        if block - place % block < 7:
            place += block - place % block
            continue
        length, kind = struct.unpack_from("<HB", data, place + 4)
        record += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


def from_trackio(folder: Path) -> dict[int, float]:
    """In a process of its own: the library looks for its folder once, when it is imported."""
    code = """
        import json
        from trackio.sqlite_storage import SQLiteStorage as Runs
        (run,) = Runs.get_runs("vissl_zero")
        rows = Runs.get_logs("vissl_zero", run)
        print(json.dumps([(row["step"], row["train/loss"]) for row in rows if "train/loss" in row]))
    """
    environment = {**os.environ, "TRACKIO_DIR": str(folder / "trackio")}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    found = json.loads(subprocess.check_output(command, env=environment, timeout=60).splitlines()[-1])
    assert len(dict(found)) == len(found)
    return dict(found)


READERS: dict[str, Callable[[Path], dict[int, float]]] = {
    "tensorboard": from_events,
    "csv": from_csv,
    "mlflow": from_mlflow,
    "wandb": from_wandb,
    "trackio": from_trackio,
}
IN_A_SECOND = ["tensorboard", "csv"]
# Trackio is not among the pinned packages: it wants an older pillow than torchvision's tests.
NEEDS_TRACKIO = pytest.mark.skipif(find_spec("trackio") is None, reason="needs pip install trackio")
LIBRARIES = [
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("mlflow", "wandb")),
    pytest.param("trackio", marks=[pytest.mark.slow, NEEDS_TRACKIO]),
]


@pytest.fixture(autouse=True)
def no_settings_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("WANDB_", "MLFLOW_", "TRACKIO_"))]:
        monkeypatch.delenv(name)


_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload([__name__])


def in_process(function: Callable[..., Any], *arguments: Any) -> tuple[int | None, Any]:
    """Call a function in a process of its own; its exit code, and what it returned.

    Whatever loads a logger's library goes there: the libraries start threads. A fork of pytest itself would hang where
    a thread of an earlier test holds a lock, so a server that has none forks.
    """
    reader, writer = _CONTEXT.Pipe(duplex=False)
    with tempfile.NamedTemporaryFile() as output:
        process = _CONTEXT.Process(target=_answer, args=(writer, output.name, dict(os.environ), function, arguments))
        process.start()
        writer.close()
        try:
            result = reader.recv()
        except EOFError:
            result = None
        process.join()
        os.write(1, output.read())  # where pytest captures it
    return process.exitcode, result


def _answer(
    writer: Connection, output: str, environment: dict[str, str], function: Callable[..., Any], arguments: Any
) -> None:
    file = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ.clear()
    os.environ.update(environment)
    writer.send(function(*arguments))


def read_back(function: Callable[..., Any], *arguments: Any) -> Any:
    code, result = in_process(function, *arguments)
    assert code == 0
    return result


def part(folder: Path, name: str, steps: range, state: dict[str, Any], is_killed: bool = False) -> dict[str, Any]:
    """Play steps as the loop does, after a resume from ``state``; the state of the last checkpoint.

    In a process of its own, which may end by kill -9.
    """
    saved = folder.parent / "state.json"
    saved.write_text(json.dumps(state))
    code, _ = in_process(play_part, folder, name, steps, state, saved, is_killed)
    assert code == (-signal.SIGKILL if is_killed else 0)
    return dict(json.loads(saved.read_text()))


def play_part(folder: Path, name: str, steps: range, state: dict[str, Any], saved: Path, is_killed: bool) -> None:
    run = make_run(folder)
    run.step = run.first_step = steps[0] - 1
    metrics, hook = MetricsFile(), Logging([name])
    if state:
        hook.load_state_dict(state)
    metrics.on_start(run)
    hook.on_start(run)
    for step in steps:
        run.step = step
        record = make_record(step)
        metrics.on_record(run, record)
        hook.on_record(run, record)
        if step % 10 == 0:
            run.results["top1"] = step / 100
            hook.on_epoch_end(run)
            saved.write_text(json.dumps(hook.state_dict()))
    if is_killed:
        os.kill(os.getpid(), signal.SIGKILL)
    hook.on_end(run)
    hook.close(run)
    metrics.close(run)


@pytest.mark.parametrize("name", [*IN_A_SECOND, *LIBRARIES])
def test_a_run_killed_three_times_has_every_step_once(tmp_path: Path, name: str) -> None:
    """Killed at 13, 17 and 25 with checkpoints of 10, 10 and 20; from the second on in another place."""
    folder = tmp_path / "run"
    folder.mkdir()
    state = part(folder, name, range(1, 14), {}, is_killed=True)
    folder = folder.rename(tmp_path / "elsewhere")
    state = part(folder, name, range(11, 18), state, is_killed=True)
    state = part(folder, name, range(11, 26), state, is_killed=True)
    part(folder, name, range(21, 31), state)
    assert read_back(READERS[name], folder) == pytest.approx({step: make_record(step).loss for step in range(1, 31)})


def play_start(folder: Path, figure: str) -> None:
    run = make_run(folder)
    hook = Logging(["mlflow"])
    run.results |= {"knn_top1_before": 0.5, figure: 1.0}
    play(run, hook, [])


def starts_in_mlflow(folder: Path) -> list[int]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{folder / 'mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name("vissl_zero").experiment_id])
    tags = [f"evaluation/{name}" for name in ("knn_top1_before", "first", "second")]
    return [len(client.get_metric_history(run.info.run_id, tag)) for tag in tags]


@pytest.mark.slow
def test_mlflow_keeps_what_it_holds_of_step_0(tmp_path: Path) -> None:
    """A measurement that is repeated in its folder, or a run that was killed in its first step."""
    for figure in ("first", "second"):
        read_back(play_start, tmp_path, figure)
    assert read_back(starts_in_mlflow, tmp_path) == [1, 1, 1]


def files_in_mlflow(folder: Path) -> tuple[str, str, str, list[str]]:
    """The experiment's place of files; the run's number, its place and its files."""
    from mlflow.artifacts import list_artifacts
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{folder / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("vissl_zero")
    (run,) = client.search_runs([experiment.experiment_id])
    paths = [file.path for file in list_artifacts(artifact_uri=run.info.artifact_uri)]
    return experiment.artifact_location, run.info.run_id, run.info.artifact_uri, paths


@pytest.mark.slow
def test_a_copied_folder_keeps_its_files_in_mlflow_of_its_own(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "summary.json").write_text("of the first")
    state = part(folder, "mlflow", range(1, 11), {}, is_killed=True)
    copied = Path(shutil.copytree(folder, tmp_path / "another place" / "copied"))
    (copied / "summary.json").write_text("of the copy")
    for place in (folder, copied):
        part(place, "mlflow", range(11, 13), state)
    for place, text in ((folder, "of the first"), (copied, "of the copy")):
        root, number, uri, paths = read_back(files_in_mlflow, place)
        assert root == str(place / "mlflow_files") and Path(uri) == place / "mlflow_files" / number / "artifacts"
        assert paths == ["artifacts/summary.json"] and (Path(uri) / "summary.json").read_text() == text


@pytest.mark.slow
def test_a_database_of_the_user_keeps_its_files_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MLflow puts them into the working directory. The next run would else write into the folder of this one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'all.db'}")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "summary.json").write_text("{}")
    part(tmp_path / "run", "mlflow", range(1, 3), {})
    assert len(list((tmp_path / "mlruns").rglob("summary.json"))) == 1
    assert not (tmp_path / "run" / "mlflow_files").exists()


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_a_server_that_is_gone_is_left_out_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """MLflow itself would try again for minutes."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{port}")
    part(tmp_path, "mlflow", range(1, 4), {})
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 3
    assert "".join(capfd.readouterr()).count("warning: the logger mlflow fails (API request to") == 1


@pytest.mark.slow
def test_wandb_keeps_copies_and_prints_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "summary.json").write_text("{}")
    (tmp_path / "config.user.yaml").write_text("a: 1")
    part(tmp_path, "wandb", range(1, 3), {})
    (files,) = (tmp_path / "wandb").glob("offline-run-*/files")
    kept = {path.name: path for path in files.iterdir()}
    for name in ("summary.json", "config.user.yaml"):
        assert not kept[name].is_symlink() and kept[name].read_text() == (tmp_path / name).read_text()
    assert "".join(capfd.readouterr()) == ""


def test_what_the_library_lost_is_logged_again(tmp_path: Path) -> None:
    state = part(tmp_path, "csv", range(1, 11), {})
    rows = (tmp_path / "metrics.csv").read_text().splitlines()
    (tmp_path / "metrics.csv").write_text("\n".join(rows[:5]) + "\n5,2.3")  # cut short
    part(tmp_path, "csv", range(11, 13), state)
    assert list(from_csv(tmp_path)) == list(range(1, 13))
    assert [row["step"] for row in table(tmp_path) if row["evaluation/top1"]] == ["10"]


def test_a_logger_added_at_a_resume_gets_the_steps_before(tmp_path: Path) -> None:
    state = part(tmp_path, "tensorboard", range(1, 11), {})
    part(tmp_path, "csv", range(11, 13), state)
    assert list(from_csv(tmp_path)) == list(range(1, 13))


def test_the_id_stays_and_two_runs_have_two(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    assert run_id(tmp_path / "a") == run_id(tmp_path / "a") != run_id(tmp_path / "b")


@pytest.fixture
def own_logger() -> Iterator[list[int]]:
    """A user's logger that fails at its fourth row."""
    seen: list[int] = []

    @LOGGERS.register("fragile")
    class Fragile(Logger):
        """Fails."""

        def open(self, run: LoggedRun) -> int:
            return 0

        def log(self, figures: Mapping[str, float], step: int) -> None:
            if step == 4:
                raise ConnectionError("the server is gone")
            seen.append(step)

    yield seen
    LOGGERS._components.pop("fragile")


def test_a_logger_that_fails_ends_alone(
    tmp_path: Path, own_logger: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    records = [make_record(step) for step in range(1, 8)]
    play(make_run(tmp_path), Logging(["fragile", "csv"]), records)
    assert own_logger == [1, 2, 3]
    assert list(from_csv(tmp_path)) == list(range(1, 8))
    assert "the logger fragile fails" in capsys.readouterr().out


def test_an_unknown_logger_is_named() -> None:
    with pytest.raises(RegistryError, match=r"config.HOOKS.LOGGERS.*known logger.*'tensorbord'"):
        Logging(["tensorbord"])


def test_only_rank_0_writes(tmp_path: Path, records: list[StepRecord]) -> None:
    play(make_run(tmp_path, rank=1), Logging(["tensorboard", "csv"]), records)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_ends_the_events_and_not_the_run(tmp_path, capfd):
    """/dev/full takes nothing, at the start and later; no thread prints a traceback of its own."""
    with pytest.raises(OSError, match="No space left on device"):
        EventFile(Path("/dev/full"))
    events = EventFile(tmp_path / "events.out.tfevents.1")
    with Path("/dev/full").open("wb", buffering=0) as full, pytest.raises(OSError, match="No space left on device"):
        events._records = RecordWriter(full)
        events.add({"train/loss": 1.0}, 1)
    events.close()
    assert "".join(capfd.readouterr()) == ""
