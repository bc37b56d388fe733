"""Every optimizer on a ResNet and a ViT, at levels 0 to 3 on 1 to 4 ranks, against itself on the whole model.

With accumulation, clipping, a frozen layer, widths that do not divide and, on 4 ranks, fewer rows than ranks. What else
may be combined with these optimizers (ties, NVMe, a run that goes on elsewhere, scalars) is in ``test_optimizers.py``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import vissl_zero
from tests.dist.test_optimizers import TOLERANCE, WHOLE_TENSOR, distance, on_disk, optimizer_over, trained
from tests.ranks import run_on_ranks
from vissl_zero.sharding.update import whole_tensors

BATCH, SIDE, CLASSES = 12, 16, 3
MICRO_BATCHES, STEPS = 2, 3
OPTIMIZERS = [*(name for name in WHOLE_TENSOR if name != "adamp"), "lion", "schedule_free"]


def build(kind: str) -> nn.Module:
    """No parameter has a true gradient of zero, as a bias before batch norm has: a sign makes a step of its noise."""
    from timm.models.resnet import BasicBlock, ResNet
    from timm.models.vision_transformer import VisionTransformer

    torch.manual_seed(0)
    if kind == "resnet":
        model = ResNet(BasicBlock, [1, 1, 1, 1], num_classes=CLASSES, in_chans=1, channels=(5, 6, 7, 9))
        model.bn1.requires_grad_(False)
    else:
        sizes = {"img_size": SIDE, "patch_size": 4, "embed_dim": 10, "depth": 2, "num_heads": 2, "qkv_bias": False}
        model = VisionTransformer(in_chans=1, num_classes=CLASSES, **sizes)
        model.patch_embed.requires_grad_(False)
    return model.double()


def optimizer_of(name: str, model: nn.Module) -> torch.optim.Optimizer:
    matrices = {"params": [p for p in trained(model) if p.dim() > 1], "weight_decay": 0.1}
    others = {"params": [p for p in trained(model) if p.dim() < 2], "weight_decay": 0.0, "lr": 0.02}
    if name == "muon":  # in bfloat16, noise of 1e-16 turns a bit now and then
        matrices["ns_dtype"] = "float64"
    optimizer = optimizer_over(name, [matrices, others])
    if name == "schedule_free":
        optimizer.train()
    return optimizer


def loss_of(model: nn.Module, step: int, rows: slice) -> Tensor:
    x = torch.randn(BATCH, 1, SIDE, SIDE, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    return F.cross_entropy(model(x[rows]), (torch.arange(BATCH) % CLASSES)[rows])


def train_plainly(name: str, kind: str) -> dict[str, Tensor]:
    model = build(kind)
    optimizer = optimizer_of(name, model)
    for step in range(STEPS):
        for index in range(MICRO_BATCHES):
            (loss_of(model, step * MICRO_BATCHES + index, slice(None)) / MICRO_BATCHES).backward()
        nn.utils.clip_grad_norm_(trained(model), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return {key: param.detach() for key, param in model.named_parameters()}


def train(name: str, kind: str, places: list[dict[str, Any]]) -> list[dict[str, Tensor]]:
    """The same on every rank's part of each batch, in each of ``places``; the state is on rank 0."""
    whole_tensors.ROUND_ELEMENTS = 1
    size, found = BATCH // dist.get_world_size(), []
    rows = slice(dist.get_rank() * size, (dist.get_rank() + 1) * size)
    for place in places:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(build(kind))
        zero = {"clip_grad": 0.5, "gradient_accumulation_steps": MICRO_BATCHES, **place}
        model, optimizer = vissl_zero.initialize(model, optimizer_of(name, model), zero)
        for step in range(STEPS * MICRO_BATCHES):
            optimizer.backward(loss_of(model, step, rows))
            optimizer.step()
            optimizer.zero_grad()
        found.append(optimizer.full_state())
        optimizer.close()
    return found


# The ResNet is the slower one: the slow tests take it once, and a ViT with one optimizer of each kind; the soak, all.
OFTEN = {("muon", "resnet"), *((name, "vit") for name in ("muon", "shampoo", "adamw_8bit", "lion"))}
CASES = [
    pytest.param(name, kind, marks=pytest.mark.slow if (name, kind) in OFTEN else pytest.mark.soak)
    for name in OPTIMIZERS
    for kind in ("resnet", "vit")
]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_an_optimizer_on_real_models_is_itself_everywhere(name: str, kind: str, tmp_path: Path) -> None:
    expected = train_plainly(name, kind)
    assert distance(expected, dict(build(kind).named_parameters())) > 1e-3
    for world_size in (1, 2, 3, 4):
        places: list[dict[str, Any]] = [{"level": level} for level in range(4)]
        if world_size == 4:
            places.append({"level": 3, "shard_group_size": 2})
        if name != "schedule_free":  # it is refused there: it has other weights to evaluate
            places += [
                {"level": 2, **on_disk(tmp_path, "optimizer")},
                {"level": 3, **on_disk(tmp_path, "optimizer", "param")},
            ]
        for place, got in zip(places, run_on_ranks(world_size, train, name, kind, places)[0], strict=True):
            assert distance(expected, got) < TOLERANCE, (world_size, place)
