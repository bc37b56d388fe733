"""A momentum teacher for a custom loop: a moving average of the model, sharded like the model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import nn

from vissl_zero.errors import ConfigError, Problem
from vissl_zero.sharding.checks.replica_check import class_name, is_marked_sharded
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

    Each update by ``optimizer.step()`` sets ``teacher = decay * teacher + (1 - decay) * model``, for parameters only
    (BYOL, https://arxiv.org/abs/2006.07733, section 3.1). Batch norm has statistics of the teacher's own batches, as
    after ``copy.deepcopy(model)``, and ``teacher.eval()`` works. ``optimizer.save`` and ``load`` include the teacher;
    ``optimizer.full_ema_state()`` exports it. At level 3 a rank keeps 1/N of it, and the update has no communication.

    Args:
        model: model that has not been passed to ``initialize``.
        decay: decay from 0 (copy the model) to 1 (keep the teacher), or a function of the update's number, from 1.
    Returns:
        The frozen teacher, of the model's class; until ``initialize``, a full copy. Every rank must call the teacher
        equally often, in the same order relative to the model.
    Raises:
        ConfigError: the model is sharded already, has a teacher, or ``decay`` is out of range.
    """
    problems = []
    if is_marked_sharded(model):
        fix = "Call ema() before initialize()."
        problems.append(Problem("model", class_name(model), "was already passed to initialize()", fix))
    if _KEY in model.__dict__:
        fix = "Use the teacher that the first call returned."
        problems.append(Problem("model", class_name(model), "already has a teacher", fix))
    if not callable(decay) and not 0 <= decay <= 1:
        problems.append(
            Problem("decay", str(decay), "must be from 0 to 1, or a function of the update's number", "Write 0.996.")
        )
    if problems:
        raise ConfigError(problems)
    teacher = copy.deepcopy(model).requires_grad_(False)
    model.__dict__[_KEY] = Ema(teacher, decay)  # past __setattr__, which would register the teacher as a submodule
    return teacher


@dataclass
class Ema:
    """A teacher and its decay."""

    teacher: nn.Module
    decay: Decay

    def decay_at(self, num_updates: int) -> float:
        """Return the decay of update ``num_updates``, from 1."""
        return self.decay(num_updates) if callable(self.decay) else self.decay

    def adopt(self, sharded: ShardedModel) -> None:
        """Shard the teacher like the model. Collective."""
        # Adopting sets the mode of every module; the user may have chosen train() or eval() already.
        modes = {module: module.training for module in self.teacher.modules()}
        sharded.adopt_teacher(self.teacher)
        for module, mode in modes.items():
            module.training = mode

    @torch.no_grad()
    def follow(self, model: nn.Module, num_updates: int) -> None:
        """Update the teacher of a model that is not sharded."""
        for average, value in zip(self.teacher.parameters(), model.parameters(), strict=True):
            follow_(average, value, self.decay_at(num_updates))


def ema_of(model: nn.Module) -> Ema | None:
    """Return the teacher that ``ema`` has made of ``model``, or None."""
    return model.__dict__.get(_KEY)


def take_ema(model: nn.Module) -> Ema | None:
    """Return the teacher that ``ema`` has made of ``model``, or None, and detach it from the model."""
    ema: Ema | None = model.__dict__.pop(_KEY, None)
    return ema
