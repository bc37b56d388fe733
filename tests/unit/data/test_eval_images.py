from __future__ import annotations

import pytest
import torch

from tests.blocks import data_block
from tests.unit.data.conftest import MULTI_CROP, MakeData
from vissl_zero.data.loader import build_eval_images
from vissl_zero.errors import DataError


def test_index_and_query_are_whole_ordered_and_without_augmentation(make_data: MakeData) -> None:
    index, query = build_eval_images(data_block(make_data("digits")), 0)
    assert query is not None
    assert (len(index), len(query)) == (1437, 360)
    batches = list(query.batches(100))
    assert [batch.num_local for batch in batches] == [100, 100, 100, 60]
    assert torch.cat([batch.sample_ids for batch in batches]).tolist() == list(range(360))
    assert {tuple(batch.images[0].shape[1:]) for batch in batches} == {(3, 12, 12)}
    assert batches[0].targets is not None
    assert batches[0].targets.tolist() == [query.source.label(i) for i in range(100)]
    assert torch.equal(batches[1].images[0], list(query.batches(100))[1].images[0])


def test_ranks_share_the_images_and_run_equally_often(make_data: MakeData) -> None:
    (index, _), world_size = build_eval_images(data_block(make_data("digits", DATA_LIMIT=18)), 0), 4
    whole = torch.cat([batch.images[0] for batch in index.batches(8)])
    shares = [list(index.batches(8, rank, world_size)) for rank in range(world_size)]
    assert {len(share) for share in shares} == {3}
    placed = torch.full_like(whole, -9.0)
    for batch in (batch for share in shares for batch in share):
        assert batch.num_local > 0
        placed[batch.sample_ids] = batch.images[0]
    assert torch.equal(placed, whole)


def test_without_test_there_are_no_queries(make_data: MakeData) -> None:
    assert build_eval_images(data_block(make_data("digits", TEST={"DATA_SOURCES": []})), 0)[1] is None


def test_several_crops_are_refused(make_data: MakeData) -> None:
    index, _ = build_eval_images(data_block(make_data("digits", TEST={"TRANSFORMS": MULTI_CROP})), 0)
    with pytest.raises(DataError, match="make 5 crops of an image"):
        next(index.batches(8))
