"""instance_retrieval_test against VISSL's own functions, whose figures on the same numbers stand here.

VISSL at 09270ed2: ``vissl/utils/instance_retrieval_utils`` (rmac.py, evaluate.py, data_util.py), ``vissl/utils/pca.py``
and ``tools/instance_retrieval_test.py``, run with NumPy 2.
"""

from __future__ import annotations

import hashlib
import json
import pickle

import numpy as np
import pytest
import torch

from tests.unit.evaluation.example_retrieval import make_copydays, make_oxford, make_revisited, retrieval_config
from tests.unit.evaluation.example_run import make_plan
from vissl_zero.engine.build import build_run
from vissl_zero.engine.loop import train
from vissl_zero.errors import DataError
from vissl_zero.evaluation.retrieval import (
    Wanted,
    Whitening,
    descriptor,
    first,
    regional_maxima,
    regions,
    retrieval_set,
    scores,
    unit_vectors,
)
from vissl_zero.evaluation.retrieval_hook import InstanceRetrieval

MAPS = torch.sin(torch.arange(2 * 5 * 9, dtype=torch.float64) ** 2).reshape(1, 2, 5, 9)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sets")
    make_revisited(folder, "roxford5k")
    make_revisited(folder, "rparis6k")
    make_oxford(folder, "Oxford")
    make_copydays(folder)
    return folder


def test_regions_are_vissl_s():
    places = [
        [value for top, left, side in regions(height, width, 3) for value in (left, top, side, side)]
        for height in range(1, 40)
        for width in range(1, 40)
    ]
    assert hashlib.sha256(repr(places).encode()).hexdigest().startswith("f465725cbd8bdc38")
    assert regions(5, 9, 1) == [(0, 0, 5), (0, 2, 5), (0, 4, 5)]


def test_descriptors_are_vissl_s():
    rows = regional_maxima(MAPS, 3)
    assert rows.shape == (1, 26, 2)
    assert rows[0].sum(dim=0).tolist() == pytest.approx([16.846999029021923, 17.599445555667188], abs=1e-12)
    assert rows[0, 7].tolist() == pytest.approx([0.7138739958640279, 0.7002741734700244], abs=1e-14)
    white = unit_vectors(Whitening.of(rows[0], 2)(rows[0]))
    whole = unit_vectors(white.sum(dim=0))
    assert whole.abs().tolist() == pytest.approx([0.348733007794833, 0.9372221130950598], abs=1e-12)
    gem = descriptor([MAPS, MAPS[:, :, :3]], "gem", 4.0, normalize=True)
    assert gem[0].tolist() == pytest.approx([0.4740182764412539, 0.49108315182757906, 0.7308505660462719], abs=1e-14)
    assert unit_vectors(torch.zeros(2, 3)).tolist() == [[0.0] * 3] * 2


def test_mean_average_precision_is_vissl_s():
    similarity = np.sin(np.arange(3 * 12) ** 2).reshape(3, 12)
    wanted = [
        Wanted(0, np.array([1, 4, 7]), np.array([0, 3])),
        Wanted(1, np.array([2, 13])),  # there is no image 13
        Wanted(2, np.array([12]), np.array([1])),  # left out: nothing to find
    ]
    mean, at = scores(similarity, wanted)
    assert mean == pytest.approx(0.6305555555555555, abs=1e-15)
    assert at == pytest.approx([0.5, 0.7, 2 / 3], abs=1e-15)


def _measured(config, folder):
    run, schedules, frozen = build_run(make_plan(config, folder), torch.device("cpu"))
    train(run, schedules, frozen, [InstanceRetrieval()])
    return run.results["instance_retrieval"]


RMAC = {"EVAL_DATASET_NAME": "roxford5k", "TRAIN_DATASET_NAME": "rparis6k", "FEATS_PROCESSING_TYPE": "rmac"}
GEM = {"EVAL_DATASET_NAME": "rparis6k", "TRAIN_DATASET_NAME": "roxford5k", "FEATS_PROCESSING_TYPE": "gem"}
PLAIN = {"EVAL_DATASET_NAME": "roxford5k", "TRAIN_PCA_WHITENING": False, "CENTER_CROP": True}
COPIES = {"EVAL_DATASET_NAME": "copydays", "TRAIN_DATASET_NAME": "copydays/train", "FEATS_PROCESSING_TYPE": "rmac"}


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (RMAC, {"e": 0.39268353174603177, "m": 0.4910683066933067, "h": 0.36880411255411255}),
        (
            GEM | {"IMG_SCALINGS": [1.0, 0.5], "CROP_QUERY_ROI": True},
            {"e": 0.3198457792207792, "m": 0.44265335359085356, "h": 0.3385957792207792},
        ),
        (
            PLAIN | {"SIMILARITY_MEASURE": "l2"},
            {"e": 0.8437499999999999, "m": 0.9395833333333333, "h": 0.9479166666666666},
        ),
        # jpegqual_3 is of its own queries alone; VISSL's 0.79375 counts those of jpegqual_30 too.
        (
            COPIES | {"USE_DISTRACTORS": True, "RESIZE_IMG": 24},
            {"original": 1, "strong": 0.3854166666666667, "jpegqual_3": 1, "jpegqual_30": 0.5875, "crops_10": 0.59375},
        ),
    ],
)
def test_a_run_measures_what_vissl_s_program_does(root, tmp_path, options, wanted):
    found = _measured(retrieval_config(root, **options), tmp_path)
    assert found["mAP"] == pytest.approx(wanted, abs=1e-12)
    folder = tmp_path / "instance_retrieval"
    assert json.loads((folder / "metrics.json").read_text()) == found
    rankings, similarity = (
        np.array(json.loads((folder / f"{name}.json").read_text())) for name in ("rankings", "similarity_scores")
    )
    assert (np.diff(np.take_along_axis(similarity.T, rankings, axis=1)) <= 0).all()


def test_lists_of_oxford_s_form(root):
    found = retrieval_set(root, "Oxford")
    assert len(found.images) == 28 and [file.stem for file in found.queries] == ["q0", "q1", "q2", "q3"]
    (wanted,) = found.wanted.values()
    names = [file.stem for file in found.images]
    assert [names[index] for index in wanted[1].good] == ["p1_0", "p1_1", "p1_2", "p1_3"]
    assert [names[index] for index in wanted[1].ignored] == ["p1_4"] and wanted[1].num_good == 4
    assert found.boxes is not None and found.boxes[0] == (2.0, 3.0, 25.5, 29.0)
    few = first(found, 10, -1)
    assert len(few.images) == len(few.queries) + 6 == 10
    assert [len(of) for of in first(found, 10, 2).wanted.values()] == [2]


def test_what_is_no_data_set_is_refused(root, tmp_path):
    class Runs:
        def __reduce__(self):
            return print, ("run",)

    folder = tmp_path / "roxford5k"
    folder.mkdir()
    (folder / "gnd_roxford5k.pkl").write_bytes(pickle.dumps(Runs()))
    with pytest.raises(DataError, match=r"is refused: .*builtins.print.*Nothing was run"):
        retrieval_set(tmp_path, "roxford5k")
    (folder / "gnd_roxford5k.pkl").write_bytes(pickle.dumps({"imlist": [1]}))
    with pytest.raises(DataError, match="is no list of roxford5k"):
        retrieval_set(tmp_path, "roxford5k")
    (folder / "gnd_roxford5k.pkl").unlink()
    with pytest.raises(DataError, match=r"cannot be read .*http://cmp.felk.cvut.cz"):
        retrieval_set(tmp_path, "roxford5k")
    with pytest.raises(DataError, match="must hold the folders lab and jpg"):
        retrieval_set(root, "copydays/train")
    with pytest.raises(DataError, match="there is no folder"):
        retrieval_set(root, "rpariss6k")
    (root / "roxford5k" / "jpg" / "p0_0.jpg").rename(tmp_path / "p0_0.jpg")
    try:
        with pytest.raises(DataError, match="1 of 52 images are missing"):
            _measured(retrieval_config(root, **RMAC), tmp_path)
    finally:
        (tmp_path / "p0_0.jpg").rename(root / "roxford5k" / "jpg" / "p0_0.jpg")
    sizes = {"EVAL_DATASET_NAME": "roxford5k", "TRAIN_PCA_WHITENING": False}
    with pytest.raises(DataError, match="Write rmac or gem"):
        _measured(retrieval_config(root, **sizes), tmp_path)
