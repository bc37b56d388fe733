"""What the parity tests train: a tiny model, its data and loss, and the settings that change the numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vissl_zero.config.blocks.model_and_loss import Lora
from vissl_zero.models.keyed_random import key_random_layers
from vissl_zero.models.model import Model, Unit
from vissl_zero.models.trunks.timm_trunk import build_timm_trunk
from vissl_zero.models.trunks.vision_transformer import VisionTransformer
from vissl_zero.optim.param_groups import ParamGroup, param_groups
from vissl_zero.resolve.resolved import Float8Plan, OptimizerPlan
from vissl_zero.sharding.model.precision import dtype_of

LR, WEIGHT_DECAY, SEED = 0.1, 0.01, 5
PROTOTYPES = "heads.0.prototypes0.weight"


@dataclass(frozen=True)
class Case:
    """What is trained, and how; the same for the reference and for every strategy.

    Attributes:
        optimizer: "sgd", "nesterov", "larc", "larc_clip", "lars", "adam" or "adamw".
        clip: largest gradient norm, or None.
        clip_per: of what: "model", "part" (trunk and head apart) or "tensor".
        rates: learning rates by block and by name, weight decay by name.
        num_micro_batches: per step.
        num_steps: optimizer steps.
        batch_sizes: source samples of each micro-batch over all ranks, taken in turn.
        norm: "batch" (one batch over all ranks), "local_batch" (each rank its own), "group" or "none".
        frozen_steps: steps for which the prototypes stay frozen.
        frozen_trunk: no gradient for the stem and first block from the start.
        unused: the model has a parameter that the loss does not use.
        tied: two blocks share a weight; of trunks, the convolutions' and the plain transformer's.
        giant: one layer holds nearly all parameters.
        is_shallow: the trunk has a block less.
        thin: the head has a layer of one row.
        dropout: probability in every block.
        two_forwards: the model is called once per resolution, before one backward pass.
        undecayed: neither biases nor norms decay.
        head_rate: learning rate of the head over the trunk's.
        decay_schedule: the weight decay grows from step to step.
        ema: follow the weights by a running average.
        inf_step: a step in which one rank's loss is infinite, under loss scaling; -1: neither.
        first_scale: loss scale of the first step.
        autocast: dtype of autocast around the forward pass, under loss scaling.
        dtype: of parameters, data and all computation.
        lr: in the first step.
        trunk: "conv", or one of ``TRUNKS``.
        float8: linear layers that multiply in float8.
        lora: adapters of the trunk, whose own weights are frozen.
    """

    optimizer: str = "sgd"
    clip: float | None = None
    clip_per: str = "model"
    rates: bool = False
    num_micro_batches: int = 1
    num_steps: int = 4
    batch_sizes: tuple[int, ...] = (12,)
    norm: str = "batch"
    frozen_steps: int = 0
    frozen_trunk: bool = False
    unused: bool = False
    tied: bool = False
    giant: bool = False
    is_shallow: bool = False
    thin: bool = False
    dropout: float = 0.0
    two_forwards: bool = False
    undecayed: bool = False
    head_rate: float = 1.0
    decay_schedule: bool = False
    ema: bool = False
    inf_step: int = -1
    first_scale: float = 65536.0
    autocast: str | None = None
    dtype: str = "float64"
    lr: float = LR
    trunk: str = "conv"
    float8: Float8Plan = field(default_factory=Float8Plan)
    lora: Lora | None = field(default=None, hash=False)


@dataclass
class Outcome:
    """Figures of a run: losses, gradient norms, loss scales, and the parameters and buffers at the end.

    A skipped step has loss and norm 0. The running average is in ``state`` too, its names behind "ema:".
    """

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    state: dict[str, Tensor] = field(default_factory=dict)

    def distance(self, other: Outcome) -> dict[str, float]:
        """Largest difference in losses, gradient norms and final tensors."""
        assert self.state.keys() == other.state.keys()
        assert self.scales == other.scales
        tensors = [_largest(self.state[name] - other.state[name]) for name in self.state]
        losses = [abs(a - b) for a, b in zip(self.losses, other.losses, strict=True)]
        norms = [abs(a - b) for a, b in zip(self.grad_norms, other.grad_norms, strict=True)]
        return {"loss": max(losses), "grad_norm": max(norms), "state": max(tensors)}

    def relative_distance(self, other: Outcome) -> dict[str, float]:
        """Of losses and tensors, over the largest entry of each where that is above 1: for float32."""
        assert self.state.keys() == other.state.keys()
        assert self.scales == other.scales
        losses = [abs(a - b) / max(1.0, abs(b)) for a, b in zip(self.losses, other.losses, strict=True)]
        tensors = [
            _largest(self.state[name] - whole) / max(1.0, _largest(whole)) for name, whole in other.state.items()
        ]
        return {"loss": max(losses), "state": max(tensors)}


def _largest(tensor: Tensor) -> float:
    return float(tensor.abs().max())


class Trunk(nn.Module):
    """Convolutions of uneven widths; 5 and 7 channels leave ranks with fewer rows, or none."""

    def __init__(self, case: Case):
        super().__init__()
        widths = [3, 5, 7] + [7] * (not case.is_shallow) + [64 if case.giant else 6]
        self.stem = _block(widths[0], widths[1], case)
        self.blocks = nn.ModuleList(_block(a, b, case) for a, b in pairwise(widths[1:]))
        self.feature_dim = widths[-1]
        if case.tied:
            first, second = _block(7, 7, case), _block(7, 7, case)
            second[0].weight = first[0].weight
            self.blocks.insert(1, first)
            self.blocks.insert(2, second)

    @property
    def stages(self) -> list[list[nn.Module]]:
        """As RegNet has them, for ``stage_checkpoints``."""
        blocks = list(self.blocks)
        return [blocks[:1], blocks[1:]]

    @property
    def map_dim(self) -> int:
        return self.feature_dim

    def forward(self, images: list[Tensor], return_maps: bool = False) -> list[Tensor]:
        xs = self.stem(images)
        for block in self.blocks:
            xs = block(xs)
        return [*(xs if return_maps else ()), *(x.mean(dim=(2, 3)) for x in xs)]


class Head(nn.Module):
    """A projection and two prototypes, fewer than most numbers of ranks."""

    def __init__(self, feature_dim: int, case: Case):
        super().__init__()
        width = 257 if case.giant else 9
        has_norm = case.norm in ("batch", "local_batch")
        # No bias before batch norm: its true gradient is zero, and layer-wise rates make steps of the rounding noise.
        first = nn.Linear(feature_dim, width, bias=not has_norm)
        norm = nn.BatchNorm1d(width) if has_norm else nn.Identity()
        self.projection_head = nn.Sequential(first, norm, nn.Tanh(), nn.Linear(width, 4))
        self.gate = nn.Linear(feature_dim, 1) if case.thin else None
        self.prototypes0 = nn.Linear(4, 2, bias=False)
        if case.unused:
            self.never_called = nn.Linear(3, 3)

    def forward(self, features: Tensor) -> tuple[Tensor, list[Tensor]]:
        embeddings = F.normalize(self.projection_head(features), dim=1)
        scores = self.prototypes0(embeddings)
        return embeddings, [scores if self.gate is None else scores * self.gate(features).tanh()]


def _block(width_in: int, width_out: int, case: Case) -> Unit:
    layer = {
        "batch": nn.BatchNorm2d(width_out),
        "local_batch": nn.BatchNorm2d(width_out),
        "group": nn.GroupNorm(1, width_out),
        "none": nn.Identity(),
    }[case.norm]
    dropout = [nn.Dropout(case.dropout)] if case.dropout else []
    return Unit(nn.Conv2d(width_in, width_out, 3, padding=1, bias=case.norm == "none"), layer, nn.Tanh(), *dropout)


def _vision_transformer(case: Case, width: int = 6, mlp_width: int = 10) -> nn.Module:
    """Positions for 3 x 3 patches, interpolated for 2 x 2; dropout of every kind where ``case.dropout``."""
    sizes = {"IMAGE_SIZE": 6, "PATCH_SIZE": 2, "NUM_LAYERS": 2, "NUM_HEADS": 2}
    widths = {"HIDDEN_DIM": width, "MLP_DIM": mlp_width}
    more = {"NUM_REGISTERS": 1, "LAYER_SCALE_INIT": 0.5, "QKV_BIAS": True, "PATCH_DROP_RATE": case.dropout}
    rates = dict.fromkeys(("DROPOUT_RATE", "ATTENTION_DROPOUT_RATE", "DROP_PATH_RATE"), case.dropout)
    trunk = VisionTransformer(**sizes, **widths, **more, **rates)
    if case.tied:
        first, second = (block.get_submodule("unit.mlp.fc1") for block in trunk.blocks)
        second.weight = first.weight
    return trunk


def _timm(name: str, **model_args: Any) -> Callable[[Case], nn.Module]:
    return lambda case: build_timm_trunk(name, drop_path_rate=case.dropout, model_args=model_args)


TRUNKS: dict[str, Callable[[Case], nn.Module]] = {
    "vit": _vision_transformer,
    # Rows of one and of two blocks of MXFP8, and what is left of them.
    "vit_wide": partial(_vision_transformer, width=36, mlp_width=70),
    # A chain of units, with dropped paths.
    "timm_convnext": _timm("convnext_atto", depths=(1, 1, 1, 2), dims=(5, 6, 7, 8)),
    # Units within timm's own forward pass, each called once per resolution.
    "timm_xcit": _timm("xcit_nano_12_p16_224", depth=2, embed_dim=8, num_heads=2, cls_attn_layers=1),
    # Attention in windows with dropout: rows within a unit are more than the batch has.
    "timm_swin": _timm(
        "swin_tiny_patch4_window7_224",
        img_size=64,
        window_size=4,
        depths=(2, 1),
        embed_dim=8,
        num_heads=(2, 2),
        attn_drop_rate=0.2,
        proj_drop_rate=0.2,
    ),
}


RULES = (
    {"match": "heads.", "max_dims": 2, "lr_factor": 0.25, "wd_factor": 3.0, "constant_lr": False},
    {"match": "", "max_dims": 1, "lr_factor": 2.0, "wd_factor": 0.0, "constant_lr": False},
)


def build(case: Case) -> nn.Module:
    """The model with its initial weights; the same on every rank."""
    torch.manual_seed(7)
    trunk = TRUNKS[case.trunk](case) if case.trunk in TRUNKS else Trunk(case)
    if case.lora is not None:
        from vissl_zero.models.lora import adapt_  # peft takes seconds to import

        adapt_(trunk, case.lora)
    model = Model(trunk, [Head(trunk.feature_dim, case)]).to(dtype_of(case.dtype))
    key_random_layers(model)
    if case.frozen_trunk:
        trunk.stem.requires_grad_(False)
        trunk.blocks[0].requires_grad_(False)
    return model


def groups_of(model: nn.Module, case: Case) -> list[ParamGroup]:
    """Trunk and head, and what of them does not decay: the package's own rules."""
    decays = not case.undecayed
    return param_groups(
        model,
        OptimizerPlan(
            "sgd",
            weight_decay=WEIGHT_DECAY,
            head_weight_decay=WEIGHT_DECAY * case.head_rate,
            regularize_bn=decays,
            regularize_bias=decays,
            layer_decay=0.5 if case.rates else 1.0,
            param_rules=RULES if case.rates else (),
        ),
    )


def schedule(case: Case, step: int, group: ParamGroup) -> tuple[float, float]:
    """Learning rate and weight decay of a group in a step."""
    lr = case.lr / (1 + step) * (case.head_rate if group.is_head else 1.0) * group.lr_factor
    return lr, group.weight_decay * (1 + 2 * step if case.decay_schedule else 1)


def ema_decay(step: int) -> float:
    """The first step copies, as VISSL's warm-up does."""
    return 0.7 if step else 0.0


def micro_batches(case: Case, step: int) -> Iterator[list[Tensor]]:
    """Whole micro-batches: two large crops and one small one a sample, indexed by crop first."""
    for index in range(case.num_micro_batches):
        position = step * case.num_micro_batches + index
        size = case.batch_sizes[position % len(case.batch_sizes)]
        generator = torch.Generator().manual_seed(1000 + position)
        yield [
            torch.randn(crops, size, 3, side, side, generator=generator, dtype=torch.float64).to(dtype_of(case.dtype))
            for crops, side in (((2, 64), (1, 32)) if case.trunk.startswith("timm") else ((2, 6), (1, 4)))
        ]


def rows_of(rank: int, world_size: int, num_samples: int) -> Tensor:
    """Sample i of B goes to rank i*N//B."""
    samples = torch.arange(num_samples)
    return samples[samples * world_size // num_samples == rank]


def forward(model: nn.Module, case: Case, images: list[Tensor]) -> list[Any]:
    """The outputs for all resolutions, from one call of the model or one a resolution."""
    flat = [crops.flatten(0, 1) for crops in images]
    if not case.two_forwards:
        return model(flat)
    parts = [model([crops])[0] for crops in flat]
    embeddings = torch.cat([part[0] for part in parts])
    return [(embeddings, [torch.cat([part[1][0] for part in parts])])]


def loss_of(outputs: list[Any], num_samples: int) -> Tensor:
    """Mean over samples of something that depends on every row, differently."""
    embeddings, (scores,) = outputs[0]
    rows = (scores.exp().sum(1) + embeddings.sin().sum(1) + 1.0).log().view(-1, num_samples)
    return (rows * torch.linspace(0.5, 1.5, len(rows), dtype=rows.dtype, device=rows.device)[:, None]).sum(0).mean()
