"""The error after "out of memory": the bytes by kind, and the cheapest changes that would help.

The savings of a change are forecast by the memory model (``planner/memory_model.py``), as in ``vissl-zero plan``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from vissl_zero.errors import OutOfMemoryError, VisslZeroError
from vissl_zero.planner.candidates import Budget, Candidate, rank_candidates
from vissl_zero.planner.dry_run import dry_run, set_stage
from vissl_zero.planner.forecast import Forecast
from vissl_zero.reporting.quantity import bytes_text, shown_kinds, total
from vissl_zero.resolve.resolved import Precision, ResolvedRun
from vissl_zero.sharding.memory import Bytes

_WORTHWHILE = 0.1  # smallest saving that is worth a change, as a share of the rank's bytes
_MOST_OTHERS = 3
_MORE_PASSES = 8  # factor for the run's passes
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


@dataclass(frozen=True)
class Switch:
    """A change to the command line that saves memory.

    Attributes:
        override: overrides to add, as the user types them.
        saved: forecast savings in bytes of a rank's peak.
        price: description of the cost.
    """

    override: str
    saved: int
    price: str

    def __str__(self) -> str:
        return f"{self.override}  saves about {bytes_text(self.saved)} per rank; {self.price}"


def explain(error: BaseException, plan: ResolvedRun, ledger: Bytes | None) -> OutOfMemoryError:
    """Return the error to raise instead of ``error``: bytes by kind, the cheapest change that would help, and others.

    Cost: forecasts of the run's other plans, a few seconds.

    Args:
        error: an error for which ``memory.is_out_of_memory`` is true.
        plan: the resolved run.
        ledger: this rank's memory by kind; None if the model was not built yet.
    """
    requested = requested_bytes(error)
    failed = f"an allocation of {bytes_text(requested)} failed" if requested else "an allocation failed"
    if ledger is None or total(ledger) == 0:
        return OutOfMemoryError(
            f"Out of memory while the model was being built: {failed}. A smaller model, fewer processes on this "
            f"machine (config.DISTRIBUTED.NUM_PROC_PER_NODE, now {plan.procs_per_node}) or a machine with more memory "
            "would help."
        )
    held = ", ".join(f"{name} {bytes_text(getattr(ledger, kind))}" for kind, name in shown_kinds(ledger).items())
    lines = [f"Out of memory: {failed} while this rank held {bytes_text(total(ledger))} ({held})."]
    # At least a share of the whole: the failed allocation is often small, and the next one would fail instead.
    need = max(requested or 0, int(_WORTHWHILE * total(ledger)))
    try:
        advice = _advice(plan, need)
    except Exception as again:  # noqa: BLE001 - memory is short, and the first error matters more
        advice = [f"The changes that would help could not be found here ({type(again).__name__}); see vissl-zero plan."]
    return OutOfMemoryError("\n".join([*lines, *advice]))


def requested_bytes(error: BaseException) -> int | None:
    """Return the bytes of the allocation that failed; None if the message does not name them."""
    match = re.search(r"[Tt]ried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)", str(error))
    return int(float(match[1]) * _UNITS[match[2]]) if match else None


def _advice(plan: ResolvedRun, need: int) -> list[str]:
    same = list(same_numbers(plan))
    enough = [switch for switch in same if switch.saved >= need]
    if enough:
        best, *others = enough
        return ["The cheapest switch that would help:", f"  {best}", *_listed("Others:", others[:_MOST_OTHERS])]
    others = list(other_numbers(plan))
    enough = [switch for switch in others if switch.saved >= need]
    if enough:
        return ["No switch that keeps results unchanged frees enough; this one would:", f"  {enough[0]}"]
    useful = sorted((switch for switch in (*same, *others) if switch.saved > 0), key=lambda switch: -switch.saved)
    if not useful:
        return ["No switch would free much here: use a smaller model or batch, or more memory."]
    return _listed("No single switch frees enough; these free the most:", useful[:_MOST_OTHERS])


def _listed(title: str, switches: list[Switch]) -> list[str]:
    return [title, *(f"  {switch}" for switch in switches)] if switches else []


def same_numbers(plan: ResolvedRun) -> Iterator[Switch]:
    """Yield every other plan that trains the same model in less memory, cheapest first."""
    stage = set_stage(plan)
    forecast = stage.forecast()
    if forecast.step is None:
        return
    peak = forecast.step.peak_bytes
    batch, ranks = plan.batch_per_rank, plan.world_size
    # Words that are in force already are left out of the advice.
    current = Candidate(plan.sharding, plan.accumulation_steps, batch, forecast, ranks, None, None).overrides()
    # Ranked for a budget of what the run takes now: plans that fit it come first, cheapest first.
    for candidate in rank_candidates(stage.forecasts(), Budget(peak), ranks):
        step = candidate.forecast.step
        if step is not None and step.peak_bytes < peak:
            changed = " ".join(word for word in candidate.overrides() if word not in current)
            time = _relative_time(candidate.forecast, forecast)
            yield Switch(changed, peak - step.peak_bytes, f"same numbers, {time}")
    with suppress(VisslZeroError):  # models whose rows see each other are refused
        passes = plan.crop_passes * _MORE_PASSES
        proposed = set_stage(replace(plan, crop_passes=passes)).forecast()
        if proposed.step is not None and proposed.step.peak_bytes < peak:
            override = f"config.TRAINER.CROP_PASSES={passes}"
            time = _relative_time(proposed, forecast)
            yield Switch(override, peak - proposed.step.peak_bytes, f"same numbers, {time}")


def _relative_time(proposed: Forecast, current: Forecast) -> str:
    if not proposed.seconds or not current.seconds:
        return "time unknown"
    ratio = proposed.seconds / current.seconds
    return "about as fast" if abs(ratio - 1) < 0.05 else f"about {ratio:.2g} times the time of a step"


def other_numbers(plan: ResolvedRun) -> Iterator[Switch]:
    """Yield changes that alter the results, smallest change first."""
    before = _peak(plan)
    if before is None:
        return
    precision = plan.sharding.precision
    changes = []
    if precision.master == "float64":
        half = replace(precision, master="float32", compute="float32", reduce="float32")
        changes.append(("config.TRAINER.DTYPE=float32", _with(plan, half), "float32 rounding"))
    elif precision.autocast is None and precision.compute == "float32":
        words = "config.MODEL.AMP_PARAMS.USE_AMP=True config.MODEL.AMP_PARAMS.DTYPE=bfloat16"
        changes.append((words, _with(plan, replace(precision, autocast="bfloat16")), "computes in bfloat16"))
    if plan.batch_per_rank > 1:
        changes.append(_smaller_micro_batch(plan))
    for words, changed, price in changes:
        # Forecast again, not scaled: gathered units and parameters do not shrink with the batch.
        after = _peak(changed)
        if after is not None:
            yield Switch(words, before - after, price)


def _with(plan: ResolvedRun, precision: Precision) -> ResolvedRun:
    return replace(plan, sharding=replace(plan.sharding, precision=precision))


def _smaller_micro_batch(plan: ResolvedRun) -> tuple[str, ResolvedRun, str]:
    half, twice = plan.batch_per_rank // 2, plan.accumulation_steps * 2
    even = plan.batch_per_rank % 2 == 0
    batch = "the same global batch" if even else f"a global batch of {half * twice * plan.world_size}"
    return (
        f"config.DATA.TRAIN.BATCHSIZE_PER_REPLICA={half} config.ZERO.gradient_accumulation_steps={twice}",
        replace(plan, batch_per_rank=half, accumulation_steps=twice),
        f"{batch}, but batch norm and assignments see half the images at a time",
    )


def _peak(plan: ResolvedRun) -> int | None:
    step = dry_run(plan).forecast.step
    return None if step is None else step.peak_bytes
