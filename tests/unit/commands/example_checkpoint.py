"""A checkpoint of a whole model, as several ranks would have written it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.blocks import model_block
from vissl_zero.checkpoint.folder import Manifest
from vissl_zero.checkpoint.saver import commit, write_rank
from vissl_zero.models.model import build_model
from vissl_zero.sharding.state.saved_state import Part

NUM_RANKS = 3


def tiny_model(num_classes: int = 7) -> nn.Module:
    """A RegNet with bottleneck blocks and a linear classifier; running statistics are not as new."""
    trunk = {"depth": 4, "w_0": 16, "w_a": 16.0, "w_m": 2.0, "group_width": 8, "stem_width": 16}
    head = {"PARAMS": [["mlp", {"dims": [64, num_classes]}]], "BATCHNORM_EPS": 1e-5, "BATCHNORM_MOMENTUM": 0.1}
    model = build_model(model_block({"TRUNK": {"NAME": "regnet", "REGNET": trunk}, "HEAD": head}))
    generator = torch.Generator().manual_seed(5)
    for name, buffer in model.named_buffers():
        if "running" in name:
            drawn = torch.rand(buffer.shape, generator=generator)
            # Means near 0, or no activation would survive the ReLUs.
            buffer.copy_(drawn + 0.5 if name.endswith("var") else 0.1 * (drawn - 0.5))
    return model.eval()


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Its tensors under a checkpoint's names, and a momentum for every parameter."""
    parameters = dict(model.named_parameters())
    return {
        **{f"model/{name}": tensor.detach() for name, tensor in parameters.items()},
        **{f"buffer/{name}": tensor for name, tensor in model.named_buffers()},
        **{f"optimizer/momentum_buffer/{name}": tensor.detach() * 2 for name, tensor in parameters.items()},
    }


def write_checkpoint(
    run_folder: Path,
    state: Mapping[str, Tensor],
    step: int = 4,
    config: Mapping[str, Any] | None = None,
    resolved: Mapping[str, Any] | None = None,
) -> Path:
    """Write ``state`` cut into uneven parts, of a run with this ``config`` (or resolved plan); gives the folder."""
    run_folder.mkdir(parents=True, exist_ok=True)
    for rank in range(NUM_RANKS):
        parts = []
        for name, tensor in state.items():
            bounds = [0, tensor.numel() // 5, tensor.numel() // 2, tensor.numel()]
            begin, end = bounds[rank : rank + 2]
            if begin < end:
                flat = tensor.reshape(-1)[begin:end]
                parts.append(Part(name, tensor.shape, begin, end - begin, tensor.dtype, lambda flat=flat: flat))
        write_rank(run_folder, step, rank, parts, {}, {})
    facts = {"epoch": 1, "epoch_samples": 12, "position": 48, "global_batch": 12, "level": 3, "engine": "torch"}
    versions = {"recipe": "r", "vissl_zero": "0", "torch": "2", "created": "2026-01-01T00:00:00Z"}
    manifest = Manifest(
        step=step,
        world_size=NUM_RANKS,
        ranks={},
        config=dict(resolved or {"config": dict(config or {})}),
        **facts,
        **versions,
    )
    return commit(run_folder, manifest)
