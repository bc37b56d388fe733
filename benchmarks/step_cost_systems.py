"""What ``step_cost.py`` compares: models, and one class per way of training them, as one would write it by hand."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import vissl_zero  # before torchvision, which it lets be imported beside a CPU build of torch

from timm.models.vision_transformer import VisionTransformer  # isort: skip
from torchvision.models import regnet_y_400mf  # isort: skip


class Block(nn.Module):
    """A residual MLP block of 4.7 M parameters."""

    def __init__(self, width: int, inner: int):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, width) -> (rows, width)."""
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    """Eight blocks: 37.8 M parameters."""

    def __init__(self, width: int = 768, inner: int = 3072, depth: int = 8):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, inner) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        """(rows, width) -> (rows, width)."""
        for block in self.blocks:
            x = block(x)
        return x


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], list[Tensor]]]] = {
    # name: (model, this rank's batch: a list of resolutions)
    "mlp": (Stack, lambda: [torch.randn(64, 768)]),
    "regnet": (lambda: regnet_y_400mf(num_classes=1000), lambda: [torch.randn(16, 3, 64, 64)]),
    "regnet-two-crops": (
        lambda: regnet_y_400mf(num_classes=1000),
        lambda: [torch.randn(16, 3, 64, 64), torch.randn(16, 3, 32, 32)],
    ),
    # ViT-S at 64 pixels: 384 wide, 12 blocks of 6 heads, 21.6 M parameters, 17 tokens an image.
    "vit": (
        lambda: VisionTransformer(64, 16, embed_dim=384, depth=12, num_heads=6, num_classes=10),
        lambda: [torch.randn(16, 3, 64, 64)],
    ),
    "tiny": (lambda: Stack(64, 128, 3), lambda: [torch.randn(8, 64)]),
}

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 1e-3, "momentum": 0.9, "fused": True}),
    "adamw": (torch.optim.AdamW, {"lr": 1e-4, "fused": True}),
}


class System:
    """A model under training. ``build`` sets ``model`` and ``optimizer``."""

    model: nn.Module
    optimizer: Any

    def __init__(self, model: nn.Module, optimizer: str):
        self.build(model, optimizer)

    def build(self, model: nn.Module, optimizer: str) -> None:
        """Wrap the model."""
        raise NotImplementedError

    def forward_backward(self, batch: list[Tensor]) -> None:
        """Gradients of one batch."""
        loss = sum((self.model(x).square().mean() for x in batch), torch.zeros(()))
        self.backward(loss)

    def backward(self, loss: Tensor) -> None:
        """Gradients of a loss."""
        loss.backward()

    def update(self) -> None:
        """Step, and forget the gradients."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state_bytes(self) -> int:
        """Unique storages of parameters, gradients and optimizer state."""
        params = list(self.model.parameters())
        optimizer = getattr(self.optimizer, "optim", self.optimizer)
        state = chain.from_iterable(entry.values() for entry in optimizer.state.values())
        return storage_bytes([*params, *(param.grad for param in params), *state])

    def exchanged_bytes(self) -> int:
        """Bytes handed to other ranks otherwise than through the network."""
        return 0


class DDP(System):
    """torch's, with its defaults."""

    options: ClassVar[dict[str, Any]] = {}

    def wrapped(self, model: nn.Module) -> nn.Module:
        """The model in DDP."""
        return DistributedDataParallel(model, **self.options)

    def build(self, model: nn.Module, optimizer: str) -> None:
        """See ``System``."""
        self.model = self.wrapped(model)
        kind, options = OPTIMIZERS[optimizer]
        self.optimizer = kind(self.model.parameters(), **options)


class BucketViews(DDP):
    """DDP without a second copy of the gradients."""

    options: ClassVar[dict[str, Any]] = {"gradient_as_bucket_view": True, "static_graph": True}


class ZeroRedundancy(BucketViews):
    """torch's ZeroRedundancyOptimizer."""

    def build(self, model: nn.Module, optimizer: str) -> None:
        """See ``System``."""
        self.model = self.wrapped(model)
        kind, options = OPTIMIZERS[optimizer]
        self.optimizer = ZeroRedundancyOptimizer(self.model.parameters(), optimizer_class=kind, **options)


class OSSWithDDP(BucketViews):
    """fairscale's OSS."""

    def build(self, model: nn.Module, optimizer: str) -> None:
        """See ``System``."""
        from fairscale.optim import OSS

        self.model = self.wrapped(model)
        kind, options = OPTIMIZERS[optimizer]
        self.optimizer = OSS(list(self.model.parameters()), optim=kind, **options)


class ShardedDDP(System):
    """fairscale's OSS and ShardedDataParallel, default buffer."""

    def build(self, model: nn.Module, optimizer: str) -> None:
        """See ``System``."""
        from fairscale.nn.data_parallel import ShardedDataParallel
        from fairscale.optim import OSS

        kind, options = OPTIMIZERS[optimizer]
        self.optimizer = OSS(list(model.parameters()), optim=kind, **options)
        self.model = ShardedDataParallel(model, self.optimizer, broadcast_buffers=False)

    def update(self) -> None:
        """In place: fairscale's buffers would lose gradients that are set to None."""
        self.optimizer.step()
        self.model.zero_grad(set_to_none=False)


class FullyShard(System):
    """torch's fully_shard, block by block."""

    reshard = True

    def build(self, model: nn.Module, optimizer: str) -> None:
        """See ``System``."""
        for part in vissl_zero_units(model):
            fully_shard(part, reshard_after_forward=self.reshard)
        self.model = fully_shard(model, reshard_after_forward=self.reshard)
        kind, options = OPTIMIZERS[optimizer]
        self.optimizer = kind(self.model.parameters(), **(options | {"fused": False, "foreach": True}))


class FullyShardNoReshard(FullyShard):
    """The same, parameters whole from forward to backward."""

    reshard = False


class Pair(torch.optim.Optimizer):
    """torch's Muon on matrices and torch's AdamW on the rest; on DTensors as well as on full tensors."""

    def __init__(self, params: Iterable[nn.Parameter]):
        params = list(params)
        self.both = [
            torch.optim.Muon([p for p in params if p.dim() == 2], lr=1e-4, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW([p for p in params if p.dim() != 2], lr=1e-4, foreach=True),
        ]
        super().__init__(params, {})

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Both."""
        for optimizer in self.both:
            optimizer.step()
            self.state |= optimizer.state


class DDPMuon(BucketViews):
    """Every rank orthogonalizes all matrices."""

    def build(self, model: nn.Module, optimizer: str) -> None:
        """See ``System``."""
        self.model = self.wrapped(model)
        self.optimizer = Pair(self.model.parameters())


class FullyShardMuon(FullyShard):
    """DTensors gather themselves in each product."""

    def build(self, model: nn.Module, optimizer: str) -> None:
        """See ``System``."""
        super().build(model, optimizer)
        self.optimizer = Pair(self.model.parameters())


class Ours(System):
    """vissl_zero.initialize."""

    level = 0
    variant = ""  # in the place of the optimizer asked for
    is_compiled = False
    tiers: ClassVar[dict[str, str]] = {}  # where the optimizer and the parameters rest

    def build(self, model: nn.Module, optimizer: str) -> None:
        """See ``System``."""
        given = {
            "sgd": {"type": "SGD", "lr": 1e-3, "momentum": 0.9},
            "larc": {"type": "LARC", "lr": 1e-3, "momentum": 0.9},
            "adamw": {"type": "AdamW", "lr": 1e-4},
            "muon": {"type": "Muon", "lr": 1e-4},
        }[self.variant or optimizer]
        blocks = {f"offload_{what}_config": _tier(device) for what, device in self.tiers.items()}
        zero = {"level": self.level, "compile": self.is_compiled, **blocks}
        self.model, self.optimizer = vissl_zero.initialize(model, optimizer=given, zero=zero)

    def backward(self, loss: Tensor) -> None:
        """See ``System``."""
        self.optimizer.backward(loss)

    def state_bytes(self) -> int:
        """See ``System``."""
        memory = self.optimizer.ledger()
        return memory.params + memory.grads + memory.optimizer

    def exchanged_bytes(self) -> int:
        """See ``System``."""
        comm = getattr(self.optimizer._sharded, "comm", None)
        return sum(comm.sent_bytes.values()) if comm else 0  # what Muon adds crosses the network


def vissl_zero_units(model: nn.Module) -> list[nn.Module]:
    """The same blocks for everyone."""
    from vissl_zero.sharding.model.wrap_plan import model_units

    return model_units(model)


def _ours(level: int, variant: str = "", is_compiled: bool = False, **tiers: str) -> type[Ours]:
    facts = {"level": level, "variant": variant, "is_compiled": is_compiled, "tiers": tiers}
    return type(f"Level{level}", (Ours,), facts)


def _tier(device: str) -> dict[str, str]:
    return {"device": device, "nvme_path": os.environ["NVME"]} if device == "nvme" else {"device": device}


SYSTEMS: dict[str, type[System]] = {
    "DDP": DDP,
    "DDP, bucket views": BucketViews,
    "DDP + ZeroRedundancyOptimizer": ZeroRedundancy,
    "fairscale OSS + DDP": OSSWithDDP,
    "fairscale ShardedDDP": ShardedDDP,
    "fully_shard, no reshard": FullyShardNoReshard,
    "fully_shard": FullyShard,
    **{f"vissl_zero level {level}": _ours(level) for level in range(4)},
    **{f"vissl_zero level {level}, LARC": _ours(level, "larc") for level in range(4)},
    "DDP, Muon": DDPMuon,
    "fully_shard, Muon": FullyShardMuon,
    **{f"vissl_zero level {level}, Muon": _ours(level, "muon") for level in range(4)},
    **{f"vissl_zero level {level}, compiled": _ours(level, is_compiled=True) for level in range(4)},
    "vissl_zero level 2, optimizer on NVMe": _ours(2, optimizer="nvme"),
    "vissl_zero level 3, optimizer on CPU": _ours(3, optimizer="cpu"),
    "vissl_zero level 3, optimizer on NVMe": _ours(3, optimizer="nvme"),
    "vissl_zero level 3, parameters on NVMe": _ours(3, param="nvme"),
    "vissl_zero level 3, both on NVMe": _ours(3, optimizer="nvme", param="nvme"),
}


def storage_bytes(tensors: Iterable[Any]) -> int:
    """Of unique storages; scalars and what is no tensor left out."""
    sizes: dict[int, int] = {}
    for tensor in tensors:
        if isinstance(tensor, Tensor) and tensor.dim():
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            storage = local.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())
