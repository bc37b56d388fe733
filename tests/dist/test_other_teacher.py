"""A student learns from the model under DISTILLATION, with the weights of a file, alike at levels 0 and 3."""

from __future__ import annotations

from pathlib import Path

import pytest
import timm
import torch

from tests.dist.distilling import losses_of
from tests.ranks import run_on_ranks
from tests.unit.resolve.test_named_score_teacher import VIEWS, network
from vissl_zero.checkpoint.first_weights import load_teacher
from vissl_zero.checkpoint.folder import newest_checkpoint
from vissl_zero.checkpoint.resume import restore
from vissl_zero.checkpoint.saver import Saver
from vissl_zero.config.compose import compose
from vissl_zero.engine.build import build_run, other_model
from vissl_zero.engine.loop import train
from vissl_zero.errors import CheckpointError, ConfigError
from vissl_zero.models.init import initialize_
from vissl_zero.resolve.host import Host
from vissl_zero.resolve.resolve import resolve
from vissl_zero.resolve.resolved import ResolvedRun

TEACHER = "config.DISTILLATION.TEACHER_MODEL"
CROPS = (
    "config.DATA.TRAIN.TRANSFORMS=[{name: ImgPilToMultiCrop, total_num_crops: 3, num_crops: [3], size_crops: [16], "
    "crop_scales: [[0.5, 1]]}, {name: ToTensor}]"
)


def _plan(weights: Path, level: int, *further: str) -> ResolvedRun:
    words = [
        "config.LOSS.name=dino_distillation_loss",
        CROPS,
        "config.MODEL.HEAD.PARAMS=[[mlp, {dims: [-1, 6]}]]",
        f"{TEACHER}.TRUNK.NAME=vision_transformer",
        f"{TEACHER}.TRUNK.VISION_TRANSFORMERS={{IMAGE_SIZE: 16, PATCH_SIZE: 8, NUM_LAYERS: 1, NUM_HEADS: 2}}",
        f"{TEACHER}.TRUNK.VISION_TRANSFORMERS.HIDDEN_DIM=8",
        f"{TEACHER}.TRUNK.VISION_TRANSFORMERS.MLP_DIM=8",
        f"{TEACHER}.HEAD.PARAMS=[[mlp, {{dims: [8, 6]}}]]",
        f"{TEACHER}.WEIGHTS_INIT.PARAMS_FILE={weights}",
        "config.DISTRIBUTED.NUM_PROC_PER_NODE=2",
        "config.MACHINE.DEVICE=cpu",
        "config.TRAINER.DTYPE=float64",
        "config.TRAINER.MAX_STEPS=2",
        f"config.ZERO.LEVEL={level}",
        *further,
    ]
    host = Host(num_gpus=0, why_no_gpu="", num_cores=2)
    return resolve(compose("digits/distillation", words).run, str(weights.parent / "run"), host=host)


def _write(path: Path, plan: ResolvedRun, scale: float) -> None:
    teacher = other_model(plan, 0)
    assert teacher is not None
    initialize_(teacher, seed=7)
    torch.save({name: tensor * scale for name, tensor in teacher.state_dict().items()}, path)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_features_alone_can_be_compared(tmp_path: Path) -> None:
    weights = tmp_path / "teacher.pth"
    weights.touch()
    words = [
        "config.LOSS.name=distillation_loss",
        "config.LOSS.distillation_loss={teacher: '', loss_type: mse}",
        "config.MODEL.HEAD.PARAMS=[[mlp, {dims: [-1, 8]}]]",
        f"{TEACHER}.HEAD.PARAMS=[[identity, {{}}]]",
    ]
    _write(weights, _plan(weights, 0, *words), 1.0)
    first, third = (run_on_ranks(2, losses_of, _plan(weights, level, *words), timeout_s=100)[0] for level in (0, 3))
    assert len(first) == 2 and first == pytest.approx(third, rel=1e-10)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_teacher_s_weights_count_and_levels_agree(tmp_path: Path) -> None:
    weights = tmp_path / "teacher.pth"
    weights.touch()
    _write(weights, _plan(weights, 0), 1.0)
    first, third = (run_on_ranks(2, losses_of, _plan(weights, level), timeout_s=100)[0] for level in (0, 3))
    assert len(first) == 2 and first == pytest.approx(third, rel=1e-10)
    _write(weights, _plan(weights, 0), 2.0)
    other = run_on_ranks(2, losses_of, _plan(weights, 0), timeout_s=100)[0]
    assert abs(other[0] - first[0]) > 1e-3


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_swav_s_assignments_can_be_learned_with_the_teacher_s_prototypes(tmp_path: Path) -> None:
    weights = tmp_path / "teacher.pth"
    weights.touch()
    words = [
        "config.LOSS.name=swav_distillation_loss",
        "config.LOSS.swav_distillation_loss={use_teacher_prototypes: true, local_queue_length: 20}",
        "config.MODEL.HEAD.PARAMS=[[mlp, {dims: [-1, 5]}]]",
        f"{TEACHER}.HEAD.PARAMS=[[swav_head, {{dims: [8, 5], num_clusters: [7]}}]]",
    ]
    _write(weights, _plan(weights, 0, *words), 1.0)
    assert _plan(weights, 0, *words).config.LOSS["swav_distillation_loss"]["queue_length"] == 40
    first, third = (run_on_ranks(2, losses_of, _plan(weights, level, *words), timeout_s=100)[0] for level in (0, 3))
    assert len(first) == 2 and first == pytest.approx(third, rel=1e-10)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_scores_of_named_weights_are_centered_alike_at_every_level_and_number_of_ranks(tmp_path: Path) -> None:
    net = network("head")
    torch.save({"teacher": net.state_dict()}, tmp_path / "dino.pth")

    def plan(level: int, num_ranks: int) -> ResolvedRun:
        words = [
            "config.LOSS.name=dino_distillation_loss",
            f"config.LOSS.dino_distillation_loss={{teacher: {tmp_path / 'dino.pth'}, ema_center: 0.5}}",
            VIEWS,
            "config.MODEL.HEAD.PARAMS=[[mlp, {dims: [-1, -1]}]]",
            "config.MACHINE.DEVICE=cpu",
            "config.TRAINER.DTYPE=float64",
            "config.TRAINER.MAX_STEPS=3",
            f"config.DATA.TRAIN.BATCHSIZE_PER_REPLICA={12 // num_ranks}",
            f"config.DISTRIBUTED.NUM_PROC_PER_NODE={num_ranks}",
            "config.MODEL.SYNC_BN_CONFIG.CONVERT_BN_TO_SYNC_BN=true",
            f"config.ZERO.LEVEL={level}",
        ]
        return resolve(compose("digits/distillation", words).run, str(tmp_path / "run"), host=Host(0, "", 3))

    expected = run_on_ranks(1, losses_of, plan(0, 1), timeout_s=100)[0]
    assert len(expected) == 3
    for level, num_ranks in ((0, 2), (1, 2), (2, 2), (3, 2), (3, 3)):
        assert run_on_ranks(num_ranks, losses_of, plan(level, num_ranks), timeout_s=100)[0] == pytest.approx(
            expected, rel=1e-10
        )


def test_what_is_wrong_with_the_teacher_is_said_under_its_own_keys(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        _plan(tmp_path / "missing.pth", 0)
    assert f"{TEACHER}.WEIGHTS_INIT.PARAMS_FILE" in str(caught.value)


def _named(teacher: Path, level: int) -> ResolvedRun:
    words = [
        f"config.LOSS.feature_distillation_loss.teacher={teacher}",
        "config.LOSS.feature_distillation_loss.global_weight=0.5",
        "config.DISTRIBUTED.NUM_PROC_PER_NODE=2",
        "config.DATA.TRAIN.BATCHSIZE_PER_REPLICA=8",
        "config.MACHINE.DEVICE=cpu",
        "config.TRAINER.DTYPE=float64",
        "config.TRAINER.MAX_STEPS=2",
        f"config.ZERO.LEVEL={level}",
    ]
    host = Host(num_gpus=0, why_no_gpu="", num_cores=2)
    run = compose("digits/feature_distillation", words).run
    return resolve(run, str(teacher.parent / "run"), host=host)


def _save(plan: ResolvedRun, folder: str) -> list[str]:
    """Train, save, and name what is in the checkpoint."""
    run, schedules, frozen = build_run(plan, torch.device("cpu"), fill_teacher=lambda model: load_teacher(model, plan))
    train(run, schedules, frozen, [])
    saver = Saver(Path(folder), is_async=False, keep_last=-1, keep_every=-1)
    saver.save(run, [], is_epoch_over=False)
    saver.close()
    run.sharded.close()
    with newest_checkpoint(folder) as checkpoint:
        return list(checkpoint.tensors)


def _restore(plan: ResolvedRun, folder: str) -> str:
    run, _, _ = build_run(plan, torch.device("cpu"), fill_teacher=lambda model: load_teacher(model, plan))
    try:
        with newest_checkpoint(folder) as checkpoint:
            restore(run, [], checkpoint)
    except CheckpointError as error:
        return str(error)
    finally:
        run.sharded.close()
    return ""


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_teacher_named_by_its_weights_is_not_in_checkpoints(tmp_path: Path) -> None:
    weights = tmp_path / "vit.pth"
    net = timm.create_model("vit_tiny_patch16_224", embed_dim=64, depth=2, num_heads=1, img_size=24, patch_size=8)
    torch.save(net.state_dict(), weights)
    (tmp_path / "run").mkdir()
    names = run_on_ranks(2, _save, _named(weights, 3), str(tmp_path / "run"), timeout_s=100)[0]
    assert "criterion/queue.embeddings" in names and not [name for name in names if "teacher" in name]
    assert not run_on_ranks(2, _restore, _named(weights, 0), str(tmp_path / "run"), timeout_s=100)[0]
    torch.save({name: 2 * tensor for name, tensor in net.state_dict().items()}, weights)
    said = run_on_ranks(2, _restore, _named(weights, 0), str(tmp_path / "run"), timeout_s=100)[0]
    assert "The teacher's weights are not those that this run began with" in said
