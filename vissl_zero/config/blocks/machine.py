"""Where and how long a run goes: ``MACHINE``, ``DISTRIBUTED``, ``SLURM``, ``TRAINER``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vissl_zero.config.vissl_block import with_vissl_keys


@dataclass
class Machine:
    """``MACHINE``."""

    DEVICE: str = "auto"
    """auto (GPU where there is one), cpu or gpu."""


@with_vissl_keys("DISTRIBUTED")
@dataclass
class Distributed:
    """``DISTRIBUTED``: processes."""

    NUM_PROC_PER_NODE: int = 1
    """Processes (ranks) on each machine; torchrun's own number wins."""
    NUM_NODES: int = 1
    """Machines; more than 1 only under torchrun."""
    BACKEND: str = "auto"
    """auto (nccl on GPUs, gloo on the CPU), nccl or gloo."""
    TIMEOUT_S: float = 600.0
    """Seconds after which a rank that waits for others gives up."""


@dataclass
class Slurm:
    """``SLURM``: submission to a cluster; not there yet, so USE_SLURM must stay false."""

    USE_SLURM: bool = False
    """Submit the run instead of starting it here."""
    NAME: str = "vissl"
    """Name of the job."""
    COMMENT: str = "vissl job"
    """Comment on the job."""
    PARTITION: str = ""
    """Partition to submit to."""
    LOG_FOLDER: str = "."
    """Folder for the job's logs."""
    TIME_HOURS: int = 72
    """Time limit, hours."""
    TIME_MINUTES: int = 0
    """Time limit, minutes on top."""
    CONSTRAINT: str = ""
    """Node features asked for."""
    MEM_GB: int = 250
    """Memory per node, GiB."""
    PORT_ID: int = 40050
    """Rendezvous port."""
    NUM_CPU_PER_PROC: int = 8
    """CPU cores per process."""
    ADDITIONAL_PARAMETERS: dict[str, Any] = field(default_factory=dict)
    """Further sbatch parameters."""


@with_vissl_keys("TRAINER")
@dataclass
class Trainer:
    """``TRAINER``: the training loop."""

    MAX_STEPS: int | None = None
    """Total of optimizer steps after which the run ends; never changes the schedule; null: no limit."""
    DTYPE: str = "float32"
    """float32, or float64: parameters, batch norm, loss and Sinkhorn all in float64 (AMP must be off)."""
    THREADS_PER_RANK: int | None = None
    """CPU threads of torch in each process; null: cores // processes on this machine."""
