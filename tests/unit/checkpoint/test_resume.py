"""What a resume requires of a checkpoint: the teacher, names, shapes and training images that the run has."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.unit.checkpoint.test_format import TENSORS, _manifest, write
from vissl_zero import collectives
from vissl_zero.checkpoint import open_checkpoint
from vissl_zero.checkpoint.folder import prune
from vissl_zero.checkpoint.resume import (
    Resumable,
    StoredState,
    _problems,
    _require_same_images,
    _require_same_names,
    _require_same_teacher,
    _require_shape,
    _restore_criterion,
    find_resumable,
    opening_lines,
    restore_buffers,
    resume,
)
from vissl_zero.checkpoint.saver import commit, write_rank
from vissl_zero.config.compose import compose
from vissl_zero.engine.hook import TEACHER_CHECKSUM
from vissl_zero.errors import CheckpointError, ConfigError
from vissl_zero.resolve.resolve import resolve
from vissl_zero.resolve.resolved import ResolvedRun
from vissl_zero.resolve.saved import as_data
from vissl_zero.sharding.state.saved_state import Part

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


def test_a_teacher_that_was_not_stored_keeps_its_buffers(tmp_path: Path) -> None:
    buffers = {"num_batches": torch.zeros(1).long(), "teacher:num_batches": torch.ones(1).long()}
    sharded: Any = SimpleNamespace(buffers=lambda: buffers)
    with open_checkpoint(write(tmp_path, 4)) as checkpoint:
        with pytest.raises(CheckpointError, match="is of another model: buffers that differ: teacher:num_batches"):
            restore_buffers(sharded, checkpoint)
        restore_buffers(sharded, checkpoint, with_teacher=False)
    assert [int(buffer) for buffer in buffers.values()] == [5, 1]


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


@cache
def _plan() -> ResolvedRun:
    data = "config.DATA.TRAIN.DATA_SOURCES=[synthetic]"
    composed = compose("pretrain/simclr/my_photos", [data, "config.NEAREST_NEIGHBOR.USE_KNN=false"])
    return resolve(composed.run, Path(), written=composed.written)


def test_leftovers_of_interrupted_saves_are_removed_before_a_run_resumes(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / ".step_000000009.partial").mkdir(parents=True)
    run: Any = SimpleNamespace(folder=tmp_path)
    plan = _plan()
    resumable = resume(run, [], plan)
    assert resumable.path is None and opening_lines(resumable, plan) == []
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_a_change_that_is_refused_is_told_from_what_the_checkpoint_has(tmp_path: Path) -> None:
    plan = _plan()
    config = as_data(plan)
    config["config"]["SEED_VALUE"] = 5
    write_rank(tmp_path, 7, 0, [], {}, {})
    commit(tmp_path, replace(_manifest(7, 1), config=config, level=0))
    run: Any = SimpleNamespace(folder=tmp_path)
    with pytest.raises(ConfigError, match=r"config.SEED_VALUE: was 5 when the checkpoint was made: .* \(got 0\)"):
        resume(run, [], plan)


@pytest.mark.parametrize("num_changed", [0, 1, 20, 21, 23])
def test_what_has_changed_is_listed_before_training(num_changed: int, tmp_path: Path) -> None:
    plan = _plan()
    config = as_data(plan)
    for number in range(num_changed):
        config["config"][f"OTHER_{number:02}"] = number
    config["config"]["DRY_RUN"] = "no change that counts"
    write_rank(tmp_path, 7, 0, [], {}, {})
    path = commit(tmp_path, replace(_manifest(7, 1), config=config, level=3))
    first, *lines = opening_lines(Resumable(path, ["\x1b[31mone is damaged"] * 25), plan)[20:]
    assert first == (
        "Resuming from step_000000007 (step 7, epoch 1; written at ZeRO level 3, torch engine, 1 process)."
    )
    changes = [f"  config.OTHER_{number:02}: {number} in the checkpoint, None now" for number in range(num_changed)]
    more = [f"  ... and {num_changed - 20} more"] * (num_changed > 20)
    assert lines == (["Changed since then:", *changes[:20], *more] if num_changed else [])
    skipped = opening_lines(Resumable(path, ["\x1b[31mone is damaged"] * 25), plan)[:20]
    assert set(skipped) == {skipped[0]} and skipped[0].startswith("skipped: ") and "\x1b" not in skipped[0]


@pytest.mark.parametrize(
    ("nth", "damaged", "step", "num_skipped"),
    [(1, (), 6, 0), (2, (), 4, 0), (1, (6,), 4, 1), (2, (4,), 2, 1), (1, (6, 4, 2), None, 3), (4, (), None, 0)],
)
def test_the_nth_newest_complete_checkpoint_is_resumed(
    nth: int, damaged: tuple[int, ...], step: int | None, num_skipped: int, tmp_path: Path
) -> None:
    paths = {number: write(tmp_path, number) for number in (2, 4, 6)}
    for number in damaged:
        (paths[number] / "manifest.json").write_text("{")
    if step is None:
        with pytest.raises(CheckpointError, match="so there is nothing to resume from") as caught:
            find_resumable(tmp_path, nth)
        assert str(caught.value).count("is damaged") == num_skipped
        assert (f"There is no {nth}th newest." in str(caught.value)) == (not num_skipped)
        return
    resumable = find_resumable(tmp_path, nth)
    assert resumable.path == paths[step] and len(resumable.skipped) == num_skipped
    assert find_resumable(paths[2]).path == paths[2]
    assert find_resumable(tmp_path / "empty").path is None


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


def test_each_rank_verifies_its_share_of_the_files_and_all_hear_of_each_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, 4)  # of three ranks
    for file in path.glob("*.safetensors"):
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    found: list[list[str]] = []

    def gather(gathered: list[Any], local: tuple[list[str], None]) -> None:
        found.append(local[0])
        gathered[:] = [(local[0], None), (["of the other", *local[0]], None)]

    monkeypatch.setattr(collectives, "world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    for rank in (0, 1):
        monkeypatch.setattr(collectives, "rank", lambda rank=rank: rank)
        assert _problems(path) == [*found[rank], "of the other"]
    assert [len(problems) for problems in found] == [2, 1]
    assert len({problem for problems in found for problem in problems}) == 3


class _Remembering(torch.nn.Module):
    """A loss with a row for each image, and a center."""

    def __init__(self, num_images: int, width: int = 2) -> None:
        super().__init__()
        self.register_buffer("memory", torch.zeros(num_images, 2))
        self.register_buffer("center", torch.zeros(width))


def _restored(path: Path, method: _Remembering) -> None:
    run: Any = SimpleNamespace(method=method, loader=SimpleNamespace(source=range(len(method.memory))))  # type: ignore[arg-type]
    with open_checkpoint(path) as checkpoint:
        _restore_criterion(run, checkpoint)


def test_the_state_of_a_loss_comes_back_to_a_loss_of_the_same_images_and_shapes(tmp_path: Path) -> None:
    state = {"criterion/memory": torch.arange(6.0).view(3, 2), "criterion/center": torch.ones(2)}
    write_rank(tmp_path, 4, 0, [Part.of(*item) for item in state.items()], {}, {})
    path = commit(tmp_path, _manifest(4, 1))
    method = _Remembering(3)
    _restored(path, method)
    for name, tensor in method.state_dict().items():
        assert torch.equal(tensor, state[f"criterion/{name}"])
    with pytest.raises(CheckpointError, match=r"remembers each of 3 training images in .*, and there are 4 here"):
        _restored(path, _Remembering(4))
    with pytest.raises(CheckpointError, match=r"criterion/center has shape \(2,\) in .* and \(5,\) here"):
        _restored(path, _Remembering(3, width=5))
    method.register_buffer("more", torch.ones(1))
    with pytest.raises(CheckpointError, match=r"tensors of the loss that differ: more"):
        _restored(path, method)
