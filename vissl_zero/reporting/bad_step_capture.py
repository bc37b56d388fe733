"""The rule for bad steps, and the hook that captures them before their update (``HOOKS.CAPTURE_BAD_STEP``)."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

import rich

from vissl_zero.checkpoint.bad_step import FOLDER_NAME, BadStep, NotWrittenError, read_facts, write_bad_step
from vissl_zero.checkpoint.snapshot import ForwardState
from vissl_zero.collectives import broadcast_object
from vissl_zero.config.blocks.output import CaptureBadStep
from vissl_zero.engine.hook import Hook, Run
from vissl_zero.errors import CheckpointError
from vissl_zero.reporting.findings import add_finding
from vissl_zero.terminal import print_line

if TYPE_CHECKING:
    from vissl_zero.data.dataset import ImageBatch

logger = logging.getLogger(__name__)
_WINDOW = 100  # steps of the running median
_FEWEST = 20  # steps before a spike can be found, because the loss falls fast at first
_NAMES = ("loss", "gradient norm")


class BadStepRule:
    """The rule for bad steps, by loss and gradient norm.

    Args:
        spike_factor: a value of at least this factor times its running median is a spike; None: spikes are not bad.
    """

    def __init__(self, spike_factor: float | None):
        self._factor = spike_factor
        self._recent: list[deque[float]] = [deque(maxlen=_WINDOW) for _ in _NAMES]

    def verdict(self, figures: Sequence[float], loss_scale: float) -> str:
        """Return why a step is bad, "" if it is good; stores its values for the median.

        Args:
            figures: loss and gradient norm.
            loss_scale: loss scale of the step. Above 1, gradients overflow while the scaler searches its scale, and
                such steps are good.
        """
        loss, norm = figures
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        if not math.isfinite(norm):
            return f"the gradient norm is {norm}" if loss_scale <= 1.0 else ""
        # Judged before they are added: a spike must not raise the median that it is compared with.
        reasons = [text for text in map(self._spike, _NAMES, figures, self._recent) if text]
        for recent, figure in zip(self._recent, figures, strict=True):
            recent.append(figure)
        return " and ".join(reasons)

    def _spike(self, name: str, figure: float, recent: Sequence[float]) -> str:
        if self._factor is None or len(recent) < _FEWEST:
            return ""
        usual = median(recent)
        # A loss may be negative; then there is no factor.
        if usual <= 0.0 or figure < self._factor * usual:
            return ""
        return f"the {name} is {figure:.4g}, {figure / usual:.3g} times its median"

    def state_dict(self) -> list[list[float]]:
        """Return the values of the running medians."""
        return [list(recent) for recent in self._recent]

    def load_state_dict(self, state: Sequence[Sequence[float]]) -> None:
        """Restore what ``state_dict`` returned."""
        for recent, figures in zip(self._recent, state, strict=True):
            recent.extend(figures)


class BadStepCapture(Hook):
    """Writes bad steps to the run folder: at most MOST in a run, and only the first of consecutive bad steps.

    Cost: before each update, an all-reduce of two numbers; and a copy of buffers and of the loss's state.

    Args:
        options: the block ``HOOKS.CAPTURE_BAD_STEP``.
    """

    def __init__(self, options: CaptureBadStep):
        self._most = options.MOST
        self._console = rich.get_console()
        self._rule = BadStepRule(options.SPIKE_FACTOR)
        self._was_bad = False
        self._before: ForwardState | None = None
        self._micro_batches: Sequence[ImageBatch] = ()
        self._captured: set[int] = set()

    def state_dict(self) -> dict[str, Any]:
        """Return the values of the running medians, and whether the last step was bad."""
        return {"recent": self._rule.state_dict(), "was_bad": self._was_bad}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state; see ``Hook``."""
        self._rule.load_state_dict(state["recent"])
        self._was_bad = bool(state["was_bad"])

    def on_start(self, run: Run) -> None:
        """Count the captures of the run so far; a resumed run may have some. Collective."""
        # From rank 0, since the decision to capture must be the same on all ranks and folders may be local.
        self._captured = broadcast_object(_captured(run) if run.is_main else set())
        if self._captured:
            run.captured = run.folder / FOLDER_NAME / str(max(self._captured))

    def on_batch(self, run: Run, micro_batches: Sequence[ImageBatch]) -> None:
        """Copy the state that the step changes before its update, unless the run has MOST captures."""
        if len(self._captured) < self._most:
            self._before, self._micro_batches = ForwardState.of(run).copy(), micro_batches

    def before_update(self, run: Run, figures: Callable[[], tuple[float, float]]) -> None:
        """Judge the step, and capture it. Collective."""
        # Forgotten here, so that the copy does not take memory during the update.
        before, self._before = self._before, None
        if before is None:
            return
        # Only now, because it is collective and waits for the device.
        loss, norm = figures()
        scale = (run.sharded.loss_scale_state() or {}).get("scale", 1.0)
        why = self._rule.verdict((loss, norm), scale)
        is_first, self._was_bad = not self._was_bad, bool(why)
        step = run.step + 1
        # One cause often makes many steps bad, and the first shows it best. A resumed run repeats captured steps.
        if not why or not is_first or step in self._captured:
            return
        # As texts: JSON has neither NaN nor infinity, and ``repr`` keeps every digit for the comparison with a replay.
        facts = BadStep(step, why, repr(loss), repr(norm), run.lr_factor)
        try:
            folder, num_bytes = write_bad_step(run, facts, before, self._micro_batches)
        except (NotWrittenError, CheckpointError) as error:
            if run.is_main:
                logger.warning("Bad step %d (%s) could not be captured: %s", step, why, error)
            return
        self._captured.add(step)
        run.captured = folder
        if run.is_main:
            sentence = (
                f"step {step:,} was bad: {why}. It is captured ({num_bytes / 1e6:,.1f} MB); to look into it: "
                f"vissl-zero replay {folder}"
            )
            add_finding(run, sentence)
            print_line(f"warning: {sentence}", self._console)


def _captured(run: Run) -> set[int]:
    """List the steps whose capture is complete."""
    steps = set()
    for path in (run.folder / FOLDER_NAME).glob("[0-9]*"):
        try:
            steps.add(read_facts(path).step)
        except CheckpointError:
            continue
    return steps
