"""A momentum teacher of a user's own loop: a copy of the model that follows it, sharded as it is."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import nn

from vissl_zero.errors import ConfigError, Problem
from vissl_zero.sharding.checks.replica_check import is_marked_sharded
from vissl_zero.sharding.sharded_model import ShardedModel
from vissl_zero.sharding.state.teacher import follow_

M = TypeVar("M", bound=nn.Module)
Decay = float | Callable[[int], float]

_KEY = "_vissl_zero_ema"


def ema(model: M, decay: Decay) -> M:
    """Make a momentum teacher of ``model`` before ``initialize``, which shards both alike.

    For example::

        teacher = vissl_zero.ema(model, decay=0.996)
        model, optimizer = vissl_zero.initialize(model, optimizer, zero)
        with torch.no_grad():
            targets = teacher(x)

    Each ``optimizer.step()`` that updates moves it: ``teacher = decay * teacher + (1 - decay) * model``, parameters
    only. Batch norm keeps statistics of the teacher's own batches, as after ``copy.deepcopy(model)``, and
    ``teacher.eval()`` works. ``optimizer.save`` and ``load`` include it; ``optimizer.full_ema_state()`` exports it. At
    level 3 a rank keeps 1/N of it, and following costs no communication (BYOL,
    https://arxiv.org/abs/2006.07733, section 3.1).

    Args:
        model: not yet given to ``initialize``.
        decay: decay from 0 (copy) to 1 (stay), or a function of the number of the update, 1 for the first.
    Returns:
        The teacher, an object of the model's class, frozen. Until ``initialize``, a full copy. Every rank must call it
        equally often, in the same order as the model.
    Raises:
        ConfigError: the model is sharded already, has a teacher, or ``decay`` is out of range.
    """
    problems = []
    if is_marked_sharded(model):
        fix = "Call ema() before initialize()."
        problems.append(Problem("model", type(model).__name__, "was already passed to initialize()", fix))
    if _KEY in model.__dict__:
        fix = "Use the teacher that the first call returned."
        problems.append(Problem("model", type(model).__name__, "already has a teacher", fix))
    if not callable(decay) and not 0 <= decay <= 1:
        problems.append(
            Problem("decay", str(decay), "must be from 0 to 1, or a function of the update's number", "Write 0.996.")
        )
    if problems:
        raise ConfigError(problems)
    teacher = copy.deepcopy(model).requires_grad_(False)
    model.__dict__[_KEY] = Ema(teacher, decay)  # not an attribute: torch would make it a part of the model
    return teacher


@dataclass
class Ema:
    """A teacher and how fast it follows."""

    teacher: nn.Module
    decay: Decay

    def decay_at(self, num_updates: int) -> float:
        """Return the decay after so many updates."""
        return self.decay(num_updates) if callable(self.decay) else self.decay

    def adopt(self, sharded: ShardedModel) -> None:
        """Shard the teacher as the model is sharded. Collective."""
        modes = {module: module.training for module in self.teacher.modules()}
        sharded.adopt_teacher(self.teacher)
        for module, mode in modes.items():
            module.training = mode

    @torch.no_grad()
    def follow(self, model: nn.Module, num_updates: int) -> None:
        """Move the teacher of a model that is not sharded."""
        for average, value in zip(self.teacher.parameters(), model.parameters(), strict=True):
            follow_(average, value, self.decay_at(num_updates))


def ema_of(model: nn.Module) -> Ema | None:
    """Return the teacher that ``ema`` has made of ``model``, if any."""
    return model.__dict__.get(_KEY)


def take_ema(model: nn.Module) -> Ema | None:
    """Take the teacher that ``ema`` has made of ``model``, if any; from now on it is its caller's."""
    ema: Ema | None = model.__dict__.pop(_KEY, None)
    return ema
