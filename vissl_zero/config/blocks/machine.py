"""Where a run goes: ``MACHINE``, ``DISTRIBUTED``, ``SLURM``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vissl_zero.config.constraints import choice, number
from vissl_zero.vissl.keys import with_vissl_keys


@dataclass
class Machine:
    """``MACHINE``."""

    DEVICE: str = choice("auto", "cpu", "gpu", default="auto", also=("cuda",))
    """auto (GPU where there is one), cpu or gpu."""
    MEMORY_GIB: float | None = number(None, above=0, most=10**9)
    """For a dry run: memory of a GPU, or of a machine without, in GiB; null: this one's, or 80 where it has no GPU."""
    TF32: bool | None = None
    """On GPUs: true rounds float32 to TF32 (10 bits of fraction) in products and convolutions, which is faster; false
    rounds in neither; null leaves it to torch, which rounds in convolutions."""


@with_vissl_keys("DISTRIBUTED")
@dataclass
class Distributed:
    """``DISTRIBUTED``: processes."""

    NUM_PROC_PER_NODE: int = number(1, least=1, most=65536)
    """Processes (ranks) on each machine; torchrun's own number overrides it."""
    NUM_NODES: int = number(1, least=1, most=2**20)
    """Machines: under torchrun, under SLURM, or by hand with RUN_ID and one command per machine."""
    RUN_ID: str = "auto"
    """Rendezvous of machines started by hand: <address of machine 0>:<port>; auto: this machine alone."""
    SECRET_FILE: str | None = None
    """What machines started by hand prove to each other that they know; null: ~/.vissl_zero/secret, made if missing."""
    BACKEND: str = choice("auto", "nccl", "gloo", default="auto")
    """auto (nccl on GPUs, gloo on the CPU), nccl or gloo."""
    TIMEOUT_S: float = number(600.0, above=0, most=10**9)
    """Seconds after which a rank that waits for others gives up."""
    MAX_RESTARTS: int = number(0, least=0)
    """How many times all processes, on all machines, restart from the newest checkpoint after one was killed."""
    MIN_PROC_PER_NODE: int = number(-1, least=1, also=(-1,))
    """One machine: after a kill, continue with fewer processes, at least this many, at the same batch; -1: with all."""


@dataclass
class Slurm:
    """``SLURM``: the run becomes a job of a cluster. NUM_NODES and NUM_PROC_PER_NODE say its size."""

    USE_SLURM: bool = False
    """Submit the run instead of starting it here."""
    # VISSL's defaults, but for the partition and the port, which were those of its authors' cluster.
    NAME: str = "vissl"
    """Name of the job."""
    COMMENT: str = "vissl job"
    """Comment on the job."""
    PARTITION: str = ""
    """Partition to submit to; empty: the cluster's default."""
    ACCOUNT: str = ""
    """Account to charge; empty: the cluster's default."""
    QOS: str = ""
    """Quality of service; empty: the cluster's default."""
    LOG_FOLDER: str = "."
    """Folder for the job's submission and logs, which this user alone can enter; relative: to the run folder."""
    TIME_HOURS: int = number(72, least=0, most=10**6)
    """Time limit, hours."""
    TIME_MINUTES: int = number(0, least=0, most=10**8)
    """Time limit, minutes on top."""
    CONSTRAINT: str = ""
    """Node features to request."""
    MEM_GB: int = number(250, least=0, most=10**9)
    """Memory per node, GiB; 0: all of it."""
    NUM_CPU_PER_PROC: int = number(8, least=1, most=65536)
    """CPU cores per process."""
    PORT_ID: int = number(0, least=0, most=65535, fix="Write 0 for a free port.")
    """Rendezvous port; 0: a free one."""
    TASK_PER: str = choice("node", "process", default="node")
    """node: one launcher per node, which starts its processes; process: one SLURM task per process."""
    SIGNAL_DELAY_S: int = number(120, least=1, most=10**8)
    """Seconds before the time limit (or the eviction) at which the run saves and stops."""
    MAX_REQUEUES: int = number(3, least=0)
    """How many times a job that saved and stopped is requeued; 0: never."""
    SNAPSHOT_CODE: bool = False
    """Run a copy of vissl_zero and of IMPORTS made at submission, so later changes of the originals have no effect."""
    SETUP: list[str] = field(default_factory=list)
    """Shell commands to run on the first node before the run, such as module load cuda."""
    ADDITIONAL_PARAMETERS: dict[str, Any] = field(default_factory=dict)
    """Further sbatch options by their long names, such as {exclude: node7}; true for one without a value."""
