"""Kill a training run again and again, and see that it comes out the same.

    python benchmarks/soak.py --kills 300 [--folder F] [--seed S] [--level L] [--ranks N]

Trains once undisturbed, then again while a random rank is killed (SIGKILL) at a random moment, half of the time in the
middle of a save, and started again from its newest checkpoint, on and on until all kills are made and it may finish.
Prints, as one JSON object: kills, how many hit a save, steps and seconds lost, and whether the final checkpoint is that
of the undisturbed run bit for bit. Exit code 0 if it is and no kill was lost to a bad checkpoint, else 1.

Ranks are forked from a process that has torch imported, so that a start takes a second; what runs in them is what the
launcher runs (``worker.train_rank``).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from vissl_zero.config.compose import compose
from vissl_zero.config.resolve import resolve
from vissl_zero.config.resolved import ResolvedRun

_PRELOAD = ["torch", "torch.distributed.fsdp", "torch.distributed.tensor", "torch._dynamo", "vissl_zero.launch.worker"]
_LONGEST_LIFE_S = 1.8
_CONTEXT = multiprocessing.get_context("forkserver")


def make_plan(folder: Path, level: int, num_ranks: int, num_steps: int) -> ResolvedRun:
    """A small SwAV run with a queue, a checkpoint every second step, written while training goes on."""
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
    """One rank, as ``worker.work`` has it."""
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
        self.store = str(scratch / f"store{number}")
        arguments = [(plan, rank, self.store) for rank in range(plan.world_size)]
        self.ranks = [_CONTEXT.Process(target=_rank, args=given, daemon=True) for given in arguments]
        for rank in self.ranks:
            rank.start()

    def is_over(self) -> bool:
        return any(not rank.is_alive() for rank in self.ranks)

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


def soak(plan: ResolvedRun, scratch: Path, num_kills: int, most_s: float, chance: random.Random) -> dict[str, Any]:
    """Kill ``num_kills`` times, or as often as ``most_s`` seconds allow, then let the run finish."""
    folder = Path(plan.run_dir)
    folder.mkdir(parents=True)
    num_in_save, lost_steps, lost_s, complaints = 0, [], [], []
    begun = time.monotonic()
    for number in range(num_kills):
        life, born = Life(plan, scratch, number), time.monotonic()
        moment = born + chance.uniform(0.2, _LONGEST_LIFE_S)
        wants_save = chance.random() < 0.5
        while time.monotonic() < moment and not life.is_over():
            time.sleep(0.002)
        while wants_save and time.monotonic() < moment + 2.0 and not life.is_over() and not _is_saving(folder):
            time.sleep(0.0005)
        if wants_save:
            time.sleep(chance.uniform(0.0, 0.01))
        victim = chance.choice(life.ranks)
        num_in_save += _is_saving(folder)
        victim.kill()
        killed = time.monotonic()
        reached, saved = _last_step(folder), _newest(folder)
        lost_steps.append(max(reached - saved, 0))
        life.end()
        lost_s.append(time.monotonic() - killed)
        complaints += life.complaints()
        if reached >= (plan.max_steps or 0) or time.monotonic() - begun > most_s:
            num_kills = number + 1
            break
    life = Life(plan, scratch, num_kills)
    codes = life.wait()
    life.end()
    return {
        "kills": num_kills,
        "kills in a save": num_in_save,
        "steps lost per kill, median": statistics.median(lost_steps) if lost_steps else 0,
        "steps lost per kill, most": max(lost_steps, default=0),
        "wall s": round(time.monotonic() - begun, 1),
        "exit codes": codes,
        "complaints": complaints + life.complaints(),
    }


def _is_saving(folder: Path) -> bool:
    checkpoints = folder / "checkpoints"
    return checkpoints.is_dir() and any(path.suffix == ".partial" for path in checkpoints.iterdir())


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


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps-per-kill", type=int, default=10, help="more, where the run ends before its last kill")
    parser.add_argument("--minutes", type=float, default=120.0, help="no more kills after this")
    parser.add_argument("--level", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    _CONTEXT.set_forkserver_preload(_PRELOAD)
    num_steps = 60 + options.steps_per_kill * options.kills
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        scratch = Path(name)
        kinds = ("quiet", "killed")
        quiet, killed = (make_plan(scratch / kind, options.level, options.ranks, num_steps) for kind in kinds)
        found = soak(killed, scratch, options.kills, 60 * options.minutes, random.Random(options.seed))
        Path(quiet.run_dir).mkdir()
        begun = time.monotonic()
        life = Life(quiet, scratch, -1)
        codes = life.wait()
        life.end()
        found["undisturbed wall s"] = round(time.monotonic() - begun, 1)
        has_ended = codes == found["exit codes"]
        found["differences"] = differences(Path(killed.run_dir), Path(quiet.run_dir)) if has_ended else ["no end"]
        found["steps"] = num_steps
        lost_s = found["wall s"] - found["undisturbed wall s"]
        found["seconds lost per kill"] = round(lost_s / max(found["kills"], 1), 2)
        print(json.dumps(found))
    is_good = not found["differences"] and not found["complaints"] and set(codes) == {0}
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
