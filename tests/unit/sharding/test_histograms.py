"""Counts of weights and gradients, from shards of one rank."""

from __future__ import annotations

import torch
from torch import nn

from vissl_zero.sharding.state.shard import row_shards, whole_shard
from vissl_zero.sharding.update.histograms import EDGES, histograms_of


def test_each_element_is_in_the_bucket_that_begins_at_or_below_it() -> None:
    model = nn.Module()
    model.a = nn.Parameter(torch.tensor([[0.0, 1.0], [-1e9, 1e9]]))
    model.b, model.c = nn.Parameter(torch.tensor([0.5])), nn.Parameter(torch.zeros(0, 2))
    shards = [*row_shards(model, {"a", "b", "c"}, 1, 0), whole_shard("copy", nn.Parameter(torch.ones(2)), False)]
    shards[0].local.grad = torch.full((2, 2), -1.0)
    histograms = histograms_of(shards, None)
    assert list(histograms.names) == ["a", "b", "c", "copy"]
    assert histograms.weights.shape == histograms.gradients.shape == (4, len(EDGES) + 1)
    assert len(EDGES) == 2 * 71 and sorted(EDGES) == EDGES and min(abs(edge) for edge in EDGES) == 1e-10
    one, half = (1 + sum(edge < value for edge in EDGES) for value in (1.0, 0.5))  # 1 is an edge
    assert histograms.weights[0].nonzero().flatten().tolist() == [0, 71, one, len(EDGES)]
    assert histograms.weights[1].nonzero().flatten().tolist() == [half - 1]
    assert histograms.gradients[0].tolist() == [4 * (edge == -1.0) for edge in [None, *EDGES]]
    # Neither without elements, nor without a gradient, nor of another rank's count.
    assert not histograms.weights[2:].any() and not histograms.gradients[1:].any()
