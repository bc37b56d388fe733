"""What one launcher knows of a run on several machines before it meets the others."""

from __future__ import annotations

from dataclasses import dataclass

_LONGEST_SILENCE_S = 60.0


@dataclass(frozen=True)
class LauncherSpec:
    """One launcher among those of its run.

    Attributes:
        index, count: this launcher's number, and how many there are; launcher 0 serves the others.
        procs: ranks that each launcher starts.
        first_local_rank: ``local_rank`` of this launcher's first rank (not 0 where SLURM starts one launcher per rank).
        address: where launcher 0 listens, or will listen; port 0: a free one.
        secret: of the run.
        timeout_s: of a collective.
        start_s: how long launchers wait for each other at the start, and for a lost one to come back.
        comes_back: whether a person may restart a lost launcher. A batch system restarts the whole job instead.
    """

    index: int
    count: int
    procs: int
    address: tuple[str, int]
    secret: bytes
    timeout_s: float
    first_local_rank: int = 0
    start_s: float = 300.0
    comes_back: bool = True

    @property
    def silence_s(self) -> float:
        """A launcher without a heartbeat for this long counts as lost."""
        # Well before a collective times out, which would name no machine.
        return min(_LONGEST_SILENCE_S, self.timeout_s / 2)
