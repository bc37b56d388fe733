"""What a resume says of a configuration that has changed since."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vissl_zero.checkpoint.comparison import refused
from vissl_zero.config.compose import compose
from vissl_zero.resolve.resolve import resolve
from vissl_zero.resolve.saved import as_data


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
