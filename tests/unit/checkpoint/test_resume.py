"""What a resume requires of a checkpoint: the teacher, names, shapes and training images that the run has."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.unit.checkpoint.test_format import TENSORS, write
from vissl_zero.checkpoint import open_checkpoint
from vissl_zero.checkpoint.folder import prune
from vissl_zero.checkpoint.resume import (
    StoredState,
    _require_same_images,
    _require_same_names,
    _require_same_teacher,
    _require_shape,
)
from vissl_zero.engine.hook import TEACHER_CHECKSUM
from vissl_zero.errors import CheckpointError

WEIGHT = "model/trunk.stem.0.weight"  # (7, 5)


@pytest.mark.parametrize(("before", "now", "fits"), [(1, 1, True), (1, 2, False), (None, 2, True), (1, None, True)])
def test_a_frozen_teacher_is_the_one_that_the_run_began_with(before: Any, now: Any, fits: bool) -> None:
    figures = [{} if value is None else {TEACHER_CHECKSUM: value} for value in (before, now)]
    run: Any = SimpleNamespace(results=figures[1])
    if fits:
        _require_same_teacher(run, figures[0])
        return
    with pytest.raises(CheckpointError, match="teacher's weights are not those that this run began with"):
        _require_same_teacher(run, figures[0])


@pytest.mark.parametrize(
    ("shape", "num_images", "refusal"),
    [
        ((7, 5), 7, ""),
        ((9, 5), 9, "remembers each of 7 training images in .*, and there are 9 here"),
        ((9, 5), 8, ""),  # something else than images
        ((7, 9), 9, "remembers each of 5 training images in .*, and there are 9 here"),
        ((9, 9), 9, ""),
        ((9,), 9, ""),
    ],
)
def test_a_loss_that_remembers_images_wants_as_many(
    shape: tuple[int, ...], num_images: int, refusal: str, tmp_path: Path
) -> None:
    with open_checkpoint(write(tmp_path, 4)) as checkpoint:
        if refusal:
            with pytest.raises(CheckpointError, match=refusal):
                _require_same_images(WEIGHT, shape, checkpoint, num_images)
        else:
            _require_same_images(WEIGHT, shape, checkpoint, num_images)


def test_names_and_shapes_are_the_models(tmp_path: Path) -> None:
    with open_checkpoint(write(tmp_path, 4)) as checkpoint:
        _require_shape(WEIGHT, (7, 5), checkpoint)
        with pytest.raises(CheckpointError, match=r"has shape \(7, 5\) in .* and \(5, 7\) here"):
            _require_shape(WEIGHT, (5, 7), checkpoint)
        names = dict.fromkeys(name.removeprefix("model/") for name in TENSORS if name.startswith("model/"))
        _require_same_names("parameters", names, checkpoint, "model/")
        without_trunk = {name: None for name in names if not name.startswith("trunk.")}
        _require_same_names("parameters", without_trunk, checkpoint, "model/", passed_over="trunk.")
        for wrong in ({**names, "more": None}, without_trunk, {}):
            with pytest.raises(CheckpointError, match=r"is of another model: parameters that differ: "):
                _require_same_names("parameters", wrong, checkpoint, "model/")


def test_state_of_the_optimizer_is_left_out_where_another_one_runs(tmp_path: Path) -> None:
    with open_checkpoint(write(tmp_path, 4)) as checkpoint:
        whole, without = StoredState(checkpoint), StoredState(checkpoint, with_optimizer=False)
        momentum = "optimizer/momentum_buffer/trunk.stem.0.weight"
        assert whole.names("optimizer/") == [momentum] and without.names("optimizer/") == []
        names = [name for name in TENSORS if name.startswith("model/")]
        assert sorted(whole.names("model/")) == sorted(without.names("model/")) == sorted(names)
        assert whole.scalars("trunk.stem.0.weight")["step"]["value"] == 4.0
        assert without.scalars("trunk.stem.0.weight") == {}
        assert (whole.shape(WEIGHT), whole.dtype(WEIGHT)) == ((7, 5), torch.float64)
        assert whole.shape("nothing") is whole.dtype("nothing") is None


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "newest", "kept"),
    [
        (-1, -1, None, [2, 3, 4, 6, 9]),
        (1, -1, None, [9]),
        (0, -1, None, [9]),  # the newest stays whatever is asked for
        (2, -1, None, [6, 9]),
        (5, -1, None, [2, 3, 4, 6, 9]),
        (1, 3, None, [3, 6, 9]),
        (1, 0, None, [9]),
        (1, -1, 4, [4, 6, 9]),  # later ones are of another course of the run
        (1, 1, 4, [2, 3, 4, 6, 9]),
    ],
)
def test_which_checkpoints_stay(
    keep_last: int, keep_every: int, newest: int | None, kept: list[int], tmp_path: Path
) -> None:
    steps = [2, 3, 4, 6, 9]
    folders = {step: tmp_path / "checkpoints" / f"step_{step:09d}" for step in steps}
    for folder in folders.values():
        folder.mkdir(parents=True)
    removed = prune(tmp_path, keep_last, keep_every, newest)
    assert removed == [folders[step] for step in reversed(steps) if step not in kept]
    assert sorted((tmp_path / "checkpoints").iterdir()) == [folders[step] for step in kept]
