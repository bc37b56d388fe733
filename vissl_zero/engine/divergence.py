"""What to do when the loss is no longer finite: write what is known to a file, then end all ranks together."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from torch import Tensor

from vissl_zero.collectives import all_gather_rows
from vissl_zero.errors import VisslZeroError

if TYPE_CHECKING:
    from vissl_zero.engine.hook import Run, Step
    from vissl_zero.sharding.strategy import StepResult

FILE_NAME = "diverged.json"
_MOST_NAMED = 3


class DivergedError(VisslZeroError):
    """The loss, or gradients at any scale, became NaN or infinite; raised on every rank at the same step."""


def diverged(run: Run, step: Step, result: StepResult, loss: float, local_loss: Tensor) -> DivergedError:
    """The error to raise; rank 0 writes ``diverged.json`` into the run folder.

    Args:
        run: in progress, perhaps a step further.
        step: that went wrong.
        result: of its update.
        loss: of all ranks.
        local_loss: this rank's share of it, 0-d.
    Cost: collective; one all-gather of a number per rank.
    """
    shares = all_gather_rows(local_loss.reshape(1))
    ranks = (~shares.isfinite()).nonzero().flatten().tolist()
    params = result.nonfinite_gradients()
    if run.is_main:
        facts = {
            "step": step.step,
            "epoch": step.epoch,
            "learning_rate": step.lr,
            "loss": str(loss),
            "loss_by_rank": [str(share) for share in shares.tolist()],
            "ranks": ranks,
            "parameters": params,
        }
        run.folder.mkdir(parents=True, exist_ok=True)
        (run.folder / FILE_NAME).write_text(json.dumps(facts, indent=1) + "\n")
    named = ", ".join(params[:_MOST_NAMED]) + (f" and {len(params) - _MOST_NAMED} more" * (len(params) > _MOST_NAMED))
    gradients = f"Gradients that are not finite: {named or 'none'}"
    when = f"at step {step.step} (learning rate {step.lr:g})"
    if ranks:
        what = f"The loss became {loss} {when} on rank {', '.join(map(str, ranks))}."
    else:
        what = f"The gradients overflow {when} at a loss scale of 1."
    return DivergedError(
        f"{what} "
        f"{gradients}; {FILE_NAME} in the run folder has the details. "
        "Lower the learning rate, lengthen the warm-up, or clip gradients with config.ZERO.clip_grad=1.0."
    )
