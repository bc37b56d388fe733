"""``ZERO`` and VISSL's two switches for sharding."""

from __future__ import annotations

from dataclasses import dataclass, field

from vissl_zero.config.constraints import choice, number


@dataclass
class ShardedDdpSetup:
    """``MODEL.SHARDED_DDP_SETUP``: ZeRO level 2."""

    USE_SDP: bool = False
    """Shard optimizer state and gradients."""
    reduce_buffer_size: int = number(-1, least=-1)
    """Elements per communication buffer of fairscale's ShardedDDP; no effect on the torch engine."""


@dataclass
class FsdpConfig:
    """``MODEL.FSDP_CONFIG``: ZeRO level 3."""

    AUTO_SETUP_FSDP: bool = False
    """Shard parameters too, and derive the precision keys below from AMP."""
    AUTO_WRAP_THRESHOLD: int = number(0, least=0)
    """Also make a unit of every layer with at least this many parameters, of any type; 0: blocks only."""
    AMP_TYPE: str = "O1"
    """O1 (autocast) or O2 (parameters cast to half precision for compute); "01" and "02" mean the same."""
    FORCE_SYNC_CUDA: bool = False
    """Synchronize the GPU around each unit; no effect on the torch engine."""
    flatten_parameters: bool = True
    """One flat parameter per unit; no effect on the torch engine, which shards each parameter by itself."""
    mixed_precision: bool = True
    """Allow compute_dtype to differ from float32."""
    fp32_reduce_scatter: bool = False
    """Reduce gradients in float32 when parameters are computed in half precision."""
    compute_dtype: str = choice("float32", "float16", "bfloat16", default="float32")
    """Dtype that parameters are cast to for compute: float32, float16 or bfloat16."""
    bucket_cap_mb: float = number(0, least=0)
    """Size in MiB of fairscale's reduce-scatter buckets; no effect on the torch engine."""
    clear_autocast_cache: bool = True
    """Drop autocast's cached casts after each unit; no effect on the torch engine, which caches none across units."""
    reshard_after_forward: bool = True
    """Free a unit's full parameters after its forward pass; no effect on the torch engine (False is its level 2)."""
    verbose: bool = False
    """Print the wrap plan."""


@dataclass
class OffloadOptimizer:
    """``ZERO.offload_optimizer_config``: where optimizer state lives."""

    device: str = "none"
    """none (with the parameters), cpu or nvme."""
    pin_memory: bool | None = None
    """Page-locked host memory; null: wherever that has an effect."""
    fast_init: bool = False
    """Touch state only when it is first used."""
    nvme_path: str | None = None
    """Folder on the NVMe disk."""
    keep_files: bool = False
    """Leave the files on the NVMe disk at a clean end."""


@dataclass
class OffloadParam:
    """``ZERO.offload_param_config``: where parameters live between uses."""

    device: str = "none"
    """none (on the training device), cpu or nvme."""
    pin_memory: bool | None = None
    """Page-locked host memory; null: wherever that has an effect."""
    fast_init: bool | int | float = False
    """Touch memory only when it is first used; a number is read as max_in_cpu."""
    max_in_cpu: float | None = None
    """With nvme: most parameters (elements of a rank) that stay in host memory between uses; null: 0."""
    nvme_path: str | None = None
    """Folder on the NVMe disk."""


# The limits of these keys are above the GiB of any machine: a larger number must be meant in MB.
_GIB_NOT_MB = "Write GiB, not MB."


@dataclass
class Zero:
    """``ZERO``: how training state is spread over processes. Changes memory and speed, never the model."""

    LEVEL: int | str = "auto"
    """0: nothing sharded (DDP); 1: optimizer state; 2: + gradients; 3: + parameters; auto: from VISSL's switches;
    fit: the cheapest plan within the three budgets below."""
    MEMORY_GB: float | None = number(None, above=0, most=2000, fix=_GIB_NOT_MB)
    """With LEVEL fit, for plan, and for dry runs: GiB a rank may use where it computes, the process itself apart; null:
    what the device, the container, or the machine has, divided among its ranks."""
    HOST_MEMORY_GB: float | None = number(None, above=0, most=20_000, fix=_GIB_NOT_MB)
    """With LEVEL fit, and for plan: GiB of host memory a rank on a GPU may use for offloaded state; null: no limit."""
    DISK_GB: float | None = number(None, above=0, most=10**9)
    """With LEVEL fit, and for plan: GiB on the disk of nvme_path a rank may use for offloaded state; null: no limit."""
    MACHINE_PROFILE: str | None = None
    """With LEVEL fit, and for plan: the machine that time is estimated for and, with GPUs, whose memory counts: a
    profile that ships (h100x8, h200x8, a100x8, a100_40gbx8, cpu_core) or a YAML file. null: cpu_core, or h100x8 with
    GPUs."""
    type: str | None = None
    """ZeroRedundancyOptimizer_Level_1, _2 or _3: the level as ColossalAI writes it. AMP says what is float16."""
    ENGINE: str = "auto"
    """Implementation: torch (auto is torch) or fairscale (levels 1 and 2, and 3 on CUDA)."""
    SHARD_GROUP_SIZE: int = -1
    """Processes that share one copy of the state; -1: all."""
    gradient_accumulation_steps: int = number(1, least=1, most=2**31)
    """Micro-batches per optimizer step."""
    dynamic_loss_scale: bool = True
    """Scale the loss in float16 so that small gradients survive; no effect in other precisions."""
    clip_grad: float | None = number(None, above=0)
    """Largest L2 norm of the gradients; null: no clipping."""
    clip_grad_per: str = choice("model", "part", "tensor", default="model")
    """What has that norm: model (all gradients together), part (the trunk and each head apart, as DINOv2) or tensor
    (each by itself, as DINO)."""
    offload_optimizer_config: OffloadOptimizer = field(default_factory=OffloadOptimizer)
    """Optimizer state on the CPU or on NVMe."""
    offload_param_config: OffloadParam = field(default_factory=OffloadParam)
    """Parameters on the CPU or on NVMe."""
