"""The most every rank held of each kind over the whole run, for the summary and the report."""

from __future__ import annotations

from dataclasses import asdict

from vissl_zero.engine.hook import Hook, Run
from vissl_zero.reporting.memory_kinds import gather, largest


class PeakMemory(Hook):
    """Adds ``bytes_per_rank`` and ``bytes`` (the largest rank's, kind by kind) to the results.

    Cost: one all-gather of a few numbers at the end of the run.
    """

    def on_end(self, run: Run) -> None:
        per_rank = gather(largest(record.bytes for record in run.records), run.device)
        run.results["bytes"] = asdict(largest(per_rank))
        run.results["bytes_per_rank"] = [asdict(memory) for memory in per_rank]
