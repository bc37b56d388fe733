"""``vissl-zero verify``: two runs compared step by step, and the whole command."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.command_line import run_command
from vissl_zero.commands.verify import _report, compare, verify
from vissl_zero.errors import ConfigError


def write_run(folder: Path, losses: Sequence[float | None], weights: list[dict[str, torch.Tensor]]) -> Path:
    (folder / "weight_trace").mkdir(parents=True)
    lines = [json.dumps({"step": step, "loss": loss}) for step, loss in enumerate(losses, start=1)]
    (folder / "metrics.jsonl").write_text("\n".join(lines))
    for step, tensors in enumerate(weights, start=1):
        save_file(tensors, folder / "weight_trace" / f"{step:06d}.safetensors")
    return folder


def test_the_first_parameter_that_differs_is_named(tmp_path):
    same, other = torch.arange(4.0), torch.ones(2, dtype=torch.float64)
    reference = write_run(tmp_path / "a", [1.0, 2.0], [{"a": same, "b": other}, {"a": same, "b": other}])
    sharded = write_run(tmp_path / "b", [1.0, 2.5], [{"a": same, "b": other}, {"a": same, "b": other + 1e-3}])
    first, second = compare(reference, sharded)
    assert (first.loss, first.parameter) == (0.0, 0.0)
    assert second.loss == 0.5 and second.name == "b" and second.parameter == pytest.approx(1e-3)


def test_nan_is_a_difference(tmp_path, capsys):
    reference = write_run(tmp_path / "a", [1.0], [{"a": torch.ones(1)}])
    sharded = write_run(tmp_path / "b", [1.0], [{"a": torch.tensor([float("nan")])}])
    assert _report(compare(reference, sharded), 1e-10) == 1
    assert "first at step 1, parameter a" in capsys.readouterr().out


def test_a_loss_that_is_not_finite_is_a_difference(tmp_path, capsys):
    runs = [write_run(tmp_path / name, [loss], [{"a": torch.ones(1)}]) for name, loss in (("a", None), ("b", 1.0))]
    assert _report(compare(*runs), 1e-10) == 1
    assert "first at step 1, the loss" in capsys.readouterr().out


def test_a_missing_parameter_is_a_difference(tmp_path):
    reference = write_run(tmp_path / "a", [1.0], [{"a": torch.ones(1), "b": torch.ones(1)}])
    sharded = write_run(tmp_path / "b", [1.0], [{"a": torch.ones(1)}])
    (difference,) = compare(reference, sharded)
    assert difference.parameter == float("inf") and difference.name == "b"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["config.ZERO.LEVEL=3"], "must name a recipe"),
        (["config=quickstart/swav_digits", "--steps", "few"], "--steps takes a whole number"),
        (["config=quickstart/swav_digits", "--steps", "0"], "must be positive"),
        (["config=no/such"], "must name a recipe"),
        (["config=quickstart/swav_digits", "config.TEST_ONLY=true"], "A run without steps proves nothing"),
        (["config=quickstart/swav_digits", "config.DISTRIBUTED.NUM_NODES=2"], "NUM_NODES: must be 1 to verify"),
    ],
)
def test_bad_arguments_are_a_sentence(arguments, message):
    with pytest.raises(ConfigError, match=message):
        verify(arguments)


def test_the_two_runs_differ_in_sharding_alone(tmp_path, monkeypatch):
    plans = []

    def note(plan, text):
        plans.append(plan)
        return 7 * (len(plans) - 1)

    monkeypatch.setattr("vissl_zero.launch.run.run", note)
    zero = ["type=ZeroRedundancyOptimizer_Level_3", "LEVEL=auto", "SHARD_GROUP_SIZE=2"]
    zero += [
        f"offload_{kind}_config.{key}"
        for kind in ("optimizer", "param")
        for key in ("device=nvme", f"nvme_path={tmp_path}")
    ]
    others = ["config.DISTRIBUTED.NUM_PROC_PER_NODE=4", "config.DATA.TRAIN.BATCHSIZE_PER_REPLICA=8"]
    others += ["config.MODEL.AMP_PARAMS.USE_AMP=true", "config.SLURM.USE_SLURM=true", "config.SLURM.MEM_GB=4"]
    others += ["config.HOOKS.LOGGERS=[jsonl]"]
    code = verify(["config=quickstart/swav_digits", *(f"config.ZERO.{word}" for word in zero), *others, "--steps", "3"])
    assert code == 7, "the second run's"
    reference, chosen = plans
    for plan, level, tier, group in ((reference, 0, "none", 4), (chosen, 3, "nvme", 2)):
        sharding = plan.sharding
        assert (sharding.level, sharding.shard_group_size) == (level, group)
        assert sharding.offload_optimizer.device == sharding.offload_params.device == tier
        assert {sharding.precision.master, sharding.precision.compute, sharding.precision.autocast} == {"float64", None}
        assert (plan.world_size, plan.global_batch, plan.max_steps) == (4, 32, 3)
        assert not plan.config.SLURM.USE_SLURM and plan.config.HOOKS.LOGGERS == []
        assert "weight_trace" in plan.config.HOOKS.EXTRA
    assert reference.optimizer == chosen.optimizer


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_the_quickstart_is_the_same_model_at_level_3():
    done = run_command("verify", "config=quickstart/swav_digits", "--steps", "2", timeout_s=270)
    assert "The same model: every loss and weight" in done.stdout
