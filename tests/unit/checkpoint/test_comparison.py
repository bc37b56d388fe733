"""Tensors and settings side by side, and which changes of settings a resume refuses."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.unit.checkpoint.test_format import _manifest
from vissl_zero.checkpoint import comparison
from vissl_zero.checkpoint.comparison import (
    compare,
    describe,
    differences,
    facts_that_differ,
    refused,
    settings_that_differ,
)
from vissl_zero.checkpoint.folder import Checkpoint, open_checkpoint
from vissl_zero.checkpoint.saver import commit, write_rank
from vissl_zero.checkpoint.shard_file import Entry, write_shard_file
from vissl_zero.checkpoint.weights import WeightsFile
from vissl_zero.errors import Problem
from vissl_zero.sharding.state.saved_state import Part

NAN, INF = math.nan, math.inf


def _compared(folder: Path, a: dict[str, Tensor], b: dict[str, Tensor]) -> list[Any]:
    files = []
    for name, tensors in (("a", a), ("b", b)):
        path = folder / f"{name}.safetensors"
        write_shard_file(path, [Entry.of(key, value) for key, value in tensors.items()])
        files.append(WeightsFile(path))
    found = [(each.name, each.what, each.text, each.largest) for each in compare(*files)]
    for file in files:
        file.close()
    return found


@pytest.mark.parametrize(
    ("a", "b", "text", "largest"),
    [
        ([1.0, 2.0, 3.0], [1.0, 2.0, 3.0], "", None),
        ([1.0, 2.0, 3.0], [1.0, 2.5, 2.0], "2 of 3 elements", 1.0),
        ([5.0, 2.0, 3.0], [1.0, 2.0, 2.0], "2 of 3 elements", 4.0),  # the largest is in an earlier chunk
        ([NAN, INF, -INF], [NAN, INF, -INF], "", None),
        ([NAN, INF, 1.0], [NAN, INF, 2.0], "1 of 3 elements", 1.0),
        ([NAN, 1.0], [NAN, 3.0], "1 of 2 elements", 2.0),
        ([INF, 0.0, 0.0], [-INF, 0.0, 0.0], "1 of 3 elements", INF),
        ([NAN, 0.0, 0.0], [0.0, 0.0, 5.0], "2 of 3 elements", NAN),  # no number hides it
        ([0.0, 0.0, NAN], [9.0, 0.0, 5.0], "2 of 3 elements", NAN),
        ([0.0], [-0.0], "", None),
    ],
)
def test_values_are_compared_chunk_by_chunk(
    a: list[float], b: list[float], text: str, largest: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparison, "_CHUNK_ELEMENTS", 2)
    found = _compared(tmp_path, {"w": torch.tensor(a)}, {"w": torch.tensor(b)})
    if not text:
        assert found == []
        return
    ((name, what, said, number),) = found
    assert (name, what, said) == ("w", "values", text)
    assert number == pytest.approx(largest, nan_ok=True)


def test_names_shapes_and_formats_that_differ(tmp_path: Path) -> None:
    a = {"b": torch.zeros(2), "c": torch.zeros(2), "d": torch.zeros(2), "e": torch.ones(2), "same": torch.ones(1)}
    b = {"a": torch.zeros(3), "c": torch.zeros(1, 2), "d": torch.zeros(2).half(), "e": torch.zeros(2).double()}
    assert _compared(tmp_path, a, {**b, "same": torch.ones(1)}) == [
        ("a", "only in B", "(3,)", None),
        ("b", "only in A", "(2,)", None),
        ("c", "shape", "(2,) and (1, 2)", None),
        ("d", "type", "float32 and float16", None),
        ("e", "values", "2 of 2 elements", 1.0),
        ("e", "type", "float32 and float64", None),
    ]


def test_settings_are_compared_key_by_key() -> None:
    before = {"config": {"A": {"x": 1, "y": [1, 2]}, "B": {}, "C": 3, "D": {"x": 1}}, "step": 5}
    after = {"config": {"A": {"x": 1, "y": [1, 3]}, "B": {}, "D": {}, "E": {"z": None}}, "step": 6}
    changed = {"A.y": ([1, 2], [1, 3]), "C": (3, None), "D.x": (1, None)}
    assert differences(before, after) == changed
    assert differences({}, {}) == {}
    assert describe(changed)[:2] == [
        "config.A.y: [1, 2] in the checkpoint, [1, 3] now",
        "config.C: 3 in the checkpoint, None now",
    ]
    assert list(settings_that_differ({"b": 1, "a": {"c": 2}}, {"b": 3}).items()) == [("a.c", (2, "-")), ("b", (1, 3))]


def _run(keys: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A resolved run as data, with some keys under ``config``."""
    tree: dict[str, Any] = {"LOSS": {"name": "moco_loss"}, "MODEL": {"LORA": {"USE_LORA": False}}}
    for path, value in keys.items():
        block, (*blocks, last) = tree, path.split(".")
        for name in blocks:
            block = block.setdefault(name, {})
        block[last] = value
    return {"config": tree, "optimizer": {"name": "sgd"}, "global_batch": 8, **more}


OTHER_SHAPES = "the model's or the loss's tensors have other shapes or another meaning"
OTHER_IMAGES = "other images come, in another order or otherwise transformed"


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        ("MODEL.TRUNK.NAME", OTHER_SHAPES),
        ("MODEL.HEAD", OTHER_SHAPES),
        ("MODEL.NON_TRAINABLE_PARAMS", OTHER_SHAPES),
        ("LOSS.moco_loss.queue_size", OTHER_SHAPES),
        ("SEED_VALUE", OTHER_IMAGES),
        ("DATA.ON_BROKEN_IMAGE", OTHER_IMAGES),
        ("DATA.TRAIN.DATASET_NAMES", OTHER_IMAGES),
        ("DATA.TRAIN.BATCHSIZE_PER_REPLICA", ""),
        ("DATA.TRAIN_NUM", ""),
        ("DATA.NUM_WORKERS", ""),
        ("MODEL.TRUNKS", ""),
        ("MODEL.LORA.R", ""),  # without adapters
        ("LOSS.moco_loss.temperature", ""),
        ("LOSS.simclr_info_nce_loss.queue_size", ""),
        ("OPTIMIZER.lr", ""),
    ],
)
def test_what_changes_shapes_or_the_order_of_images_is_refused(key: str, reason: str) -> None:
    saved, now = _run({key: 1}), _run({key: 2})
    problems = refused(saved, now, [])
    assert [(p.key, p.got) for p in problems] == ([(f"config.{key}", "2")] if reason else [])
    for problem in problems:
        assert problem.must == f"was 1 when the checkpoint was made: {reason}"
        assert f"allow it: config.CHECKPOINT.ALLOW_CHANGED=[{key}]" in problem.fix
    for allowed in (key, f"config.{key}", key.rpartition(".")[0] or key):
        assert refused(saved, now, [allowed]) == []
    assert len(refused(saved, now, [f"{key}.x", "OTHER"])) == len(problems)


@pytest.mark.parametrize("key", ["USE_LORA", "R", "LORA_ALPHA", "TARGET_MODULES"])
@pytest.mark.parametrize("which", ["saved", "now"])
def test_adapters_of_another_shape_are_refused(key: str, which: str) -> None:
    with_adapters = {"MODEL.LORA.USE_LORA": True}
    keys = {"saved": {f"MODEL.LORA.{key}": False}, "now": {f"MODEL.LORA.{key}": 3}}
    if key != "USE_LORA":
        keys[which] |= with_adapters
    expected = {f"config.MODEL.LORA.{key}"} | ({"config.MODEL.LORA.USE_LORA"} if key != "USE_LORA" else set())
    assert {problem.key for problem in refused(_run(keys["saved"]), _run(keys["now"]), [])} == expected


def test_another_optimizer_is_refused_unless_allowed() -> None:
    saved, now = _run({}), _run({}, optimizer={"name": "adamw"})
    (problem,) = refused(saved, now, [])
    assert (problem.key, problem.got) == ("config.OPTIMIZER.name", "adamw")
    assert problem.must == "was sgd when the checkpoint was made: its state does not fit"
    assert refused(saved, now, ["OPTIMIZER.name"]) == refused(saved, now, ["OPTIMIZER"]) == []


def _folder(folder: Path, step: int, rank_seed: int, momentum: float) -> Checkpoint:
    tensors = {
        "model/w": torch.ones(2),
        "optimizer/momentum_buffer/w": torch.tensor([momentum, 1.0]),
        f"of_rank/{rank_seed}": torch.ones(1),
    }
    (folder / "checkpoints").mkdir(parents=True)
    parts = [Part.of(name, tensor) for name, tensor in tensors.items()]
    write_rank(folder, step, 0, parts, {}, {})
    return open_checkpoint(commit(folder, _manifest(step, 1)))


def test_two_checkpoints_are_compared_with_their_optimizers_and_a_file_with_their_weights(tmp_path: Path) -> None:
    a, b = _folder(tmp_path / "a", 3, 0, momentum=1.0), _folder(tmp_path / "b", 4, 1, momentum=1.5)
    assert [(each.name, each.what, each.largest) for each in compare(a, b)] == [
        ("optimizer/momentum_buffer/w", "values", 0.5)  # and not what is of one rank, whose number may differ
    ]
    assert facts_that_differ(a, b) == {"step": (3, 4)}
    path = tmp_path / "w.safetensors"
    write_shard_file(path, [Entry.of("w", torch.zeros(2))])
    file = WeightsFile(path)
    assert [(each.name, each.what) for each in compare(a, file)] == [("w", "values")]
    for opened in (a, b, file):
        opened.close()


def test_the_differences_of_another_recipe_are_one_sentence() -> None:
    changes = ("MODEL.TRUNK.NAME", "MODEL.HEAD.PARAMS", "DATA.TRAIN.TRANSFORMS", "DATA.TRAIN.COPY_TO_LOCAL_DISK")
    texts = []
    for count, (before, now) in ((3, ("a", "b")), (3, ("a", "a")), (3, ("", "b")), (1, ("a", "b")), (2, ("a", "b"))):
        saved = {**_run(dict.fromkeys(changes[:count], 1)), "recipe": before}
        texts.append(
            [str(each) for each in refused(saved, {**_run(dict.fromkeys(changes[:count], 2)), "recipe": now}, [])]
        )
    keys = ", ".join(f"config.{key}" for key in changes[:3])
    assert texts[0] == [
        "config: must be the recipe that ran in this folder, a: its checkpoint does not continue here, as "
        f"{keys} differ (got b). Name another run folder: config.CHECKPOINT.DIR=<folder>."
    ]
    assert [len(each) for each in texts[1:]] == [3, 3, 1, 1]
    assert texts[3][0].startswith(f"config.{changes[0]}: was 1 when the checkpoint was made")
    problems = [Problem(f"k{number}", "", "", "") for number in range(5)]
    assert "as k0, k1, k2 and 2 more differ" in str(comparison._of_another_recipe("a", "b", problems)[0])
