"""VICRegL's parts beside arithmetic by hand, and what it asks of a recipe."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.unit.config.example_config import complaints
from tests.unit.methods.batches import LossBatch
from vissl_zero.errors import ConfigError
from vissl_zero.methods.feature_distillation import FeatureMaps
from vissl_zero.methods.vicregl import (
    VICRegL,
    VICRegLHead,
    match_places,
    pairs_of,
    place_centers,
    spread_and_redundancy,
)
from vissl_zero.methods.vicregl_keys import VICRegLLossConfig
from vissl_zero.models.model import Model


def test_centers_of_places() -> None:
    """Two rows of three places between 10 and 30 down, 0 and 60 across; mirrored, the columns change sides."""
    found = place_centers(torch.tensor([[10.0, 0.0, 30.0, 60.0], [10.0, 60.0, 30.0, 0.0]]), 2, 3)
    rows = [[(15.0, x) for x in (10.0, 30.0, 50.0)], [(25.0, x) for x in (10.0, 30.0, 50.0)]]
    assert found[0].tolist() == [list(place) for row in rows for place in row]
    assert found[1].tolist() == [list(place) for row in rows for place in row[::-1]]


def test_matches_are_the_nearest_in_the_order_of_places() -> None:
    distances = torch.tensor([[[5.0, 4.0], [1.0, 2.0], [9.0, 9.0], [3.0, 0.5]]])
    places, others = torch.arange(4.0).view(1, 4, 1), torch.tensor([[[10.0], [20.0]]])
    own, matched = match_places(places, others, distances, 2)
    assert own.flatten().tolist() == [1, 3] and matched.flatten().tolist() == [10, 20]
    own, matched = match_places(places, others, distances)
    assert own.flatten().tolist() == [0, 1, 2, 3] and matched.flatten().tolist() == [20, 10, 10, 20]
    assert match_places(places, others, distances, 9)[0].shape == (1, 4, 1)  # no more than there are
    assert match_places(places, others, torch.ones(1, 4, 2), 2)[0].flatten().tolist() == [0, 1]  # equal: the first


def test_spread_and_redundancy_are_torchs() -> None:
    rows = torch.randn(7, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    spread, redundancy = spread_and_redundancy(rows)
    lacking = [torch.relu(1 - torch.sqrt(rows[:, k].var(dim=0) + 1e-4)).mean() for k in range(3)]
    covariances = [torch.cov(rows[:, k].T).fill_diagonal_(0).square().sum() / 4 for k in range(3)]
    torch.testing.assert_close(spread, torch.stack(lacking).mean())
    torch.testing.assert_close(redundancy, torch.stack(covariances).mean())
    spread, redundancy = spread_and_redundancy(rows[:1])  # of one sample, without a division by 0
    assert spread.isfinite() and redundancy == 0


def test_each_of_the_first_two_views_is_compared_with_all() -> None:
    assert pairs_of(2) == [(0, 1), (1, 0)]
    assert pairs_of(4) == [(0, 1), (0, 2), (0, 3), (1, 0), (1, 2), (1, 3)]


class Maps(nn.Module):
    """A trunk whose maps are the images, and features their means."""

    feature_dim = map_dim = 3

    def forward(self, images: list[Tensor], return_maps: bool = False) -> list[Tensor]:
        return [*(images if return_maps else ()), *(image.mean(dim=(2, 3)) for image in images)]


@pytest.mark.parametrize("norm", ["batch", "layer"])
def test_a_place_is_expanded_as_a_row(norm: str) -> None:
    """Batch norm has the places of all sizes together; apart, each view by itself."""
    torch.manual_seed(0)
    head = VICRegLHead([3, 6, 5], [8, 4], norm).train()
    images = [torch.randn(4, 3, 3, 3), torch.randn(2, 3, 2, 2)]
    model = Model(Maps(), [head])
    (found,) = model(images)
    rows = torch.cat([image.movedim(1, 3).reshape(-1, 3) for image in images])
    expected = head.map_expander(rows).split([36, 8])
    for crop_map, own, side in zip(found.maps, expected, (3, 2), strict=True):
        torch.testing.assert_close(crop_map.movedim(1, 3).reshape(-1, 4), own)
        assert crop_map.shape[1:] == (4, side, side)
    torch.testing.assert_close(found.embeddings, head.expander(torch.cat([i.mean(dim=(2, 3)) for i in images])))
    model.views_apart = True
    first, second = images[0].chunk(2)
    (apart,) = model([first, second])
    alone = [head(view.mean(dim=(2, 3)), maps=[view]) for view in (first, second)]
    torch.testing.assert_close(apart.maps[0], torch.cat([output.maps[0] for output in alone]))
    together = head(images[0].mean(dim=(2, 3)), maps=images[:1])
    assert torch.allclose(apart.maps[0], together.maps[0]) == (norm == "layer")


def test_a_trunk_with_other_features_than_maps_is_refused() -> None:
    with pytest.raises(ConfigError, match="must be a trunk whose features are as many as the channels of its maps, 3"):
        VICRegLHead([3, 6, 5], [8, 4])(torch.zeros(2, 7), [torch.zeros(2, 3, 2, 2)])


def _loss(boxes: Tensor | None, **keys: Any) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    output = FeatureMaps(torch.randn(8, 5, generator=generator), [torch.randn(8, 4, 3, 3, generator=generator)])
    return VICRegL(**keys)([output], LossBatch([2], torch.arange(4), 4, boxes=boxes))


def test_boxes_decide_the_matches() -> None:
    boxes = torch.tensor([[0.0, 0.0, 30.0, 30.0]]).repeat(8, 1)
    moved = boxes.clone()
    moved[4:] += 15  # the second view's
    assert _loss(boxes) != _loss(moved)
    assert _loss(boxes, alpha=1.0) == _loss(moved, alpha=1.0)
    with pytest.raises(ConfigError, match="must keep the boxes of crops"):
        _loss(None)


CROPS = {
    "name": "ImgPilToMultiCrop",
    "total_num_crops": 3,
    "num_crops": [2, 1],
    "size_crops": [16, 12],
    "crop_scales": [[0.5, 1], [0.3, 0.5]],
    "keeps_boxes": True,
}
END = {"name": "ToTensor"}


HEADS: dict[str, dict[str, Any]] = {"vicregl_head": {"dims": [-1, 8], "map_dims": [8]}, "mlp": {"dims": [-1, 8]}}


def _complaints(
    transforms: list[Any] | None = None, head: str = "vicregl_head", apart: bool = False, **keys: Any
) -> str:
    values = {
        "LOSS": {"name": "vicregl_loss", "vicregl_loss": VICRegLLossConfig(**keys)},
        "MODEL__HEAD__PARAMS": [[head, HEADS[head]]],
        "DATA__TRAIN__TRANSFORMS": transforms or [CROPS, END],
        "MODEL__VIEWS_APART": apart,
    }
    return "\n".join(complaints(**values))


def test_what_it_asks_of_a_recipe() -> None:
    assert "vicregl" not in _complaints()
    assert "must be one vicregl_head for vicregl_loss" in _complaints(head="mlp")
    without_boxes = [CROPS | {"keeps_boxes": False}, END]
    assert "must make crops that keep their boxes for vicregl_loss" in _complaints(without_boxes)
    without_crops = _complaints([END])
    assert "must make two or more crops of an image for vicregl_loss (got no multi-crop)" in without_crops
    assert "VIEWS_APART: must be false for vicregl_loss with crops of 2 sizes" in _complaints(apart=True)
    for wrong in ([20], [0, 4]):
        assert "num_matches: must be two numbers of at least 1" in _complaints(num_matches=wrong)
    assert "std_coeff: must be at least 0" in _complaints(std_coeff=-1.0)
