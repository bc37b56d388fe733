"""Learning rate, weight decay and frozen parameters: what changes from step to step, set before each step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from vissl_zero.config.derive.optimizer_plan import peak
from vissl_zero.config.resolved import ResolvedRun
from vissl_zero.errors import ConfigError, Problem, did_you_mean
from vissl_zero.models.weight_names import without_wrappers
from vissl_zero.optim.param_groups import ParamGroup
from vissl_zero.optim.schedules import build_schedule
from vissl_zero.sharding.strategy import Sharded

Schedule = Callable[[int], float]


class Schedules:
    """Sets the hyperparameters of every parameter group as functions of the optimizer step.

    Args:
        plan: the resolved run.
        groups: as given to the strategy; a group's ``name`` finds it in the optimizer.
        steps_per_epoch: optimizer steps of one epoch.
    """

    def __init__(self, plan: ResolvedRun, groups: Sequence[ParamGroup], steps_per_epoch: int):
        optimizer = plan.optimizer

        def build(config: dict | None) -> Schedule | None:
            return build_schedule(config, steps_per_epoch, plan.num_epochs) if config else None

        lr, lr_head = build(optimizer.lr), build(optimizer.lr_head)
        wd, wd_head = build(optimizer.wd_schedule), build(optimizer.wd_head_schedule)
        assert lr is not None
        self._lr = lr
        self._groups = {group.name: group for group in groups}
        self._lr_of = {g.name: (lr_head or lr) if g.is_head else lr for g in groups}
        for group in groups:
            if group.has_constant_lr:
                self._lr_of[group.name] = _constant(peak(optimizer.lr_head if group.is_head else optimizer.lr))
        self._wd_of = {g.name: wd_head if g.is_head else wd for g in groups if g.is_decayed}

    def lr(self, step: int) -> float:
        """The trunk's learning rate at optimizer step ``step`` (from 0)."""
        return self._lr(step)

    def apply(self, sharded: Sharded, step: int) -> float:
        """Set every group's ``lr`` and ``weight_decay`` for optimizer step ``step`` (from 0); gives the trunk's LR."""
        for group in sharded.optimizer.param_groups:
            name = group["name"]
            group["lr"] = self._lr_of[name](step) * self._groups[name].lr_factor
            schedule = self._wd_of.get(name)
            if schedule is not None:
                group["weight_decay"] = schedule(step) * self._groups[name].wd_factor
        return self._lr(step)


def _constant(value: float) -> Schedule:
    return lambda step: value


class Frozen:
    """Parameters that are frozen for the first steps (VISSL's ``TEMP_FROZEN_PARAMS_ITER_MAP``).

    Args:
        entries: pairs of full parameter name, in which what DDP and FSDP put there is allowed, and number of steps.
        known: the model's parameter names.
    Raises:
        ConfigError: a name is not a parameter.
    """

    def __init__(self, entries: Iterable[Sequence], known: Iterable[str]):
        names = set(known)
        self._until: dict[str, int] = {}
        problems = []
        for entry in entries:
            name, num_steps = without_wrappers(str(entry[0])).removeprefix("module."), int(entry[1])
            if name not in names:
                problems.append(
                    Problem(
                        "config.MODEL.TEMP_FROZEN_PARAMS_ITER_MAP",
                        repr(name),
                        "must name parameters of the model",
                        f"Use a full parameter name.{did_you_mean(name, names)}",
                    )
                )
            self._until[name] = num_steps
        if problems:
            raise ConfigError(problems)

    def at(self, step: int) -> set[str]:
        """Names frozen at optimizer step ``step`` (from 0)."""
        return {name for name, until in self._until.items() if step < until}
