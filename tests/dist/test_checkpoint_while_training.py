"""An asynchronous save holds the state of its step, bit for bit, whatever training does meanwhile."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.dist.case import PROTOTYPES
from tests.dist.test_behaviour import _copied
from tests.dist.training import Case, Outcome, shard, train_step
from tests.ranks import run_on_ranks
from vissl_zero.checkpoint import find_checkpoints, open_checkpoint
from vissl_zero.checkpoint.folder import Manifest
from vissl_zero.checkpoint.saver import Saver
from vissl_zero.checkpoint.snapshot import Snapshot, replicated_parts
from vissl_zero.sharding.sharded_model import ShardedModel
from vissl_zero.sharding.state.saved_state import Part

CASE = Case(optimizer="adamw")
HELD_S = 0.05


class _HeldSaver(Saver):
    """Writes when it may."""

    may_write: threading.Event

    def _write(self, snapshot: Snapshot) -> None:
        assert self.may_write.wait(30)
        super()._write(snapshot)


def _held(part: Part, gate: threading.Event) -> Part:
    """A part that is read when the gate opens."""
    return dataclasses.replace(part, read=lambda: (gate.wait(30), part.read())[1])


def _snapshot(sharded: ShardedModel, step: int, gate: threading.Event) -> Snapshot:
    manifest = Manifest(step, 0, 0, 0, dist.get_world_size(), 0, "torch", 12, "", "", "", "", {})
    parts = [_held(part, gate) for part in sharded.parts()]
    return Snapshot(parts, replicated_parts("buffer", sharded.buffers()), {}, {}, manifest)


def _changes(sharded: ShardedModel, earlier: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    """Everything that changes shards, optimizer state or averages."""

    def swap() -> None:
        with sharded.averaged():
            pass

    return {
        "step": sharded.step,
        "normalize_rows": lambda: sharded.normalize_rows([PROTOTYPES]),
        "average": lambda: sharded.average(0.5),
        "averaged": swap,
        "load_state_dict": lambda: sharded.load_state_dict(earlier),
    }


def _save_while_training(folder: Path, engine: str, level: int) -> list[str]:
    """Names of tensors that were not saved as they were, by kind of change."""
    sharded, saver = shard(CASE, level, engine=engine), _HeldSaver(folder, True, keep_last=-1, keep_every=-1)
    train_step(sharded, CASE, 0, Outcome())
    sharded.average(0.0)
    earlier, wrong = _copied(sharded.state_dict()), []
    for number, (kind, change) in enumerate(_changes(sharded, earlier).items(), start=1):
        train_step(sharded, CASE, number, Outcome())
        expected = {part.name: (part.first_element, part.read().reshape(-1).clone()) for part in sharded.parts()}
        buffers = {f"buffer/{name}": (0, buffer.flatten().clone()) for name, buffer in sharded.buffers().items()}
        gate, saver.may_write = threading.Event(), threading.Event()
        saver.store(_snapshot(sharded, number, gate), sharded)

        def open_then(change: Callable[[], Any] = change, gate: threading.Event = gate) -> Any:
            assert not gate.is_set()
            threading.Timer(HELD_S, gate.set).start()
            result = change()
            assert gate.is_set(), "it did not wait for the copy"
            return result

        if kind == "step":  # forward and backward go on with nothing copied yet
            sharded.step = open_then  # type: ignore[method-assign]
            train_step(sharded, CASE, number + 1, Outcome())
            del sharded.step
        else:
            open_then()
        train_step(sharded, CASE, number + 1, Outcome())  # and nothing written yet
        saver.may_write.set()
        saver.finish()
        with open_checkpoint(find_checkpoints(folder)[0]) as checkpoint:
            assert checkpoint.manifest.step == number and list(checkpoint.verify()) == []
            for name, (first, values) in {**expected, **buffers}.items():
                stored = checkpoint.read_range(name, first, values.numel())
                wrong += [f"{kind}: {name}"] * (not torch.equal(stored, values))
    return wrong + _give_up(sharded, saver)


def _give_up(sharded: ShardedModel, saver: Saver) -> list[str]:
    """A copy that fails costs the save and not the run."""

    def fail() -> Tensor:
        raise MemoryError

    latest, snapshot = saver.latest_step, _snapshot(sharded, 99, threading.Event())
    parts = [dataclasses.replace(part, read=fail) for part in snapshot.parts]
    saver.store(dataclasses.replace(snapshot, parts=parts), sharded)
    train_step(sharded, CASE, 9, Outcome())
    saver.finish()
    saver.close()
    return [] if saver.latest_step == latest is not None else ["a failed copy was taken for a checkpoint"]


@pytest.mark.parametrize(
    ("engine", "level"), [("torch", 0), ("torch", 1), ("torch", 3), ("fairscale", 1), ("fairscale", 2)]
)
def test_what_is_saved_is_the_state_of_the_step_whatever_comes_next(tmp_path: Path, engine: str, level: int) -> None:
    assert run_on_ranks(2, _save_while_training, tmp_path, engine, level) == [[], []]
