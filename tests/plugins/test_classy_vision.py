"""A Classy Vision task trains with our ZeRO after one import, and ends where Classy's own DDP training ends."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from tests.ranks import run_on_ranks
from vissl_zero.errors import ConfigError

DATASET = {
    "name": "synthetic_image",
    "num_samples": 32,
    "crop_size": 16,
    "class_ratio": 0.5,
    "seed": 0,
    "batchsize_per_replica": 4,
    "use_shuffle": False,
    "transforms": [{"name": "apply_transform_to_key", "key": "input", "transforms": [{"name": "ToTensor"}]}],
}
CONFIG: dict[str, Any] = {
    "name": "classification_task",
    "num_epochs": 2,
    "loss": {"name": "CrossEntropyLoss"},
    "dataset": {"train": DATASET},
    "model": {"name": "mlp", "input_dim": 768, "output_dim": 2, "hidden_dims": [16, 16, 16], "use_batchnorm": False},
    "optimizer": {
        "name": "sgd",
        "momentum": 0.9,
        "param_schedulers": {"lr": {"name": "cosine", "start_value": 0.1, "end_value": 0.01}},
    },
}


def sharded(level: int) -> dict[str, Any]:
    config = copy.deepcopy(CONFIG)
    config["name"] = "vissl_zero_classification_task"
    schedulers = config["optimizer"].pop("param_schedulers")
    zero = {"level": level}
    config["optimizer"] = {
        "name": "vissl_zero",
        "zero": zero,
        "base_optimizer": config["optimizer"],
        "param_schedulers": schedulers,
    }
    return config


def trained(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Full weights on rank 0 after training."""
    import vissl_zero.integration.classy as ours  # the one import; before Classy's, which a CPU build of torch needs

    # isort: split
    from classy_vision.generic.distributed_util import set_cpu_device
    from classy_vision.tasks import build_task
    from classy_vision.trainer import ClassyTrainer

    set_cpu_device()
    torch.manual_seed(1)
    task = build_task(config)
    for dataset in task.datasets.values():
        dataset.set_num_workers(0)  # else it forks a process that has threads, which may never end
    ClassyTrainer().train(task)
    if isinstance(task.optimizer, ours.ClassyZero):
        return task.optimizer.optimizer.full_state()
    return {name: value.detach().clone() for name, value in task.base_model.classy_model.named_parameters()}


@pytest.mark.parametrize("level", [1, 3])
def test_classy_trains_sharded_as_it_does_unsharded(level):
    reference = run_on_ranks(2, trained, CONFIG)[0]
    found = run_on_ranks(2, trained, sharded(level))[0]
    assert found.keys() == reference.keys() and len(found) == 8
    for name, value in reference.items():
        torch.testing.assert_close(found[name], value, atol=1e-6, rtol=0)


def test_classys_own_zero_stays_what_it_is():
    from classy_vision.optim import OPTIMIZER_REGISTRY
    from classy_vision.optim.zero import ZeRO

    import vissl_zero.integration.classy as ours

    assert OPTIMIZER_REGISTRY["zero"] is ZeRO
    assert OPTIMIZER_REGISTRY["vissl_zero"] is ours.ClassyZero


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [("clip_grad_norm", 1.0, "clip by the norm of a shard"), ("simulated_global_batchsize", 64, "accumulation")],
)
def test_what_would_be_done_twice_is_refused(key, value, message):
    from classy_vision.tasks import build_task

    import vissl_zero.integration.classy  # noqa: F401

    task = build_task({**sharded(1), key: value})
    with pytest.raises(ConfigError, match=message):
        task.prepare()
