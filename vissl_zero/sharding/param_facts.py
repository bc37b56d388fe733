"""Facts of parameters that decide what a level gathers and stores: whole, sharded, sent and on a disk, in bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from vissl_zero.resolve.resolved import ShardingPlan
from vissl_zero.sharding.model.float8 import sent_weights
from vissl_zero.sharding.model.precision import dtype_of
from vissl_zero.sharding.model.wrap_plan import ROOT, WrapPlan
from vissl_zero.sharding.offload.layout import kept_in_memory


@dataclass(frozen=True)
class ParamFacts:
    """Properties of a parameter that determine its memory.

    Attributes:
        shape: shape of the full parameter.
        itemsize: bytes of an element.
        unit: first module of the unit that holds it at level 3.
        is_trained: an optimizer updates it.
        is_replicated: every rank holds it whole, and no unit gathers it: a scalar, or batch norm in half precision.
        is_float8: level 3 sends it in float8.
    """

    shape: tuple[int, ...]
    itemsize: int
    unit: str
    is_trained: bool
    is_replicated: bool
    is_float8: bool

    @property
    def num_bytes(self) -> int:
        """Bytes of the full parameter."""
        return torch.Size(self.shape).numel() * self.itemsize

    def padded(self, num_ranks: int) -> int:
        """Return the bytes of the largest part of any of ``num_ranks`` ranks: whole rows, as ``torch.chunk`` cuts."""
        if self.is_replicated:
            return self.num_bytes
        return self._rows(num_ranks) * torch.Size(self.shape[1:]).numel() * self.itemsize

    def sent(self, num_ranks: int, share: float) -> float:
        """Return its bytes in a rank's gather message; ``share`` is message bytes over master bytes (``share_of``)."""
        if not self.is_float8:
            return self.padded(num_ranks) * share
        return self.padded(num_ranks) // self.itemsize + self._rows(num_ranks)  # a scale for each row

    def _rows(self, num_ranks: int) -> int:
        return -(-self.shape[0] // num_ranks)


def param_facts(model: nn.Module, wrap_plan: WrapPlan, trained: Iterable[str]) -> dict[str, ParamFacts]:
    """Collect the facts of all parameters; tied ones once.

    Args:
        model: whole.
        wrap_plan: its units at level 3.
        trained: full names.
    """
    owners = {name: unit for unit in wrap_plan.units for name in unit.modules}
    updated, sent = set(trained), sent_weights(model)
    facts = {}
    for name, param in model.named_parameters():
        module = name.rpartition(".")[0]
        # The innermost unit around it; the root, "", contains every module.
        while module not in owners:
            module = module.rpartition(".")[0]
        facts[name] = ParamFacts(
            tuple(param.shape),
            param.element_size(),
            owners[module].modules[0],
            is_trained=name in updated and param.requires_grad,
            is_replicated=owners[module].is_replicated or not param.dim(),
            is_float8=param in sent,
        )
    return facts


def whole_units(params: Mapping[str, ParamFacts], num_ranks: int) -> dict[str, int]:
    """Sum each unit's bytes while it is gathered, in the master format."""
    bytes_by_unit: dict[str, int] = {}
    for param in params.values():
        if not param.is_replicated:
            # Padding included: torch gathers parts of equal length.
            bytes_by_unit[param.unit] = bytes_by_unit.get(param.unit, 0) + param.padded(num_ranks) * num_ranks
    return bytes_by_unit


def params_on_disk(params: Mapping[str, ParamFacts], plan: ShardingPlan, num_ranks: int) -> dict[str, ParamFacts]:
    """Select the parameters on a disk: all sharded ones, except the first ones, which fit into ``max_in_cpu``.

    Args:
        params: facts of a model's parameters.
        plan: offload tiers.
        num_ranks: number of ranks that share one copy of the state.
    """
    if not plan.offload_params.is_on_disk:
        return {}
    # Units as they are wrapped: the root comes last.
    cut = sorted((item for item in params.items() if not item[1].is_replicated), key=lambda item: item[1].unit == ROOT)
    sizes = (param.padded(num_ranks) // param.itemsize for _, param in cut)
    keeps = kept_in_memory(sizes, plan.offload_params.max_in_cpu or 0)
    return {name: param for (name, param), is_kept in zip(cut, keeps, strict=True) if not is_kept}


def gathered_bytes(params: Mapping[str, ParamFacts], plan: ShardingPlan, num_ranks: int) -> int:
    """Return the peak bytes of full parameters in a step, in the compute dtype and in addition to the shards.

    At levels 1 and 2 all parameters are full; at level 3 those of a unit and of all units around it, the root included.
    Units that a GPU prefetches count as communication until they are used.

    Args:
        params: facts of a model's parameters.
        plan: level and number formats.
        num_ranks: number of ranks that share one copy of the state.
    """
    units = whole_units(params, num_ranks)
    if plan.level == 0:
        return 0
    if plan.level < 3:
        most = sum(units.values())
    else:
        most = max((sum(units[other] for other in units if _is_around(other, unit)) for unit in units), default=0)
    return int(most * share_of(plan.precision.compute, plan))


def _is_around(outer: str, unit: str) -> bool:
    return outer in (ROOT, unit) or unit.startswith(f"{outer}.")


def share_of(dtype: str, plan: ShardingPlan) -> float:
    """Return the bytes of ``dtype`` as a share of those in the master dtype."""
    return dtype_of(dtype).itemsize / dtype_of(plan.precision.master).itemsize
