"""Memory by kind, as tables, bars and files show it: names, order, peaks over a run, figures of all ranks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, fields

import torch

from vissl_zero.collectives import all_gather_rows
from vissl_zero.engine.hook import Hook, Run, Step
from vissl_zero.sharding.strategy import Bytes

# What a rank holds, in the order it is shown. Two figures of Bytes are no part of the sum: ``peak`` is measured for
# the process as a whole (resident set size on the CPU, allocated on CUDA), so it has code, data and caches too;
# ``params_step_peak`` is the peak of ``params`` while units are gathered.
KINDS = {
    "params": "parameters",
    "grads": "gradients",
    "optimizer": "optimizer state",
    "activations": "activations",
    "buffers": "buffers",
    "teacher": "teacher",
}
_FIELDS = tuple(field.name for field in fields(Bytes))


def shown_kinds(*figures: Bytes) -> dict[str, str]:
    """``KINDS`` without the teacher, where no figure has one."""
    has_teacher = any(memory.teacher for memory in figures)
    return {kind: name for kind, name in KINDS.items() if kind != "teacher" or has_teacher}


def total(memory: Bytes) -> int:
    """Bytes of all kinds together."""
    return sum(getattr(memory, kind) for kind in KINDS)


def largest(figures: Iterable[Bytes]) -> Bytes:
    """The largest figure of each kind on its own; zeros for no figures."""
    table = [asdict(memory) for memory in figures]
    return Bytes(**{name: max((row[name] for row in table), default=0) for name in _FIELDS})


def gather(memory: Bytes, device: torch.device) -> list[Bytes]:
    """Every rank's figures, in rank order. Collective: every rank calls it. Cost: one all-gather of a few numbers."""
    row = torch.tensor([list(asdict(memory).values())], dtype=torch.int64, device=device)
    return [Bytes(*figures) for figures in all_gather_rows(row).tolist()]


class PeakMemory(Hook):
    """Adds ``bytes_per_rank`` and ``bytes`` (the largest rank's, kind by kind) to the results.

    Cost: one all-gather of a few numbers at the end of the run.
    """

    def __init__(self) -> None:
        self._largest = self._newest = Bytes()

    def on_step(self, run: Run, step: Step) -> None:
        if step.bytes is not self._newest:  # a new measurement
            self._newest = step.bytes
            self._largest = largest((self._largest, step.bytes))

    def on_end(self, run: Run) -> None:
        recorded = (record.bytes for record in run.records)  # those before a resume, too; not all of a long run
        per_rank = gather(largest((self._largest, *recorded)), run.device)
        run.results["bytes"] = asdict(largest(per_rank))
        run.results["bytes_per_rank"] = [asdict(memory) for memory in per_rank]
