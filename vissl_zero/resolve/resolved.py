"""The plan of a run with every derived value: the frozen result of ``resolve(RunConfig)``.

Imports no torch; dtypes are strings ("float32", "bfloat16", ...).
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
        master: dtype of the parameters that the optimizer updates: TRAINER.DTYPE.
        autocast: dtype of torch.autocast around the forward pass, or None (AMP off, or level 3 with O2).
        compute: dtype that parameters are cast to for forward and backward (FSDP_CONFIG.compute_dtype); equals
            ``master`` unless parameters themselves are computed in half precision.
        reduce: dtype in which gradients are reduced over ranks.
        use_loss_scale: scale the loss dynamically (float16 only).
        rounding: rounding of updated parameters in bfloat16: "stochastic" or "kahan"; empty: ``master`` is wider.
    """

    master: str = "float32"
    autocast: str | None = None
    compute: str = "float32"
    reduce: str = "float32"
    use_loss_scale: bool = False
    rounding: str = ""

    @property
    def wide(self) -> str:
        """Return the dtype of losses, statistics and optimizer state: float64 for float64 parameters, else float32."""
        return "float64" if self.master == "float64" else "float32"

    @property
    def casts_parameters(self) -> bool:
        """Check whether parameters are cast for the forward and backward pass."""
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
        head_weight_decay: weight decay of the heads' regularized parameters; equals ``weight_decay`` unless
            head_optimizer_params.use_different_wd.
        lr: schedule of the learning rate after automatic scaling: a plain dict with a "name" and that schedule's keys.
        lr_head: the same for the head (equal to ``lr`` unless use_different_lr).
        wd_schedule, wd_head_schedule: schedules of the weight decay, or None.
        regularize_bn, regularize_bias, non_regularized: which parameters decay.
        head_lr_factors: factors of the learning rate, one per head; empty: 1 for all.
        grouping: default (by trunk, heads, norms and biases), dino (biases and norms apart) or single (one group).
        head_rules: decay and rate of each head, the keys of ``LinearEvalHead``; empty: all heads have the same.
        layer_decay: decay of the learning rate from one block of a transformer to the one before.
        param_rules: settings of matching parameters, the keys of ``ParamGroupKeys``; the first match counts.
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


# Tier, as named in recipes -> where its bytes are.
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
        max_in_cpu: for parameters on NVMe: maximum number of elements per rank in host memory; None: 0.
        run: run folder; files that its killed attempts left on NVMe are removed first. Empty: no files are removed.
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
        """Check whether the state is in files between uses and is read into memory in pieces."""
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
        layers: regular expression that is searched in the full names of layers; empty: no layer.
        scales: rows (one scale per row) or mx (one scale per 32 elements of a row).
        gather: round the weights to one byte per element, and send them so at level 3.
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
        clip_grad: maximum L2 norm of the gradients; None: no clipping.
        clip_grad_per: clip the norm of the whole model (model), of the trunk and each head (part), or of each tensor
            (tensor).
        sync_bn_group: ranks per batch-norm group; 0: batch norm is not synchronized.
        sync_bn_only_marked: synchronize only the modules that are ``SyncBatchNorm`` already.
        checkpoint_every: recompute the activations of every n-th block in backward; 0: off.
        stage_checkpoints: VISSL's lists of block ends per stage, used instead of ``checkpoint_every`` when not empty.
        checkpoint_blocks: full names of the blocks to recompute, used instead of both when not empty.
        precision: number formats.
        timeout_s: timeout of every collective, in seconds.
        deterministic: the same bits at levels 0 to 3 of the torch engine, at one number of ranks.
        verbose: print the wrap plan.
        seed: seed of the initial weights of a model built on the meta device, and of stochastic rounding.
        offload_optimizer, offload_params: where optimizer state and parameters are between uses.
        reduce_buffer_size: elements per communication buffer of fairscale's ShardedDDP at level 2; -1: its own 2**23.
        flatten_parameters: fairscale at level 3 joins the parameters of a unit into one flat tensor.
        bucket_cap_mb: MiB per reduce-scatter bucket of fairscale at level 3; 0: one reduce-scatter per parameter.
        clear_autocast_cache: fairscale at level 3 drops autocast's cached casts after each unit.
        force_sync_cuda: fairscale at level 3 waits for the GPU before and after each unit.
        reshard_after_forward: fairscale at level 3 frees the full parameters of a unit after its forward pass.
        keep_gradients: levels 1 and 2 on the CPU keep whole averaged gradients until the step.
        compile: backend of torch.compile for the units of the model ("inductor"); empty: not compiled.
        float8: linear layers that multiply in float8.
        needs_whole_tensors: the optimizer's update of an element depends on its full tensor; detected by a trial step.
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
        """Check whether any block is run again in the backward pass."""
        return bool(self.checkpoint_every or any(self.stage_checkpoints) or self.checkpoint_blocks)

    def ranks_per_copy(self, world_size: int) -> int:
        """Return how many of ``world_size`` ranks share one copy of the state; 1 at level 0."""
        if self.level == 0:
            return 1
        # -1 (``initialize``) and 1 (the default) mean all ranks.
        return self.shard_group_size if self.shard_group_size > 1 else world_size

    def of_run(self, run: str) -> ShardingPlan:
        """Return a copy whose offload files belong to the run folder ``run``."""
        optimizer, params = replace(self.offload_optimizer, run=run), replace(self.offload_params, run=run)
        return replace(self, offload_optimizer=optimizer, offload_params=params)

    def keeping_activations(self) -> ShardingPlan:
        """Return a copy without activation recomputation."""
        return replace(self, checkpoint_every=0, stage_checkpoints=(), checkpoint_blocks=())


@dataclass(frozen=True)
class ResolvedRun:
    """The complete plan of a run; saved as ``config.resolved.yaml`` and read by every rank.

    Attributes:
        config: the typed tree with ``${oc.env:...}`` resolved (masked again on disk). The blocks of the chosen trunk,
            heads and loss have all their keys; all other components' blocks have their defaults.
        recipe: name of the recipe, the value of ``config=``.
        run_dir: absolute path of the run folder.
        device: "cpu" or "cuda".
        backend: "gloo" or "cpu:gloo,cuda:nccl".
        world_size, num_nodes, procs_per_node: number of ranks, of machines, and of ranks per machine.
        threads_per_rank: CPU threads of torch per rank.
        seed: SEED_VALUE.
        batch_per_rank: BATCHSIZE_PER_REPLICA, source images per rank and micro-batch.
        accumulation_steps: micro-batches per optimizer step.
        exact_accumulation: compute one loss over all micro-batches of a step.
        crop_passes: number of forward passes among which the crops of a micro-batch are divided.
        global_batch: source images per optimizer step = batch_per_rank * world_size * accumulation_steps.
        num_epochs, max_steps: length of the run; max_steps None: no limit. It never changes the schedule.
        sharding, optimizer: the plans of these two parts.
        notes: sentences to print once at the start (keys with no effect, keys overridden by ZERO.LEVEL, ...).
        interpolations: key path under ``config`` (list positions as numbers) -> the ``${...}`` in the recipe.
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

    def num_steps(self, steps_per_epoch: int) -> int:
        """Return how many optimizer steps the run takes; 0 if it only evaluates."""
        if self.config.TEST_ONLY:
            return 0
        whole = steps_per_epoch * self.num_epochs
        return whole if self.max_steps is None else min(whole, self.max_steps)


NO_UNITS = " has no effect at levels 1 and 2 on the CPU, where parameters stay whole."


def keeps_parameters_whole(plan: ShardingPlan, num_ranks: int, world_size: int, device_type: str) -> bool:
    """Check whether the torch engine keeps whole parameters on every rank between steps, without all-gathers.

    Args:
        plan: sharding plan of the run.
        num_ranks: number of ranks that share one copy of the state.
        world_size: number of all ranks.
        device_type: "cpu" or "cuda".
    """
    precision = plan.precision
    # On the CPU, torch would copy all parameters in and out of buffers, which costs as much as the
    # communication. Casts, disks and several copies of the state need its buffers anyway.
    return (
        plan.engine == "torch"
        and plan.level in (1, 2)
        and device_type == "cpu"
        and num_ranks == world_size
        and not plan.offload_params.is_on_disk
        and {precision.compute, precision.reduce} == {precision.master}
    )


def shards_parameters(plan: ShardingPlan, num_ranks: int, world_size: int, device_type: str) -> bool:
    """Check whether ranks have shards of parameters between steps; arguments as for ``keeps_parameters_whole``."""
    return plan.level > 0 and not keeps_parameters_whole(plan, num_ranks, world_size, device_type)


def with_fewer_ranks(plan: ResolvedRun, least: int) -> ResolvedRun | None:
    """Return a plan for the largest smaller number of processes (at least ``least``) that divides the micro-batch.

    For runs on one machine. Shard groups and batch-norm groups smaller than the world keep their size, which must
    divide the number too. None if there is no such number.
    """
    micro_batch = plan.batch_per_rank * plan.world_size
    for number in range(plan.world_size - 1, least - 1, -1):
        if number >= 1 and micro_batch % number == 0 and (fewer := with_ranks(plan, number)):
            return fewer
    return None


def with_ranks(plan: ResolvedRun, number: int) -> ResolvedRun | None:
    """Return a plan for ``number`` processes on one machine, with the micro-batch divided as evenly as possible.

    Groups smaller than the world keep their size; None if it does not divide ``number``.
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
        # Rounded up: no image of the micro-batch may be lost where the number does not divide it.
        batch_per_rank=-(-plan.batch_per_rank * plan.world_size // number),
        sharding=replace(plan.sharding, shard_group_size=shard_group, sync_bn_group=bn_group),
    )
