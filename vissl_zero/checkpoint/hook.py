"""When a run saves, and when it stops because it was asked to."""

from __future__ import annotations

from collections.abc import Sequence

import rich
import torch.distributed as dist
from rich.console import Console

from vissl_zero import collectives
from vissl_zero.checkpoint.saver import Saver
from vissl_zero.engine import stopping
from vissl_zero.engine.hook import Hook, Run, StepRecord


class CheckpointHook(Hook):
    """Saves as ``CHECKPOINT`` says, and saves and stops when any rank is asked to (``engine/stopping.py``).

    It must be the last of the hooks, so that the others have seen the step that is saved.

    Args:
        saver: writes.
        hooks: all other hooks, whose state is saved.
        epochs, steps: between checkpoints; -1: none by these. The end of the run is saved unless both are -1.
        console: where to say that the run stops.

    Cost: nothing in a step that neither saves nor follows a save whose files are still being written.
    """

    def __init__(self, saver: Saver, hooks: Sequence[Hook], epochs: int, steps: int, console: Console | None = None):
        self._saver = saver
        self._hooks = list(hooks)
        self._epochs = epochs
        self._steps = steps
        self._console = console or rich.get_console()

    def on_step(self, run: Run, record: StepRecord) -> None:
        self._saver.advance()
        is_last = run.step >= run.num_steps
        if run.is_asked_to_stop and not is_last:
            self._stop(run)
        elif self._steps > 0 and run.step % self._steps == 0 and not is_last:
            self._saver.save(run, self._hooks)

    def on_epoch_end(self, run: Run) -> None:
        is_last = run.step >= run.num_steps
        is_wanted = self._epochs > 0 or self._steps > 0
        if is_wanted and (is_last or (self._epochs > 0 and (run.epoch + 1) % self._epochs == 0)):
            is_over = run.epoch_samples >= run.loader.order.num_kept  # not where MAX_STEPS ends the run in mid-epoch
            self._saver.save(run, self._hooks, is_over)
        if is_last:
            self._saver.finish()  # nobody looks after it from here on

    def close(self, run: Run) -> None:
        self._saver.close()

    def _stop(self, run: Run) -> None:
        """Save now; the loop ends after this step, with the first reason in the order of ranks."""
        asked = stopping.asked()
        stops = [asked] * collectives.world_size()
        if len(stops) > 1:
            dist.all_gather_object(stops, asked)
        run.stop = next(stop for stop in stops if stop is not None)
        self._saver.save(run, self._hooks)
        self._saver.finish()
        if run.is_main:
            latest = self._saver.latest_step
            saved = "no checkpoint could be saved" if latest is None else f"the checkpoint of step {latest} is saved"
            self._console.print(
                f"Stopping after step {run.step} ({run.stop.reason}); {saved}. The same command goes on from there.",
                markup=False,
                highlight=False,
                soft_wrap=True,
            )
