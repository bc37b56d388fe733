"""How many processes, on which device, joined by what."""

from __future__ import annotations

from dataclasses import dataclass

from vissl_zero.config.host import Host
from vissl_zero.config.run_config import RunConfig

GPU_NAMES = ("gpu", "cuda")


@dataclass(frozen=True)
class Placement:
    """Where the ranks of a run live.

    Attributes:
        device: "cpu" or "cuda".
        backend: "gloo" or "cpu:gloo,cuda:nccl".
        world_size, num_nodes, procs_per_node: ranks.
        threads_per_rank: CPU threads of torch.
        notes: sentences to say once.
    """

    device: str
    backend: str
    world_size: int
    num_nodes: int
    procs_per_node: int
    threads_per_rank: int
    notes: tuple[str, ...] = ()


def placement(cfg: RunConfig, host: Host) -> Placement:
    """Where the ranks of ``cfg`` live on ``host``."""
    distributed, notes = cfg.DISTRIBUTED, [host.assumed] if host.assumed else []
    world_size, procs = ranks(cfg, host)
    device = _device(cfg, host, procs)
    if device == "cpu" and host.num_gpus and cfg.MACHINE.DEVICE == "auto" and distributed.BACKEND != "gloo":
        notes.append(f"{procs} processes do not fit on {host.num_gpus} GPU(s), so the CPU is used.")
    if device == "cpu" and distributed.BACKEND == "nccl":
        notes.append("config.DISTRIBUTED.BACKEND: nccl needs GPUs; gloo is used on the CPU.")
    if host.torchrun and procs != distributed.NUM_PROC_PER_NODE != 1:
        notes.append(f"config.DISTRIBUTED.NUM_PROC_PER_NODE has no effect: torchrun started {procs} processes.")
    if host.torchrun and distributed.MAX_RESTARTS:
        notes.append("config.DISTRIBUTED.MAX_RESTARTS has no effect under torchrun, which has --max-restarts.")
    if cfg.MACHINE.MEMORY_GIB is not None and not cfg.DRY_RUN:
        notes.append("config.MACHINE.MEMORY_GIB has an effect on dry runs only.")
    threads = _threads(cfg, host, procs)
    if threads < host.num_cores // procs and not (cfg.TRAINER.THREADS_PER_RANK or host.num_threads):
        plural = "thread" if threads == 1 else "threads"
        notes.append(
            f"The machine is busy ({host.num_idle_cores} of {host.num_cores} cores idle): {threads} {plural} per "
            f"process; config.TRAINER.THREADS_PER_RANK={host.num_cores // procs} uses all cores."
        )
    return Placement(
        device=device,
        backend="cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
        world_size=world_size,
        num_nodes=max(1, world_size // procs),
        procs_per_node=procs,
        threads_per_rank=threads,
        notes=tuple(notes),
    )


def _threads(cfg: RunConfig, host: Host, procs: int) -> int:
    """Threads of a rank: as the user says, else its share of the idle cores (of all, if bits must not depend on it)."""
    looks = host.num_idle_cores is not None and not cfg.TRAINER.DETERMINISTIC
    cores = host.num_idle_cores if looks and host.num_idle_cores else host.num_cores
    return cfg.TRAINER.THREADS_PER_RANK or host.num_threads or max(1, cores // procs)


def ranks(cfg: RunConfig, host: Host) -> tuple[int, int]:
    """World size and processes on this machine; torchrun's numbers win."""
    procs = max(1, cfg.DISTRIBUTED.NUM_PROC_PER_NODE)
    return host.torchrun or (procs * max(1, cfg.DISTRIBUTED.NUM_NODES), procs)


def _device(cfg: RunConfig, host: Host, procs: int) -> str:
    if cfg.MACHINE.DEVICE in GPU_NAMES:
        return "cuda"
    fits = host.num_gpus >= procs and cfg.DISTRIBUTED.BACKEND != "gloo"
    return "cuda" if cfg.MACHINE.DEVICE == "auto" and fits else "cpu"


def micro_batch(cfg: RunConfig, host: Host) -> int:
    """Source images per micro-batch over all ranks."""
    return cfg.DATA.TRAIN.BATCHSIZE_PER_REPLICA * ranks(cfg, host)[0]


def global_batch(cfg: RunConfig, host: Host) -> int:
    """Source images per optimizer step over all ranks and micro-batches."""
    return micro_batch(cfg, host) * cfg.ZERO.gradient_accumulation_steps
