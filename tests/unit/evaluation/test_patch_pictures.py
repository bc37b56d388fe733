"""Principal components and attention of a real transformer, against an SVD and timm's own attention."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.blocks import data_block
from tests.unit.evaluation.example_run import make_config, make_plan
from vissl_zero.data.source import build_eval_sources
from vissl_zero.engine.build import build_run
from vissl_zero.evaluation.pictures import patch_pictures, principal_components

VIT = {"IMAGE_SIZE": 8, "PATCH_SIZE": 2, "NUM_LAYERS": 2, "NUM_HEADS": 2, "HIDDEN_DIM": 6, "MLP_DIM": 10}


def test_components_are_those_of_an_svd():
    tokens = torch.randn(3, 16, 5, dtype=torch.float64) * torch.tensor([5.0, 3.0, 2.0, 0.1, 0.1])
    found = principal_components(tokens).flatten(0, 1).numpy()
    rows = tokens.flatten(0, 1).numpy()
    left, values, _ = np.linalg.svd(rows - rows.mean(axis=0), full_matrices=False)
    for index in range(3):
        inner = (found[:, index] > 0) & (found[:, index] < 1)  # the ends are cut
        correlation = np.corrcoef(found[inner, index], left[inner, index] * values[index])[0, 1]
        assert abs(correlation) == pytest.approx(1, abs=1e-9)
    assert found.min() == 0 and found.max() == 1


def make_transformer_config():
    """The example's with a tiny vision transformer."""
    config = make_config()
    config["MODEL"]["TRUNK"] = {"NAME": "vision_transformer", "VISION_TRANSFORMERS": VIT}
    config["MODEL"]["HEAD"]["PARAMS"] = [["mlp", {"dims": [6, 10]}]]
    return config


def test_pictures_of_a_transformer(tmp_path):
    config = make_transformer_config()
    run, _, _ = build_run(make_plan(config, tmp_path), torch.device("cpu"))
    source, _ = build_eval_sources(data_block(config["DATA"]), 3)
    found = patch_pictures(run, source, [0, 5])
    assert [picture.image_id for picture in found] == [0, 5]
    assert all(picture.components.shape == picture.attention.shape == (4, 4, 3) for picture in found)
    assert found[0].attention.max() == 255 and not np.array_equal(found[0].components, found[1].components)
    assert run.sharded.model.training


def test_attention_is_that_of_the_last_block(tmp_path):
    """The picture against the probabilities of timm's unfused attention, caught at its dropout."""
    config = make_transformer_config()
    run, _, _ = build_run(make_plan(config, tmp_path), torch.device("cpu"))
    attention = [module for name, module in run.sharded.model.named_modules() if name.endswith("attn")][-1]
    attention.fused_attn = False
    caught = []
    attention.attn_drop.register_forward_hook(lambda _module, _inputs, output: caught.append(output))
    source, _ = build_eval_sources(data_block(config["DATA"]), 3)
    (picture,) = patch_pictures(run, source, [2])
    expected = caught[0][0, :, 0, 1:].mean(dim=0).view(4, 4)
    expected = (expected / expected.max() * 255).round().to(torch.uint8).numpy()
    assert np.array_equal(picture.attention[:, :, 0], expected)


def test_other_trunks_have_none(tmp_path):
    run, _, _ = build_run(make_plan(make_config(), tmp_path), torch.device("cpu"))
    assert patch_pictures(run, build_eval_sources(data_block(make_config()["DATA"]), 3)[0], [0]) == []
