"""``extra`` of ``optimizer.save``: what a loop of one's own needs to resume, beside the training state."""

from __future__ import annotations

import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import vissl_zero
from tests.dist.own_loop import Loop, given_optimizer, loss_of, text, tokens_of
from tests.ranks import run_on_ranks
from vissl_zero.checkpoint.folder import open_checkpoint
from vissl_zero.cli import main
from vissl_zero.errors import CheckpointError

NUM_UPDATES = 8
LOOP = Loop("adamw_ready", clip=0.5, accumulation=2)


def _train(folder: str, level: int, updates: range, from_step: int | None = None) -> dict[str, Tensor]:
    """Cosine schedule, accumulation, clipping and a teacher; a checkpoint after each update. Resumes past update 0."""
    model = text()
    teacher = vissl_zero.ema(model, decay=0.9)
    zero = {"level": level, "clip_grad": LOOP.clip, "gradient_accumulation_steps": LOOP.accumulation}
    model, optimizer = vissl_zero.initialize(model, given_optimizer(LOOP.optimizer, model), zero)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=NUM_UPDATES)
    if updates.start:
        extra = optimizer.load(folder if from_step is None else f"{folder}/checkpoints/step_{from_step:09d}")
        assert extra is not None and extra["next"] == updates.start and optimizer.num_updates == updates.start
        scheduler.load_state_dict(extra["scheduler"])
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for update in updates:
        for index in range(LOOP.accumulation):
            optimizer.backward(loss_of(model, tokens_of(update, index).chunk(world_size)[rank], 1))
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step()
        optimizer.save(folder, extra={"scheduler": scheduler.state_dict(), "next": update + 1, "rank": rank})
    assert next(teacher.parameters()) is not None
    state, averages = optimizer.full_state(), optimizer.full_ema_state()
    return state | {f"ema:{name}": value for name, value in averages.items()}


def _distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() == b.keys()
    return max((a[name] - b[name]).abs().max().item() for name in a)


@pytest.mark.timeout(90)
def test_a_schedule_resumes_at_another_level_and_number_of_ranks(tmp_path: Path) -> None:
    whole = run_on_ranks(1, _train, str(tmp_path / "whole"), 0, range(NUM_UPDATES))[0]
    folder = str(tmp_path / "parts")
    run_on_ranks(2, _train, folder, 3, range(3))
    run_on_ranks(3, _train, folder, 1, range(3, 6))
    assert _distance(run_on_ranks(1, _train, folder, 3, range(6, NUM_UPDATES))[0], whole) < 1e-10
    assert sorted(path.name for path in Path(folder, "checkpoints").iterdir()) == [
        f"step_{update + 1:09d}" for update in range(NUM_UPDATES)
    ], "nothing is deleted"
    # DeepSpeed's tag: the checkpoint that is named, and not the newest.
    assert _distance(run_on_ranks(2, _train, folder, 2, range(2, NUM_UPDATES), 2)[0], whole) < 1e-10


def _extra_of(folder: str) -> Any:
    _, optimizer = vissl_zero.initialize(text(), {"type": "Adam", "lr": 0.1}, {"level": 3})
    return optimizer.load(folder)


def _save(folder: str, extra: Any) -> Any:
    _, optimizer = vissl_zero.initialize(text(), {"type": "Adam", "lr": 0.1}, {"level": 1})
    optimizer.save(folder, extra=extra)


@pytest.mark.timeout(60)
def test_what_plain_data_holds_comes_back_on_every_rank(tmp_path: Path) -> None:
    random.seed(1)
    extra = {"random": random.getstate(), "torch": torch.get_rng_state(), 3: [None, True, 1.5, "text", b"x", {1, 2}]}
    run_on_ranks(2, _save, str(tmp_path), extra)
    for found in run_on_ranks(3, _extra_of, str(tmp_path)):
        assert torch.equal(found.pop("torch"), extra["torch"])
        assert found == {key: value for key, value in extra.items() if key != "torch"}
    (folder,) = tmp_path.glob("checkpoints/step_*")
    with open_checkpoint(folder) as checkpoint:
        assert "extra/torch_save" in checkpoint.ranks["rank00000"].pieces
    for words in (
        ["verify", str(folder)],
        ["inspect", str(folder)],
        ["export", str(folder), "--to", f"{tmp_path}/w.pt"],
    ):
        assert main(["checkpoint", *words]) == 0
    run_on_ranks(2, _save, str(tmp_path / "none"), None)
    assert run_on_ranks(2, _extra_of, str(tmp_path / "none")) == [None, None]
    run_on_ranks(1, _save, str(tmp_path / "empty"), {})
    assert run_on_ranks(2, _extra_of, str(tmp_path / "empty")) == [{}, {}]


def _load_damaged(folder: str) -> tuple[str, bool]:
    model, optimizer = vissl_zero.initialize(text(), {"type": "Adam", "lr": 0.1}, {"level": 3})
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    with pytest.raises(CheckpointError) as caught:
        optimizer.load(folder)
    return str(caught.value), all(not value.any() for value in optimizer.full_state().values())


@pytest.mark.timeout(60)
def test_a_checkpoint_whose_extra_is_damaged_or_missing_is_not_loaded(tmp_path: Path) -> None:
    run_on_ranks(2, _save, str(tmp_path), {"name": "a text that stands in the file"})
    (file,) = tmp_path.glob("checkpoints/step_*/rank00000.safetensors")
    file.write_bytes(file.read_bytes().replace(b"a text that stands", b"b text that stands"))
    for folder in (tmp_path, file.parent):
        for sentence, is_unchanged in run_on_ranks(2, _load_damaged, str(folder)):
            assert "extra/torch_save do not fit" in sentence and is_unchanged
    gone = tmp_path / "checkpoints/step_000000009"
    for sentence, is_unchanged in run_on_ranks(2, _load_damaged, str(gone)):
        assert f"{gone} does not exist. Beside it are step_" in sentence and is_unchanged


class _Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("was_run"),)


def _save_and_look(folder: str, kind: str) -> tuple[str, bool]:
    model, optimizer = vissl_zero.initialize(text(), {"type": "Adam", "lr": 0.1}, {"level": 3})
    extra: Any = {
        "object": {"epoch": 1, "scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer)},
        "array": {"state": np.random.default_rng(0).random(3)},
        "function": {"decay": lambda step: 0.9},
        "shards": {"model": model.state_dict()},
        "list": [1, 2],
        "evil": {"evil": _Evil()},
    }[kind]
    # Rank 0's counts.
    with pytest.raises(CheckpointError) as caught:
        optimizer.save(folder, extra=extra if dist.get_rank() == 0 else None)
    return str(caught.value), Path(folder).exists()


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("object", "extra['scheduler'] (ConstantLR) cannot be read back without running code. Write its state_dict()"),
        ("array", "extra['state'] (ndarray) cannot be read back"),
        ("function", "extra['decay'] (function) cannot be read back"),
        ("evil", "extra['evil'] (_Evil) cannot be read back"),
        ("shards", "extra['model'] holds a sharded tensor, of which rank 0 has a part"),
        ("list", "extra must be a dict (got list)"),
    ],
)
def test_what_cannot_be_read_back_is_refused_on_every_rank(kind: str, sentence: str, tmp_path: Path) -> None:
    for said, is_written in run_on_ranks(2, _save_and_look, str(tmp_path / "run"), kind):
        assert sentence in said and not is_written and "\n" not in said


def _write_hostile(folder: str) -> None:
    """A checkpoint whose checksums fit and whose extra would run something."""
    from vissl_zero.checkpoint import extra as module

    data = torch.frombuffer(bytearray(pickle.dumps(_Evil())), dtype=torch.uint8)
    original, module._packed = module._packed, lambda _: data  # type: ignore[assignment]
    try:
        _save(folder, {})
    finally:
        module._packed = original


@pytest.mark.timeout(60)
def test_nothing_in_a_foreign_checkpoint_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_on_ranks(1, _write_hostile, str(tmp_path))
    for sentence, is_unchanged in run_on_ranks(2, _load_damaged, str(tmp_path)):
        assert "or is damaged. Nothing was run." in sentence and is_unchanged
    assert not Path("was_run").exists()


@pytest.mark.timeout(60)
def test_the_average_of_ones_own_loop_is_exported(tmp_path: Path) -> None:
    state = run_on_ranks(2, _train, str(tmp_path), 3, range(2))[0]
    file = tmp_path / "teacher.pt"
    assert main(["checkpoint", "export", str(tmp_path), "--average", "--to", str(file)]) == 0
    exported = torch.load(file, weights_only=True)
    tied = {"ema:head.weight"}  # stored once
    wanted = {name for name in state if name.startswith("ema:")} - tied
    assert {f"ema:{name}" for name in exported} - tied == wanted
    assert all(torch.equal(exported[name.removeprefix("ema:")], state[name]) for name in wanted)
    run_on_ranks(1, _save, str(tmp_path / "none"), None)
    assert main(["checkpoint", "export", str(tmp_path / "none"), "--average", "--to", str(file)]) == 2
