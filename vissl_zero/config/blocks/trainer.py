"""``TRAINER``: how long and in which number format a run trains, and in how many passes."""

from __future__ import annotations

from dataclasses import dataclass

from vissl_zero.config.constraints import choice, number
from vissl_zero.vissl.keys import with_vissl_keys


@with_vissl_keys("TRAINER")
@dataclass
class Trainer:
    """``TRAINER``: the training loop."""

    MAX_STEPS: int | None = number(None, least=1)
    """Total of optimizer steps after which the run ends; never changes the schedule; null: no limit."""
    DTYPE: str = choice("float32", "float64", "bfloat16", default="float32")
    """float32; float64: parameters, batch norm, loss and Sinkhorn all in float64; or bfloat16: parameters, their
    gradients, and the forward pass, with batch norm, losses, and optimizer state in float32 (AMP must be off)."""
    ROUNDING: str = choice("stochastic", "kahan", default="stochastic")
    """How the float32 result of an update becomes a parameter in bfloat16. stochastic: up or down by chance, so that it
    is right on average; the same at every ZeRO level. kahan: to the nearest, and the rest is kept beside it in
    bfloat16."""
    DETERMINISTIC: bool = False
    """Fix the order of all sums: the same bits in every run and, without norms, at ZeRO levels 0 to 3; slower."""
    EXACT_ACCUMULATION: bool = False
    """With gradient_accumulation_steps above 1: one loss over all micro-batches of a step, as if each were a process of
    its own; the forward pass runs twice."""
    CROP_PASSES: int = number(1, least=1, most=4096)
    """Passes in which the crops of a micro-batch go through the model, for one loss of all of them: activations are
    those of one pass, gradients the same. Above 1 the student's forward pass runs twice, and batch norm needs
    MODEL.VIEWS_APART, where a pass holds whole crops."""
    COMPILE: bool = False
    """Compile each unit of the model with torch.compile as it first runs: the same numbers to rounding, at every ZeRO
    level; the first steps wait for it. A unit that cannot be compiled runs as it is and is named."""
    THREADS_PER_RANK: int | None = number(None, least=1, most=65536)
    """CPU threads of torch in each process; null: cores // processes on this machine."""
