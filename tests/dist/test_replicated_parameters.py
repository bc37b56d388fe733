"""Level 3: at no moment are more parameters whole than those of the unit in use, the next one and the root."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from tests.dist.training import Case, Outcome, build, shard, train_step
from tests.ranks import run_on_ranks
from vissl_zero.resolve.resolved import ShardingPlan
from vissl_zero.sharding.model.wrap_plan import plan_wrap


def _alive(units: list[FSDPModule]) -> int:
    """Bytes of full parameters, and of what was gathered for them, each storage once."""
    sizes: dict[int, int] = {}
    for unit in units:
        group = unit._get_fsdp_state()._fsdp_param_group
        for param in group.fsdp_params if group is not None else ():
            whole: list[Tensor] = [*getattr(param, "all_gather_outputs", [])]
            if hasattr(param, "_unsharded_param"):
                whole.append(param._unsharded_param)
            for tensor in whole:
                storage = tensor.untyped_storage()
                if storage.nbytes():
                    sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def _watch(case: Case, changes: dict[str, Any]) -> list[int]:
    """What is alive whenever a layer begins its forward pass, or autograd reaches its output."""
    sharded = shard(case, 3, **changes)
    units = [module for module in sharded.model.modules() if isinstance(module, FSDPModule)]
    seen: list[int] = []

    def look(*_: Any) -> None:
        seen.append(_alive(units))

    def look_forward(module: nn.Module, inputs: Any, output: Any) -> None:
        look()
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(look)

    for module in sharded.model.modules():
        if not list(module.children()):
            module.register_forward_hook(look_forward)
    for step in range(2):
        train_step(sharded, case, step, Outcome())
    look()
    assert seen[-1] == 0 and max(seen) > 0
    return seen


@pytest.mark.timeout(60)
@pytest.mark.parametrize("recompute", [0, 1])
def test_current_and_next_unit_only(recompute: int) -> None:
    case = Case(num_micro_batches=2)
    plan = ShardingPlan(level=3, checkpoint_every=recompute)
    units = [unit.num_params for unit in plan_wrap(build(case), plan, 2).units]
    # Rows are padded to a multiple of the ranks.
    padding = 8 * sum(param[0].numel() for param in build(case).parameters() if param.dim() and len(param) % 2)
    bound = 8 * (units[-1] + max(a + b for a, b in zip([0, *units[:-2]], units[:-1], strict=True))) + padding
    for seen in run_on_ranks(2, _watch, case, {"checkpoint_every": recompute}):
        print(f"{max(seen):,} of {8 * sum(units):,} bytes alive, bound {bound:,}")
        assert max(seen) <= bound < 8 * sum(units)
