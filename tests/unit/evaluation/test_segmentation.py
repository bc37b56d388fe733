"""Intersection over union on TEST, what is looked at before training, and what the report shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.unit.data.test_pairs import NUM_CLASSES, make_folder
from tests.unit.evaluation.example_run import make_plan
from tests.unit.evaluation.example_segmentation import TO_TENSOR, make_segmentation_config
from vissl_zero.data.loader import build_eval_images
from vissl_zero.data.source import masks_of
from vissl_zero.data.sources.segmentation import voc_colors
from vissl_zero.engine.build import build_run
from vissl_zero.engine.hook import Run
from vissl_zero.engine.loop import train
from vissl_zero.errors import ConfigError, DataError
from vissl_zero.evaluation.segmentation import SegmentationHook, _confusion_of, overlap
from vissl_zero.planner.dry_run import dry_run
from vissl_zero.reporting.report import segmented_samples
from vissl_zero.reporting.summary import summarize, table
from vissl_zero.reporting.weight_files import BestWeights
from vissl_zero.resolve.resolved import OptimizerPlan


def test_overlap_is_counted_by_hand() -> None:
    # Class 2 is neither there nor predicted, output 3 is no class.
    confusion = torch.tensor([[4, 1, 0, 1], [2, 3, 0, 0], [0, 0, 0, 0]])
    found = overlap(confusion)
    assert found is not None
    assert found.by_class == [4 / 8, 3 / 6, None]
    assert found.miou == 0.5
    assert found.pixel_accuracy == 7 / 11
    assert overlap(torch.zeros(3, 3, dtype=torch.int64)) is None


def _trained(config: dict[str, Any], folder: Path, **plan: Any) -> tuple[Run, SegmentationHook]:
    run, schedules, frozen = build_run(make_plan(config, folder, **plan), torch.device("cpu"))
    hook = SegmentationHook()
    train(run, schedules, frozen, [hook, BestWeights("miou")])
    return run, hook


def test_training_beats_the_untrained_head_and_figures_are_those_of_single_images(tmp_path: Path) -> None:
    config = make_segmentation_config(num_train=160)
    config["TEST_EVERY_NUM_EPOCH"] = 2
    sgd = OptimizerPlan("sgd", {"momentum": 0.9}, lr={"name": "constant", "value": 0.3})
    run, hook = _trained(config, tmp_path, num_epochs=8, optimizer=sgd)
    curve = run.results["miou_by_step"]
    assert [step for step, _ in curve] == [0, 20, 40, 60, 80]
    # One class everywhere has at most the share of the ground, a twelfth of it on average.
    assert curve[0][1] < 0.09 < 0.11 < curve[-1][1] == run.results["miou"], curve
    assert run.results["miou_best"] == max(miou for _, miou in curve)
    images = build_eval_images(run.plan.config.DATA, run.plan.seed)[1]
    assert images is not None
    read = masks_of(images.source)
    assert read is not None
    right, there, predicted = (np.zeros(11, int) for _ in range(3))
    for index in range(len(images)):
        mask = np.asarray(read(index))
        (crop,) = images.transform(images.source.image(index))
        with torch.no_grad():
            (logits,) = run.sharded.model.eval()([crop[None].double()])
        large = torch.nn.functional.interpolate(logits, size=(16, 16), mode="bilinear")
        classes = large[0].argmax(dim=0).numpy()
        for number in range(11):
            right[number] += ((mask == number) & (classes == number)).sum()
            there[number] += (mask == number).sum()
            predicted[number] += (classes == number).sum()
    unions = there + predicted - right
    shares = [own / union for own, union in zip(right, unions, strict=True)]
    assert list(run.results["iou_by_class"].values()) == pytest.approx(shares)
    assert list(run.results["iou_by_class"])[:2] == ["ground", "digit 0"]
    assert run.results["pixel_accuracy"] == right.sum() / there.sum()
    assert len(hook.pictures) == 8
    samples = segmented_samples(hook.pictures, config["DATA"]["TRAIN"]["TRANSFORMS"])
    first = hook.pictures[0]
    assert np.array_equal(samples[0].crops[0], voc_colors()[first.mask])
    assert np.array_equal(samples[0].crops[1], voc_colors()[first.predicted])
    assert samples[0].original.max() > 200  # strokes are white again


def test_the_summary_names_the_worst_classes(tmp_path: Path) -> None:
    from rich.console import Console

    run, _ = _trained(make_segmentation_config(), tmp_path, max_steps=1)
    run.results["bytes_per_rank"] = []
    summary = {**summarize(run), "num_steps": 0}  # without the table of memory, which needs the hooks that measure it
    console = Console(width=200, record=True)
    console.print(table(run, summary))
    text = console.export_text()
    assert "mIoU" in text and "least IoU" in text and "digit" in text


def _folder_config(folder: Path, num_classes: int = NUM_CLASSES) -> dict[str, Any]:
    source = {"DATA_SOURCES": ["segmentation_folder"], "DATA_PATHS": [str(folder)]}
    transforms = [{"name": "Resize", "size": [16, 16]}, *TO_TENSOR]
    params = {"SOURCE_PARAMS": {"num_classes": num_classes}}
    return make_segmentation_config(-1, -1, **source, **params, TRANSFORMS=transforms)


def test_all_that_is_wrong_is_named_before_the_first_step(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "pairs", num_images=16)
    Image.new("L", (5, 5)).save(folder / "masks/2.png")
    Image.new("RGB", (32, 40), (1, 2, 3)).save(folder / "masks/5.png")
    Image.new("L", (32, 40), NUM_CLASSES).save(folder / "masks/11.png")
    config = _folder_config(folder)
    run, schedules, frozen = build_run(make_plan(config, tmp_path), torch.device("cpu"))
    with pytest.raises(DataError) as raised:
        train(run, schedules, frozen, [SegmentationHook()])
    for said in ("2.png: image and mask have different sizes", "5.png: its color (1, 2, 3)", "11.png: it has class 11"):
        assert said in str(raised.value)
    assert run.step == 0
    config["DATA"]["ON_BROKEN_IMAGE"] = "skip"
    run, _ = _trained(config, tmp_path, max_steps=1)
    assert run.step == 1


def test_a_broken_image_counts_in_no_overlap(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "pairs", num_images=16)
    config = _folder_config(folder)
    config["DATA"]["ON_BROKEN_IMAGE"] = "skip"
    run = build_run(make_plan(config, tmp_path), torch.device("cpu"))[0]

    def counted() -> torch.Tensor:
        images = build_eval_images(run.plan.config.DATA, run.plan.seed)[1]
        assert images is not None
        return _confusion_of(run, images)

    expected = counted()
    whole = (folder / "images/3.png").read_bytes()
    (folder / "images/30.png").write_bytes(whole[: len(whole) // 2])
    Image.open(folder / "masks/3.png").save(folder / "masks/30.png")
    assert torch.equal(counted(), expected)


def test_a_head_with_fewer_outputs_than_classes_is_refused(tmp_path: Path) -> None:
    config = _folder_config(make_folder(tmp_path / "pairs", num_images=16))
    config["MODEL"]["HEAD"]["PARAMS"] = [["fcn_head", {"dims": [-1, 7]}]]
    with pytest.raises(ConfigError, match="an output for each of the 11 classes"):
        _trained(config, tmp_path, max_steps=1)


def test_a_dry_run_forecasts_a_segmentation(tmp_path: Path) -> None:
    found = dry_run(make_plan(make_segmentation_config(), tmp_path))
    assert found.forecast.step is not None
    assert len(found.class_names) == 11
