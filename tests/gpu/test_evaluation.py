"""Evaluation on a GPU gives the figures that it gives on the CPU, in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.runs import run
from vissl_zero.evaluation.feature_files import read_features

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.timeout(280),
]
DOUBLE = "config.TRAINER.DTYPE=float64"
SMALL = ["config.DATA.TRAIN.DATA_LIMIT=320", "config.DATA.TEST.DATA_LIMIT=90"]
FIGURES = ("knn_", "rankme_", "top1", "svm_", "probe_", "miou", "iou_", "pixel_", "lidar", "loss_")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evaluation") / "run"
    run(folder, "quickstart/swav_digits", "config.TRAINER.MAX_STEPS=4", DOUBLE, *SMALL, device="cpu")
    return folder


def figures_of(results: dict[str, Any], prefix: str = "") -> dict[str, float]:
    """Flatten the figures of quality; those of time and memory differ."""
    figures = {}
    for name, value in results.items():
        if isinstance(value, dict) and (prefix or name.startswith(FIGURES)):
            figures |= figures_of(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and (prefix or name.startswith(FIGURES)):
            figures[prefix + name] = value
    return figures


@pytest.mark.parametrize("level", [0, 3])
@pytest.mark.parametrize("recipe", ["knn", "linear", "svm", "extract_features"])
def test_a_benchmark_has_the_figures_of_the_cpu(recipe, level, trained, tmp_path):
    words = [f"config.MODEL.WEIGHTS_INIT.PARAMS_FILE={trained}", DOUBLE, *SMALL]
    words += ["config.OPTIMIZER.num_epochs=2"] if recipe == "linear" else []
    wanted = run(tmp_path / "cpu", f"benchmark/{recipe}", *words, "config.ZERO.LEVEL=0", device="cpu")
    measured = run(tmp_path / "gpu", f"benchmark/{recipe}", *words, f"config.ZERO.LEVEL={level}")
    assert figures_of(measured) == pytest.approx(figures_of(wanted), rel=1e-6)
    if recipe == "extract_features":
        rows, expected = (read_features(tmp_path / name).rows for name in ("gpu", "cpu"))
        torch.testing.assert_close(torch.as_tensor(rows), torch.as_tensor(expected), rtol=1e-6, atol=1e-6)
    else:
        assert figures_of(wanted)


@pytest.mark.parametrize("recipe", ["digits/segmentation", "digits/supervised", "digits/dino"])
def test_training_is_evaluated_as_on_the_cpu(recipe, tmp_path):
    words = ["config.TRAINER.MAX_STEPS=3", DOUBLE, *SMALL, "config.DATA.TRAIN.BATCHSIZE_PER_REPLICA=16"]
    wanted = run(tmp_path / "cpu", recipe, *words, "config.ZERO.LEVEL=0", device="cpu")
    measured = run(tmp_path / "gpu", recipe, *words, "config.ZERO.LEVEL=3", "config.HOOKS.HISTOGRAMS_EVERY=1")
    assert figures_of(wanted)
    assert figures_of(measured) == pytest.approx(figures_of(wanted), rel=1e-6)
