"""k-means of features against scikit-learn, and the data set that is written of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sklearn.cluster import KMeans
from sklearn.datasets import load_iris

from tests.blocks import data_block
from tests.unit.evaluation.example_run import make_config, make_plan
from vissl_zero.data.source import build_eval_sources
from vissl_zero.engine.build import build_run
from vissl_zero.engine.loop import train
from vissl_zero.errors import DataError
from vissl_zero.evaluation.clustering import ClusterFeatures, kmeans, nearest_centroids, unit_rows
from vissl_zero.evaluation.retrieval import Whitening


def test_lloyd_s_algorithm_is_scikit_learn_s():
    rows = unit_rows(torch.from_numpy(load_iris(return_X_y=True)[0]))
    begin = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(7))[:5]]
    wanted = KMeans(5, init=begin.numpy(), n_init=1, tol=0, algorithm="lloyd").fit(rows.numpy())
    found = kmeans(rows, 5, 100, seed=7)
    np.testing.assert_allclose(found.numpy(), wanted.cluster_centers_, atol=1e-12)
    labels, distances = nearest_centroids(rows, found)
    assert labels.tolist() == wanted.labels_.tolist() and float(distances.sum()) == pytest.approx(wanted.inertia_)


def test_an_empty_cluster_moves_to_the_farthest_row():
    rows = torch.tensor([[0.0], [0.0], [0.0], [1.0], [9.0]], dtype=torch.float64)
    for seed in range(5):  # drawn twice at 0, one of them is empty
        assert sorted(kmeans(rows, 3, 20, seed).flatten().tolist()) == [0, 1, 9]


def test_components_are_white():
    rows = torch.from_numpy(load_iris(return_X_y=True)[0])
    white = Whitening.of(rows, 3)(rows)
    torch.testing.assert_close(white.T @ white, torch.eye(3, dtype=torch.float64), rtol=0, atol=1e-9)


@pytest.fixture
def config(tmp_path) -> dict[str, Any]:
    """Digits as files: 40 for TRAIN, 20 for TEST."""
    data = make_config()["DATA"]
    for split, count in (("TRAIN", 40), ("TEST", 20)):
        digits = build_eval_sources(data_block(data), 3)[split == "TEST"]
        assert digits is not None
        for index in range(count):
            file = tmp_path / split / f"{digits.label(index)}" / f"{index}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            digits.image(index).save(file)
    config = make_config(USE_KNN=False)
    config["TEST_ONLY"] = True
    for split in ("TRAIN", "TEST"):
        config["DATA"][split] |= {
            "DATA_SOURCES": ["disk_folder"],
            "DATA_PATHS": [str(tmp_path / split)],
            "DATA_LIMIT": -1,
        }
    config["CLUSTERFIT"] |= {"NUM_CLUSTERS": 6, "DATA_LIMIT": 30, "OUTPUT_DIR": "made"}
    config["CLUSTERFIT"]["FEATURES"] |= {"DATASET_NAME": "digits", "LAYER_NAME": "trunk", "DIMENSIONALITY_REDUCTION": 4}
    return config


def _cluster(config: dict[str, Any], folder: Any) -> dict[str, Any]:
    run, schedules, frozen = build_run(make_plan(config, folder), torch.device("cpu"))
    train(run, schedules, frozen, [ClusterFeatures()])
    return run.results


def test_the_lists_are_a_data_set_to_train_on(config, tmp_path):
    files = _cluster(config, tmp_path)["clusters"]
    assert files["TRAIN"][0] == str(tmp_path / "made" / "digits_train_trunk_N6_D4_images.npy")
    data = make_config()["DATA"]
    for split in ("TRAIN", "TEST"):
        images, labels = files[split]
        data[split] |= {"DATA_SOURCES": ["disk_filelist"], "DATA_PATHS": [images], "DATA_LIMIT": -1}
        data[split] |= {"LABEL_SOURCES": ["disk_filelist"], "LABEL_PATHS": [labels]}
    train_source, test_source = build_eval_sources(data_block(data), 3)
    assert (len(train_source), len(test_source)) == (40, 20)
    assert {*train_source.class_names} == {str(label) for label in np.unique(np.load(files["TRAIN"][1]))}
    assert 1 < len(train_source.class_names) <= 6 and train_source.image(0).size == (8, 8)


def test_a_broken_image_has_no_cluster(config, tmp_path):
    broken = sorted(tmp_path.glob("TRAIN/*/*.png"))[3]
    broken.write_bytes(b"no image")
    config["DATA"]["ON_BROKEN_IMAGE"] = "skip"
    images, labels = map(np.load, _cluster(config, tmp_path)["clusters"]["TRAIN"])
    assert len(labels) == len(images) == 39 and str(broken) not in images
    config["CLUSTERFIT"] |= {"NUM_CLUSTERS": 40, "DATA_LIMIT": -1}
    with pytest.raises(DataError, match="40 clusters need as many images, and 39 of TRAIN"):
        _cluster(config, tmp_path / "more")


def test_features_that_are_nan_are_not_clustered(config, tmp_path):
    run, schedules, frozen = build_run(make_plan(config, tmp_path), torch.device("cpu"))
    with torch.no_grad():
        next(run.sharded.model.parameters()).fill_(torch.nan)
    with pytest.raises(DataError, match="The features of 40 of 40 images are NaN or infinite"):
        train(run, schedules, frozen, [ClusterFeatures()])


def test_what_cannot_be_clustered_is_refused(config, tmp_path):
    config["CLUSTERFIT"]["NUM_CLUSTERS"] = 31
    with pytest.raises(DataError, match="31 clusters need as many images"):
        _cluster(config, tmp_path)
    config["DATA"]["TRAIN"] |= {"DATA_SOURCES": ["digits"], "DATA_PATHS": []}
    with pytest.raises(DataError, match="writes lists of image files"):
        _cluster(config, tmp_path)
