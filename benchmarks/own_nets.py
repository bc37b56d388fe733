"""Eleven networks that no recipe has, each with its loss, for ``plan_accuracy.py`` to train through ``initialize``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vissl_zero.integration.fit import forecaster_of
from vissl_zero.resolve.resolved import OffloadPlan, Precision, ShardingPlan

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"type": "SGD", "lr": 1e-3},
    "momentum": {"type": "SGD", "lr": 1e-3, "momentum": 0.9},
    "adamw": {"type": "AdamW", "lr": 1e-3},
}


class UNet(nn.Module):
    """Two steps down, two up, each joined with what was there before."""

    def __init__(self) -> None:
        super().__init__()
        widths = [16, 32, 64]
        self.down = nn.ModuleList(_conv(i, o) for i, o in pairwise([3, *widths]))
        self.up = nn.ModuleList([_conv(64 + 32, 32), _conv(32 + 16, 16)])
        self.last = nn.Conv2d(16, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 3, H, W) -> the same."""
        x1 = self.down[0](x)
        x2 = self.down[1](F.max_pool2d(x1, 2))
        x3 = self.down[2](F.max_pool2d(x2, 2))
        x2 = self.up[0](torch.cat([F.interpolate(x3, scale_factor=2), x2], dim=1))
        return self.last(self.up[1](torch.cat([F.interpolate(x2, scale_factor=2), x1], dim=1)))


class Recurrent(nn.Module):
    """A GRU over the rows of a sequence, and a classifier of its last state."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.GRU(64, 192, num_layers=2, batch_first=True)
        self.classifier = nn.Linear(192, 10)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, 64) -> (B, 10)."""
        states, _ = self.cells(x)
        return self.classifier(states[:, -1])


class LanguageModel(nn.Module):
    """A causal transformer whose output layer is its embedding; it gives its own loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(2000, 128)
        layer = nn.TransformerEncoderLayer(128, 4, 256, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.output = nn.Linear(128, 2000, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, T) -> loss."""
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1] - 1)
        scores = self.output(self.encoder(self.embedding(tokens[:, :-1]), mask=mask, is_causal=True))
        return F.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())


class Recomputed(nn.Module):
    """Wide blocks that the loop's author recomputes with torch's own function."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(96, 256)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(256), nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(4)
        )
        self.last = nn.Linear(256, 10)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, 96) -> (B, 10)."""
        x = self.first(x)
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return self.last(x.mean(dim=1))


class Mixture(nn.Module):
    """Branches of different widths over one input, weighted by a gate; the first layer is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(128, 256).requires_grad_(False)
        self.branches = nn.ModuleList(
            nn.Sequential(nn.Linear(256, width), nn.ReLU(), nn.Linear(width, 10)) for width in (33, 130, 517, 1029)
        )
        self.gate = nn.Linear(256, 4)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 128) -> (B, 10)."""
        x = self.first(x).relu()
        outputs = torch.stack([branch(x) for branch in self.branches], dim=1)
        return (self.gate(x).softmax(dim=1)[:, :, None] * outputs).sum(dim=1)


def _conv(num_in: int, num_out: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(num_in, num_out, 3, padding=1, bias=False), nn.BatchNorm2d(num_out), nn.ReLU())


def _mlp() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(6)), nn.Linear(256, 10))


def _small_conv() -> nn.Module:
    parts = [_conv(3, 32), nn.MaxPool2d(2), _conv(32, 64), nn.MaxPool2d(2), _conv(64, 128)]
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(128, 10))


def _autoencoder() -> nn.Module:
    widths = [1024, 512, 64, 512, 1024]
    layers = [nn.Linear(i, o) for i, o in pairwise(widths)]
    return nn.Sequential(*(part for layer in layers for part in (layer, nn.Tanh())))


def _encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.1, batch_first=True)
    return nn.Sequential(nn.TransformerEncoder(layer, 3), nn.Flatten(), nn.Linear(16 * 128, 10))


# torchvision, which timm imports, needs vissl_zero before it beside a CPU build of torch: imported late.
def _resnet() -> nn.Module:
    from torchvision.models import resnet18

    return resnet18(num_classes=10)


def _mixer() -> nn.Module:
    from timm.models import MlpMixer

    return MlpMixer(num_classes=10, img_size=32, patch_size=8, num_blocks=4, embed_dim=128)


@dataclass(frozen=True)
class Net:
    """A network to be trained.

    Attributes:
        build: gives it.
        shape: of one of its inputs.
        loss: of the network and a batch.
        is_labeled: batches have labels of ten classes.
        num_tokens: inputs are integers below this; 0: they are floating-point numbers.
    """

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    loss: Callable[..., Tensor]
    is_labeled: bool = True
    num_tokens: int = 0

    def batch(self, size: int) -> tuple[Tensor, ...]:
        """Random inputs, and labels."""
        shape = size, *self.shape
        inputs = torch.randint(self.num_tokens, shape) if self.num_tokens else torch.randn(shape)
        return (inputs, torch.arange(size) % 10) if self.is_labeled else (inputs,)


def _classify(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(inputs), labels)


def _rebuild(model: nn.Module, inputs: Tensor) -> Tensor:
    return F.mse_loss(model(inputs), inputs)


def _own(model: nn.Module, *inputs: Tensor) -> Tensor:
    loss: Tensor = model(*inputs)
    return loss


NETS = {
    "mlp": Net(_mlp, (256,), _classify),
    "small_conv": Net(_small_conv, (3, 32, 32), _classify),
    "unet": Net(UNet, (3, 32, 32), _rebuild, is_labeled=False),
    "gru": Net(Recurrent, (24, 64), _classify),
    "encoder": Net(_encoder, (16, 128), _classify),
    "autoencoder": Net(_autoencoder, (1024,), _rebuild, is_labeled=False),
    "tied_weights": Net(LanguageModel, (33,), _own, is_labeled=False, num_tokens=2000),
    "own_recompute": Net(Recomputed, (16, 96), _classify),
    "torchvision_resnet18": Net(_resnet, (3, 32, 32), _classify),
    "timm_mixer": Net(_mixer, (3, 32, 32), _classify),
    "mixed_widths": Net(Mixture, (128,), _classify),
}


def forecast(
    model: nn.Module,
    optimizer: dict[str, Any],
    level: int,
    optimizer_tier: dict[str, Any],
    param_tier: dict[str, Any],
    sample: Any,
    precision: Precision,
) -> int:
    """Peak bytes of a step at a level, as ``level="fit"`` forecasts it for that plan."""
    tiers = OffloadPlan(**optimizer_tier), OffloadPlan(**param_tier)
    plan = ShardingPlan(
        level, shard_group_size=-1, precision=precision, offload_optimizer=tiers[0], offload_params=tiers[1]
    )
    forecaster, mode = forecaster_of(model, optimizer, plan, sample, torch.device("cpu"))
    with mode:
        step = forecaster.forecast(plan).step
    assert step is not None
    return step.peak_bytes
