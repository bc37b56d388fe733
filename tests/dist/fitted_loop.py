"""A loop of one's own that is told how much memory there is, beside the same loop in plain torch."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import vissl_zero
from tests.ranks import log_messages
from vissl_zero.errors import ConfigError

WIDTH, NUM_BLOCKS, BATCH = 512, 12, 8


def mlp() -> nn.Module:
    """Units large enough for what ranks exchange, and threads of a disk hold, not to count."""
    torch.manual_seed(1)
    blocks = [nn.Linear(WIDTH, WIDTH) for _ in range(NUM_BLOCKS)]
    return nn.Sequential(nn.Sequential(*blocks), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 3)).double().eval()


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(BATCH, WIDTH, generator=generator).double(), torch.arange(BATCH) % 3


def train_plainly(num_steps: int) -> dict[str, Tensor]:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)
    for step in range(num_steps):
        inputs, labels = batch_of(step)
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


def train_fitted(zero: dict[str, Any], is_meta: bool, num_steps: int) -> tuple[dict[str, Tensor], list[str]]:
    """Full weights on rank 0 and what was said; of a refusal, nothing and the error."""
    model = mlp()
    before = torch.random.get_rng_state()
    sample = tuple(t.chunk(torch.distributed.get_world_size())[0].to("meta" if is_meta else "cpu") for t in batch_of(0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)
    try:
        with log_messages() as messages:
            model, zero_optimizer = vissl_zero.initialize(model, optimizer, {"level": "fit", **zero}, sample=sample)
    except ConfigError as error:
        return {}, [str(error)]
    assert torch.equal(torch.random.get_rng_state(), before)
    for step in range(num_steps):
        rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        inputs, labels = (tensor.chunk(world_size)[rank] for tensor in batch_of(step))
        zero_optimizer.backward(F.cross_entropy(model(inputs), labels))
        zero_optimizer.step()
        zero_optimizer.zero_grad()
    state = zero_optimizer.full_state()
    zero_optimizer.close()
    return state, messages
