"""kNN against loops in Python and against scikit-learn."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.neighbors import KNeighborsClassifier

from vissl_zero.evaluation import features
from vissl_zero.evaluation.features import Features, nearest
from vissl_zero.evaluation.knn import knn_top1, vote


def drawn(rows, seed, width=6):
    return torch.randn(rows, width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def slow_nearest(query, index, num_neighbors, is_cosine):
    """Places by similarity, then by place."""
    similarity = [float(query @ row) for row in index]
    if is_cosine:
        similarity = [s / float(query.norm() * row.norm()) for s, row in zip(similarity, index, strict=True)]
    return sorted(range(len(index)), key=lambda place: (-similarity[place], place))[:num_neighbors]


@pytest.mark.parametrize("is_cosine", [True, False])
@pytest.mark.parametrize("chunk_elements", [1, 40, 2**22])
def test_nearest_in_chunks_of_any_size(is_cosine, chunk_elements, monkeypatch):
    monkeypatch.setattr(features, "_CHUNK_ELEMENTS", chunk_elements)
    queries, index = drawn(9, 0), drawn(15, 1)
    similarities, places = nearest(queries, index, 4, is_cosine)
    assert places.tolist() == [slow_nearest(query, index, 4, is_cosine) for query in queries]
    assert (similarities.diff(dim=1) <= 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("is_cosine", [True, False])
def test_of_equally_near_rows_the_first_are_taken(dtype, is_cosine):
    # A collapsed model: the features of all images are the same.
    index = torch.full((1000, 3), 7.0, dtype=dtype)
    _, places = nearest(index[:2], index, 5, is_cosine)
    assert places.tolist() == [[0, 1, 2, 3, 4]] * 2


def test_a_query_that_is_in_the_index_is_no_neighbor_of_itself():
    rows = drawn(8, 2)
    excluded = torch.tensor([3, 5])
    _, places = nearest(rows[excluded], rows, 7, excluded=excluded)
    assert [sorted(found) for found in places.tolist()] == [[0, 1, 2, 4, 5, 6, 7], [0, 1, 2, 3, 4, 6, 7]]


def test_fewer_rows_than_neighbors():
    assert nearest(drawn(2, 0), drawn(3, 1), 20)[1].shape == (2, 3)
    assert nearest(drawn(0, 0), drawn(3, 1), 20)[1].shape == (0, 3)


def test_a_row_of_zeros_is_near_to_nothing():
    similarities, _ = nearest(torch.zeros(1, 6), drawn(3, 1).float(), 3)
    assert similarities.tolist() == [[0.0, 0.0, 0.0]]


def test_vote_by_hand():
    similarities = torch.tensor([[0.9, 0.8, 0.8], [0.9, 0.1, 0.1]], dtype=torch.float64)
    labels = torch.tensor([[2, 1, 1], [2, 1, 1]])
    # exp(.9/.1) = 8103 against 2 exp(.8/.1) = 5962; with sigma 1 two votes win where they are near.
    assert vote(similarities, labels, 0.1, 3).tolist() == [2, 2]
    assert vote(similarities, labels, 1.0, 3).tolist() == [1, 2]
    assert 2 * math.exp(0.8) > math.exp(0.9)
    assert 2 * math.exp(0.1) < math.exp(0.9)


def test_vote_of_equals_is_the_lowest_class():
    assert vote(torch.ones(1, 4, dtype=torch.float64), torch.tensor([[3, 1, 3, 1]]), 0.07, 5).tolist() == [1]


def test_a_small_sigma_does_not_overflow():
    similarities = torch.tensor([[1.0, 0.5]], dtype=torch.float64)
    assert vote(similarities, torch.tensor([[0, 1]]), 1e-6, 2).tolist() == [0]


def test_top1_equals_scikit_learns_on_digits():
    data = load_digits()
    pixels, labels = torch.tensor(data.data), torch.tensor(data.target)
    found = knn_top1(Features(pixels[1437:], labels[1437:]), Features(pixels[:1437], labels[:1437]), 20, 0.07)
    classifier = KNeighborsClassifier(20, metric="cosine", weights=lambda distance: np.exp((1 - distance) / 0.07))
    wanted = classifier.fit(data.data[:1437], data.target[:1437]).score(data.data[1437:], data.target[1437:])
    assert found == wanted == pytest.approx(343 / 360)


def test_without_labels_there_is_no_figure():
    rows, labels = drawn(3, 0), torch.tensor([0, 1, 2])
    assert knn_top1(Features(rows, None), Features(rows, labels)) is None
    assert knn_top1(Features(rows, labels), Features(rows, None)) is None
