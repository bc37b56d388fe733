"""``HOOKS.EMA_MODEL``: a running average of the weights, and ``weights_ema.safetensors`` at the end."""

from __future__ import annotations

from typing import Any

import vissl_zero
from vissl_zero.config.blocks.output import EmaModel
from vissl_zero.engine.hook import Hook, Run, Step
from vissl_zero.reporting.weights_file import stream_weights

FILE_NAME = "weights_ema.safetensors"


class WeightAverageHook(Hook):
    """Follows the weights, step by step, as VISSL's ``EmaHook`` does: a copy in the warm-up, an average after it.

    Skipped steps change neither. Cost: one more copy of what a rank holds, no communication but at the end.

    Args:
        options: UPDATE_ITER, WARMUP and DECAY.
    """

    def __init__(self, options: EmaModel):
        self._options = options
        self._has_begun = False

    def on_step(self, run: Run, step: Step) -> None:
        """Update the average every UPDATE_ITER steps."""
        if step.skipped or step.step % self._options.UPDATE_ITER:
            return
        self._has_begun = True
        length = run.steps_per_epoch * run.plan.num_epochs
        is_warm = (step.step - 1) / length >= self._options.WARMUP
        run.sharded.average(self._options.DECAY if is_warm else 0.0)

    def state_dict(self) -> dict[str, Any]:
        """Whether there is an average; the average itself is the model's."""
        return {"has_begun": self._has_begun}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See ``Hook``."""
        self._has_begun = bool(state["has_begun"])

    def on_end(self, run: Run) -> None:
        """Gather the average tensor by tensor; rank 0 writes it."""
        if not self._has_begun:
            return
        with run.sharded.averaged():
            run.sharded.consolidate_buffers()  # as in weights.safetensors
            metadata = {"vissl_zero": vissl_zero.__version__, "recipe": run.plan.recipe, "step": str(run.step)}
            stream_weights(run.sharded.whole_tensors(), run.folder / FILE_NAME, metadata, run.is_main)
