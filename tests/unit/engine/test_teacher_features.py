"""What a frozen teacher gives, kept on disk: the same bits, whole rows only, and a folder for each teacher."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.unit.config.example_config import CPU_HOST
from vissl_zero.config.compose import compose
from vissl_zero.data.loader import build_train_loader
from vissl_zero.engine.teacher_features import TeacherFeatures, folder_of
from vissl_zero.errors import ConfigError, VisslZeroError
from vissl_zero.resolve.resolve import resolve
from vissl_zero.resolve.resolved import ResolvedRun

CPU, NUM_IMAGES = torch.device("cpu"), 5
CACHE = "config.DISTILLATION.CACHE_FEATURES=true"


class _Output(NamedTuple):
    embeddings: Tensor
    maps: list[Tensor]
    nothing: None


class _Teacher:
    """Gives features, maps of two resolutions and a flag in other formats, by image and view; counts its calls."""

    def __init__(self, scale: float = 1.0):
        self.calls, self.scale = 0, scale

    def __call__(self, view: int, ids: Tensor) -> list[Any]:
        self.calls += 1
        rows = torch.cat([ids + 10.0 * crop + 100.0 * view for crop in range(3)])[:, None]
        values = (rows * torch.tensor([1.0, 1 / 3]) * self.scale).double()
        maps = [values[: 2 * len(ids), :, None, None].bfloat16(), values[2 * len(ids) :].float()]
        return [_Output(values, maps, None), rows[:, 0] > 12]


def _asked(features: TeacherFeatures, teacher: _Teacher, epoch: int, ids: list[int], num_views: int = 2) -> list[Any]:
    chosen = torch.tensor(ids)
    return features.outputs(epoch, chosen, lambda: teacher(epoch % num_views, chosen))


def _leaves(outputs: list[Any]) -> list[Tensor]:
    return [outputs[0].embeddings, *outputs[0].maps, outputs[1]]


def _features(folder: Path) -> TeacherFeatures:
    return TeacherFeatures(folder, NUM_IMAGES, 2, CPU)


def test_each_view_is_computed_once_and_read_with_the_same_bits(tmp_path):
    features, teacher, plain = _features(tmp_path), _Teacher(), _Teacher()
    for epoch in range(5):
        for ids in ([3, 1], [0, 4, 2]) if epoch % 2 else ([0, 1, 2], [4, 3]):
            found, expected = _asked(features, teacher, epoch, ids), plain(epoch % 2, torch.tensor(ids))
            pairs = zip(_leaves(found), _leaves(expected), strict=True)
            assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in pairs)
            assert isinstance(found[0], _Output) and found[0].nothing is None
    assert teacher.calls == features.num_computed == 4  # two micro-batches of two views


def test_another_process_reads_what_is_whole_and_computes_the_rest(tmp_path):
    features, teacher = _features(tmp_path), _Teacher()
    _asked(features, teacher, 0, [0, 1])
    _asked(features, teacher, 0, [2])
    features.close()
    (places,) = tmp_path.glob("*.places")
    _asked(killed := _features(tmp_path), _Teacher(), 0, [4])
    del killed  # its row was never declared
    with places.open("ab") as file:
        file.write(b"\3\0\0\0\0\0\0\0\4\0")  # a place whose row is lost, and half a place
    assert sorted(path.stat().st_size > 0 for path in tmp_path.glob("*.rows")) == [True, True]
    again, other = _features(tmp_path), _Teacher()
    _asked(again, other, 0, [1, 0])  # the first of a process is always computed
    assert torch.equal(_asked(again, other, 0, [2, 1])[0].embeddings, _Teacher()(0, torch.tensor([2, 1]))[0].embeddings)
    assert other.calls == 1
    for image in (3, 4):
        _asked(again, other, 0, [image])
    assert other.calls == 3


def test_features_of_other_images_are_refused_and_a_full_disk_ends_nothing(tmp_path, capsys):
    features = _features(tmp_path / "a")
    _asked(features, _Teacher(), 0, [0, 1])
    features.close()
    with pytest.raises(VisslZeroError, match="changed in place, or the files are damaged"):
        _asked(_features(tmp_path / "a"), _Teacher(scale=1.2), 0, [0, 1])
    (tmp_path / "file").write_text("")
    full, teacher = _features(tmp_path / "file" / "b"), _Teacher()
    for epoch in (0, 2):
        _asked(full, teacher, epoch, [0, 1])
    assert teacher.calls == 2 and "cannot be written" in capsys.readouterr().out


def _resolved(*words: str) -> ResolvedRun:
    recipe = "digits/feature_distillation"
    return resolve(compose(recipe, list(words)).run, "runs/x", recipe=recipe, host=CPU_HOST)


@pytest.mark.slow
def test_the_folder_is_of_teacher_images_views_and_numbers(tmp_path):
    folder, period = f"config.DISTILLATION.CACHE_FOLDER={tmp_path}", "config.DATA.AUGMENTATION_PERIOD=1"

    def name(*words: str, checksum: int = 1) -> str:
        plan = _resolved(CACHE, folder, "config.DATA.NUM_DATALOADER_WORKERS=0", period, *words)
        return folder_of(plan, build_train_loader(plan, 0, 1).source, checksum).name

    loss = "config.LOSS.feature_distillation_loss"
    plain = name()
    same = (
        "config.DATA.AUGMENTATION_PERIOD=3",
        f"{loss}.temperature=0.2",
        "config.MODEL.HEAD.PARAMS=[[mlp,{dims:[-1,32]}]]",
    )
    assert {name(word) for word in same} == {plain}
    others = (
        "config.SEED_VALUE=7",
        "config.TRAINER.DTYPE=float64",
        "config.DATA.TRAIN.DATA_LIMIT=400",
        f"{loss}.teacher_mean=[0.1,0.1,0.1]",
        "config.DATA.TRAIN.TRANSFORMS=[{name: Resize, size: [16, 16]}, {name: ToTensor}]",
    )
    assert len({plain, name(checksum=2), *map(name, others)}) == 2 + len(others)


def test_an_image_that_is_written_anew_makes_another_folder(tmp_path):
    from vissl_zero.engine.teacher_features import _digest

    (tmp_path / "1.jpg").write_bytes(b"abc")
    source: Any = dataclasses.make_dataclass("Source", [("name", Any)], namespace={"__len__": lambda _: 1})
    images = source(lambda index: str(tmp_path / "1.jpg"))
    first = _digest(images, [str(tmp_path)])
    assert _digest(images, [str(tmp_path)]) == first
    os.utime(tmp_path / "1.jpg", (1, 1))
    assert _digest(images, [str(tmp_path)]) != first


def test_views_repeat_after_the_period_and_the_order_never_does():
    plan = _resolved("config.DATA.AUGMENTATION_PERIOD=2", "config.DATA.TRAIN.DATA_LIMIT=300")
    loader = build_train_loader(plan, 0, 1)
    epochs = [list(loader.order.steps(epoch)) for epoch in range(4)]
    assert [steps[0][0].epoch for steps in epochs] == [0, 1, 0, 1]
    assert epochs[0][0][0].sample_ids != epochs[2][0][0].sample_ids


def test_views_that_never_come_again_are_refused_and_so_are_teachers_that_move():
    def said(*words: str) -> str:
        with pytest.raises(ConfigError) as caught:
            _resolved(CACHE, *words)
        return str(caught.value)

    text = said("config.DATA.TRAIN.COLLATE_FUNCTION=cutmixup_collator")
    assert "config.DISTILLATION.CACHE_FEATURES" in text and "Write config.DATA.AUGMENTATION_PERIOD=1" in text
    assert "no mixture comes again" in text
    assert "must be below the 5 epochs" in said("config.DATA.AUGMENTATION_PERIOD=5", "config.OPTIMIZER.num_epochs=5")
    with pytest.raises(ConfigError, match="swav_loss has no teacher that gives the same"):
        resolve(compose("quickstart/swav_digits", [CACHE]).run, "runs/x", host=CPU_HOST)
