"""What a resume says of a configuration that has changed since."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from vissl_zero.checkpoint.comparison import refused
from vissl_zero.config.compose import compose
from vissl_zero.resolve.resolve import resolve
from vissl_zero.resolve.saved import as_data


@cache
def resolved(*overrides: str) -> dict[str, Any]:
    data = "config.DATA.TRAIN.DATA_SOURCES=[synthetic]"
    composed = compose("pretrain/simclr/my_photos", [data, "config.NEAREST_NEIGHBOR.USE_KNN=false", *overrides])
    return as_data(resolve(composed.run, Path(), written=composed.written))


def test_another_image_size_is_named_and_not_the_crops_that_follow_from_it() -> None:
    before, after = resolved(), resolved("config.DATA.IMG_SIZE=64")
    (problem,) = refused(before, after, [])
    assert problem.key == "config.DATA.IMG_SIZE"
    assert refused(before, after, ["DATA.IMG_SIZE"]) == []
    after["config"]["DATA"]["IMG_SIZE"] = before["config"]["DATA"]["IMG_SIZE"]
    (other,) = refused(before, after, [])
    assert other.key == "config.DATA.TRAIN.TRANSFORMS"


@pytest.mark.parametrize(
    ("before", "write"),
    [
        (
            48,
            "Write config.DATA.TRAIN.BATCHSIZE_PER_REPLICA=8, name another run folder",
        ),  # 2 processes, 3 micro-batches
        (6, "Write config.DATA.TRAIN.BATCHSIZE_PER_REPLICA=1, name"),
        (50, "Name another run folder"),
        (0, "Name another run folder"),
        (-6, "Name another run folder"),
        (None, "Name another run folder"),
        (24, ""),
    ],
)
def test_another_batch_is_answered_with_the_one_of_a_rank_that_makes_the_same_steps(before: object, write: str) -> None:
    now = resolved() | {"world_size": 2, "accumulation_steps": 3, "batch_per_rank": 4, "global_batch": 24}
    texts = [str(problem) for problem in refused(now | {"global_batch": before}, now, [])]
    assert len(texts) == bool(write)
    for text in texts:
        assert f"must make steps of {before} images, as when the checkpoint was made" in text and write in text
        assert "(got 4 x 2 processes x 3 micro-batches = 24)" in text
        assert "allow it: config.CHECKPOINT.ALLOW_CHANGED=[DATA.TRAIN.BATCHSIZE_PER_REPLICA]" in text


def test_another_recipe_is_one_sentence_and_not_one_for_each_of_its_keys() -> None:
    before, other = resolved() | {"recipe": "mine"}, {"recipe": "pretrain/simclr/my_photos"}
    after = resolved("config.DATA.IMG_SIZE=64", "config.SEED_VALUE=7") | other
    (problem,) = refused(before, after, [])
    assert str(problem).startswith(
        "config: must be the recipe that ran in this folder, mine: its checkpoint does not continue here, as "
        "config.DATA.IMG_SIZE, config.SEED_VALUE differ (got pretrain/simclr/my_photos). Name another run folder"
    )
    assert refused(before, after, ["DATA.IMG_SIZE", "SEED_VALUE"]) == []
    assert refused(before, resolved() | other, []) == []
    assert len(refused(before, after | {"recipe": "mine"}, [])) == 2
