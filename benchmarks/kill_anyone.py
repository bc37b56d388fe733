"""Kill any process of a training run again and again, and see that nothing is left.

    python benchmarks/kill_anyone.py --kills 200 [--minutes M] [--ranks N] [--workers W] [--seed S]

Trains through the command line with loader workers and ``MAX_RESTARTS``. At a random moment a random one of launcher,
rank, fork server, loader worker, resource tracker and cleanup process gets SIGKILL. What must go with it has to be gone
within a minute, and the run has to train on (by itself, or, after a kill of the launcher, by the same command). At the
end the run is asked to stop. Prints one JSON object: kills by role, and the processes, temporary files and shared
memory that were left, and how long it took until all that had to go was gone (a run whose worker was killed says so
first, and its other ranks get some seconds to do so, too). Exit code 0 if nothing was left. As root it has a /dev/shm
to itself (``unshare --mount``). A line per kill goes to stderr. Asked to stop (SIGTERM, Ctrl-C), it kills no more and
ends so.

Most of the work is to import torch again, four times a restart: some 15 s of processor time.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

_TOKEN = "VISSL_ZERO_KILL_ANYONE"
_LONGEST_S = 60.0
_STEP_S = 600.0
ROLES = ("launcher", "rank", "fork server", "worker", "resource tracker", "cleanup process")


class Run:
    """A run that is started as often as it takes, in a folder with its own TMPDIR."""

    def __init__(self, folder: Path, ranks: int, workers: int):
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        self._folder, self._log = folder / "run", folder / "log"
        self._command = [
            *(sys.executable, "-m", "vissl_zero.cli", "config=quickstart/swav_digits"),
            f"config.CHECKPOINT.DIR={self._folder}",
            "config.CHECKPOINT.CHECKPOINT_ITER_FREQUENCY=20",
            f"config.DISTRIBUTED.NUM_PROC_PER_NODE={ranks}",
            "config.DISTRIBUTED.MAX_RESTARTS=1000000",
            f"config.DATA.TRAIN.BATCHSIZE_PER_REPLICA={8 // ranks}",
            f"config.DATA.NUM_DATALOADER_WORKERS={workers}",
            "config.TRAINER.MAX_STEPS=10000000",
            "config.TRAINER.THREADS_PER_RANK=1",
            "config.OPTIMIZER.num_epochs=1000000",
            "config.NEAREST_NEIGHBOR.USE_KNN=false",
            "config.HOOKS.TENSORBOARD_SETUP.USE_TENSORBOARD=false",
        ]
        self._token = f"{os.getpid()}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        environment = {**os.environ, _TOKEN: self._token, "TMPDIR": str(self.temporary), "OMP_NUM_THREADS": "1"}
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                self._command,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,  # Ctrl-C is for the benchmark
            )

    def wait_for_a_step(self) -> None:
        """Until a step was made after now."""
        now, deadline = time.time(), time.monotonic() + _STEP_S
        metrics = self._folder / "metrics.jsonl"
        while not metrics.exists() or metrics.stat().st_mtime <= now:
            if self.process is not None and self.process.poll() is not None:
                raise RuntimeError(
                    f"The run has ended with {self.process.returncode}:\n{self._log.read_text()[-3000:]}"
                )
            if time.monotonic() > deadline:
                raise RuntimeError(f"No step in {_STEP_S:g} s: {self.processes()}\n{self._log.read_text()[-3000:]}")
            time.sleep(0.05)

    def _log_end(self) -> str:
        return self._log.read_text(errors="replace")[-3000:]

    def processes(self) -> dict[int, str]:
        """Every process of the run that is alive, with its role."""
        found, wanted = {}, f"{_TOKEN}={self._token}".encode()
        for path in Path("/proc").glob("[0-9]*"):
            try:
                state, parent = (path / "stat").read_text().rpartition(")")[2].split()[:2]
                is_ours = state not in "ZX" and wanted in (path / "environ").read_bytes().split(b"\0")
                if is_ours:
                    found[int(path.name)] = _role((path / "cmdline").read_text(), int(parent))
            except (OSError, ValueError):  # gone meanwhile
                continue
        return found


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _role(command: str, parent: int) -> str:
    if "forkserver" in command:
        return "worker" if "forkserver" in Path(f"/proc/{parent}/cmdline").read_text() else "fork server"
    names = {"vissl-zero-cleanup": "cleanup process", "resource_tracker": "resource tracker", "rank_group": "rank"}
    return next((role for word, role in names.items() if word in command), "launcher")


def kill_once(run: Run, chance: random.Random) -> tuple[str, list[str], float]:
    """Kill a process of a run that trains; its role, what should have gone with it and has not, and the seconds."""
    alive = run.processes()
    role = chance.choice([role for role in ROLES if role in alive.values()])
    os.kill(chance.choice([pid for pid, other in alive.items() if other == role]), signal.SIGKILL)
    assert run.process is not None
    if role == "launcher":
        run.process.wait()
    spared = {"resource tracker": set(ROLES), "cleanup process": set(ROLES), "launcher": set()}
    stays = spared.get(role, {"launcher", "cleanup process"})
    doomed = {pid: other for pid, other in alive.items() if other not in stays}
    begin = time.monotonic()
    while (left := [pid for pid in doomed if _is_alive(pid)]) and time.monotonic() < begin + _LONGEST_S:
        time.sleep(0.05)
    return role, [f"{doomed[pid]} after a kill of the {role}" for pid in left], time.monotonic() - begin


def soak(options: argparse.Namespace, run: Run, is_asked_to_stop: Callable[[], bool]) -> int:
    """All kills; the exit code."""
    deadline = time.monotonic() + 60 * options.minutes
    before = {path.name for path in Path("/dev/shm").iterdir()}
    kills: collections.Counter[str] = collections.Counter()
    left: list[str] = []
    seconds: dict[str, list[float]] = collections.defaultdict(list)
    chance = random.Random(options.seed)
    run.start()
    while kills.total() < options.kills and time.monotonic() < deadline and not is_asked_to_stop():
        run.wait_for_a_step()
        time.sleep(chance.uniform(0.0, 0.5))
        role, remains, taken = kill_once(run, chance)
        kills[role] += 1
        left += remains
        seconds[role].append(taken)
        if role == "launcher":
            run.start()
        print(f"{kills.total()} {role} {taken:.2f} s {remains or ''}", file=sys.stderr, flush=True)
    run.wait_for_a_step()
    assert run.process is not None
    run.process.terminate()
    code = run.process.wait()
    time.sleep(3.0)  # for cleanup processes
    found = {
        "kills": kills.total(),
        "by role": dict(kills),
        "seconds until all was gone": {
            role: {"median": round(statistics.median(taken), 2), "longest": round(max(taken), 2)}
            for role, taken in seconds.items()
        },
        "exit code after SIGTERM": code,
        "outlived their run": left,
        "processes left": sorted(run.processes().values()),
        "temporary files left": sorted(path.name for path in run.temporary.iterdir()),
        "shared memory left": sorted({path.name for path in Path("/dev/shm").iterdir()} - before),
    }
    print(json.dumps(found), flush=True)
    return int(code != 75 or any(found[name] for name in [*found][4:]))


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=120.0, help="no further kill after this")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    alone = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs none /dev/shm && exec "$@"', "sh"]
    if os.getuid() == 0 and "VISSL_ZERO_OWN_SHM" not in os.environ:
        os.environ["VISSL_ZERO_OWN_SHM"] = "1"
        os.execvp(alone[0], [*alone, sys.executable, *sys.argv])
    asked: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: asked.append(number))
    with tempfile.TemporaryDirectory() as name:
        run = Run(Path(name), options.ranks, options.workers)
        try:
            return soak(options, run, lambda: bool(asked))
        finally:  # nothing, unless it has failed
            for pid in run.processes():
                os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
