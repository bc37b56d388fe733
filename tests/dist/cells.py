"""The parity matrix as one table: which cells there are, which are excluded and why, what each trains.

A cell is a feature, an optimizer, an engine, a level and a number of ranks. ``CELLS`` is a covering array: every triple
of feature, (engine, level) and 1, 2 or 3 ranks; at 4 ranks, every feature at one level of each engine; and every pair
of an optimizer with a feature, with an (engine, level) and with a number of ranks (``test_the_cells_cover`` in
test_parity.py holds it).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from tests.dist.case import Case
from vissl_zero.resolve.resolved import OffloadPlan

OPTIMIZERS = ("sgd", "nesterov", "larc", "larc_clip", "lars", "adam", "adamw")
PLACES = tuple(
    [("torch", level) for level in range(4)] + [("fairscale", level) for level in (1, 2, 3, 0)]  # level 0: excluded
)
WORLDS = (1, 2, 3, 4)
SETTINGS: dict[str, Any] = {"num_steps": 3, "is_shallow": True}

# Why a cell is not run; tests/unit/resolve/test_parity_exclusions.py shows what somebody who asks for it is told.
NOTHING_TO_SHARD = "level 0 shards nothing: offload is refused there, shard groups have no effect, which is said"
FAIRSCALE_HAS_NONE = "fairscale neither offloads nor shards in groups: refused, with ZERO.ENGINE=torch"
PARAMETERS_STAY = "parameters rest outside the device at level 3 only: refused below"
NOT_A_GROUP = "groups of 2 ranks are all ranks of 2, and do not divide 1 or 3: refused"
FAIRSCALE_SHARDS = "fairscale has nothing to do at level 0: refused, with ZERO.ENGINE=torch"


@dataclass(frozen=True)
class Feature:
    """What a row of the matrix adds to plain training.

    Attributes:
        case: settings that change the numbers, and so the reference.
        plan: settings that must not change them.
        min_level: lower levels do not have it.
        worlds: numbers of ranks that make sense.
        has_fairscale: fairscale has it.
        compares: "numbers", or "scales" where half precision leaves only skips and scales to compare exactly.
        is_rare: few places have it, and these meet all optimizers.
    """

    case: dict[str, Any] = field(default_factory=dict)
    plan: dict[str, Any] = field(default_factory=dict)
    min_level: int = 0
    worlds: tuple[int, ...] = WORLDS
    has_fairscale: bool = True
    compares: str = "numbers"
    is_rare: bool = False


def _offload(optimizer: str = "none", params: str = "none", **keys: Any) -> dict[str, Any]:
    return {
        "offload_optimizer": OffloadPlan(device=optimizer),
        "offload_params": OffloadPlan(device=params, pin_memory=False),
        **keys,
    }


_EVERYTHING: dict[str, Any] = {
    "clip": 0.05,
    "clip_per": "part",
    "num_micro_batches": 2,
    "num_steps": 2,
    "batch_sizes": (11, 8, 9),
    "frozen_steps": 1,
    "unused": True,
    "tied": True,
    "thin": True,
    "undecayed": True,
    "head_rate": 0.5,
    "decay_schedule": True,
    "ema": True,
}
FEATURES: dict[str, Feature] = {
    "plain": Feature(),
    "clip": Feature({"clip": 0.05}),
    "rates_by_name_clip_per_tensor": Feature({"rates": True, "clip": 0.02, "clip_per": "tensor"}),
    "accumulation": Feature({"num_micro_batches": 3, "num_steps": 2}),
    "accumulation_clip": Feature({"num_micro_batches": 3, "num_steps": 2, "clip": 0.05}),
    "recompute_blocks": Feature(plan={"checkpoint_every": 1}),
    "recompute_every_2nd": Feature(plan={"checkpoint_every": 2}),
    "recompute_stages": Feature(plan={"stage_checkpoints": ((1,), (2,))}),
    "recompute_named": Feature(plan={"checkpoint_blocks": ("trunk.blocks.1",)}),
    "recompute_dropout": Feature({"dropout": 0.3}, {"checkpoint_every": 1}),
    "recompute_unsynchronized_norm": Feature({"norm": "local_batch"}, {"checkpoint_every": 1}),
    "two_forwards": Feature({"two_forwards": True}),
    "two_forwards_recompute": Feature({"two_forwards": True}, {"checkpoint_every": 1}),
    "every_layer_wrapped": Feature(plan={"wrap_threshold": 1, "checkpoint_every": 2}),
    "frozen_trunk": Feature({"frozen_trunk": True}),
    "thawed_prototypes": Feature({"frozen_steps": 1}),
    "unused_parameter": Feature({"unused": True}),
    "unused_accumulation": Feature({"unused": True, "num_micro_batches": 3, "num_steps": 2}),
    "tied_weights": Feature({"tied": True}),
    "rows_below_ranks": Feature({"thin": True}),
    "one_element_accumulation": Feature({"thin": True, "num_micro_batches": 2, "num_steps": 2}),
    "giant_tensor": Feature({"giant": True}),
    "unsynchronized_norm": Feature({"norm": "local_batch"}),
    "group_norm": Feature({"norm": "group"}),
    "no_norm": Feature({"norm": "none"}),
    "ema": Feature({"ema": True}),
    "schedules": Feature({"decay_schedule": True}),
    "undecayed_bias_and_norm": Feature({"undecayed": True}),
    "head_rate": Feature({"head_rate": 0.3}),
    "uneven_micro_batches": Feature({"batch_sizes": (11, 7), "num_micro_batches": 2, "num_steps": 2}),
    "uneven_last_batch": Feature({"batch_sizes": (12, 12, 5)}),
    "inf_on_one_rank": Feature({"inf_step": 1}),
    "inf_clip_accumulation": Feature({"inf_step": 0, "clip": 0.05, "num_micro_batches": 3, "num_steps": 2}),
    "float16_inf": Feature(
        {"inf_step": 1, "first_scale": 128.0, "dtype": "float32", "autocast": "float16"}, compares="scales"
    ),
    "optimizer_on_cpu": Feature(plan=_offload("cpu"), min_level=1, has_fairscale=False),
    "optimizer_on_nvme": Feature(plan=_offload("nvme"), min_level=1, has_fairscale=False),
    "nvme_everything": Feature(_EVERYTHING, _offload("nvme", checkpoint_every=1), min_level=1, has_fairscale=False),
    "parameters_on_cpu": Feature(plan=_offload(params="cpu"), min_level=3, has_fairscale=False, is_rare=True),
    "parameters_on_nvme": Feature(plan=_offload("nvme", "nvme"), min_level=3, has_fairscale=False, is_rare=True),
    "shard_groups": Feature(plan={"shard_group_size": 2}, min_level=1, worlds=(4,), has_fairscale=False, is_rare=True),
    "shard_groups_everything": Feature(
        _EVERYTHING,
        {"shard_group_size": 2, "checkpoint_every": 1},
        min_level=1,
        worlds=(4,),
        has_fairscale=False,
        is_rare=True,
    ),
    "everything": Feature(_EVERYTHING, {"checkpoint_every": 1}),
    "norm_groups": Feature({"norm": "local_batch"}, {"sync_bn_group": 2}, worlds=(4,), is_rare=True),
}

# fairscale's keys that change how it communicates, dealt in turn. 100 elements: some gradients fit into buffers, others
# do not.
_FAIRSCALE: dict[int, tuple[dict[str, Any], ...]] = {
    1: ({},),
    2: ({}, {"reduce_buffer_size": 0}, {"reduce_buffer_size": 100}),
    3: (
        {},
        {"flatten_parameters": False},
        {"flatten_parameters": False, "bucket_cap_mb": 0.001},
        {"reshard_after_forward": False},
    ),
}


@dataclass(frozen=True)
class Cell:
    """One training run to compare with its reference."""

    feature: str
    optimizer: str
    engine: str
    level: int
    world_size: int

    def __str__(self) -> str:
        return f"{self.feature}-{self.optimizer}-{self.engine}{self.level}-{self.world_size}ranks"

    @property
    def case(self) -> Case:
        """What is trained. fairscale's FSDP takes float32 only; what that rounds off grows with the learning rate."""
        is_adam = self.optimizer.startswith("adam")
        settings: dict[str, Any] = {"optimizer": self.optimizer, "lr": 0.01 if is_adam else 0.1, **SETTINGS}
        case = Case(**settings | FEATURES[self.feature].case)
        return replace(case, dtype="float32", lr=0.002 if is_adam else 0.01) if self.is_float32 else case

    @property
    def is_float32(self) -> bool:
        """Whether it is compared in float32."""
        return (self.engine, self.level) == ("fairscale", 3)

    @property
    def plan(self) -> dict[str, Any]:
        """Changes of the sharding plan."""
        settings: dict[str, Any] = {"engine": self.engine}
        if self.engine == "fairscale":
            choices = _FAIRSCALE[self.level]
            settings |= choices[(list(FEATURES).index(self.feature) + self.world_size) % len(choices)]
        return settings | FEATURES[self.feature].plan

    @property
    def num_batches(self) -> int:
        """Batches whose statistics batch norm keeps apart."""
        if self.case.norm != "local_batch":
            return 1
        return self.world_size // FEATURES[self.feature].plan.get("sync_bn_group", 1)

    @property
    def excluded(self) -> str | None:
        """Why it is not run; None if it is."""
        feature = FEATURES[self.feature]
        if (self.engine, self.level) == ("fairscale", 0):
            return FAIRSCALE_SHARDS
        if self.engine == "fairscale" and not feature.has_fairscale:
            return FAIRSCALE_HAS_NONE
        if self.level < feature.min_level:
            return NOTHING_TO_SHARD if self.level == 0 else PARAMETERS_STAY
        return None if self.world_size in feature.worlds else NOT_A_GROUP


def _cells() -> Iterator[Cell]:
    for row, (name, feature) in enumerate(FEATURES.items()):
        for column, (engine, level) in enumerate(PLACES):
            for world_size in WORLDS:
                for optimizer in _dealt(row, column, world_size, feature):
                    yield Cell(name, optimizer, engine, level, world_size)


def _dealt(row: int, column: int, world_size: int, feature: Feature) -> tuple[str, ...]:
    """The optimizers that meet in one place of the table; together, a feature's places have all seven."""
    if feature.is_rare and world_size == max(feature.worlds) and column < 4:
        return tuple(name for index, name in enumerate(OPTIMIZERS) if feature.min_level == 3 or index % 3 == column % 3)
    if world_size < 4:  # two optimizers each
        return (OPTIMIZERS[(row + 2 * (world_size - 1) + column % 2) % len(OPTIMIZERS)],)
    # The dearest cells: one level of each engine.
    of_torch = 1 + row % 3 if feature.min_level else row % 4
    return (OPTIMIZERS[(row + 6) % len(OPTIMIZERS)],) if column in (of_torch, 4 + row % 3) else ()


CELLS = list(_cells())
