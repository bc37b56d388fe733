"""Decides which modules become units, which stay in float32, and which are recomputed.

Pure: nothing here changes the model or needs a process group, so that a plan can be printed and tested anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from vissl_zero.errors import ConfigError, Problem, did_you_mean
from vissl_zero.models.model import Unit
from vissl_zero.resolve.resolved import ShardingPlan

ROOT = ""


@dataclass(frozen=True)
class PlannedUnit:
    """Modules whose parameters are gathered, resharded and reduced together.

    Attributes:
        modules: full module names; several if they share tied parameters; ``("",)`` is the model itself.
        kind: "block" (a unit of the model), "layer" (large enough for ``wrap_threshold``), "norm" (batch norm kept in
            float32) or "root" (all parameters of no other unit).
        num_params: elements of its parameters, without those of units inside it.
        is_float32: computes in the master precision, while other units compute in half precision.
        is_replicated: stays whole on every rank and is never gathered, because it is too small to be worth a message.
        is_checkpointed: recomputed in backward.
    """

    modules: tuple[str, ...]
    kind: str
    num_params: int
    is_float32: bool = False
    is_replicated: bool = False
    is_checkpointed: bool = False


@dataclass(frozen=True)
class WrapPlan:
    """All units of a model, inner units before outer ones, the root last.

    Attributes:
        level: ZeRO level.
        num_ranks: ranks that share one copy of the state.
        compute: dtype that parameters have in forward and backward.
        units: units in the order of wrapping, replicated ones included.
        checkpointed: names of the units that are recomputed in backward (at level 0 too).
        whole_bytes: bytes of full parameters at the peak of a step, in addition to a rank's shards
            (``param_facts.gathered_bytes``).
    """

    level: int
    num_ranks: int
    compute: str
    units: tuple[PlannedUnit, ...]
    checkpointed: tuple[str, ...] = ()
    whole_bytes: int = 0

    def describe(self) -> str:
        """Format a table for people: one line per unit, and which state is whole on a rank when."""
        total = sum(unit.num_params for unit in self.units)
        largest = max((unit.num_params for unit in self.units), default=0)
        ranks = f" over {self.num_ranks} rank{'s' * (self.num_ranks > 1)}" if self.level else ""  # 0 shards nothing
        lines = [f"ZeRO level {self.level}{ranks}, {total:,} parameters, {_MOMENT[self.level]}"]
        if self.level:
            width = max(len(_title(unit)) for unit in self.units)
            for unit in self.units:
                lines.append(f"  {unit.kind:5}  {_title(unit):{width}}  {unit.num_params:>13,}  {self._remarks(unit)}")
            whole = sum(unit.num_params for unit in self.units if unit.is_replicated)
            # Rounded up: floor division of a negative number.
            kept = whole - (whole - total) // self.num_ranks
            lines.append(f"  largest unit {largest:,} parameters, each rank keeps about {kept:,}")
        if self.checkpointed:
            lines.append(f"  recomputed in backward: {', '.join(self.checkpointed)}")
        return "\n".join(lines)

    def advice(self) -> str:
        """Return advice if level 3 gathers most of a large model at once; else ""."""
        total = sum(unit.num_params for unit in self.units)
        largest = max(self.units, key=lambda unit: unit.num_params)
        if self.level < 3 or total < _LARGE or largest.num_params * 2 <= total:
            return ""
        return (
            f"{_title(largest)} has {largest.num_params / total:.0%} of the parameters, and level 3 gathers it "
            f"at once. To gather less, set wrap_threshold (FSDP_CONFIG.AUTO_WRAP_THRESHOLD) to {total // 16} or so, "
            f"or return the blocks of the model from a method zero_units()."
        )

    def _remarks(self, unit: PlannedUnit) -> str:
        remarks = ["float32" if unit.is_float32 else self.compute]
        if unit.is_replicated:
            remarks.append("on every rank")
        if unit.is_checkpointed:
            remarks.append("recomputed")
        if len(unit.modules) > 1:
            remarks.append("bound by a tied parameter")
        return ", ".join(remarks)


_LARGE = 10_000_000  # parameters; in a smaller model, even a unit of most of them takes little memory
_MOMENT = {
    0: "replicated",
    1: "optimizer state sharded; gradients whole until the last micro-batch",
    2: "optimizer state and gradients sharded; parameters whole from first use to the end of backward",
    3: "all state sharded; parameters whole only where they are being used",
}


def plan_wrap(model: nn.Module, plan: ShardingPlan, num_ranks: int) -> WrapPlan:
    """Decide the units of ``model``.

    Args:
        model: whole, not yet wrapped. Its blocks are those of its ``zero_units()``, if it has any, else repeated ones.
        plan: level, threshold, checkpointing and precision.
        num_ranks: ranks that share one copy of the state.
    Raises:
        ConfigError: activation checkpointing needs ``Unit``s, and the model has none; or, in half precision, a batch
            norm shares a parameter with a layer of another kind.
    """
    names = {module: name for name, module in model.named_modules()}
    blocks = [names[block] for block in model_units(model) if block in names]
    checkpointed = _checkpointed(model, blocks, plan)
    # A container of models has no forward pass that could gather anything: each of its models is a root.
    kinds: dict[str, str] = {ROOT: "root"}
    if isinstance(model, nn.ModuleList | nn.ModuleDict):
        kinds = dict.fromkeys((names[child] for child in _called_first(model)), "root")
    if plan.level:
        kinds |= dict.fromkeys(_large_layers(model, plan.wrap_threshold), "layer")
        # The last kind wins: a large layer that is a block counts as a block, and batch norm is always apart.
        kinds |= dict.fromkeys((name for name in blocks if name != ROOT), "block")
        if plan.precision.compute != plan.precision.wide:
            kinds |= dict.fromkeys(_batch_norms(model), "norm")
    first_names = _first_names(model)
    groups = _resolve_ties(model, kinds, first_names)
    order = {name: position for position, name in enumerate(_inner_first(model))}
    owned = _owned_elements(model, kinds, first_names)
    units = [
        PlannedUnit(
            modules=group,
            kind=kinds[group[0]],
            num_params=sum(owned[name] for name in group),
            is_float32=kinds[group[0]] == "norm",
            # fairscale's FSDP gathers batch norm like any unit. The root must be a unit, whatever it contains.
            is_replicated=plan.engine == "torch"
            and all(kinds[name] == "norm" and _is_plain_norm(model.get_submodule(name)) for name in group)
            and ROOT not in group,
            is_checkpointed=any(name in checkpointed for name in group),
        )
        # A group of tied modules takes the place of its last module: all units inside any of them are wrapped by then.
        for group in sorted(groups, key=lambda group: max(order[name] for name in group))
    ]
    return WrapPlan(plan.level, num_ranks, plan.precision.compute, tuple(units), tuple(checkpointed))


def model_units(model: nn.Module) -> list[nn.Module]:
    """List the blocks of a model in forward order: its ``zero_units()``, or the children of repeated containers.

    A repeated container is a ModuleList or Sequential of two or more callable children of one type with parameters.
    Containers of containers are searched too. A module elsewhere of the same type as such a child is a block too, if it
    is no smaller than their mean.
    """
    units = getattr(model, "zero_units", None)
    if callable(units):
        return [unit for unit in units() if _has_parameters(unit)]
    blocks = {block: _num_params(block) for block in _repeated_blocks(model)}
    return list(dict.fromkeys(_with_single_blocks(model, blocks)))


def _with_single_blocks(module: nn.Module, blocks: Mapping[nn.Module, int]) -> Iterator[nn.Module]:
    """Yield ``blocks``, and modules of the same type without blocks inside, in the order of the tree.

    RegNet's last stage has one block, with a third of the parameters.
    """
    # torch's own types, such as Sequential, may be anything.
    is_alike = not type(module).__module__.startswith("torch.nn.") and any(type(module) is type(b) for b in blocks)
    if module in blocks or (
        is_alike
        and _num_params(module) * len(blocks) >= sum(blocks.values())
        and not any(inner in blocks for inner in module.modules())
    ):
        yield module
        return
    for child in module.children():
        yield from _with_single_blocks(child, blocks)


def _repeated_blocks(module: nn.Module) -> Iterator[nn.Module]:
    for container in _repeated_containers(module):
        children = list(container.children())
        # Stages of Swin, ConvNeXt or RegNet differ in size, and the largest may hold most of the model.
        may_be_stages = len(set(map(_num_params, children))) > 1
        for child in children:
            inner = list(_repeated_containers(child)) if may_be_stages else []
            if len(inner) == 1 and _is_stage(child, inner[0]):
                yield from _repeated_blocks(child)
            else:
                yield child


def _repeated_containers(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost modules inside that are two or more callable children of one type with parameters."""
    children = list(module.children())
    is_of_one_type = len(children) > 1 and len({type(child) for child in children}) == 1
    if is_of_one_type and all(_has_parameters(child) and _is_callable(child) for child in children):
        # timm's RegNet and DenseNet give each block of a stage a name.
        is_list = isinstance(module, nn.ModuleList | nn.Sequential)
        # Named children of one type may also be branches or experts: only blocks have normalization layers.
        if is_list or all(_normalizes(child) and not any(_repeated_containers(child)) for child in children):
            yield module
            return
    for child in children:
        yield from _repeated_containers(child)


def _is_stage(module: nn.Module, container: nn.Module) -> bool:
    """Check whether a module has most of its parameters in a container of blocks.

    Experts are not blocks: ranks may call different experts, but every rank must gather a unit. Blocks have
    normalization layers, and experts have none.
    """
    return all(map(_normalizes, container.children())) and _num_params(container) * 2 > _num_params(module)


def _normalizes(module: nn.Module) -> bool:
    return any("norm" in type(inner).__name__.lower() for inner in module.modules() if inner is not module)


def _num_params(module: nn.Module) -> int:
    return sum(param.numel() for param in module.parameters())


def _called_first(container: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost modules inside that have a forward pass."""
    for child in container.children():
        if _is_callable(child):
            yield child
        else:
            yield from _called_first(child)


def _is_callable(module: nn.Module) -> bool:
    """Check whether a module has a forward pass; ModuleList, ModuleDict and ParameterList have none."""
    return getattr(type(module), "forward", None) is not nn.Module.forward


def _large_layers(model: nn.Module, threshold: int) -> list[str]:
    """List modules whose direct parameters have at least ``threshold`` elements; none if ``threshold`` is 0."""
    if threshold <= 0:
        return []
    hidden = {  # nn.MultiheadAttention reads the weight of this child without calling it, so hooks on it never run
        f"{name}.out_proj".lstrip(".")
        for name, module in model.named_modules()
        if isinstance(module, nn.MultiheadAttention)
    }
    return [
        name
        for name, module in model.named_modules()
        if name
        and name not in hidden
        and _is_callable(module)
        and sum(param.numel() for param in module.parameters(recurse=False)) >= threshold
    ]


def _batch_norms(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, _BatchNorm) and module.affine]


def _is_plain_norm(module: nn.Module) -> bool:
    """Check that a batch norm has no parameters but its own two: a layer inside (PReLU) needs inputs of its dtype."""
    return {name for name, _ in module.named_parameters()} <= {"weight", "bias"}


def _resolve_ties(model: nn.Module, kinds: dict[str, str], first_names: Mapping[str, str]) -> list[tuple[str, ...]]:
    """Group units that share a parameter; drop from ``kinds`` units that share one with a unit around them.

    A parameter must be sharded once, and be whole whenever any module that uses it runs. Returns the groups.
    """
    while True:
        owners: dict[Tensor, list[str]] = {}
        # All names of a tied parameter: each of its places belongs to a unit.
        for name, param in model.named_parameters(remove_duplicate=False):
            owner = _owner(name.rpartition(".")[0], kinds, first_names)
            if owner not in owners.setdefault(param, []):
                owners[param].append(owner)
        nested = {
            inner
            for shared in owners.values()
            for inner in shared
            if any(outer != inner and _is_inside(inner, outer) for outer in shared)
        }
        if not nested:
            break
        _refuse_tied_norms(model, [name for name in nested if kinds[name] == "norm"])
        # Parameters of a dropped unit belong to the unit around it, which may create further ties: repeat.
        for name in nested:
            del kinds[name]
    groups = {name: {name} for name in kinds}
    for shared in owners.values():
        merged = set().union(*(groups[name] for name in shared))
        for name in merged:
            groups[name] = merged
    unique = {id(group): group for group in groups.values()}
    for group in unique.values():
        norms = [name for name in group if kinds[name] == "norm"]
        # Batch norms may share parameters with each other: they compute in one dtype.
        _refuse_tied_norms(model, norms if len(norms) < len(group) else [])
    positions = {name: position for position, (name, _) in enumerate(model.named_modules())}
    return [tuple(sorted(group, key=positions.__getitem__)) for group in unique.values()]


def _refuse_tied_norms(model: nn.Module, names: Sequence[str]) -> None:
    must = (
        "must share no parameter with a layer that is no batch norm in half precision: batch norm computes in float32"
    )
    fix = "Give it parameters of its own, or train in float32 or at level 0."
    if names:
        raise ConfigError(
            [Problem(name, type(model.get_submodule(name)).__name__, must, fix) for name in sorted(names)]
        )


def _first_names(model: nn.Module) -> dict[str, str]:
    """Map each name of a module to its first name: a model may have one module in several places."""
    first = {module: name for name, module in model.named_modules()}
    return {name: first[module] for name, module in model.named_modules(remove_duplicate=False)}


def _owner(module_name: str, kinds: dict[str, str], first_names: Mapping[str, str]) -> str:
    """Return the innermost unit that contains a module, by the unit's name."""
    while first_names[module_name] not in kinds:
        module_name = module_name.rpartition(".")[0]
    return first_names[module_name]


def _is_inside(inner: str, outer: str) -> bool:
    return outer == ROOT or inner.startswith(outer + ".")


def _owned_elements(model: nn.Module, kinds: dict[str, str], first_names: Mapping[str, str]) -> dict[str, int]:
    owned = dict.fromkeys(kinds, 0)
    for name, param in model.named_parameters():
        owned[_owner(name.rpartition(".")[0], kinds, first_names)] += param.numel()
    return owned


def _inner_first(model: nn.Module) -> Iterator[str]:
    """List module names, children before parents, in forward order among siblings."""

    def walk(module: nn.Module, prefix: str) -> Iterator[str]:
        for name, child in module.named_children():
            yield from walk(child, f"{prefix}.{name}".lstrip("."))
        yield prefix

    return walk(model, ROOT)


def _checkpointed(model: nn.Module, blocks: Sequence[str], plan: ShardingPlan) -> list[str]:
    """Return the names of units to recompute: those in the plan, each n-th, or up to VISSL's block ends per stage."""
    if not plan.is_recomputed:
        return []
    candidates = [name for name in blocks if isinstance(model.get_submodule(name), Unit)]
    if not candidates:
        problem = Problem(
            "config.MODEL.ACTIVATION_CHECKPOINTING",
            "true",
            "needs a model made of units, and this trunk has none",
            "Use a built-in trunk, put the blocks of yours into vissl_zero.models.model.Unit, or turn it off.",
        )
        raise ConfigError([problem])
    if plan.checkpoint_blocks:
        return _named_units(candidates, plan.checkpoint_blocks)
    if any(plan.stage_checkpoints):
        return _stage_units(model, plan.stage_checkpoints)
    return candidates[:: plan.checkpoint_every]


def _named_units(candidates: Sequence[str], names: Sequence[str]) -> list[str]:
    """Select the candidates in ``names``, in the model's order."""
    problems = []
    for name in names:
        if name not in candidates:
            fix = f"The blocks are {candidates[0]} to {candidates[-1]}.{did_you_mean(name, candidates)}"
            problems.append(
                Problem(
                    "config.MODEL.ACTIVATION_CHECKPOINTING.BLOCKS", repr(name), "must name blocks of the model", fix
                )
            )
    if problems:
        raise ConfigError(problems)
    return [name for name in candidates if name in names]


def _stage_units(model: nn.Module, ends: Sequence[Sequence[int]]) -> list[str]:
    """Return the names of each stage's units up to its last block end.

    VISSL cuts a stage at every block end and recomputes each piece as a whole; here every block up to the last end is
    recomputed by itself, which keeps the same memory bound or a lower one, with the same results.
    """
    stages = getattr(getattr(model, "trunk", model), "stages", None)
    names = {module: name for name, module in model.named_modules()}
    if stages is None or len(ends) > len(stages):
        problem = Problem(
            "config.MODEL.TRUNK.REGNET.stage_checkpoints",
            str([list(stage) for stage in ends]),
            f"must be a list of block ends per stage, for {0 if stages is None else len(stages)} stages",
            "Use config.MODEL.ACTIVATION_CHECKPOINTING instead, which works with every trunk.",
        )
        raise ConfigError([problem])
    return [
        names[block]
        for stage, stops in zip(stages, ends, strict=False)
        for block in list(stage)[: max(stops, default=0)]
    ]


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _title(unit: PlannedUnit) -> str:
    return " + ".join(name or "(model)" for name in unit.modules)
