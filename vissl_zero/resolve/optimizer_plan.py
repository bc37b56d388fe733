"""The base optimizer and its schedules, from each form that OPTIMIZER may have, and their rules.

docs/optimizer_forms.md lists the forms.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import sqrt
from typing import TYPE_CHECKING, Any

from vissl_zero.config.blocks.optimizer import LinearEvalHead, Optimizer, ParamGroupKeys, Scheduler
from vissl_zero.config.components import component_keys, typed_options
from vissl_zero.config.run_config import RunConfig
from vissl_zero.errors import ConfigError, Problem
from vissl_zero.registry import OPTIMIZERS, SCHEDULERS
from vissl_zero.resolve.resolved import LarcPlan, OptimizerPlan
from vissl_zero.vissl.keys import ALIASES

if TYPE_CHECKING:
    from vissl_zero.resolve.decisions import Decisions

_KEY = "config.OPTIMIZER"
_WRITE = f"Write {_KEY}.base_optimizer.name=sgd, for example, or {_KEY}.name=sgd with {_KEY}.use_zero=True."


def form(cfg: RunConfig, decided: Decisions) -> list[Problem]:
    """Check that OPTIMIZER names one optimizer; flat and nested names must be equal."""
    block, nested = cfg.OPTIMIZER, cfg.OPTIMIZER.base_optimizer.name
    if nested == "zero":
        must = "must be the optimizer whose state zero shards, not zero itself"
        return [Problem(f"{_KEY}.base_optimizer.name", "'zero'", must, "Write sgd, for example.")]
    if block.name != "zero":
        if nested and block.name and nested != block.name:
            got = f"{block.name!r} and base_optimizer.name {nested!r}"
            return [
                Problem(f"{_KEY}.name", got, "must name one optimizer", f"Write {_KEY}.name=zero, or leave one out.")
            ]
        return []
    problems = []
    if block.use_zero is False:
        fix = f"Leave use_zero out, or write {_KEY}.name={nested or 'sgd'} for unsharded state."
        problems.append(Problem(f"{_KEY}.use_zero", "False", "contradicts name: zero", fix))
    if nested is None:
        problems.append(Problem(f"{_KEY}.base_optimizer", "", "must name the optimizer that zero shards", _WRITE))
    return problems


def known(cfg: RunConfig, decided: Decisions) -> list[Problem]:
    """Check that the optimizer and its keys are known."""
    # Reported by that rule. Which optimizer's keys to check is not known.
    if form(cfg, decided):
        return []
    if base_name(cfg.OPTIMIZER) not in OPTIMIZERS:
        return [OPTIMIZERS.unknown(base_name(cfg.OPTIMIZER))]
    try:
        options, _ = _optimizer_options(cfg.OPTIMIZER)
    except ConfigError as error:
        return list(error.problems)
    problems = []
    if options.get("nesterov") and not options.get("momentum"):
        fix = f"Give it a momentum, or write {_KEY}.nesterov=False."
        problems.append(Problem(f"{_KEY}.nesterov", "True", "needs a momentum above 0", fix))
    betas = options.get("betas")
    if betas is not None and not (len(betas) == 2 and all(0 <= beta < 1 for beta in betas)):
        problems.append(
            Problem(f"{_KEY}.betas", str(betas), "must be two numbers from 0 to below 1", "Write [0.9, 0.999].")
        )
    return problems


def larc(cfg: RunConfig, decided: Decisions) -> list[Problem]:
    """Check that LARC is not combined with LARS, which has the same layer-wise rates."""
    block, problems = cfg.OPTIMIZER, []
    if uses_larc(block) and base_name(block) == "lars":
        must = "cannot be put on top of lars, which adapts its rates by itself"
        problems.append(Problem(f"{_KEY}.use_larc", "True", must, f"Write {_KEY}.use_larc=False, or use sgd."))
    return problems


def groups(cfg: RunConfig, decided: Decisions) -> list[Problem]:
    """Check the entries of ``param_groups`` and ``linear_eval_heads``, and that lr_factors have a group per head."""
    block = cfg.OPTIMIZER
    try:
        rules = param_rules(block)
    except ConfigError as error:
        return list(error.problems)
    for index, rule in enumerate(rules):
        # A constant rate is the schedule's peak.
        if rule["constant_lr"] and block.param_schedulers.lr.name not in KEYS:
            must = f"needs a schedule whose peak is known, and {block.param_schedulers.lr.name} is one of your own"
            return [Problem(f"{_KEY}.param_groups[{index}].constant_lr", "True", must, "Leave it out.")]
    if problems := _head_rules(cfg):
        return problems
    if one_rate(block) and block.head_optimizer_params.lr_factors:
        fix = (
            f"Write lr_factors: [], or leave {_KEY}.construct_single_param_group_only and param_group_constructor out."
        )
        got = str(block.head_optimizer_params.lr_factors)
        must = "needs a group for each head, which this grouping of parameters does not have"
        return [Problem(f"{_KEY}.head_optimizer_params.lr_factors", got, must, fix)]
    return []


def _head_rules(cfg: RunConfig) -> list[Problem]:
    """Check that linear_eval_heads has a block per head, and that no other key sets the heads' rates or decay."""
    block, key = cfg.OPTIMIZER, f"{_KEY}.linear_eval_heads"
    if block.param_group_constructor != "linear_eval_heads" or one_rate(block):
        return []
    try:
        rules = head_rules(block)
    except ConfigError as error:
        return list(error.problems)
    count = len(cfg.MODEL.HEAD.PARAMS)
    if len(rules) != count:
        must = f"must have a block for each of the {count} heads"
        return [Problem(key, f"{len(rules)} blocks", must, "Write {lr: 1.0} for a head like the others.")]
    others = {
        "head_optimizer_params.lr_factors": bool(block.head_optimizer_params.lr_factors),
        "head_optimizer_params.use_different_lr": block.head_optimizer_params.use_different_lr,
        "head_optimizer_params.use_different_wd": block.head_optimizer_params.use_different_wd,
        "param_schedulers.weight_decay": bool(block.param_schedulers.weight_decay.name),
    }
    must = "cannot go with linear_eval_heads, which sets it for each head"
    return [Problem(f"{_KEY}.{name}", "", must, "Leave it out.") for name, is_set in others.items() if is_set]


_SCHEDULES = "config.OPTIMIZER.param_schedulers"


def used_schedules(cfg: RunConfig) -> dict[str, Scheduler]:
    """Return the schedules that this run follows."""
    block = cfg.OPTIMIZER.param_schedulers
    values = {"lr": block.lr}
    if cfg.OPTIMIZER.head_optimizer_params.use_different_lr:
        values["lr_head"] = block.lr_head
    named = {"weight_decay": block.weight_decay, "weight_decay_head": block.weight_decay_head}
    return values | {name: schedule for name, schedule in named.items() if schedule.name}


def _well_formed(cfg: RunConfig, decided: Decisions) -> list[Problem]:
    """Check that every schedule, and every part of a composite, is known and complete."""
    problems: list[Problem] = []
    for name, schedule in used_schedules(cfg).items():
        problems += _schedule(f"{_SCHEDULES}.{name}", asdict(schedule), cfg.OPTIMIZER.num_epochs)
    return problems


def _schedule(key: str, schedule: Mapping[str, Any], num_epochs: int) -> list[Problem]:
    name = schedule.get("name")
    if not isinstance(name, str) or name not in SCHEDULERS:
        return [replace(SCHEDULERS.unknown(str(name)), key=f"{key}.name")]
    problems = _missing(key, name, schedule)
    if problems:
        return problems
    if name == "multistep":
        return _multistep(key, schedule["values"], schedule["milestones"], num_epochs)
    if name == "composite":
        return _composite(key, schedule, num_epochs)
    return []


def _missing(key: str, name: str, schedule: Mapping[str, Any]) -> list[Problem]:
    """Return problems of unknown and of missing keys of a schedule."""
    # Parts of a composite are plain dicts, which the typed configuration has not checked.
    try:
        typed_options(Scheduler, schedule, key)
    except ConfigError as error:
        return list(error.problems)
    needed = [part for part in KEYS.get(name, ()) if part not in OPTIONAL_KEYS]
    fix = f"The {name} schedule needs {', '.join(needed)}."
    return [Problem(f"{key}.{part}", "", "must be given", fix) for part in needed if part not in schedule]


def _multistep(key: str, values: list[float], milestones: list[int], num_epochs: int) -> list[Problem]:
    if len(values) != len(milestones) + 1 or sorted(milestones) != list(milestones):
        got = f"values {list(values)}, milestones {list(milestones)}"
        fix = "Write one more value than milestones, the milestones ascending."
        return [Problem(key, got, "must have a value before, between and after the milestones", fix)]
    if milestones and milestones[-1] >= num_epochs:
        must = f"must lie before the end, config.OPTIMIZER.num_epochs={num_epochs}"
        return [
            Problem(
                f"{key}.milestones", str(list(milestones)), must, "Lower them, name another schedule, or train longer."
            )
        ]
    return []


def _composite(key: str, schedule: Mapping[str, Any], num_epochs: int) -> list[Problem]:
    parts, lengths, scaling = schedule["schedulers"], schedule["lengths"], schedule.get("interval_scaling") or []
    if not parts or len(lengths) != len(parts) or len(scaling) not in (0, len(parts)):
        got = f"{len(parts)} schedulers, {len(lengths)} lengths, {len(scaling)} interval_scaling"
        return [
            Problem(key, got, "must have a length and an interval_scaling per part", "Give the lists the same length.")
        ]
    # Negated comparisons, because comparisons with NaN are false. Thirds in decimals do not sum to 1 exactly.
    if not min(lengths) > 0 or not abs(sum(lengths) - 1) <= 1e-6:
        fix = "They are shares of the whole run, such as [0.1, 0.9]."
        return [Problem(f"{key}.lengths", str(list(lengths)), "must be positive and sum to 1", fix)]
    problems: list[Problem] = []
    for index, part in enumerate(parts):
        where = f"{key}.schedulers[{index}]"
        if isinstance(part, Mapping):
            problems += _schedule(where, part, num_epochs)
        else:
            problems.append(Problem(where, str(part), "must be a block with a name", "Write {name: linear, ...}."))
    return problems


def _auto_scaling(cfg: RunConfig, decided: Decisions) -> list[Problem]:
    """Check that a schedule with auto_lr_scaling rises above 0."""
    problems: list[Problem] = []
    for name, schedule in used_schedules(cfg).items():
        auto, key = schedule.auto_lr_scaling, f"OPTIMIZER.param_schedulers.{name}.auto_lr_scaling"
        if not auto.auto_scale:
            continue
        # A broken schedule is reported by ``_well_formed`` alone. Any length is fine here, hence 10**9 epochs.
        if schedule.name in KEYS and not _schedule(key, asdict(schedule), 10**9) and peak(plain(schedule)) <= 0:
            fix = "Write the schedule for base_value; its shape is kept."
            problems.append(Problem(f"config.{key}", "", "needs a schedule that rises above 0", fix))
    return problems


def _peak_value(cfg: RunConfig, decided: Decisions) -> list[Problem]:
    """Check that the schedule can be scaled to the peak value OPTIMIZER.lr."""
    value, schedule = cfg.OPTIMIZER.lr, cfg.OPTIMIZER.param_schedulers.lr
    if value is None:
        return []
    problems = []
    if schedule.name not in KEYS:
        must = f"must be left out: the schedule {schedule.name} is not one that can be scaled"
        problems.append(Problem("config.OPTIMIZER.lr", str(value), must, f"Write the rate into {_SCHEDULES}.lr."))
    elif not _schedule(_SCHEDULES, asdict(schedule), 10**9) and peak(plain(schedule)) <= 0:
        must = f"needs a schedule that rises above 0 ({_SCHEDULES}.lr)"
        problems.append(Problem("config.OPTIMIZER.lr", str(value), must, "Its shape is kept, and its peak is moved."))
    return problems


OPTIMIZER_RULES = (form, known, larc, groups, _well_formed, _auto_scaling, _peak_value)


_DEFAULT_WEIGHT_DECAY = 1e-4
# Keys of optimizers that are fields of the block; all other keys of an optimizer are in PARAMS.
_BLOCK_KEYS = ("momentum", "nesterov", "betas", "exclude_bias_and_norm")
_BASE = "config.OPTIMIZER.base_optimizer"


def base_name(block: Optimizer) -> str:
    """Return the name of the optimizer that runs: the nested one, else the flat one, else sgd."""
    flat = None if block.name == "zero" else block.name
    return block.base_optimizer.name or flat or "sgd"


def grouping(block: Optimizer) -> str:
    """Return how parameters are grouped: default, dino or single."""
    if block.construct_single_param_group_only:
        return "single"
    return "dino" if block.param_group_constructor == "dino" else "default"


def one_rate(block: Optimizer) -> bool:
    """Check whether the grouping ignores the heads' keys: heads then have the trunk's rate and weight decay."""
    return grouping(block) != "default"


def param_rules(block: Optimizer) -> list[dict[str, Any]]:
    """Return the entries of ``param_groups``, typed, with defaults filled in.

    Raises:
        ConfigError: an entry is not a block, or has unknown keys.
    """
    key = "config.OPTIMIZER.param_groups"
    for index, entry in enumerate(block.param_groups):
        if not isinstance(entry, Mapping):
            must = "must be a block of keys"
            raise ConfigError(
                [Problem(f"{key}[{index}]", str(entry), must, "Write {match: patch_embed, lr_factor: 0.2}.")]
            )
    return [typed_options(ParamGroupKeys, entry, f"{key}[{index}]") for index, entry in enumerate(block.param_groups)]


def head_rules(block: Optimizer) -> list[dict[str, Any]]:
    """Return the entries of ``linear_eval_heads``, typed; empty unless ``param_group_constructor`` is this name.

    Raises:
        ConfigError: an entry is not a block, or has unknown keys.
    """
    key = "config.OPTIMIZER.linear_eval_heads"
    if block.param_group_constructor != "linear_eval_heads" or one_rate(block):
        return []
    for index, entry in enumerate(block.linear_eval_heads):
        if not isinstance(entry, Mapping):
            problem = Problem(f"{key}[{index}]", str(entry), "must be a block of keys", "Write {lr: 0.1}.")
            raise ConfigError([problem])
    return [
        typed_options(LinearEvalHead, entry, f"{key}[{index}]") for index, entry in enumerate(block.linear_eval_heads)
    ]


def uses_larc(block: Optimizer) -> bool:
    """Check whether LARC is on; the nested key wins over the flat key."""
    return bool(_nested_first(block, "use_larc"))


def weight_decay(block: Optimizer) -> float:
    """Return the weight decay of the trunk's regularized parameters."""
    value = _nested_first(block, "weight_decay")
    return _DEFAULT_WEIGHT_DECAY if value is None else float(value)


def _optimizer_options(block: Optimizer) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the optimizer's keys, typed, with defaults filled in, and notes on keys without effect on it.

    Raises:
        ConfigError: unknown keys in PARAMS, or values of a wrong type.
    """
    name = base_name(block)
    schema = component_keys(OPTIMIZERS, name)
    known = set(getattr(schema, "__dataclass_fields__", ()))
    options, notes = {}, []
    for key in _BLOCK_KEYS:
        value = _nested_first(block, key)
        if value is not None and key in known:
            options[key] = value
        elif value is not None:
            notes.append(f"config.OPTIMIZER: {key} has no effect on {name}.")
    # The nested block wins, as it does for the keys above.
    options |= {**block.PARAMS, **block.base_optimizer.PARAMS}
    return typed_options(schema, options, f"{_BASE}.PARAMS"), tuple(notes)


def _nested_first(block: Optimizer, key: str) -> Any:
    nested = getattr(block.base_optimizer, key)
    return getattr(block, key) if nested is None else nested


def _larc(block: Optimizer) -> tuple[LarcPlan | None, tuple[str, ...]]:
    flat, nested = block.larc_config, block.base_optimizer.larc_config
    written = {key: getattr(block.larc_config, key) for key in vars(flat) if getattr(flat, key) is not None}
    written |= {key: value for key, value in vars(nested).items() if value is not None}
    if uses_larc(block):
        return LarcPlan(**written), ()
    return None, (
        "config.OPTIMIZER: LARC is off (use_larc is not True), so larc_config has no effect.",
    ) if written else ()


def optimizer_plan(cfg: RunConfig, global_batch: int, num_nodes: int) -> tuple[OptimizerPlan, tuple[str, ...]]:
    """Return the optimizer plan of a run, and notes to print about it.

    Args:
        cfg: a configuration that has passed the rules.
        global_batch: source images per optimizer step, for automatic scaling of the learning rate.
        num_nodes: number of machines, for VISSL's form of the scaling.
    """
    block = cfg.OPTIMIZER
    options, option_notes = _optimizer_options(block)
    larc, larc_notes = _larc(block)
    decay, head = weight_decay(block), block.head_optimizer_params
    schedules = resolved_schedules(block, global_batch, num_nodes)
    plan = OptimizerPlan(
        name=base_name(block),
        options=options,
        larc=larc,
        weight_decay=decay,
        head_weight_decay=head.weight_decay if head.use_different_wd and not one_rate(block) else decay,
        lr=schedules.lr,
        lr_head=schedules.lr_head,
        wd_schedule=schedules.weight_decay,
        wd_head_schedule=schedules.weight_decay_head,
        regularize_bn=block.regularize_bn,
        regularize_bias=block.regularize_bias,
        non_regularized=tuple(_own_names(block.non_regularized_parameters)),
        head_lr_factors=tuple(head.lr_factors),
        grouping=grouping(block),
        layer_decay=block.layer_decay,
        param_rules=tuple(param_rules(block)),
        head_rules=tuple(head_rules(block)),
    )
    return plan, (*option_notes, *larc_notes, *_warm_up_notes(block, schedules))


def _warm_up_notes(block: Optimizer, schedules: DerivedSchedules) -> list[str]:
    """Return a note for each schedule from which VISSL's scaling has removed the warm-up."""
    return [
        f"config.OPTIMIZER.param_schedulers.{name}: on one machine the warm-up is left out, as in VISSL, because it "
        "would begin at the scaled rate; auto_lr_scaling.keep_shape=true keeps it."
        for name, schedule in (("lr", schedules.lr), ("lr_head", schedules.lr_head))
        if len(schedule.get("schedulers", ())) < len(_parts(getattr(block.param_schedulers, name)))
        and (name == "lr" or block.head_optimizer_params.use_different_lr)
    ]


def _parts(scheduler: Scheduler) -> list[Any]:
    return scheduler.schedulers if scheduler.name == "composite" else []


def _own_names(parts: Sequence[str]) -> list[str]:
    """Return parts of parameters' names, each VISSL name followed by its name here (class_token, cls_token)."""
    return list(dict.fromkeys(name for part in parts for name in (part, ALIASES["parameters"].get(part, part))))


# Schedule -> the keys that it reads; the resolved configuration omits all other keys.
KEYS: dict[str, tuple[str, ...]] = {
    "constant": ("value",),
    "linear": ("start_value", "end_value"),
    "cosine": ("start_value", "end_value"),
    "cosine_warm_restart": (
        "start_value",
        "end_value",
        "restart_interval_length",
        "wave_type",
        "lr_multiplier",
        "is_adaptive",
    ),
    "step": ("values",),
    "multistep": ("values", "milestones"),
    "composite": ("schedulers", "lengths", "interval_scaling"),
}
# Keys that may be missing even in a part of a composite.
OPTIONAL_KEYS = ("interval_scaling", "lr_multiplier", "is_adaptive")
_VALUES = ("value", "start_value", "end_value")


@dataclass(frozen=True)
class DerivedSchedules:
    """Schedules of a run as plain dicts. None: the value is constant."""

    lr: dict[str, Any]
    lr_head: dict[str, Any]
    weight_decay: dict[str, Any] | None
    weight_decay_head: dict[str, Any] | None


def resolved_schedules(block: Optimizer, global_batch: int, num_nodes: int = 1) -> DerivedSchedules:
    """Return all schedules of OPTIMIZER, with learning rates scaled by the global batch if auto_scale is on."""
    schedulers, head = block.param_schedulers, block.head_optimizer_params
    has_own_lr = head.use_different_lr and not one_rate(block)
    if block.lr is None:
        lr = scaled(schedulers.lr, global_batch, num_nodes)
    else:  # by one factor, so that the largest rate is this one at any batch
        lr = plain(schedulers.lr)
        lr = _multiplied(lr, block.lr / peak(lr))
    decay = plain(schedulers.weight_decay) if schedulers.weight_decay.name else None
    # Heads with a weight decay of their own keep it: the schedule is the trunk's.
    decay_head = None if head.use_different_wd and not one_rate(block) else decay
    if schedulers.weight_decay_head.name and not one_rate(block):
        decay_head = plain(schedulers.weight_decay_head)
    return DerivedSchedules(
        lr=lr,
        lr_head=scaled(schedulers.lr_head, global_batch, num_nodes) if has_own_lr else lr,
        weight_decay=decay,
        weight_decay_head=decay_head,
    )


def scaled(scheduler: Scheduler, global_batch: int, num_nodes: int = 1) -> dict[str, Any]:
    """Return a schedule, scaled by the batch if auto_scale is on: https://arxiv.org/abs/1706.02677.

    The rate becomes ``base_value * ratio``, or ``base_value * sqrt(ratio)``, where ``ratio`` is
    ``global_batch / base_lr_batch_size``. With ``keep_shape`` the schedule is multiplied by one factor, so that the
    rate is its peak. Otherwise it follows ``get_scaled_lr_scheduler`` of vissl/utils/hydra_config.py at 09270ed2.
    """
    schedule, auto = plain(scheduler), scheduler.auto_lr_scaling
    if not auto.auto_scale:
        return schedule
    ratio = global_batch / auto.base_lr_batch_size
    wanted = auto.base_value * (sqrt(ratio) if auto.scaling_type == "sqrt" else ratio)
    if auto.keep_shape:
        return _multiplied(schedule, wanted / peak(schedule))
    return _as_in_vissl(schedule, wanted, auto.base_value * ratio / num_nodes, num_nodes)


def _as_in_vissl(schedule: dict[str, Any], wanted: float, of_one_machine: float, num_nodes: int) -> dict[str, Any]:
    """Scale as VISSL: each part starts at ``wanted``, but a linear part rises to it from the rate of one machine.

    On one machine the last linear part is removed unless it falls.
    """
    name = schedule["name"]
    if name == "linear":
        return {**schedule, "end_value": wanted}
    if name != "composite":
        first = schedule.get("start_value") or next(iter(schedule.get("values", ())), 0.0) or peak(schedule)
        return _multiplied(schedule, wanted / (first or 1.0))
    parts = [_as_in_vissl(part, wanted, of_one_machine, num_nodes) for part in schedule["schedulers"]]
    # VISSL's warm-up starts at the rate of one machine's share of the batch, as Goyal et al. (section 2.2) start at the
    # rate of one worker.
    parts = [{**part, "start_value": of_one_machine} if part["name"] == "linear" else part for part in parts]
    lines = [index for index, part in enumerate(parts) if part["name"] == "linear"]
    if not lines or num_nodes > 1 or of_one_machine > wanted or len(parts) == 1:
        return {**schedule, "schedulers": parts}
    return _without_part({**schedule, "schedulers": parts}, lines[-1])


def _without_part(schedule: dict[str, Any], index: int) -> dict[str, Any]:
    """Return a composite without the part ``index``; the other lengths are rescaled to sum to 1."""
    parts, lengths, scaling = (
        [value for at, value in enumerate(schedule.get(key) or []) if at != index]
        for key in ("schedulers", "lengths", "interval_scaling")
    )
    if len(parts) == 1:
        interval = {"update_interval": schedule["update_interval"]} if "update_interval" in schedule else {}
        return {**interval, **parts[0]}
    # The other parts take over the time of the one that is removed.
    shares = [length / sum(lengths) for length in lengths]
    return {**schedule, "schedulers": parts, "lengths": shares, "interval_scaling": scaling}


def plain(scheduler: Scheduler) -> dict[str, Any]:
    """Convert a schedule to the dict that builds it: its name, the keys that it reads, its update interval."""
    return _own_keys(asdict(scheduler))


def _own_keys(schedule: Mapping[str, Any]) -> dict[str, Any]:
    name = schedule["name"]
    # A schedule of the user's own gets every key: nothing tells which of them it reads.
    keys = KEYS.get(name, tuple(key for key in schedule if key not in ("name", "auto_lr_scaling", "update_interval")))
    kept = {"name": name, **{key: schedule[key] for key in keys if key in schedule}}
    if name == "composite":
        kept["schedulers"] = [_own_keys(part) for part in schedule["schedulers"]]
    if schedule.get("update_interval"):
        kept["update_interval"] = schedule["update_interval"]
    return kept


def peak(schedule: Mapping[str, Any]) -> float:
    """Return the largest value of a schedule."""
    if schedule["name"] == "composite":
        return max((peak(part) for part in schedule["schedulers"]), default=0.0)
    return max([*(schedule[key] for key in _VALUES if key in schedule), *schedule.get("values", [])], default=0.0)


def _multiplied(schedule: dict[str, Any], factor: float) -> dict[str, Any]:
    result = dict(schedule)
    for key in _VALUES:
        if key in result:
            result[key] = result[key] * factor
    if "values" in result:
        result["values"] = [value * factor for value in result["values"]]
    if "schedulers" in result:
        result["schedulers"] = [_multiplied(part, factor) for part in result["schedulers"]]
    return result
