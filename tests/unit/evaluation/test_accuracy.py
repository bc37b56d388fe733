"""Supervised top-1 on TEST."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from safetensors import safe_open

from tests.blocks import data_block
from tests.unit.evaluation.example_run import NUM_TEST, make_config, make_plan
from vissl_zero.data.decode import BrokenImageError
from vissl_zero.data.loader import build_eval_images, eval_images
from vissl_zero.engine.build import build_run
from vissl_zero.engine.hook import Hook
from vissl_zero.engine.loop import train
from vissl_zero.errors import ConfigError
from vissl_zero.evaluation.accuracy import AccuracyHook, accuracies
from vissl_zero.evaluation.knn import KnnHook
from vissl_zero.methods.method import Method
from vissl_zero.planner.dry_run import dry_run
from vissl_zero.reporting.weight_files import BestWeights


def test_top1_is_the_share_of_right_answers():
    run, _, _ = build_run(make_plan(make_config()), torch.device("cpu"))
    AccuracyHook().on_end(run)
    images = build_eval_images(run.plan.config.DATA, run.plan.seed)[1]
    right = 0
    for index in range(NUM_TEST):
        (crop,) = images.transform(images.source.image(index))
        with torch.no_grad():
            logits = run.sharded.model.eval()([crop[None].double()])[0]
        right += int(logits.argmax()) == images.source.label(index)
    assert run.results["top1"] == right / NUM_TEST


def _answers(run):
    """Logits and labels of TEST's images, one image at a time."""
    images = build_eval_images(run.plan.config.DATA, run.plan.seed)[1]
    crops = [images.transform(images.source.image(index))[0] for index in range(NUM_TEST)]
    with torch.no_grad():
        logits = torch.cat([run.sharded.model.eval()([crop[None].double()])[0] for crop in crops])
    return logits, torch.tensor([images.source.label(index) for index in range(NUM_TEST)])


def test_meters_add_what_they_name():
    config = make_config()
    config["METERS"] |= {
        "name": "accuracy_list_meter",
        "names": ["precision_at_k_list_meter", "recall_at_k_list_meter"],
    }
    config["METERS"]["accuracy_list_meter"]["topk_values"] = [1, 3, 100]
    config["METERS"]["precision_at_k_list_meter"]["topk_values"] = [2]
    config["METERS"]["recall_at_k_list_meter"]["topk_values"] = [2, 5]
    run, _, _ = build_run(make_plan(config), torch.device("cpu"))
    AccuracyHook().on_end(run)
    logits, labels = _answers(run)
    place = (logits > logits.gather(1, labels[:, None])).sum(dim=1)  # how many classes come before the label
    shares = {k: (place < k).double().mean().item() for k in (1, 2, 3, 5)}
    assert run.results["top1"] == shares[1]
    figures = {"top3": shares[3], "precision_at_2": shares[2] / 2, "recall_at_2": shares[2], "recall_at_5": shares[5]}
    assert {name: run.results[name] for name in figures} == figures
    assert "top100" not in run.results  # there are ten classes


def test_a_mask_leaves_out_classes_without_images(monkeypatch):
    config = make_config()
    config["METERS"]["model_output_mask"] = True
    run, _, _ = build_run(make_plan(config), torch.device("cpu"))
    logits, labels = _answers(run)
    images = build_eval_images(data_block(config["DATA"]), run.plan.seed)[1]
    few = replace_labels(images, {0, 1, 2})
    is_few = labels < 3
    masked = logits.clone()
    masked[:, 3:] = float("-inf")
    right = ((masked.argmax(dim=1) == labels) & is_few).sum().item()
    assert top1(run, few, -1) == right / is_few.sum().item()
    assert right > ((logits.argmax(dim=1) == labels) & is_few).sum().item()


def replace_labels(images, kept):
    """The same images, of which those of other classes have no label."""

    class Few:
        def __getattr__(self, name):
            return getattr(images.source, name)

        def __len__(self):
            return len(images.source)

        def label(self, index):
            label = images.source.label(index)
            return label if label in kept else -1

    return eval_images(Few(), data_block(make_config()["DATA"]), 0)


def test_without_test_model_nothing_is_measured():
    config = make_config()
    config["TEST_MODEL"] = False
    run, _, _ = build_run(make_plan(config), torch.device("cpu"))
    AccuracyHook().on_end(run)
    assert "top1" not in run.results


def top1(run, images, ignored_label):
    return accuracies(run, images, ignored_label)[0].top1


def test_an_ignored_label_does_not_count():
    run, _, _ = build_run(make_plan(make_config()), torch.device("cpu"))
    images = build_eval_images(run.plan.config.DATA, run.plan.seed)[1]
    everything = top1(run, images, -1)
    labels = [images.source.label(index) for index in range(NUM_TEST)]
    without = [top1(run, images, label) for label in range(10)]
    # Each image is left out once: the right answers add up to nine times as many.
    counted = [share * (NUM_TEST - labels.count(label)) for label, share in enumerate(without)]
    assert abs(sum(counted) - 9 * everything * NUM_TEST) < 1e-9


def test_a_broken_image_does_not_count_and_its_message_says_so(caplog):
    """The next image would count twice, under its own label."""
    config = make_config()
    config["DATA"]["ON_BROKEN_IMAGE"] = "skip"
    run, _, _ = build_run(make_plan(config), torch.device("cpu"))
    logits, labels = _answers(run)
    wrong = int((logits.argmax(dim=1) != labels).nonzero()[0])
    images = build_eval_images(run.plan.config.DATA, run.plan.seed)[1]

    class Broken:
        def __getattr__(self, name):
            return getattr(images.source, name)

        def __len__(self):
            return len(images.source)

        def image(self, index):
            if index == wrong:
                raise BrokenImageError("a.png", "it is too small")
            return images.source.image(index)

    right = (logits.argmax(dim=1) == labels).sum().item()
    assert top1(run, eval_images(Broken(), run.plan.config.DATA, 0), -1) == right / (NUM_TEST - 1)
    assert caplog.messages == ["Skipping a.png: it is too small. It is left out."]


def test_other_losses_have_no_top1():
    run, _, _ = build_run(make_plan(make_config()), torch.device("cpu"))
    run.method = Method()
    AccuracyHook().on_end(run)
    assert "top1" not in run.results


def test_images_that_cannot_be_evaluated_on_are_found_before_training():
    config = make_config()
    config["DATA"]["TEST"]["TRANSFORMS"] = [{"name": "Resize", "size": "small"}, {"name": "ToTensor"}]
    run, _, _ = build_run(make_plan(config), torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"config\.DATA\.TEST\.TRANSFORMS\[0\]: Resize"):
        AccuracyHook().on_start(run)
    with pytest.raises(ConfigError, match=r"config\.DATA\.TEST\.TRANSFORMS\[0\]: Resize"):
        dry_run(run.plan)


def probe(folder, factors, **changes):
    """Train heads on a frozen trunk at these factors of the rate; weights by head, results."""
    config = make_config(USE_KNN=False)
    config["MODEL"]["HEAD"]["PARAMS"] = [["mlp", {"dims": [-1, -1]}]] * len(factors)
    config["MODEL"]["FEATURE_EVAL_SETTINGS"] |= {"EVAL_MODE_ON": True, "FREEZE_TRUNK_ONLY": True}
    config["MODEL"]["NON_TRAINABLE_PARAMS"] = ["trunk"]
    config["CHECKPOINT"]["SAVE_BEST"] = True
    plan = make_plan(config, folder, **changes)
    optimizer = replace(plan.optimizer, head_lr_factors=tuple(factors), weight_decay=0.01, head_weight_decay=0.01)
    plan = replace(plan, optimizer=optimizer)
    run, schedules, frozen = build_run(plan, torch.device("cpu"))
    train(run, schedules, frozen, [AccuracyHook(), BestWeights("top1")])
    state = run.sharded.full_state()
    return [state[f"heads.{index}.clf.0.weight"] for index in range(len(factors))], run.results


def test_probes_side_by_side_are_those_trained_alone(tmp_path):
    factors = [0.3, 1.0, 30.0]
    together, results = probe(tmp_path, factors)
    assert together[0].shape == (10, 32)  # -1, -1: features and classes
    top1 = {}
    for factor, weight in zip(factors, together, strict=True):
        (alone,), own = probe(tmp_path, [factor])
        torch.testing.assert_close(weight, alone, rtol=0, atol=1e-12)
        top1[f"{0.1 * factor:g}"] = own["top1"]
    assert not torch.allclose(together[0], together[2])
    assert results["top1_by_lr"] == top1 and results["top1"] == max(top1.values())
    assert top1[f"{results['best_lr']:g}"] == results["top1"]


def test_accuracy_follows_training_and_the_best_weights_are_kept(tmp_path):
    _, results = probe(tmp_path, [1.0], num_epochs=4)
    curve = results["top1_by_step"]
    assert [step for step, _ in curve] == [4, 8, 12, 16] and curve[-1][1] == results["top1"]
    best = max(top1 for _, top1 in curve)
    first = next(step for step, top1 in curve if top1 == best)
    assert (results["top1_best"], results["best_step"]) == (best, first)
    with safe_open(tmp_path / "weights_best.safetensors", framework="pt") as file:
        assert file.metadata()["step"] == str(first)
    assert results["top1"] <= results["top5"] <= 1 and "top1_latest" not in results


@pytest.mark.parametrize(("metric", "is_best"), [("loss", min), ("knn_top1", max)])
def test_the_best_weights_are_those_of_the_figure_that_is_named(tmp_path, metric, is_best):
    config = make_config(USE_KNN=True)
    config["NEAREST_NEIGHBOR"] |= {"EVERY_NUM_EPOCHS": 1}
    plan = make_plan(config, tmp_path, num_epochs=3)
    run, schedules, frozen = build_run(plan, torch.device("cpu"))
    losses: dict[int, list[float]] = {}

    class Losses(Hook):
        def on_record(self, run, record):
            losses.setdefault((record.step - 1) // run.steps_per_epoch, []).append(record.loss)

    train(run, schedules, frozen, [Losses(), KnnHook(plan), BestWeights(metric)])
    ends = [(epoch + 1) * run.steps_per_epoch for epoch in range(3)]
    if metric == "loss":
        curve = [(step, sum(losses[epoch]) / len(losses[epoch])) for epoch, step in enumerate(ends)]
    else:
        curve = [(int(step), top1) for step, top1 in run.results["knn_top1_by_step"] if step in ends]
    best = is_best(figure for _, figure in curve)
    first = next(step for step, figure in curve if figure == best)
    assert (run.results[f"{metric}_best"], run.results["best_step"]) == (best, first)
    with safe_open(tmp_path / "weights_best.safetensors", framework="pt") as file:
        assert file.metadata()["step"] == str(first)
