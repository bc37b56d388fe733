"""A tiny training run, twice: by plain torch in one process, and through a strategy on many ranks.

The plain one shares no code with the package but the layers: norms, LARC, clipping, freezing and weighting are written
out. Whatever differs between the two is a defect of sharding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from vissl_zero import collectives
from vissl_zero.config.resolved import Precision, ShardingPlan
from vissl_zero.models.model import Model
from vissl_zero.models.unit import Unit
from vissl_zero.optim.adaptation import Adaptation, Larc, Lars
from vissl_zero.optim.elementwise import adam, adamw, sgd
from vissl_zero.optim.param_groups import ParamGroup
from vissl_zero.registry import STRATEGIES
from vissl_zero.sharding.precision import dtype_of
from vissl_zero.sharding.strategy import Sharded, StepResult

DOUBLE = Precision(master="float64", compute="float64", reduce="float64")
LR, WEIGHT_DECAY, NUM_STEPS = 0.1, 0.01, 4


@dataclass(frozen=True)
class Case:
    """What is trained, and how; the same for both runs.

    Attributes:
        optimizer: "sgd", "nesterov", "larc", "larc_clip", "lars", "adam" or "adamw".
        clip: largest gradient norm, or None.
        num_micro_batches: per step.
        batch_sizes: source samples of each micro-batch over all ranks, taken in turn.
        norm: "batch", "group" or "none".
        frozen_steps: steps for which the prototypes stay frozen.
        frozen_trunk: no gradient for the stem and first block from the start.
        unused: the model has a parameter that the loss does not use.
        tied: two blocks share a weight.
        giant: one layer holds nearly all parameters.
        checkpoint_every, wrap_threshold, shard_group_size: as in ShardingPlan.
        dtype: of parameters, data and all computation.
        lr: in the first step.
    """

    optimizer: str = "sgd"
    clip: float | None = None
    num_micro_batches: int = 1
    batch_sizes: tuple[int, ...] = (12,)
    norm: str = "batch"
    frozen_steps: int = 0
    frozen_trunk: bool = False
    unused: bool = False
    tied: bool = False
    giant: bool = False
    checkpoint_every: int = 0
    wrap_threshold: int = 0
    shard_group_size: int = -1
    dtype: str = "float64"
    lr: float = LR


@dataclass
class Outcome:
    """Figures of a run: losses, gradient norms and the parameters and buffers at the end."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    state: dict[str, Tensor] = field(default_factory=dict)

    def distance(self, other: Outcome) -> dict[str, float]:
        """Largest difference in losses, gradient norms and final tensors."""
        assert self.state.keys() == other.state.keys()
        tensors = [(self.state[name] - other.state[name]).abs().max().item() for name in self.state]
        losses = [abs(a - b) for a, b in zip(self.losses, other.losses, strict=True)]
        norms = [abs(a - b) for a, b in zip(self.grad_norms, other.grad_norms, strict=True)]
        return {"loss": max(losses), "grad_norm": max(norms), "state": max(tensors)}


class Trunk(nn.Module):
    """Convolutions of uneven widths; 5 and 7 channels leave ranks with fewer rows, or none."""

    def __init__(self, case: Case):
        super().__init__()
        widths = [3, 5, 7, 7, 64 if case.giant else 6]
        self.stem = _block(widths[0], widths[1], case.norm)
        self.blocks = nn.ModuleList(_block(a, b, case.norm) for a, b in pairwise(widths[1:]))
        self.feature_dim = widths[-1]
        if case.tied:
            first, second = _block(7, 7, case.norm), _block(7, 7, case.norm)
            second[0].weight = first[0].weight
            self.blocks.insert(2, first)
            self.blocks.insert(3, second)

    def forward(self, images: list[Tensor]) -> list[Tensor]:
        xs = self.stem(images)
        for block in self.blocks:
            xs = block(xs)
        return [x.mean(dim=(2, 3)) for x in xs]


class Head(nn.Module):
    """A projection and two prototypes, fewer than most numbers of ranks."""

    def __init__(self, feature_dim: int, case: Case):
        super().__init__()
        width = 257 if case.giant else 9
        has_norm = case.norm == "batch"
        # No bias before batch norm: its true gradient is zero, and layer-wise rates make steps of the rounding noise.
        first = nn.Linear(feature_dim, width, bias=not has_norm)
        norm = nn.BatchNorm1d(width) if has_norm else nn.Identity()
        self.projection_head = nn.Sequential(first, norm, nn.Tanh(), nn.Linear(width, 4))
        self.prototypes0 = nn.Linear(4, 2, bias=False)
        if case.unused:
            self.never_called = nn.Linear(3, 3)

    def forward(self, features: Tensor) -> tuple[Tensor, list[Tensor]]:
        embeddings = F.normalize(self.projection_head(features), dim=1)
        return embeddings, [self.prototypes0(embeddings)]


def _block(width_in: int, width_out: int, norm: str) -> Unit:
    layer = {
        "batch": nn.BatchNorm2d(width_out),
        "group": nn.GroupNorm(1, width_out),
        "none": nn.Identity(),
    }[norm]
    return Unit(nn.Conv2d(width_in, width_out, 3, padding=1, bias=norm == "none"), layer, nn.Tanh())


def build(case: Case) -> nn.Module:
    """The model with its initial weights; the same on every rank."""
    torch.manual_seed(7)
    trunk = Trunk(case)
    model = Model(trunk, [Head(trunk.feature_dim, case)]).to(dtype_of(case.dtype))
    if case.frozen_trunk:
        trunk.stem.requires_grad_(False)
        trunk.blocks[0].requires_grad_(False)
    return model


def groups_of(model: nn.Module) -> list[ParamGroup]:
    """Matrices and filters decay, the rest does not."""
    trained = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    decayed = tuple(name for name, param in trained if param.dim() > 1)
    others = tuple(name for name, param in trained if param.dim() <= 1)
    return [
        ParamGroup("decayed", decayed, False, True, WEIGHT_DECAY),
        ParamGroup("others", others, False, False, 0.0),
    ]


def micro_batches(case: Case, step: int) -> Iterator[list[Tensor]]:
    """Whole micro-batches: two large crops and one small one a sample, indexed by crop first."""
    for index in range(case.num_micro_batches):
        position = step * case.num_micro_batches + index
        size = case.batch_sizes[position % len(case.batch_sizes)]
        generator = torch.Generator().manual_seed(1000 + position)
        yield [
            torch.randn(crops, size, 3, side, side, generator=generator, dtype=torch.float64).to(dtype_of(case.dtype))
            for crops, side in ((2, 6), (1, 4))
        ]


def loss_of(outputs: list[Any], num_samples: int) -> Tensor:
    """Mean over samples of something that depends on every row, differently."""
    embeddings, (scores,) = outputs[0]
    rows = (scores.exp().sum(1) + embeddings.sin().sum(1) + 1.0).log().view(-1, num_samples)
    return (rows * torch.linspace(0.5, 1.5, len(rows), dtype=rows.dtype)[:, None]).sum(0).mean()


def schedule(case: Case, step: int) -> float:
    return case.lr / (1 + step)


# --- plain torch, one process ---------------------------------------------------------------------------------------


def train_plainly(case: Case, reverse_rows: bool = False) -> Outcome:
    """The reference. ``reverse_rows`` gives the noise floor: the same mathematics, another order of summation."""
    model = build(case)
    groups = groups_of(model)
    params = dict(model.named_parameters())
    optimizer = _optimizer(
        case.optimizer,
        [{"params": [params[n] for n in g.params], "lr": 0.0, "weight_decay": g.weight_decay} for g in groups],
    )
    outcome = Outcome()
    for step in range(NUM_STEPS):
        batches = list(micro_batches(case, step))
        num_samples = sum(batch[0].shape[1] for batch in batches)
        total = 0.0
        for batch in batches:
            images = [crops.flip(1) if reverse_rows else crops for crops in batch]
            size = images[0].shape[1]
            loss = loss_of(model([crops.flatten(0, 1) for crops in images]), size) * (size / num_samples)
            loss.backward()
            total += loss.item()
        if step < case.frozen_steps:
            params["heads.0.prototypes0.weight"].grad = None
        moving = [param for param in params.values() if param.grad is not None]
        outcome.losses.append(total)
        outcome.grad_norms.append(torch.stack([p.grad.norm() for p in moving]).norm().item())
        if case.clip is not None:
            nn.utils.clip_grad_norm_(moving, case.clip)
        for group in optimizer.param_groups:
            group["lr"] = schedule(case, step)
        _step_adapted(case.optimizer, optimizer)
        optimizer.zero_grad()
    outcome.state = {name: tensor.detach().clone() for name, tensor in params.items()}
    outcome.state |= {name: buffer.clone() for name, buffer in model.named_buffers()}
    return outcome


def _step_adapted(name: str, optimizer: torch.optim.Optimizer) -> None:
    """LARC as apex has it and LARS as Barlow Twins has it, parameter by parameter."""
    if not name.startswith("lar"):
        optimizer.step()
        return
    decays = [group["weight_decay"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.grad is None:
                continue
            decay, p, g = group["weight_decay"], param.detach().norm(), param.grad.norm()
            if name == "lars":
                update = param.grad + decay * param.detach()
                rate = 0.02 * p / (update.norm() + 1e-8) if p > 0 and update.norm() > 0 else 1.0
                param.grad.copy_(update * rate)
            elif p > 0 and g > 0:
                rate = 0.02 * p / (g + p * decay + 1e-8)
                rate = min(rate / group["lr"], 1.0) if name == "larc_clip" else rate
                param.grad.copy_((param.grad + decay * param.detach()) * rate)
        group["weight_decay"] = 0.0
    optimizer.step()
    for group, decay in zip(optimizer.param_groups, decays, strict=True):
        group["weight_decay"] = decay


def _optimizer(name: str, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    if name.startswith("adam"):
        return {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[name](groups, eps=1e-3)
    return torch.optim.SGD(groups, momentum=0.9, nesterov=name == "nesterov")


# --- through the strategy -------------------------------------------------------------------------------------------


def shard(case: Case, level: int, **changes: Any) -> Sharded:
    """The model of ``case`` under a level of the torch engine, or as ``changes`` of the sharding plan say."""
    adaptations: dict[str, Adaptation] = {
        "larc": Larc(trust_coefficient=0.02, clip=False),
        "larc_clip": Larc(trust_coefficient=0.02, clip=True),
        "lars": Lars(eta=0.02),
    }
    settings = {
        "level": level,
        "clip_grad": case.clip,
        "sync_bn_group": -1,
        "precision": Precision(master=case.dtype, compute=case.dtype, reduce=case.dtype),
        "checkpoint_every": case.checkpoint_every,
        "wrap_threshold": case.wrap_threshold,
        "shard_group_size": case.shard_group_size,
        **changes,
    }
    model = build(case)
    plan = ShardingPlan(**settings)
    return (
        STRATEGIES.get(plan.engine)
        .build()
        .shard(
            model,
            groups_of(model),
            lambda groups: (_own_optimizer(case.optimizer, groups), adaptations.get(case.optimizer)),
            plan,
            torch.device("cpu"),
        )
    )


def _own_optimizer(name: str, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """The package's own, whose fused kernels must bear with shards that hold nothing."""
    if name.startswith("adam"):
        return {"adam": adam, "adamw": adamw}[name](groups, eps=1e-3)
    return sgd(groups, momentum=0.9, nesterov=name == "nesterov")


def train_sharded(case: Case, level: int, changes: dict[str, Any] | None = None) -> Outcome:
    """The same training on this rank's samples. Every rank calls it; the state is on rank 0."""
    sharded = shard(case, level, **(changes or {}))
    outcome = Outcome()
    for step in range(NUM_STEPS):
        train_step(sharded, case, step, outcome)
    outcome.state = sharded.full_state()
    return outcome


def train_step(sharded: Sharded, case: Case, step: int, outcome: Outcome) -> StepResult:
    """One optimizer step; notes loss and gradient norm in ``outcome``."""
    sharded.freeze(["heads.0.prototypes0.weight"] if step < case.frozen_steps else [])
    for group in sharded.optimizer.param_groups:
        group["lr"] = schedule(case, step)
    batches = list(micro_batches(case, step))
    num_samples = sum(batch[0].shape[1] for batch in batches)
    total = torch.zeros((), dtype=torch.float64)
    for index, batch in enumerate(batches):
        images = [crops[:, _rows_of_this_rank(crops.shape[1])] for crops in batch]
        num_local = images[0].shape[1]
        with sharded.micro_batch(is_last=index == len(batches) - 1):
            loss = loss_of(sharded.model([crops.flatten(0, 1) for crops in images]), num_local)
            sharded.backward(loss, num_local * dist.get_world_size() / num_samples)
        total += loss.detach() * (num_local / num_samples)
    result = sharded.step()
    sharded.zero_grad()
    outcome.losses.append(float(collectives.all_reduce_sum(total)))
    outcome.grad_norms.append(float(result.grad_norm))
    return result


def _rows_of_this_rank(size: int) -> Tensor:
    """Sample i of B goes to rank i*N//B."""
    samples = torch.arange(size)
    return samples[samples * dist.get_world_size() // size == dist.get_rank()]
