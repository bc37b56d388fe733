"""ZeRO for Classy Vision: importing this module registers a sharded optimizer and a task that uses it.

::

    import vissl_zero.integration.classy

    config = {
        "name": "vissl_zero_classification_task",
        "optimizer": {
            "name": "vissl_zero",
            "zero": {"level": 3, "clip_grad": 1.0},
            "base_optimizer": {"name": "sgd", "momentum": 0.9},
            "param_schedulers": {"lr": {"name": "constant", "value": 0.1}},
        },
        ...                     # other keys as for Classy's "classification_task"
    }

Classy's own optimizer ``zero`` is not changed.
"""

from __future__ import annotations

from typing import Any

# isort: split
from classy_vision.optim import ClassyOptimizer, build_optimizer, register_optimizer
from classy_vision.tasks import ClassificationTask, register_task
from torch import nn

from vissl_zero.errors import ConfigError, Problem
from vissl_zero.integration.initialize import initialize
from vissl_zero.integration.sharded_optimizer import ZeroOptimizer


@register_optimizer("vissl_zero")
class ClassyZero(ClassyOptimizer):
    """A Classy optimizer whose state and model are sharded by ``vissl_zero.initialize``.

    Args:
        base_optimizer: Classy optimizer with element-wise updates.
        zero: see ``initialize``.
    Attributes:
        model: the model; the task sets it before ``set_param_groups``, which shards it in place.
    """

    def __init__(self, base_optimizer: ClassyOptimizer, zero: Any):
        super().__init__()
        self.base_optimizer = base_optimizer
        self.zero = zero
        self.model: nn.Module | None = None
        self.optimizer: ZeroOptimizer | None = None

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> ClassyZero:
        """Build from ``{"name": "vissl_zero", "zero": {...}, "base_optimizer": {...}}``.

        Raises:
            ConfigError: a block is missing.
        """
        for key, example in (("base_optimizer", '{"name": "sgd"}'), ("zero", '{"level": 3}')):
            if key not in config:
                raise ConfigError([Problem(f"optimizer.{key}", "", "must be given", f"Write {key}: {example}.")])
        return cls(build_optimizer(config["base_optimizer"]), config["zero"])

    def prepare(self, param_groups: Any) -> None:
        """Shard the model. Collective; ``set_param_groups`` calls this."""
        if self.model is None:
            fix = "Name the task vissl_zero_classification_task."
            raise ConfigError([Problem("optimizer.name", "vissl_zero", "needs a task that gives it the model", fix)])
        # Classy builds its torch optimizer only here, and initialize() needs the instance.
        self.base_optimizer.prepare(param_groups)
        _, self.optimizer = initialize(self.model, self.base_optimizer.optimizer, self.zero)

    def _update_schedule(self, param_groups: Any) -> None:
        """Copy all options of the groups except the parameters: those of the optimizer are shards of Classy's."""
        assert self.optimizer is not None
        for group, values in zip(self.optimizer.param_groups, param_groups, strict=True):
            group.update({key: value for key, value in values.items() if key != "params"})


@register_task("vissl_zero_classification_task")
class ZeroClassificationTask(ClassificationTask):
    """Classy's classification task with support for the optimizer ``vissl_zero``."""

    def prepare_optimizer(self, optimizer: ClassyOptimizer, model: nn.Module, loss: nn.Module | None = None) -> None:
        """Set the optimizer's model, then call Classy's method.

        Raises:
            ConfigError: the task accumulates, clips or uses AMP, which the optimizer does itself.
        """
        if isinstance(optimizer, ClassyZero):
            self._refuse_double()
            # Classy wraps models in an object that is not a module, and whose call would bypass the sharding hooks.
            optimizer.model = getattr(model, "classy_model", model)
        super().prepare_optimizer(optimizer=optimizer, model=model, loss=loss)

    def _refuse_double(self) -> None:
        samples = self.simulated_global_batchsize
        if samples is not None and samples != self.get_global_batchsize():
            must = "cannot go with optimizer vissl_zero, which does not see the task's accumulation"
            raise ConfigError([Problem("simulated_global_batchsize", str(samples), must, "Leave it out.")])
        if self.clip_grad_norm is not None:
            must = "cannot go with optimizer vissl_zero: the task would clip by the norm of a shard"
            fix = 'Write "zero": {"clip_grad": ...}.'
            raise ConfigError([Problem("clip_grad_norm", str(self.clip_grad_norm), must, fix)])
        if self.amp_args is not None:
            must = "cannot go with optimizer vissl_zero, which scales the loss itself"
            raise ConfigError([Problem("amp_args", str(self.amp_args), must, 'Write "zero": {"bf16": true}.')])

    @property
    def model(self) -> nn.Module:
        """Return the model that the loop calls: the sharded model instead of Classy's DDP wrapper."""
        return self.base_model if isinstance(self.optimizer, ClassyZero) else super().model

    def init_distributed_data_parallel_model(self) -> None:
        """Skip DDP around a sharded model."""
        # DDP would broadcast parameters that a rank has only in part, and reduce gradients that are averaged already.
        if not isinstance(self.optimizer, ClassyZero):
            super().init_distributed_data_parallel_model()
