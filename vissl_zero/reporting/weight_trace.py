"""Full weights after every step, for comparing two runs parameter by parameter (``vissl-zero verify``)."""

from __future__ import annotations

from vissl_zero.engine.hook import Hook, Run, Step
from vissl_zero.registry import HOOKS
from vissl_zero.reporting.weights_file import stream_weights

FOLDER = "weight_trace"


@HOOKS.register("weight_trace")
class WeightTrace(Hook):
    """Saves the full weights after every step into the run folder's weight_trace/ (large: one model per step)."""

    def on_start(self, run: Run) -> None:
        """Save what training starts from, as step 0. Collective."""
        self._save(run, 0)

    def on_step(self, run: Run, step: Step) -> None:
        """Save what the step left. Collective."""
        self._save(run, step.step)

    def _save(self, run: Run, step: int) -> None:
        folder = run.folder / FOLDER
        if run.is_main:
            folder.mkdir(exist_ok=True)
        path = folder / f"{step:06d}.safetensors"
        stream_weights(run.sharded.whole_tensors(), path, {"step": str(step)}, run.is_main)
