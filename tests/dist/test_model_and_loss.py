"""The built-in trunk, heads and SwAV together: the same losses sharded or not, recomputed or not, at any world size.

Multi-crop, a queue, dropout in a second head, and a batch that ranks cannot share evenly. Batch norm is left out here:
how it synchronizes is sharding's matter.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from tests.blocks import model_block
from tests.ranks import run_on_ranks
from tests.unit.methods.batches import LossBatch
from vissl_zero import collectives
from vissl_zero.methods.method import Method, build_method
from vissl_zero.models.init import initialize_
from vissl_zero.models.keyed_random import set_random_key
from vissl_zero.models.model import Model, Unit, build_model

NUM_SAMPLES, NUM_STEPS = 7, 4


def _model() -> Model:
    trunk = {"depth": 4, "w_0": 16, "w_a": 16.0, "w_m": 2.0, "group_width": 8, "stem_width": 16}
    heads = [
        ["swav_head", {"dims": [64, 32, 16], "num_clusters": [30]}],
        ["mlp", {"dims": [64, 32, 5], "use_relu": True, "use_dropout": True}],
    ]
    head = {"PARAMS": heads, "BATCHNORM_EPS": 1e-5, "BATCHNORM_MOMENTUM": 0.1}
    model = build_model(model_block({"TRUNK": {"NAME": "regnet", "REGNET": trunk}, "HEAD": head}))
    initialize_(model, seed=0)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    return model.double()


def _criterion() -> Method:
    keys = {"num_crops": 4, "num_prototypes": [30], "embedding_dim": 16, "queue": {"queue_length": 20}}
    return build_method({"name": "swav_loss", "swav_loss": keys}).double()


def _crops(step: int, samples: Tensor) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    whole = [torch.randn(2, NUM_SAMPLES, 3, s, s, dtype=torch.float64, generator=generator) for s in (16, 8)]
    return [crops[:, samples].flatten(0, 1) for crops in whole]


def _losses(is_sharded: bool, is_checkpointed: bool) -> list[float]:
    """Train a few steps; the loss of each, over all ranks."""
    model, criterion = _model(), _criterion()
    world_size = collectives.world_size()
    for unit in model.zero_units():
        if isinstance(unit, Unit):
            unit.checkpoint = is_checkpointed
    if is_sharded:
        mesh = dist.init_device_mesh("cpu", (world_size,))
        for module in (*model.zero_units(), model):
            fully_shard(module, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    samples = torch.arange(NUM_SAMPLES)
    mine = samples[samples * world_size // NUM_SAMPLES == collectives.rank()]
    losses = []
    for step in range(NUM_STEPS):
        batch = LossBatch([2, 2], mine, NUM_SAMPLES)
        set_random_key(0, step, mine)
        criterion.on_step(step, epoch=0)
        outputs = model(_crops(step, mine), criterion.probe())
        loss = (criterion(outputs, batch) + outputs[1].square().mean()) * (len(mine) / NUM_SAMPLES)
        (loss * world_size).backward()  # fully_shard averages over ranks
        criterion.update_state([criterion.observe(outputs, batch)])
        optimizer.step()
        optimizer.zero_grad()
        losses.append(collectives.all_reduce_sum(loss).item())
    return losses


@cache
def _expected() -> list[float]:
    return run_on_ranks(1, _losses, False, False)[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("world_size", "is_sharded", "is_checkpointed"),
    [(1, False, True), (2, True, False), (2, True, True), (3, True, True)],
)
def test_losses_are_those_of_one_process(world_size: int, is_sharded: bool, is_checkpointed: bool) -> None:
    expected = _expected()
    assert len({round(loss, 6) for loss in expected}) == NUM_STEPS
    for losses in run_on_ranks(world_size, _losses, is_sharded, is_checkpointed):
        assert losses == pytest.approx(expected, abs=1e-12)
