"""Where one launcher stands among those of a run on several machines."""

from __future__ import annotations

from dataclasses import dataclass

_LONGEST_SILENCE_S = 60.0


@dataclass(frozen=True)
class Place:
    """Where one launcher stands among those of its run.

    Attributes:
        index, count: of launchers; 0 serves.
        procs: ranks that each launcher starts.
        first_local_rank: number on its machine of this launcher's first rank (one launcher per rank under SLURM).
        address: where launcher 0 listens (or shall listen; port 0: a free one).
        secret: of the run.
        timeout_s: of a collective.
        start_s: how long launchers wait for each other at the start, and for one that was lost to come back.
        comes_back: somebody (a person) may start a lost launcher again; a batch system starts the whole job again.
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
        """After how long without a sign of life a launcher counts as lost."""
        return min(_LONGEST_SILENCE_S, self.timeout_s / 2)
