"""A loop somebody else wrote, by plain torch and through ``initialize``: a small language model with awkward parts."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import vissl_zero

NUM_STEPS, BATCH, VOCABULARY, WIDTH = 6, 6, 11, 10


class Block(nn.Module):
    """Widths that do not divide by the number of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 13), nn.GELU(), nn.Linear(13, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class Text(nn.Module):
    """Tied embedding and head; a frozen layer; a layer no loss uses; a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.blocks[0].requires_grad_(False)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.unused = nn.Linear(3, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def greedy(self, tokens: Tensor) -> Tensor:
        """A method of the user's own class."""
        return self(tokens).argmax(-1)


@dataclass(frozen=True)
class Loop:
    """What is trained; the same for both runs.

    Attributes:
        optimizer: a key of ``OPTIMIZERS``.
        clip: largest gradient norm.
        accumulation: micro-batches per update.
        num_calls: calls of the model per micro-batch.
        zero: further keys.
    """

    optimizer: str = "adam_dict"
    clip: float | None = None
    accumulation: int = 1
    num_calls: int = 1
    zero: dict[str, Any] = field(default_factory=dict)


def text(dtype: torch.dtype = torch.float64) -> Text:
    torch.manual_seed(3)
    return Text().to(dtype)


def plain_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    params = [param for param in model.parameters() if param.requires_grad]
    if name == "adam_dict":
        return torch.optim.Adam(params, lr=1e-2, weight_decay=0.1, eps=1e-4)
    if name == "sgd_class":
        return torch.optim.SGD(params, lr=0.1, momentum=0.9)
    if name == "adamw_ready":
        return _two_groups(model)
    assert name == "rmsprop_dict"
    return torch.optim.RMSprop(params, lr=1e-3, eps=1e-3)


def given_optimizer(name: str, model: nn.Module) -> Any:
    return {
        "adam_dict": {"type": "Adam", "lr": 1e-2, "weight_decay": 0.1, "eps": 1e-4},
        "sgd_class": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        "adamw_ready": _two_groups(model) if name == "adamw_ready" else None,
        "rmsprop_dict": {"type": "RMSprop", "lr": 1e-3, "eps": 1e-3},
        "larc_dict": {"type": "LARC", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "trust_coefficient": 0.02},
    }[name]


def _two_groups(model: nn.Module) -> torch.optim.Optimizer:
    trained = [param for param in model.parameters() if param.requires_grad]
    matrices, others = [p for p in trained if p.dim() > 1], [p for p in trained if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.2}, {"params": others, "lr": 3e-3, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-2, betas=(0.8, 0.95), eps=1e-4)


def tokens_of(step: int, index: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + index)
    return torch.randint(0, VOCABULARY, (BATCH, 5), generator=generator)


def loss_of(model: nn.Module, tokens: Tensor, num_calls: int) -> Tensor:
    losses = []
    for call in range(num_calls):
        part = tokens.roll(call, dims=1)
        losses.append(F.cross_entropy(model(part[:, :-1]).flatten(0, 1), part[:, 1:].flatten()))
    return torch.stack(losses).mean()


def train_plainly(loop: Loop) -> dict[str, Tensor]:
    """The reference: one process, whole batches."""
    model = text()
    optimizer = plain_optimizer(loop.optimizer, model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    for step in range(NUM_STEPS):
        for index in range(loop.accumulation):
            (loss_of(model, tokens_of(step, index), loop.num_calls) / loop.accumulation).backward()
        if loop.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), loop.clip)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return {name: param.detach() for name, param in model.named_parameters(remove_duplicate=False)}


def train(loop: Loop, level: int) -> dict[str, Tensor]:
    """The same through ``initialize`` on this rank's rows; full parameters."""
    model = text()
    optimizer = given_optimizer(loop.optimizer, model)
    zero = {"level": level, "clip_grad": loop.clip, "gradient_accumulation_steps": loop.accumulation, **loop.zero}
    model, zero_optimizer = vissl_zero.initialize(model, optimizer=optimizer, zero=zero)
    run_steps(model, zero_optimizer, loop, range(NUM_STEPS))
    return zero_optimizer.full_state()


def run_steps(model: nn.Module, optimizer: Any, loop: Loop, steps: range) -> None:
    """Steps of the loop; the learning rate decays by 0.8 after each."""
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for step in steps:
        for index in range(loop.accumulation):
            rows = tokens_of(step, index).chunk(world_size)[rank]
            loss = loss_of(model, rows, loop.num_calls)
            if loop.accumulation > 1:
                optimizer.backward(loss)
            else:
                loss.backward()  # plain is right where nothing is scaled
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step()


class Normed(nn.Module):
    """Batch norm that its user wants synchronized, between layers of the same type."""

    def __init__(self, norm: type[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.norm = norm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[1](self.norm(self.layers[0](x)).tanh())


def normed(norm: type[nn.Module]) -> Normed:
    torch.manual_seed(4)
    return Normed(norm).double()


def rows_of(step: int) -> Tensor:
    return torch.randn(12, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def train_normed_plainly(num_steps: int, change_at: int) -> dict[str, Tensor]:
    """One process, whole batches; the learning rate changes once, by hand."""
    model = normed(nn.BatchNorm1d)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(num_steps):
        optimizer.param_groups[0]["lr"] = 0.03 if step >= change_at else 0.1
        model(rows_of(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def train_normed(zero: dict[str, Any], folder: str, steps: range, change_at: int) -> dict[str, Any]:
    """The same on this rank's rows, from ``folder`` unless it is the beginning, and saved there."""
    model, optimizer = vissl_zero.initialize(
        normed(nn.SyncBatchNorm), {"type": "SGD", "lr": 0.1, "momentum": 0.9}, zero
    )
    if steps.start:
        optimizer.load(folder)
    for step in steps:
        if step == change_at:
            optimizer.param_groups[0]["lr"] = 0.03
        optimizer.backward(model(rows_of(step).chunk(dist.get_world_size())[dist.get_rank()]).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    optimizer.save(folder)
    return {"state": optimizer.full_state(), "optimizer": optimizer.ledger().optimizer}
