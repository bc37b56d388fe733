"""Kill a training run again and again, and see that it comes out the same.

    python benchmarks/soak.py --kills 300 [--folder F] [--minutes M] [--seed S] [--level L] [--ranks N]

Trains while a random rank is killed (SIGKILL) at a random moment, half of the time in the middle of a save, and started
again from its newest checkpoint, on and on until all kills are made and it may finish; then once more undisturbed.
Prints, as one JSON object: kills, how many hit a save, steps and seconds lost, and whether the final checkpoint is that
of the undisturbed run bit for bit. Exit code 0 if it is and no kill was lost to a bad checkpoint, else 1.

With --folder, what is done is kept there, and the same command goes on with the rest, however it was interrupted;
after so many --minutes nothing new is begun, and the exit code is 75.

Ranks are forked from a process that has torch imported, so that a start takes a second; what runs in them is what the
launcher runs (``worker.train_rank``).
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import json
import multiprocessing
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vissl_zero.config.compose import compose
from vissl_zero.resolve.resolve import resolve
from vissl_zero.resolve.resolved import ResolvedRun

_PRELOAD = ["torch", "torch.distributed.fsdp", "torch.distributed.tensor", "torch._dynamo", "vissl_zero.launch.worker"]
_LONGEST_LIFE_S = 1.8
_INTERRUPTED = 75
_PR_SET_PDEATHSIG = 1
_CONTEXT = multiprocessing.get_context("forkserver")


def make_plan(folder: Path, level: int, num_ranks: int, num_steps: int) -> ResolvedRun:
    """A small SwAV run with a queue, a checkpoint every second step, written while training continues."""
    composed = compose(
        "quickstart/swav_digits",
        [
            f"config.CHECKPOINT.DIR={folder}",
            "config.CHECKPOINT.CHECKPOINT_ITER_FREQUENCY=2",
            f"config.DISTRIBUTED.NUM_PROC_PER_NODE={num_ranks}",
            f"config.DATA.TRAIN.BATCHSIZE_PER_REPLICA={12 // num_ranks}",
            f"config.TRAINER.MAX_STEPS={num_steps}",
            "config.TRAINER.THREADS_PER_RANK=1",
            "config.DATA.NUM_DATALOADER_WORKERS=0",
            "config.DATA.TRAIN.DATA_LIMIT=60",
            "config.LOSS.swav_loss.queue.start_epoch=0",
            "config.OPTIMIZER.num_epochs=1000",
            "config.NEAREST_NEIGHBOR.USE_KNN=false",
            "config.HOOKS.TENSORBOARD_SETUP.USE_TENSORBOARD=false",
            f"config.ZERO.LEVEL={level}",
            "config.LOG_FREQUENCY=1000000",
        ],
    )
    return resolve(composed.run, folder, recipe=composed.recipe, written=composed.written)


def _rank(plan: ResolvedRun, rank: int, store: str) -> None:
    """One rank, as ``worker.work`` has it. It ends with the process that forked it, which ends with this program."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    with Path(os.devnull).open("w") as nowhere:
        sys.stdout = nowhere
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(plan.world_size)}
        os.environ |= {"VISSL_ZERO_STORE": store, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        from vissl_zero.launch.worker import work

        try:
            code = work(plan)
        except BaseException as error:  # noqa: BLE001 - a peer was killed, or something is wrong: the parent knows
            Path(f"{store}.rank{rank}").write_text(f"{type(error).__name__}: {error}")
            code = 1
    os._exit(code)


class Life:
    """The ranks from one start to their end."""

    def __init__(self, plan: ResolvedRun, scratch: Path, number: int):
        self.store = str(scratch / f"store{number}.{os.getpid()}")  # never one that an interrupted life has left
        self._checkpoints, self._is_clean = Path(plan.run_dir) / "checkpoints", False
        arguments = [(plan, rank, self.store) for rank in range(plan.world_size)]
        self.ranks = [_CONTEXT.Process(target=_rank, args=given, daemon=True) for given in arguments]
        for rank in self.ranks:
            rank.start()

    def is_over(self) -> bool:
        return any(not rank.is_alive() for rank in self.ranks)

    def is_saving(self) -> bool:
        """Whether a save is under way; to be asked often, since what an earlier life has left there goes first."""
        is_there = self._checkpoints.is_dir() and any(p.suffix == ".partial" for p in self._checkpoints.iterdir())
        self._is_clean |= not is_there
        return is_there and self._is_clean

    def wait(self) -> list[int | None]:
        """Until all have ended by themselves."""
        while any(rank.is_alive() for rank in self.ranks):
            codes = [rank.exitcode for rank in self.ranks]
            if any(code not in (None, 0) for code in codes):
                time.sleep(1.0)
                break
            time.sleep(0.02)
        return [rank.exitcode for rank in self.ranks]

    def end(self) -> None:
        for rank in self.ranks:
            rank.kill()
        for rank in self.ranks:
            rank.join()

    def complaints(self) -> list[str]:
        """What ranks said that were not killed, lost peers apart."""
        found = [path.read_text() for path in Path(self.store).parent.glob(f"{Path(self.store).name}.rank*")]
        return [text for text in found if text.startswith(("CheckpointError", "ConfigError", "AssertionError"))]


@dataclass
class Progress:
    """What was done so far, in a file that is whole at any moment.

    Attributes:
        settings: of the command; another one cannot go on with it.
        in_save: of each kill, whether it hit a save.
        lost_steps: of each kill, steps to do again.
        complaints: of ranks that were not killed.
        wall_s: of all lives so far.
        codes: exit codes of the last life, once it has ended by itself.
        undisturbed_wall_s: of the undisturbed run, once it was made.
    """

    settings: dict[str, Any]
    in_save: list[bool] = field(default_factory=list)
    lost_steps: list[int] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)
    wall_s: float = 0.0
    codes: list[int | None] = field(default_factory=list)
    undisturbed_wall_s: float = 0.0

    def write(self, path: Path) -> None:
        temporary = path.with_suffix(".new")
        temporary.write_text(json.dumps(dataclasses.asdict(self)))
        temporary.replace(path)


def kill_once(plan: ResolvedRun, scratch: Path, progress: Progress, most_steps: int, chance: random.Random) -> None:
    """Start the run, kill a rank of it, and note what that has cost. It takes ``most_steps`` steps at most."""
    folder, number, begun = Path(plan.run_dir), len(progress.lost_steps), time.monotonic()
    life, first = Life(plan, scratch, number), _newest(folder)
    moment = begun + chance.uniform(0.2, _LONGEST_LIFE_S)
    wants_save = chance.random() < 0.5

    def may_live() -> bool:
        return not life.is_over() and _last_step(folder) - first < most_steps

    while time.monotonic() < moment and may_live():
        life.is_saving()
        time.sleep(0.002)
    while wants_save and time.monotonic() < moment + 20.0 and may_live() and not life.is_saving():
        time.sleep(0.0005)
    if wants_save:
        time.sleep(chance.uniform(0.0, 0.01))
    progress.in_save.append(life.is_saving())
    chance.choice(life.ranks).kill()
    progress.lost_steps.append(max(_last_step(folder) - _newest(folder), 0))
    life.end()
    progress.complaints += life.complaints()
    progress.wall_s += time.monotonic() - begun


def finish(plan: ResolvedRun, scratch: Path, number: int) -> tuple[list[int | None], list[str], float]:
    """Let the run end by itself: exit codes, complaints, seconds."""
    begun = time.monotonic()
    life = Life(plan, scratch, number)
    codes = life.wait()
    life.end()
    return codes, life.complaints(), time.monotonic() - begun


def _last_step(folder: Path) -> int:
    try:
        return (folder / "metrics.jsonl").read_bytes().count(b"\n")
    except OSError:
        return 0


def _newest(folder: Path) -> int:
    from vissl_zero.checkpoint.folder import find_checkpoints, step_of

    found = find_checkpoints(folder)
    return (step_of(found[0]) or 0) if found else 0


def differences(a: Path, b: Path) -> list[str]:
    """Names of tensors and state that differ between the newest checkpoints of two runs."""
    import torch

    from vissl_zero.checkpoint import newest_checkpoint

    with newest_checkpoint(a) as one, newest_checkpoint(b) as other:
        assert list(one.verify()) == [] and list(other.verify()) == []
        wrong = sorted(one.tensors.keys() ^ other.tensors.keys())
        wrong += [name for name in one.tensors if not torch.equal(one.read(name), other.read(name))]
        for stem, rank in one.ranks.items():
            twin = other.ranks[stem]
            wrong += [f"{stem} {what}" for what in ("rng", "scalars") if getattr(rank, what) != getattr(twin, what)]
        for field in ("step", "epoch", "epoch_samples", "position", "loss_scale"):
            wrong += [field] if getattr(one.manifest, field) != getattr(other.manifest, field) else []
    return wrong


def _opened(path: Path, settings: dict[str, Any]) -> Progress:
    if not path.exists():
        return Progress(settings)
    progress = Progress(**json.loads(path.read_text()))
    if progress.settings != settings:
        sys.exit(f"{path} is of another command: {progress.settings}. Give the same, or another --folder.")
    return progress


def run(scratch: Path, options: argparse.Namespace) -> int:
    """All of it, or what is left of it; exit code."""
    settings = {name: getattr(options, name) for name in ("kills", "seed", "steps_per_kill", "level", "ranks")}
    path, deadline = scratch / "progress.json", time.monotonic() + 60 * options.minutes
    progress = _opened(path, settings)
    num_steps = 60 + options.steps_per_kill * options.kills
    kinds = ("quiet", "killed")
    quiet, killed = (make_plan(scratch / kind, options.level, options.ranks, num_steps) for kind in kinds)
    Path(killed.run_dir).mkdir(parents=True, exist_ok=True)

    def is_late() -> bool:
        if time.monotonic() > deadline:
            print(f"{len(progress.lost_steps)} of {options.kills} kills are made; the same command goes on.")
        return time.monotonic() > deadline

    while len(progress.lost_steps) < options.kills:
        if is_late():
            return _INTERRUPTED
        if _newest(Path(killed.run_dir)) >= num_steps:
            sys.exit(f"The run was over after {len(progress.lost_steps)} kills. Give more --steps-per-kill.")
        chance = random.Random(f"{options.seed} {len(progress.lost_steps)}")
        kill_once(killed, scratch, progress, options.steps_per_kill, chance)
        progress.write(path)
    if not progress.codes:
        if is_late():
            return _INTERRUPTED
        progress.codes, complaints, seconds = finish(killed, scratch, options.kills)
        progress.complaints += complaints
        progress.wall_s += seconds
        progress.write(path)
    if not progress.undisturbed_wall_s:
        if is_late():
            return _INTERRUPTED
        shutil.rmtree(quiet.run_dir, ignore_errors=True)
        Path(quiet.run_dir).mkdir()
        codes, complaints, seconds = finish(quiet, scratch, -1)
        if set(codes) != {0}:
            sys.exit(f"The undisturbed run has failed: {codes} {complaints}")
        progress.undisturbed_wall_s = seconds
        progress.write(path)
    has_ended = set(progress.codes) == {0}
    found = {
        "kills": len(progress.lost_steps),
        "kills in a save": sum(progress.in_save),
        "steps": num_steps,
        "steps lost per kill, median": statistics.median(progress.lost_steps),
        "steps lost per kill, most": max(progress.lost_steps),
        "wall s": round(progress.wall_s, 1),
        "undisturbed wall s": round(progress.undisturbed_wall_s, 1),
        "seconds lost per kill": round((progress.wall_s - progress.undisturbed_wall_s) / options.kills, 2),
        "exit codes": progress.codes,
        "complaints": progress.complaints,
        "differences": differences(Path(killed.run_dir), Path(quiet.run_dir)) if has_ended else ["no end"],
    }
    print(json.dumps(found))
    return 0 if has_ended and not found["differences"] and not found["complaints"] else 1


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--folder", type=Path, help="kept, so that the same command can go on; else a temporary one")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps-per-kill", type=int, default=4, help="a rank is killed after so many at the latest")
    parser.add_argument("--minutes", type=float, default=120.0, help="nothing new is begun after this")
    parser.add_argument("--level", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    _CONTEXT.set_forkserver_preload(_PRELOAD)
    if options.folder is not None:
        options.folder.mkdir(parents=True, exist_ok=True)
        return run(options.folder, options)
    with tempfile.TemporaryDirectory() as name:
        return run(Path(name), options)


if __name__ == "__main__":
    sys.exit(main())
