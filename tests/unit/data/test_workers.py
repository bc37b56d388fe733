from __future__ import annotations

import gc
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from PIL import Image

from tests.blocks import data_block
from tests.unit.data.conftest import MakeData
from vissl_zero.data import workers
from vissl_zero.data.batch_memory import BatchReceiver
from vissl_zero.data.dataset import MicroBatchPlan
from vissl_zero.data.loader import Loader, build_loader
from vissl_zero.data.workers import BatchStream, _ahead, _is_stopped
from vissl_zero.errors import DataError, ProcessLostError
from vissl_zero.registry import TRANSFORMS

ROOT = Path(__file__).parents[3]
# Loads batches of digits for ever, in a process that can be killed. Arguments: the batch size.
SCRIPT = """
import itertools, os, sys
from vissl_zero.config.compose import compose
from vissl_zero.resolve.resolve import resolve
from vissl_zero.data.loader import build_loader
from vissl_zero.errors import DataError

if __name__ == "__main__":
    composed = compose("quickstart/swav_digits", ["config.DATA.NUM_DATALOADER_WORKERS=2"])
    plan = resolve(composed.run, "nowhere")
    loader = build_loader(plan.config.DATA, "TRAIN", 0, int(sys.argv[1]), 0, 1, 1)
    try:
        for epoch in itertools.count():
            for step in loader.epoch(epoch):
                print("a step", flush=True)
    except DataError as error:
        sys.exit(str(error))
"""

# The same, with a process that takes long to begin. A worker imports the script that its creator runs.
SLOW_SCRIPT = f"""
import pathlib, time
from vissl_zero.data import workers

if __name__ == "__mp_main__" and pathlib.Path("a worker is slow").exists():
    pathlib.Path("it imports").touch()
    time.sleep(60)
if __name__ == "__main__":
    workers._PRELOAD.append("slow_to_import")
{SCRIPT}"""
SLOW_MODULE = """
import pathlib, time

if pathlib.Path("a fork server is slow").exists():
    pathlib.Path("it imports").touch()
    time.sleep(60)
"""


@TRANSFORMS.register("ExitTheWorker")
class ExitTheWorker:
    """Ends the process at once: by a signal, as the kernel does when memory runs out, or with an exit code."""

    def __init__(self, code: int):
        self.code = code

    def __call__(self, image: Image.Image) -> Image.Image:
        if self.code < 0:
            os.kill(os.getpid(), -self.code)
        os._exit(self.code)


@TRANSFORMS.register("ADefect")
class ADefect:
    """A transform of a user's own with a mistake in it."""

    def __call__(self, image: Image.Image) -> Image.Image:
        raise KeyError("my own mistake")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "ending"),
    [
        (9, r"ended with exit code 9.*Its own error stands above"),
        (-9, r"was ended by SIGKILL.* lower config.DATA.NUM_DATALOADER_WORKERS \(2 per"),
    ],
)
def test_a_worker_that_dies_is_named_with_what_to_do(make_data: MakeData, photos: Path, code: int, ending: str) -> None:
    data = make_data("disk_folder", photos, num_workers=2, TRANSFORMS=[{"name": "ExitTheWorker", "code": code}])
    with pytest.raises(ProcessLostError, match=rf"worker \d \(process \d+\) {ending}"):
        next(build_loader(data_block(data), "TRAIN", 0, 4, 0, 1, 1).epoch(0))


def _with_workers(make_data: MakeData, *ends: int | None, pids: Sequence[int] = (101, 102)) -> BatchStream:
    """A stream whose workers ended with these codes; None: it is alive."""
    stream = build_loader(data_block(make_data("digits")), "TRAIN", 0, 4, 0, 1, 1)._stream
    stream._num_workers = len(ends)
    stream._workers = [
        SimpleNamespace(pid=pid, exitcode=code, is_alive=lambda code=code: code is None, join=Mock(), kill=Mock())
        for pid, code in zip(pids, ends, strict=True)
    ]
    return stream


@pytest.mark.parametrize(
    ("ends", "said", "advice", "was_killed"),
    [
        ((None, 9), "worker 1 (process 102) ended with exit code 9", "Its own error stands above", False),
        ((0, None), "worker 0 (process 101) ended with exit code 0", "NUM_DATALOADER_WORKERS (2 per process", False),
        ((-9, None), "worker 0 (process 101) was ended by SIGKILL", "the machine ran out of memory", True),
        ((None, -15), "worker 1 (process 102) was ended by SIGTERM", "the machine ran out of memory", False),
        ((-15, -9), "worker 0 (process 101) was ended by SIGTERM, worker 1 (", "the machine ran out of memory", True),
    ],
)
def test_how_workers_ended_is_said_with_what_to_do(
    make_data: MakeData, ends: tuple[int | None, ...], said: str, advice: str, was_killed: bool
) -> None:
    stream = _with_workers(make_data, *ends)
    lost = stream._explained(EOFError())
    assert isinstance(lost, ProcessLostError) and said in str(lost) and advice in str(lost)
    assert lost.was_killed == was_killed and all(worker.kill.called for worker in stream._workers)


def test_an_error_while_all_workers_live_stays_what_it_is(make_data: MakeData) -> None:
    stream, error = _with_workers(make_data, None, None), EOFError()
    assert stream._explained(error) is error
    assert all(worker.join.called and not worker.kill.called for worker in stream._workers)


def test_who_is_stopped_is_named_and_else_who_is_slow(make_data: MakeData) -> None:
    process = subprocess.Popen(["sleep", "60"])
    try:
        pids = (process.pid, os.getpid())
        stream = _with_workers(make_data, None, None, pids=pids)
        assert f"60 s from data loading worker 1 (process {pids[1]}). Look at" in stream._give_up_on(1)
        assert all(worker.kill.called for worker in stream._workers)
        process.send_signal(signal.SIGSTOP)
        _until(lambda: _is_stopped(process.pid))
        assert f"loading worker 0 (process {pids[0]}, which is stopped). Look at" in stream._give_up_on(1)
    finally:
        process.kill()
        process.wait()
    assert not _is_stopped(process.pid)


def test_a_worker_goes_with_its_rank_and_leaves_the_other_cores_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    for owner, name in ((workers, "end_with_creator"), (workers, "register_for_cleanup"), (gc, "freeze")):
        monkeypatch.setattr(owner, name, lambda name=name: done.append(name))
    ours, theirs = multiprocessing.Pipe()
    ours.close()  # the training process has ended
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        workers._work(None, theirs)  # type: ignore[arg-type]
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
    assert done == ["end_with_creator", "register_for_cleanup", "freeze"]


@pytest.mark.parametrize(("timeout_s", "at_first"), [(60.0, 180.0), (0.0, 0.0)])
def test_workers_have_two_minutes_more_for_the_first_batch_of_all(
    make_data: MakeData, monkeypatch: pytest.MonkeyPatch, timeout_s: float, at_first: float
) -> None:
    """And the training process neither waits for them at exit nor keeps their end of the socket."""
    limits: list[float] = []
    ends: list[Connection] = []

    def process(target: Callable[..., None], args: tuple[Any, Connection], name: str) -> Any:
        assert target is workers._work
        ends.append(args[1])
        return SimpleNamespace(start=Mock(), kill=Mock(), daemon=False)

    monkeypatch.setattr(workers, "start_fork_server", lambda modules: None)
    monkeypatch.setattr(workers, "register_for_cleanup", Mock())
    monkeypatch.setattr(workers, "_CONTEXT", SimpleNamespace(Pipe=multiprocessing.Pipe, Process=process))
    monkeypatch.setattr(BatchReceiver, "set_timeout", lambda self, seconds: limits.append(seconds))
    monkeypatch.setattr(BatchReceiver, "receive", lambda self: "an answer")
    data = make_data("digits", num_workers=2) | {"WORKER_TIMEOUT_S": timeout_s}
    stream = build_loader(data_block(data), "TRAIN", 0, 4, 0, 1, 1)._stream
    stream._start_workers()
    assert all(worker.daemon and worker.start.called for worker in stream._workers)
    assert len(ends) == 2 and all(end.closed for end in ends) and limits == [at_first] * 2
    stream._due.extend((0, 1))
    assert stream._received() == stream._received() == "an answer"
    assert limits == [at_first] * 2 + [timeout_s] * 2
    assert workers.register_for_cleanup.called  # type: ignore[attr-defined]
    started = [*stream._workers]
    del stream
    gc.collect()
    assert all(worker.kill.called for worker in started)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_defect_in_a_users_transform_keeps_its_own_traceback(
    make_data: MakeData, photos: Path, num_workers: int
) -> None:
    data = make_data("disk_folder", photos, num_workers=num_workers, TRANSFORMS=[{"name": "ADefect"}])
    with pytest.raises(KeyError, match="my own mistake"):
        next(build_loader(data_block(data), "TRAIN", 0, 4, 0, 1, 1).epoch(0))


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL, signal.SIGRTMIN + 6])
def test_a_worker_that_is_stopped_or_killed_between_epochs_is_named(
    make_data: MakeData, photos: Path, number: int
) -> None:
    data = make_data("disk_folder", photos, num_workers=2)
    loader = build_loader(data_block({**data, "WORKER_TIMEOUT_S": 20.0}), "TRAIN", 0, 4, 0, 1, 1)
    assert len(list(loader.epoch(0))) == 3
    pids = _pids(loader)
    os.kill(pids[1], number)
    words = {signal.SIGSTOP: "which is stopped", signal.SIGKILL: "was ended by SIGKILL"}
    with pytest.raises(
        ProcessLostError, match=rf"worker 1 \(process {pids[1]}.*{words.get(number, 'by signal 40')}"
    ) as lost:
        list(loader.epoch(1))
    assert lost.value.was_killed == (number == signal.SIGKILL)
    _until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_worker_that_is_stopped_or_killed_while_it_sends_a_batch_is_named(
    make_data: MakeData, photos: Path, number: int
) -> None:
    sizes = list(range(60, 70))  # tensors that travel with the message, together more than a socket holds
    crops = {"total_num_crops": 10, "size_crops": sizes, "num_crops": [1] * 10, "crop_scales": [[0.5, 1.0]] * 10}
    transforms = [{"name": "ImgPilToMultiCrop", **crops}, {"name": "ToTensor"}]
    data = make_data("disk_folder", photos, num_workers=2, TRANSFORMS=transforms)
    timeout_s = 10.0 if number == signal.SIGSTOP else 60.0
    loader = build_loader(data_block({**data, "WORKER_TIMEOUT_S": timeout_s}), "TRAIN", 0, 1, 0, 1, 1)
    batches = loader.epoch(0)
    next(batches)

    def senders() -> list[int]:
        return [pid for pid in _pids(loader) if any("sock_alloc_send" in text for text in _waits(pid))]

    _until(lambda: len(senders()) == 2)
    victim = senders()[0]
    os.kill(victim, number)
    words = {signal.SIGSTOP: ", which is stopped", signal.SIGKILL: r"\) was ended by SIGKILL"}
    begin = time.monotonic()
    with pytest.raises(ProcessLostError, match=rf"\(process {victim}{words[number]}") as lost:
        list(batches)
    assert lost.value.was_killed == (number == signal.SIGKILL)
    assert time.monotonic() - begin < 30.0


@pytest.mark.timeout(120)
def test_a_thread_takes_batches_ahead_as_page_locked_memory_needs_it(make_data: MakeData, photos: Path) -> None:
    loader = build_loader(data_block(make_data("disk_folder", photos, num_workers=2)), "TRAIN", 0, 1, 0, 1, 1)
    plans = [MicroBatchPlan(0, (sample,), 1) for sample in (3, 1, 2)]

    def loaded() -> Iterator[int]:
        for one in _ahead(thread, loader._stream._from_workers(plans)):
            assert one.batch is not None
            yield int(one.batch.sample_ids)

    with ThreadPoolExecutor(1) as thread:
        assert list(loaded()) == [3, 1, 2]
        assert next(loaded()) == 3  # given up
        assert list(loaded()) == [3, 1, 2]
        os.kill(_pids(loader)[1], signal.SIGKILL)
        with pytest.raises(ProcessLostError):
            list(loaded())


@pytest.mark.timeout(180)
def test_workers_end_with_an_iteration_that_an_error_keeps(make_data: MakeData, photos: Path) -> None:
    """They ignore SIGTERM: the process would not exit."""
    (photos / "a/3.jpg").write_bytes(b"no image")
    kept: list[Any] = [
        build_loader(data_block(make_data("disk_folder", photos, num_workers=2)), "TRAIN", 0, 6, 0, 1, 1)
    ]
    try:
        list(kept[0].epoch(0))
    except DataError as error:
        kept += [error, kept]  # a cycle, as of a traceback and the frame that caught it
    pids = _pids(kept[0])
    assert len(pids) == 2
    del kept
    gc.collect()
    _until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))


@pytest.mark.slow
def test_what_asks_a_run_to_stop_does_not_end_its_workers(short_path: Path) -> None:
    """Ctrl-C reaches every process of a terminal, and SLURM's signals all of a job; the rank has steps to take yet."""
    process = _start(short_path, "64")
    assert process.stdout is not None and process.stdout.readline() == "a step\n"
    server = next(pid for pid in _children(process.pid) if "forkserver" in _command(pid))
    for pid in (server, *_children(server)):
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            os.kill(pid, number)
    for _ in range(100):  # several epochs: more than was loaded ahead
        assert process.stdout.readline() == "a step\n"
    process.kill()
    process.stdout.close()
    process.wait(timeout=60)
    _until(lambda: not _of_group(process.pid))


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("victim", ["rank", "worker", "fork server", "resource tracker"])
def test_nothing_is_left_of_a_process_that_loads_whoever_is_killed(short_path: Path, victim: str) -> None:
    process = _start(short_path, "8")
    assert process.stdout is not None and process.stdout.readline() == "a step\n"
    servers = _children(process.pid)
    found = {
        "rank": process.pid,
        "fork server": next(pid for pid in servers if "forkserver" in _command(pid)),
        "resource tracker": next(pid for pid in servers if "resource_tracker" in _command(pid)),
    }
    workers = _children(found["fork server"])
    assert len(workers) == 2
    os.kill(workers[0], signal.SIGSTOP if victim == "rank" else 0)  # a stopped one must go, too
    os.kill(found.get(victim, workers[0]), signal.SIGKILL)
    if victim == "resource tracker":  # nobody misses it
        time.sleep(1.0)
        process.kill()
    process.stdout.close()
    process.wait(timeout=60)
    _until(lambda: not _of_group(process.pid))
    _until(lambda: not list(short_path.iterdir()))
    assert not list(Path("/dev/shm").glob(f"*vissl-zero-{process.pid}-*"))
    assert not [path for pid in workers for path in Path("/dev/shm").glob(f"torch_{pid}_*")]


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("slow", ["fork server", "worker"])
def test_a_loading_process_goes_with_its_rank_while_it_still_imports(short_path: Path, slow: str) -> None:
    """On a busy machine importing torch takes a minute, in which neither of them looks at its pipes."""
    (short_path / "script.py").write_text(SLOW_SCRIPT)
    (short_path / "slow_to_import.py").write_text(SLOW_MODULE)
    (short_path / f"a {slow} is slow").touch()
    process = _start(short_path, "8", script=["script.py"])
    while not (short_path / "it imports").exists():
        assert process.poll() is None
        time.sleep(0.05)
    assert any("forkserver" in row for row in _of_group(process.pid))
    process.kill()
    process.wait()
    _until(lambda: not _of_group(process.pid), seconds=2.0)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_batches_need_no_room_in_dev_shm(short_path: Path) -> None:
    """A container has 64 MiB there, and a batch of large crops more."""
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-rm", "true"], check=False).returncode:
        pytest.skip("no mount namespaces of a user's own here")
    own = ["unshare", "-rm", "sh", "-c", 'mount -t tmpfs -o size=64k none /dev/shm; exec "$@"', "sh"]
    process = _start(short_path, "256", own)
    assert process.stdout is not None
    for _ in range(20):
        assert process.stdout.readline() == "a step\n"
    process.kill()
    process.communicate(timeout=60)


def _start(
    folder: Path, batch: str, prefix: Sequence[str] = (), script: Sequence[str] = ("-c", SCRIPT)
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*prefix, sys.executable, *script, batch],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env={**os.environ, "TMPDIR": str(folder), "PYTHONPATH": f"{ROOT}:{folder}"},
        start_new_session=True,
    )


def _pids(loader: Loader) -> list[int]:
    return [worker.pid for worker in loader._stream._workers]


def _children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")  # by the thread that started them
    return [int(word) for path in tasks for word in path.read_text().split()]


def _waits(pid: int) -> list[str]:
    """What each thread of a process waits for in the kernel."""
    return [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/wchan")]


def _command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


def _of_group(group: int) -> list[str]:
    listing = subprocess.run(["ps", "-ww", "-eo", "pgid,stat,args"], capture_output=True, text=True, check=True).stdout
    rows = [line.split(maxsplit=2) for line in listing.splitlines()]
    return [row[2] for row in rows if row[0] == str(group) and not row[1].startswith("Z")]


def _until(is_so: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)
