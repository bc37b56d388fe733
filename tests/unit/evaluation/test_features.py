"""Features in the order of the images, and pixels before normalization."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.unit.evaluation.example_run import NUM_TEST, NUM_TRAIN, make_config, make_plan
from vissl_zero.data.loader import build_eval_images
from vissl_zero.data.pipeline import build_pipeline
from vissl_zero.engine.build import build_run
from vissl_zero.errors import DataError
from vissl_zero.evaluation.feature_files import ExtractFeatures
from vissl_zero.evaluation.features import evaluating, extract_features, thumbnails


@pytest.fixture
def run():
    return build_run(make_plan(make_config()), torch.device("cpu"))[0]


def test_rows_labels_and_pixels_are_those_of_the_source_in_order(run):
    images, _ = build_eval_images(run.plan.config.DATA, run.plan.seed)
    features = extract_features(run, images, with_pixels=True)
    source = images.source
    assert features.labels.tolist() == [source.label(index) for index in range(NUM_TRAIN)]
    for index in (0, 17, NUM_TRAIN - 1):
        (crop,) = images.transform(source.image(index))
        with torch.no_grad():
            alone = run.sharded.model.eval()([crop[None].double()], features_only=True)[0]
        torch.testing.assert_close(features.rows[index : index + 1], alone, rtol=0, atol=1e-12)
        (scan,) = build_pipeline([{"name": "ToTensor"}], "")(source.image(index))
        torch.testing.assert_close(features.pixels[index], scan.flatten(), rtol=0, atol=1e-6)


def test_training_mode_is_given_back_module_by_module(run):
    model = run.sharded.model.train()
    frozen = next(module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm))
    frozen.eval()
    before = [module.training for module in model.modules()]
    _, test = build_eval_images(run.plan.config.DATA, run.plan.seed)
    assert len(extract_features(run, test).rows) == NUM_TEST
    assert [module.training for module in model.modules()] == before
    assert torch.is_grad_enabled()
    with pytest.raises(RuntimeError, match="midway"), evaluating(model):
        assert not any(module.training for module in model.modules())
        assert not torch.is_grad_enabled()
        raise RuntimeError("midway")
    assert [module.training for module in model.modules()] == before


def test_running_statistics_are_left_alone(run):
    before = {name: buffer.clone() for name, buffer in run.sharded.model.named_buffers()}
    extract_features(run, build_eval_images(run.plan.config.DATA, run.plan.seed)[0])
    assert before
    assert all(torch.equal(buffer, before[name]) for name, buffer in run.sharded.model.named_buffers())


def test_features_that_are_nan_get_no_index_and_the_weights_are_named(tmp_path):
    config = make_config()
    config["TEST_ONLY"], config["MODEL"]["WEIGHTS_INIT"] = True, {"PARAMS_FILE": "/w/a.pth"}
    run, _, _ = build_run(make_plan(make_config(), tmp_path), torch.device("cpu"))
    run.plan = make_plan(config, tmp_path)
    next(run.sharded.model.trunk.parameters()).data[:] = float("nan")
    with pytest.raises(DataError, match=f"features of {NUM_TRAIN} of {NUM_TRAIN} images are NaN .* weights /w/a.pth h"):
        ExtractFeatures().on_end(run)
    assert not list(tmp_path.glob("features/*.json"))


def test_thumbnails_undo_the_normalization_and_average():
    pipeline = build_pipeline([{"name": "ToTensor"}, {"name": "Normalize", "mean": [0.1] * 3, "std": [2.0] * 3}], "")
    images = torch.arange(64.0).view(1, 1, 8, 8).repeat_interleave(8, 2).repeat_interleave(8, 3).expand(2, 3, 64, 64)
    rows = thumbnails((images - 0.1) / 2.0, pipeline)
    assert rows.shape == (2, 3 * 16 * 16)
    wanted = torch.arange(64.0).view(8, 8).repeat_interleave(2, 0).repeat_interleave(2, 1).flatten()
    torch.testing.assert_close(rows[1].view(3, -1)[2], wanted, rtol=0, atol=1e-4)
