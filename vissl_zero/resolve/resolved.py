"""The plan of a run, every derived value decided: the frozen result of ``resolve(RunConfig)``.

No torch here; dtypes are named by strings ("float32", "bfloat16", ...).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from vissl_zero.config.components.optimizers import TRUST_COEFFICIENT, TRUST_EPS

if TYPE_CHECKING:
    from vissl_zero.config.run_config import RunConfig


@dataclass(frozen=True)
class Precision:
    """The number formats of a run.

    Attributes:
        master: dtype of the parameters the optimizer updates: TRAINER.DTYPE.
        autocast: dtype of torch.autocast around the forward pass, or None (AMP off, or level 3 with O2).
        compute: dtype that parameters are cast to for forward and backward (FSDP_CONFIG.compute_dtype); equals
            ``master`` unless parameters themselves are computed in half precision.
        reduce: dtype gradients are reduced in.
        use_loss_scale: dynamic loss scaling (float16 only).
        rounding: how an update becomes a parameter in bfloat16: "stochastic" or "kahan"; empty: ``master`` is wider.
    """

    master: str = "float32"
    autocast: str | None = None
    compute: str = "float32"
    reduce: str = "float32"
    use_loss_scale: bool = False
    rounding: str = ""

    @property
    def wide(self) -> str:
        """The format of losses, statistics and optimizer state: that of the parameters, float32 at least."""
        return "float64" if self.master == "float64" else "float32"

    @property
    def casts_parameters(self) -> bool:
        """Whether parameters are cast for the forward and backward pass."""
        return self.compute != self.master


@dataclass(frozen=True)
class LarcPlan:
    """LARC on top of the base optimizer: https://arxiv.org/abs/1708.03888, clipping as in apex."""

    clip: bool = False
    trust_coefficient: float = TRUST_COEFFICIENT
    eps: float = TRUST_EPS


@dataclass(frozen=True)
class OptimizerPlan:
    """The base optimizer that every level runs, after all forms of OPTIMIZER were merged.

    Attributes:
        name: registry name.
        options: keyword arguments by the component's own config (momentum, nesterov, betas, eps ...), typed.
        larc: None when LARC is off.
        weight_decay: weight decay of the regularized parameters of the trunk.
        head_weight_decay: weight decay of the head's; equals ``weight_decay`` unless head_optimizer_params say
            otherwise.
        lr: schedule of the learning rate after automatic scaling: a plain dict with a "name" and that schedule's keys.
        lr_head: the same for the head (equal to ``lr`` unless use_different_lr).
        wd_schedule, wd_head_schedule: schedules of the weight decay, or None.
        regularize_bn, regularize_bias, non_regularized: which parameters decay.
        head_lr_factors: factors of the learning rate, one per head; empty: 1 for all.
        grouping: default (by trunk, heads, norms and biases), dino (biases and norms apart) or single (one group).
        head_rules: decay and rate of each head, the keys of ``LinearEvalHead``; empty: all heads have the same.
        layer_decay: decay of the learning rate from one block of a transformer to the one before.
        param_rules: what some parameters have of their own, the keys of ``ParamGroupKeys``; the first that fits counts.
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    larc: LarcPlan | None = None
    weight_decay: float = 0.0
    head_weight_decay: float = 0.0
    lr: dict[str, Any] = field(default_factory=dict)
    lr_head: dict[str, Any] = field(default_factory=dict)
    wd_schedule: dict[str, Any] | None = None
    wd_head_schedule: dict[str, Any] | None = None
    regularize_bn: bool = False
    regularize_bias: bool = True
    non_regularized: tuple[str, ...] = ()
    head_lr_factors: tuple[float, ...] = ()
    grouping: str = "default"
    layer_decay: float = 1.0
    param_rules: tuple[dict[str, Any], ...] = ()
    head_rules: tuple[dict[str, Any], ...] = ()


# Tier, as recipes name it -> where its bytes are.
TIERS = {"none": "device", "cpu": "host", "nvme": "disk"}


@dataclass(frozen=True)
class OffloadPlan:
    """The place of one kind of training state between uses.

    Attributes:
        device: a name of ``TIERS``.
        nvme_path: folder on the disk; given with nvme.
        pin_memory: page-lock host memory, where there is an accelerator.
        fast_init: leave memory and disk untouched until their first use.
        keep_files: leave the files on the disk at a clean end.
        max_in_cpu: parameters on NVMe: most elements of a rank that stay in host memory; None: none does.
        run: the run folder, whose killed attempts' files are removed first; empty: of none.
    """

    device: str = "none"
    nvme_path: str | None = None
    pin_memory: bool = True
    fast_init: bool = False
    keep_files: bool = False
    max_in_cpu: int | None = None
    run: str = ""

    @property
    def is_on_disk(self) -> bool:
        """The state is in files between uses, and passes through memory in pieces."""
        return TIERS[self.device] == "disk"

    def place(self, device_type: str) -> str:
        """Return where the state is between uses: "device", "host" or "disk".

        Args:
            device_type: "cpu" or "cuda". On the CPU, host memory is the memory of the device.
        """
        place = TIERS[self.device]
        return "device" if device_type == "cpu" and place == "host" else place


@dataclass(frozen=True)
class Float8Plan:
    """The linear layers that multiply in float8, and their format.

    Attributes:
        layers: regular expression of their full names, found anywhere in them; empty: none does.
        scales: rows (one for each row) or mx (one for each 32 elements of a row).
        gather: their weights are rounded to a byte an element, in which level 3 sends them.
    """

    layers: str = ""
    scales: str = "rows"
    gather: bool = False


@dataclass(frozen=True)
class ShardingPlan:
    """The sharding plan of a run: the input of ``sharding``.

    Attributes:
        level: ZeRO level, 0 to 3.
        engine: a name of the STRATEGIES registry.
        shard_group_size: ranks that share one copy of the state; the world size unless HSDP.
        wrap_threshold: also wrap every layer with at least this many parameters; 0: blocks only.
        clip_grad: largest L2 norm of the gradients, None: off.
        clip_grad_per: whose norm is clipped: model (all together), part (trunk and each head by itself) or tensor (each
            by itself).
        sync_bn_group: ranks per batch-norm group; 0: batch norm is not synchronized.
        sync_bn_only_marked: leave batch norms alone that are not ``SyncBatchNorm`` in the model itself.
        checkpoint_every: recompute the activations of every n-th block in backward; 0: off.
        stage_checkpoints: VISSL's lists of block ends per stage, used instead of ``checkpoint_every`` when not empty.
        checkpoint_blocks: full names of the blocks to recompute, used instead of both when not empty.
        precision: number formats.
        timeout_s: timeout of every collective, in seconds.
        deterministic: the same bits at levels 0 to 3 of the torch engine, at one number of ranks.
        verbose: print the wrap plan.
        seed: seed of weights that have no values yet (a model built on the meta device), and of stochastic rounding.
        offload_optimizer, offload_params: where optimizer state and parameters rest.
        reduce_buffer_size: elements per communication buffer of fairscale's ShardedDDP at level 2; -1: its own 2**23.
        flatten_parameters: fairscale at level 3 joins the parameters of a unit into one flat tensor.
        bucket_cap_mb: MiB per reduce-scatter bucket of fairscale at level 3; 0: one reduce-scatter per parameter.
        clear_autocast_cache: fairscale at level 3 drops autocast's cached casts after each unit.
        force_sync_cuda: fairscale at level 3 waits for the GPU before and after each unit.
        reshard_after_forward: fairscale at level 3 frees the full parameters of a unit after its forward pass.
        keep_gradients: levels 1 and 2 on the CPU leave whole averaged gradients in place until the step.
        compile: backend of torch.compile for the units of the model ("inductor"); empty: they run as they are.
        float8: linear layers that multiply in float8.
        needs_whole_tensors: the optimizer's update of an element depends on its full tensor; found by trial.
    """

    level: int
    engine: str = "torch"
    shard_group_size: int = 1
    wrap_threshold: int = 0
    clip_grad: float | None = None
    clip_grad_per: str = "model"
    sync_bn_group: int = 0
    sync_bn_only_marked: bool = False
    checkpoint_every: int = 0
    stage_checkpoints: tuple[tuple[int, ...], ...] = ()
    checkpoint_blocks: tuple[str, ...] = ()
    precision: Precision = Precision()
    timeout_s: float = 600.0
    deterministic: bool = False
    verbose: bool = False
    seed: int = 0
    offload_optimizer: OffloadPlan = OffloadPlan()
    offload_params: OffloadPlan = OffloadPlan()
    reduce_buffer_size: int = -1
    flatten_parameters: bool = True
    bucket_cap_mb: float = 0
    clear_autocast_cache: bool = True
    force_sync_cuda: bool = False
    reshard_after_forward: bool = True
    keep_gradients: bool = False
    compile: str = ""
    float8: Float8Plan = Float8Plan()
    needs_whole_tensors: bool = False

    @property
    def is_recomputed(self) -> bool:
        """Return whether any block is run again in the backward pass."""
        return bool(self.checkpoint_every or any(self.stage_checkpoints) or self.checkpoint_blocks)

    def ranks_per_copy(self, world_size: int) -> int:
        """Return how many of ``world_size`` ranks share one copy of the state; 1 at level 0."""
        if self.level == 0:
            return 1
        return self.shard_group_size if self.shard_group_size > 1 else world_size

    def of_run(self, run: str) -> ShardingPlan:
        """Build the same plan with the run folder that files on a disk belong to."""
        optimizer, params = replace(self.offload_optimizer, run=run), replace(self.offload_params, run=run)
        return replace(self, offload_optimizer=optimizer, offload_params=params)

    def keeping_activations(self) -> ShardingPlan:
        """Copy the plan with nothing recomputed."""
        return replace(self, checkpoint_every=0, stage_checkpoints=(), checkpoint_blocks=())


@dataclass(frozen=True)
class ResolvedRun:
    """Everything a rank needs to know; saved as ``config.resolved.yaml`` and read by the workers.

    Attributes:
        config: the typed tree, ``${oc.env:...}`` already resolved (masked again when written to disk for people). The
            blocks of the chosen trunk, heads and loss hold all their keys; blocks that are not chosen are at their
            defaults.
        recipe: what ``config=`` named.
        run_dir: absolute path of the run folder.
        device: "cpu" or "cuda".
        backend: "gloo" or "cpu:gloo,cuda:nccl".
        world_size, num_nodes, procs_per_node: ranks.
        threads_per_rank: CPU threads for torch in every rank.
        seed: SEED_VALUE.
        batch_per_rank: BATCHSIZE_PER_REPLICA, source images per rank and micro-batch.
        accumulation_steps: micro-batches per optimizer step.
        exact_accumulation: the loss is one over all micro-batches of a step.
        crop_passes: passes of the model that the crops of a micro-batch take.
        global_batch: source images per optimizer step = batch_per_rank * world_size * accumulation_steps.
        num_epochs, max_steps: length of the run; max_steps None: no limit. It never changes the schedule.
        sharding, optimizer: see there.
        notes: sentences to say once at the start (keys with no effect, keys overridden by ZERO.LEVEL, ...).
        interpolations: key path under ``config`` (list positions as numbers) -> the ``${...}`` that was written there.
        learns_from_other: the loss learns from the model under DISTILLATION.
        copies: path in the plan ("optimizer.weight_decay") -> the interpolated key whose value was copied there.
    """

    config: RunConfig
    recipe: str
    run_dir: str
    device: str
    backend: str
    world_size: int
    num_nodes: int
    procs_per_node: int
    threads_per_rank: int
    seed: int
    batch_per_rank: int
    accumulation_steps: int
    global_batch: int
    num_epochs: int
    max_steps: int | None
    sharding: ShardingPlan
    optimizer: OptimizerPlan
    exact_accumulation: bool = False
    crop_passes: int = 1
    learns_from_other: bool = False
    notes: tuple[str, ...] = ()
    interpolations: dict[str, str] = field(default_factory=dict)
    copies: dict[str, str] = field(default_factory=dict)


NO_UNITS = " has no effect at levels 1 and 2 on the CPU, where parameters stay whole."


def keeps_parameters_whole(plan: ShardingPlan, num_ranks: int, world_size: int, device_type: str) -> bool:
    """Check whether the torch engine leaves parameters whole on every rank between steps, and gathers none.

    So at levels 1 and 2 on the CPU, in one number format and with one copy of the state: ``fully_shard`` would copy all
    of them in and out of buffers, which costs as much there as the communication.

    Args:
        plan: level, engine, precision, tiers.
        num_ranks: number of ranks that share one copy of the state.
        world_size: all ranks.
        device_type: "cpu" or "cuda".
    """
    precision = plan.precision
    return (
        plan.engine == "torch"
        and plan.level in (1, 2)
        and device_type == "cpu"
        and num_ranks == world_size
        and not plan.offload_params.is_on_disk
        and {precision.compute, precision.reduce} == {precision.master}
    )


def shards_parameters(plan: ShardingPlan, num_ranks: int, world_size: int, device_type: str) -> bool:
    """Check whether a rank holds shards of parameters between steps; arguments as of ``keeps_parameters_whole``."""
    return plan.level > 0 and not keeps_parameters_whole(plan, num_ranks, world_size, device_type)


def with_fewer_ranks(plan: ResolvedRun, least: int) -> ResolvedRun | None:
    """Plan for the most processes below the present number, at least ``least``, that divide the micro-batch.

    Groups of fewer ranks than all (a shard group, a batch-norm group) keep their size, so the processes must be a
    multiple of it too. None if there are none. For runs on one machine.
    """
    micro_batch = plan.batch_per_rank * plan.world_size
    for number in range(plan.world_size - 1, least - 1, -1):
        if number >= 1 and micro_batch % number == 0 and (fewer := with_ranks(plan, number)):
            return fewer
    return None


def with_ranks(plan: ResolvedRun, number: int) -> ResolvedRun | None:
    """Plan for another number of processes on one machine, which share the micro-batch as evenly as it goes.

    Groups of fewer ranks than all keep their size; None: the processes are no multiple of it.
    """
    sizes = (plan.sharding.shard_group_size, plan.sharding.sync_bn_group)
    shard_group, bn_group = (number if size == plan.world_size else size for size in sizes)
    if any(size > 1 and number % size for size in (shard_group, bn_group)):
        return None
    return replace(
        plan,
        world_size=number,
        num_nodes=1,
        procs_per_node=number,
        batch_per_rank=-(-plan.batch_per_rank * plan.world_size // number),
        sharding=replace(plan.sharding, shard_group_size=shard_group, sync_bn_group=bn_group),
    )
