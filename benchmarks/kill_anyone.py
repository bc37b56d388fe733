"""Kill any process of a training run again and again, and see that nothing is left.

    python benchmarks/kill_anyone.py --kills 200 [--minutes M] [--ranks N] [--workers W] [--seed S] [--nvme 1.3]

Trains through the command line with loader workers and ``MAX_RESTARTS``. At a random moment a random one of launcher,
rank, fork server, loader worker, resource tracker and cleanup process gets SIGKILL. What must go with it has to be gone
within a minute, and the run has to train on (by itself, or, after a kill of the launcher, by the same command). At the
end the run is asked to stop. Prints one JSON object: kills by role, and the processes, temporary files and shared
memory that were left, and how long it took until all that had to go was gone (a run whose worker was killed says so
first, and its other ranks get some seconds to do so, too). Exit code 0 if nothing was left. As root it has a /dev/shm
to itself (``unshare --mount``). A line per kill goes to stderr. Asked to stop (SIGTERM, Ctrl-C), it kills no more and
ends so.

With --nvme, parameters and optimizer state are in files on a small file system of their own, which has room for so many
states (it needs root). Every third kill does not wait for a step then, so that starts are hit too. With each step the
file system has to hold one state and no file of a dead attempt, and at the end none. Afterwards the run is made once
more, undisturbed: each checkpoint has to be the same bit for bit.

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

import soak

_TOKEN = "VISSL_ZERO_KILL_ANYONE"
_LONGEST_S = 60.0
_STEP_S = 600.0
ROLES = ("launcher", "rank", "fork server", "worker", "resource tracker", "cleanup process")


class Run:
    """A run that is started as often as it takes, in a folder with its own TMPDIR.

    Args:
        folder: new.
        ranks, workers: processes, and loader workers of each.
        tier: where parameters and optimizer state are kept, or None: in memory.
    """

    def __init__(self, folder: Path, ranks: int, workers: int, tier: Path | None):
        self.temporary = folder / "tmp"
        self.temporary.mkdir(parents=True)
        self.folder, self._log = folder / "run", folder / "log"
        self._command = [
            *(sys.executable, "-m", "vissl_zero.cli", "config=quickstart/swav_digits"),
            f"config.CHECKPOINT.DIR={self.folder}",
            f"config.CHECKPOINT.CHECKPOINT_ITER_FREQUENCY={20 if tier is None else 5}",
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
        if tier is not None:
            place = f"{{device: nvme, nvme_path: {tier}}}"
            self._command += [f"config.ZERO.offload_{what}_config={place}" for what in ("optimizer", "param")]
            self._command += ["config.ZERO.LEVEL=3", "config.CHECKPOINT.KEEP_LAST=-1"]
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
        metrics = self.folder / "metrics.jsonl"
        while not metrics.exists() or metrics.stat().st_mtime <= now:
            if self.process is not None and self.process.poll() is not None:
                raise RuntimeError(
                    f"The run has ended with {self.process.returncode}:\n{self._log.read_text()[-3000:]}"
                )
            if time.monotonic() > deadline:
                raise RuntimeError(f"No step in {_STEP_S:g} s: {self.processes()}\n{self._log.read_text()[-3000:]}")
            time.sleep(0.05)

    def stop(self) -> int:
        """Ask the run to save and stop; its exit code."""
        assert self.process is not None
        self.process.terminate()
        return self.process.wait()

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


class Tier:
    """A file system for the state of a run."""

    def __init__(self, path: Path):
        self.path = path
        self.path.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1g", "tmpfs", str(path)], check=True)
        self._state: collections.Counter[tuple[str, int]] = collections.Counter()

    def limit(self, num_states: float) -> int:
        """Take what is there for one state, and leave room for so many; bytes of the state."""
        self._state = self._found()
        num_bytes = sum(size * number for (_, size), number in self._state.items())
        room = f"remount,size={int(num_bytes * num_states)}"
        subprocess.run(["mount", "-o", room, str(self.path)], check=True)
        return num_bytes

    def surplus(self) -> list[str]:
        """Files and folders that are not those of one state."""
        found = self._found()
        found.subtract(self._state)
        return [f"{number:+} '{name}' of {size} bytes on the tier" for (name, size), number in found.items() if number]

    def names(self) -> list[str]:
        return sorted(path.name for path in self.path.iterdir())

    def close(self) -> None:
        subprocess.run(["umount", "--lazy", str(self.path)], check=True)

    def _found(self) -> collections.Counter[tuple[str, int]]:
        """Every file and folder, by the part of its path that all starts share."""
        paths = [(path, path.relative_to(self.path).parts[1:]) for path in self.path.rglob("*")]
        return collections.Counter(("/".join(parts), path.stat().st_size * path.is_file()) for path, parts in paths)


def compare(run: Run, undisturbed: Run) -> tuple[int, list[str]]:
    """Train undisturbed for as many steps; the number of checkpoints that both have, and what differs in any."""
    from vissl_zero.checkpoint import find_checkpoints

    checkpoints = find_checkpoints(run.folder)
    undisturbed.start()
    while len(find_checkpoints(undisturbed.folder)) <= len(checkpoints):
        undisturbed.wait_for_a_step()
    undisturbed.stop()
    # Not the last of each: it is of whatever step the run was asked to stop at.
    twins = [(path, undisturbed.folder / path.relative_to(run.folder)) for path in checkpoints]
    twins = [twin for twin in twins if twin[1].exists()]
    return len(twins), [f"{one.name}: {what}" for one, other in twins for what in soak.differences(one, other)]


def kill_all(
    options: argparse.Namespace, folder: Path, run: Run, tier: Tier | None, is_asked: Callable[[], bool]
) -> int:
    """All kills; the exit code."""
    deadline = time.monotonic() + 60 * options.minutes
    before = {path.name for path in Path("/dev/shm").iterdir()}
    kills: collections.Counter[str] = collections.Counter()
    left: list[str] = []
    seconds: dict[str, list[float]] = collections.defaultdict(list)
    chance = random.Random(options.seed)
    run.start()
    found: dict[str, object] = {}
    if tier is not None:
        run.wait_for_a_step()
        found = {"bytes of the state": tier.limit(options.nvme), "states that have room": options.nvme}
    while kills.total() < options.kills and time.monotonic() < deadline and not is_asked():
        if tier is None or kills.total() % 3:
            run.wait_for_a_step()
            left += tier.surplus() if tier is not None else []
            time.sleep(chance.uniform(0.0, 0.5 if tier is None else 2.0))
        else:
            time.sleep(chance.uniform(0.0, 10.0))
        role, remains, taken = kill_once(run, chance)
        kills[role] += 1
        left += remains
        seconds[role].append(taken)
        if role == "launcher":
            run.start()
        print(f"{kills.total()} {role} {taken:.2f} s {remains or ''}", file=sys.stderr, flush=True)
    run.wait_for_a_step()
    code = run.stop()
    time.sleep(3.0)  # for cleanup processes
    found |= {
        "kills": kills.total(),
        "by role": dict(kills),
        "seconds until all was gone": {
            role: {"median": round(statistics.median(taken), 2), "longest": round(max(taken), 2)}
            for role, taken in seconds.items()
        },
        "exit code after SIGTERM": code,
    }
    wrong: dict[str, object] = {
        "outlived their run": left,
        "processes left": sorted(run.processes().values()),
        "temporary files left": sorted(path.name for path in run.temporary.iterdir()),
        "shared memory left": sorted({path.name for path in Path("/dev/shm").iterdir()} - before),
    }
    if tier is not None:
        wrong["left on the tier"] = tier.names()
        twin = Run(folder / "undisturbed", options.ranks, options.workers, tier.path)
        found["checkpoints compared"], wrong["differences"] = compare(run, twin)
    print(json.dumps(found | wrong), flush=True)
    return int(code != 75 or any(wrong.values()))


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=120.0, help="no further kill after this")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--nvme", type=float, help="keep the state on a file system with room for so many of it")
    options = parser.parse_args()
    alone = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs none /dev/shm && exec "$@"', "sh"]
    if os.getuid() == 0 and "VISSL_ZERO_OWN_SHM" not in os.environ:
        os.environ["VISSL_ZERO_OWN_SHM"] = "1"
        os.execvp(alone[0], [*alone, sys.executable, *sys.argv])
    asked: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: asked.append(number))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tier = None if options.nvme is None else Tier(folder / "tier")
        run = Run(folder / "killed", options.ranks, options.workers, None if tier is None else tier.path)
        try:
            return kill_all(options, folder, run, tier, lambda: bool(asked))
        finally:  # nothing, unless it has failed
            for pid in run.processes():
                os.kill(pid, signal.SIGKILL)
            if tier is not None:
                tier.close()


if __name__ == "__main__":
    sys.exit(main())
