"""``WEIGHTS_INIT.CONTINUE``: student and teacher begin with a file's weights, its positions resized, at any level."""

from __future__ import annotations

from pathlib import Path

import pytest
import timm
import torch
import torch.distributed as dist
from torch import Tensor

from tests.dist.test_method_parity import make_method_plan
from tests.ranks import run_on_ranks
from tests.unit.config.example_config import CPU_HOST
from vissl_zero.checkpoint.first_weights import load_first_weights
from vissl_zero.config.compose import compose
from vissl_zero.engine.build import build_run
from vissl_zero.errors import CheckpointError, ConfigError
from vissl_zero.evaluation.knn import fall_of_rank
from vissl_zero.models.init import initialize_
from vissl_zero.models.model import build_model
from vissl_zero.models.trunks.token_embedding import interpolated
from vissl_zero.resolve.resolve import resolve
from vissl_zero.resolve.resolved import ResolvedRun

CPU = torch.device("cpu")
POSITIONS, MASK_TOKEN = "trunk.embedding.unit.pos_embed", "trunk.embedding.unit.mask_token"


def _plan(level: int, file: str) -> ResolvedRun:
    plan = make_method_plan("ibot", level, dist.get_world_size() if dist.is_initialized() else 1, "batch")
    plan.config.MODEL.WEIGHTS_INIT.PARAMS_FILE = file
    plan.config.MODEL.WEIGHTS_INIT.CONTINUE = True
    return plan


@pytest.fixture
def larger(tmp_path: Path) -> tuple[Path, dict[str, Tensor]]:
    """Write a trunk of images twice as large, without a mask token; return the file and what must come of it."""
    plan = _plan(0, "")
    model = build_model(plan.config.MODEL, 10).double()
    initialize_(model, seed=77)
    embedding = model.trunk.embedding.unit
    height, width = embedding.grid_size
    state = {name: tensor for name, tensor in model.trunk.state_dict(prefix="trunk.").items() if name != MASK_TOKEN}
    drawn = torch.randn(
        1, embedding.num_prefix_positions + 4 * height * width, model.trunk.feature_dim
    )  # as files have it
    torch.save({**state, POSITIONS: drawn}, tmp_path / "larger.pth")
    prefix = embedding.num_prefix_positions
    patches = interpolated(drawn[:, prefix:], (2 * height, 2 * width), (height, width), embedding.position_resize)
    return tmp_path / "larger.pth", {**state, POSITIONS: torch.cat([drawn[:, :prefix], patches], dim=1).double()}


def _first(file: str) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    found = []
    for level in (0, 3):
        plan = _plan(level, file)
        run, _, _ = build_run(plan, CPU, lambda model, plan=plan: load_first_weights(model, plan))
        found.append((run.sharded.full_state(), run.sharded.full_teacher_state()))
        run.sharded.close()
    return found


@pytest.mark.slow
def test_student_and_teacher_begin_with_the_file_at_levels_0_and_3(larger) -> None:
    file, expected = larger
    for student, teacher in run_on_ranks(2, _first, str(file))[0]:
        assert teacher and teacher.keys() <= student.keys() and POSITIONS in teacher
        for name, tensor in teacher.items():
            assert torch.equal(tensor, student[name]), name
        for name, tensor in expected.items():
            torch.testing.assert_close(student[name], tensor, rtol=0, atol=1e-6, msg=name)  # float32 on other threads


def test_counts_are_printed_and_without_continue_the_file_is_refused(larger, capsys) -> None:
    plan = _plan(0, str(larger[0]))
    model = build_model(plan.config.MODEL, 10)
    load_first_weights(model, plan)
    said = capsys.readouterr().out
    num_anew = 1 + len(model.heads.state_dict())
    assert f"{len(larger[1]) - 1} tensors as they are, 1 resized; {num_anew} of the model start anew, 0 of" in said
    plan.config.MODEL.WEIGHTS_INIT.CONTINUE = False
    with pytest.raises(CheckpointError, match=r"mask_token.*pos_embed"):
        load_first_weights(model, plan)


def test_continuing_needs_weights_and_training() -> None:
    def refused(*words: str) -> str:
        composed = compose("digits/dino", ["config.MODEL.WEIGHTS_INIT.CONTINUE=true", *words])
        with pytest.raises(ConfigError) as caught:
            resolve(composed.run, "runs/x", recipe="digits/dino", written=composed.written, host=CPU_HOST)
        return str(caught.value)

    assert "the weights that CONTINUE goes on from" in refused()
    assert "is for pretraining" in refused("config.TEST_ONLY=true")
    teachers = "config.DISTILLATION.TEACHER_MODEL.WEIGHTS_INIT.CONTINUE=true"
    assert "this teacher is not trained" in refused(teachers)


def test_a_method_that_masks_gets_its_token_whatever_the_weights_are_of(tmp_path: Path) -> None:
    net = timm.create_model("vit_tiny_patch16_224", depth=1, num_classes=0)
    torch.save(net.state_dict(), tmp_path / "vit.pth")
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.jpg").touch()
    words = [f"config.MODEL.WEIGHTS_INIT.PARAMS_FILE={tmp_path}/vit.pth"]
    words += [f"config.DATA.TRAIN.DATA_PATHS=[{tmp_path}/photos]", "config.DATA.TRAIN.BATCHSIZE_PER_REPLICA=1"]
    composed = compose("continue/dinov2", words)
    plan = resolve(composed.run, "runs/x", recipe="continue/dinov2", written=composed.written, host=CPU_HOST)
    assert plan.config.MODEL.TRUNK.PARAMS["use_mask_token"] and plan.notes == ()
    model = build_model(plan.config.MODEL)
    load_first_weights(model, plan)
    assert torch.equal(model.trunk.embedding.unit.pos_embed, net.pos_embed)


def test_a_fall_of_rank_is_said() -> None:
    assert "fell from 100.0 to 20.0" in fall_of_rank({"rankme_before": 100.0, "rankme_after": 20.0})
    assert fall_of_rank({"rankme_before": 100.0, "rankme_after": 60.0}) == "" == fall_of_rank({})
