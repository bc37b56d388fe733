"""The benchmark recipes for real: on a checkpoint of the quickstart at level 3, at other levels."""

from __future__ import annotations

import json

import pytest

from tests.command_line import run_command
from vissl_zero.evaluation.feature_files import read_features


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_benchmarks_of_a_checkpoint(tmp_path):
    trained = tmp_path / "trained"
    small = ["config.DATA.TRAIN.DATA_LIMIT=320", "config.DATA.TEST.DATA_LIMIT=90"]
    words = ["config=quickstart/swav_digits", f"config.CHECKPOINT.DIR={trained}"]
    run_command(*words, "config.TRAINER.MAX_STEPS=4", *small)
    (trained / "weights.safetensors").unlink()
    figures = {}
    for name, level, ranks in (("knn", 0, 1), ("linear", 3, 2), ("extract_features", 2, 2)):
        words = [f"config.MODEL.WEIGHTS_INIT.PARAMS_FILE={trained}", f"config.CHECKPOINT.DIR={tmp_path}/{name}"]
        words += [f"config.ZERO.LEVEL={level}", f"config.DISTRIBUTED.NUM_PROC_PER_NODE={ranks}"]
        said = run_command(f"config=benchmark/{name}", *words, *small).stdout
        assert "(the checkpoint of step 4, " in said
        figures[name] = json.loads((tmp_path / name / "summary.json").read_text())
    after = json.loads((trained / "summary.json").read_text())["knn_top1_after"]
    assert figures["knn"]["knn_top1_after"] == pytest.approx(after, abs=2 / 90)  # kernels differ with the batch
    assert figures["knn"]["num_steps"] == 0 and not (tmp_path / "knn" / "checkpoints").exists()
    assert figures["linear"]["top1"] > 0.3
    features = read_features(tmp_path / "extract_features")
    assert features.rows.shape == (320, 256) and len(set(features.images)) == 320


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_knn_of_a_teachers_weights(tmp_path):
    trained, small = tmp_path / "trained", ["config.DATA.TRAIN.DATA_LIMIT=320", "config.DATA.TEST.DATA_LIMIT=90"]
    words = ["config.ZERO.LEVEL=3", "config.DISTRIBUTED.NUM_PROC_PER_NODE=2", "config.EVALUATED_MODEL=teacher"]
    words += ["config.LOSS.moco_loss.momentum=0.9", "config.TRAINER.MAX_STEPS=4", f"config.CHECKPOINT.DIR={trained}"]
    run_command("config=digits/moco_v2", *words, *small)
    wanted, found = json.loads((trained / "summary.json").read_text()), {}
    for name in ("weights", "weights_teacher"):
        weights = f"config.MODEL.WEIGHTS_INIT.PARAMS_FILE={trained}/{name}.safetensors"
        run_command("config=benchmark/knn", weights, f"config.CHECKPOINT.DIR={tmp_path}/{name}", *small)
        found[name] = json.loads((tmp_path / name / "summary.json").read_text())
    teacher, student = found["weights_teacher"], found["weights"]
    assert teacher["knn_top1_after"] == pytest.approx(wanted["knn_top1_after"], abs=2 / 90)
    # The teacher's running statistics are its own: RankMe tells the two apart.
    assert teacher["rankme_after"] == pytest.approx(wanted["rankme_after"], rel=1e-3)
    assert abs(student["rankme_after"] - wanted["rankme_after"]) > 1e-2
