"""A run built with fake tensors (shapes, no memory): the memory it will take, by place, and its number of steps.

It can describe another machine. If the images are not here, their number and size are assumed and printed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from vissl_zero.config.blocks.data import Data
from vissl_zero.data.dataset import ImageBatch, join_batches
from vissl_zero.data.loader import Loader, build_train_loader, require_evaluation
from vissl_zero.data.source import left_out_of_run
from vissl_zero.engine.build import add_probe, other_model
from vissl_zero.engine.exact_accumulation import is_float, surrogate, wide
from vissl_zero.engine.hook import Hook
from vissl_zero.engine.loop import Frozen, Schedules, explaining_single_images
from vissl_zero.engine.passes import passes_of, require_separate_rows
from vissl_zero.errors import ConfigError
from vissl_zero.methods.method import Method, build_method
from vissl_zero.methods.mixing import mixing_of
from vissl_zero.methods.supervised import require_classes
from vissl_zero.models.bare import whole_start_bytes, why_whole
from vissl_zero.models.keyed_random import set_random_key
from vissl_zero.models.model import build_model
from vissl_zero.optim.param_groups import ParamGroup, build_optimizer, freeze_untrainable, param_groups
from vissl_zero.planner.candidates import Budget, Forecasts, forecast_all
from vissl_zero.planner.forecast import Forecast, Forecaster, Subject, fake_
from vissl_zero.planner.machine_profile import MachineProfile, read_profile
from vissl_zero.registry import HOOKS, load_plugins, require_interface
from vissl_zero.resolve.pairs import SOURCE as MASKED
from vissl_zero.resolve.resolved import ResolvedRun, shards_parameters
from vissl_zero.sharding.model.precision import cast_to_master, dtype_of
from vissl_zero.sharding.state.teacher import require_wide

T = TypeVar("T")

_NUM_READ = 8  # images, for the shapes of their crops
_ASSUMED_IMAGES, _ASSUMED_CLASSES, _ASSUMED_SIDE = 1_281_167, 1_000, 256  # ImageNet's


@dataclass(frozen=True)
class DryRun:
    """The result of ``dry_run``.

    Attributes:
        plan: the resolved run.
        forecast: forecast of units and memory.
        num_params, num_trained: parameter elements of the model, and those that the optimizer updates.
        num_images, steps_per_epoch, num_steps: images of an epoch, steps of an epoch, and steps of the run.
        class_names: class names of the images; empty without labels, and where images are assumed.
        crops: number, height and width in pixels of an image's crops at each resolution.
        assumed: sentences on what was assumed about the images; empty if they are on this machine.
        lr_first, lr_peak, lr_last: learning rate of the trunk at the first step, at its highest and at the last step.
        left_out: sentences on files in the folders of images that the run does not read.
        built_whole: why every rank builds the whole model before it is sharded; empty if no rank does.
        start_bytes: bytes of a rank that building the whole model takes.
    """

    plan: ResolvedRun
    forecast: Forecast
    num_params: int
    num_trained: int
    num_images: int
    class_names: tuple[str, ...]
    crops: tuple[tuple[int, int, int], ...]
    steps_per_epoch: int
    num_steps: int
    assumed: tuple[str, ...]
    lr_first: float
    lr_peak: float
    lr_last: float
    left_out: Sequence[str]
    built_whole: str
    start_bytes: int

    @property
    def needed(self) -> int:
        """Return the bytes that a rank needs on its device; without activations if these are unknown."""
        step = self.forecast.step
        return self.tiers["device"] if step is None else step.resident_bytes

    @property
    def tiers(self) -> dict[str, int]:
        """Peak bytes of a rank in a step, by place: device, host memory, disk.

        On the CPU, the device is the host memory. The system's cache of files is not counted.
        """
        held, sharding = self.forecast.memory, self.plan.sharding
        tiers = {"device": held.activations + held.buffers + self.forecast.teacher_buffers, "host": 0, "disk": 0}
        params = sharding.offload_params.place(self.plan.device)
        tiers[params] += held.params + self.forecast.teacher_params
        tiers["device"] += held.params_step_peak - held.params  # units that are gathered
        tiers["disk" if params == "disk" else "device"] += held.grads
        tiers[sharding.offload_optimizer.place(self.plan.device)] += held.optimizer
        return {name: num_bytes for name, num_bytes in tiers.items() if num_bytes}


@dataclass(frozen=True)
class Stage:
    """A run built with fake tensors, which can be forecast at any level.

    Attributes:
        plan: the resolved run.
        forecaster: forecaster of the run; call it in ``mode``.
        mode: mode of the fake tensors.
        model, method, groups, loader: model, method, parameter groups and loader of the run.
        crops, assumed: see ``DryRun``.
    """

    plan: ResolvedRun
    forecaster: Forecaster
    mode: FakeTensorMode
    model: nn.Module
    method: Method
    groups: list[ParamGroup]
    loader: Loader
    crops: tuple[tuple[int, int, int], ...]
    assumed: tuple[str, ...]

    def can_split(self) -> bool:
        """Check whether smaller micro-batches give the same gradients: uncoupled samples, or exact accumulation."""
        has_batch_norm = any(isinstance(module, _BatchNorm) for module in self.model.modules())
        return (self.plan.exact_accumulation or not self.method.couples_samples) and not has_batch_norm

    def apply(self, function: Callable[[Forecaster], T]) -> T:
        """Call ``function`` with the forecaster, in the mode of fake tensors and the run's number format."""
        with self.mode, _default_dtype(dtype_of(self.plan.sharding.precision.wide)):
            return function(self.forecaster)

    def forecast(self) -> Forecast:
        """Forecast the run with its own plan."""
        plan = self.plan
        return self.apply(lambda forecaster: forecaster.forecast(plan.sharding, plan.accumulation_steps))

    def forecasts(self, budget: Budget | None = None) -> Forecasts:
        """Forecast every plan of the run with its micro-batch; ``budget`` as in ``forecast_all``."""
        plan = self.plan
        return self.apply(
            lambda forecaster: forecast_all(
                forecaster, plan.sharding, plan.accumulation_steps, plan.batch_per_rank, budget
            )
        )


def set_stage(plan: ResolvedRun, check: Callable[[nn.Module], object] | None = None) -> Stage:  # noqa: C901
    """Build everything but the processes. Cost: indexing the data, reading a few images, a second or two.

    Args:
        plan: plan of the run.
        check: called with the model on the meta device if the images are here; raises the error of the run.
    Raises:
        ConfigError, DataError: the run would be refused with the same error.
    """
    load_plugins(plan.config.IMPORTS)
    for name in plan.config.HOOKS.EXTRA:
        require_interface(HOOKS, name, HOOKS.get(name).build(), base=Hook)
    data, assumed = _data(plan)
    # Only one micro-batch is read, so loader processes are not worth their start.
    loader = build_train_loader(plan, 0, plan.world_size, replace(data, NUM_DATALOADER_WORKERS=0))
    batch, num_local, num_global = loader.first_images(1 if assumed else _NUM_READ)  # assumed images are all equal
    if plan.config.NEAREST_NEIGHBOR.USE_KNN or batch.targets is not None or batch.masks is not None:
        require_evaluation(data, plan.seed)
    num_classes = _ASSUMED_CLASSES if assumed else len(loader.source.class_names)
    precision = plan.sharding.precision
    dtype = dtype_of(precision.wide)
    # Built on the meta device, where constructors still compute (drop path rates of timm's), and faked afterward.
    with torch.device("meta"), _default_dtype(dtype):
        model = build_model(plan.config.MODEL, num_classes)
        method = build_method(plan.config.LOSS, len(loader.source))
        method.mixing = mixing_of(plan.config.DATA.TRAIN)
        method.views_apart = plan.config.MODEL.VIEWS_APART
        require_separate_rows(model, plan)
        add_probe(plan, method, model, num_classes, None)
        teacher = None
        if method.has_teacher:
            origin = other_model(plan, num_classes) or build_model(plan.config.MODEL, num_classes)
            teacher = method.make_teacher(origin)
        cast_to_master(model, precision)
        if teacher is not None:
            cast_to_master(teacher, precision)
    if method.has_teacher and method.teacher_follows:
        require_wide(precision, "a teacher that follows the student")
    if plan.config.HOOKS.EMA_MODEL.SAVE_EMA_MODEL:
        require_wide(precision, "a running average of the weights")
    if check is not None and not assumed:  # else the number of classes is assumed too
        check(model)
    is_single = not assumed and meets_single_images(plan, loader)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode, _default_dtype(dtype):
        for module in filter(None, (model, method, teacher)):
            fake_(module)
        freeze_untrainable(model, plan.config.MODEL.NON_TRAINABLE_PARAMS)
        groups = param_groups(model, plan.optimizer)
        names = [name for name, _ in model.named_parameters()]
        Frozen(plan.config.MODEL.TEMP_FROZEN_PARAMS_ITER_MAP, names)
        method.set_length(loader.steps_per_epoch * plan.num_epochs, loader.steps_per_epoch)
        fakes = _dummy_batch(batch, num_local, num_global, dtype_of(precision.master))
        if is_single:
            _require_values(plan, model, method, _dummy_batch(batch, 1, plan.world_size, dtype_of(precision.master)))

        def run_forward() -> tuple[torch.Tensor, Any]:
            method.on_step(method.heaviest_step(), 0)
            set_random_key(plan.seed, 0, fakes.sample_ids)
            batch, teacher_outputs = method.prepare(fakes), None
            if teacher is not None:
                with torch.no_grad():
                    teacher_outputs = method.run_teacher(teacher, batch)
            settings = plan.config.MODEL.FEATURE_EVAL_SETTINGS
            if plan.config.TEST_ONLY and not settings.EVAL_TRUNK_AND_HEAD:
                # The heads are not used, and there may be no labels for a loss.
                outputs = [getattr(output, "embeddings", output) for output in model(fakes.images)]
                return torch.cat([output.flatten() for output in outputs]).sum(), (outputs, None)
            outputs = method.run_student(model, batch)
            if method.ignored_label is not None and not assumed:
                require_classes(outputs, num_classes)
            return method.loss(outputs, batch, teacher_outputs), (outputs, teacher_outputs)

        is_joint = plan.exact_accumulation and plan.accumulation_steps > 1
        in_rounds = (is_joint or plan.crop_passes > 1) and not plan.config.TEST_ONLY
        number = plan.crop_passes if in_rounds else 1
        subject = Subject(
            model=model,
            groups=groups,
            build_optimizer=functools.partial(build_optimizer, plan.optimizer),
            world_size=plan.world_size,
            num_nodes=plan.num_nodes,
            device_type=plan.device,
            run_forward=_in_two_rounds(plan, method, model, teacher, fakes) if in_rounds else run_forward,
            passes=number,
            passes_per_loss=number * plan.accumulation_steps if is_joint else number,
            inputs=fakes.images,
            is_averaged=plan.config.HOOKS.EMA_MODEL.SAVE_EMA_MODEL,
            is_uniform=True,
            teacher=teacher,
            loss=method,
            machine=described_machine(plan),
            num_threads=plan.threads_per_rank,
        )
        forecaster = Forecaster(subject, plan.sharding)
        if in_rounds:
            with torch.no_grad(), suppress(Exception):  # for shapes; the recording says what fails
                subject.run_forward()
    sizes = [(int(image.shape[-2]), int(image.shape[-1])) for image in batch.images]
    crops = tuple((number, *size) for number, size in zip(batch.num_crops, sizes, strict=True))
    return Stage(plan, forecaster, mode, model, method, groups, loader, crops, assumed)


def meets_single_images(plan: ResolvedRun, loader: Loader) -> bool:
    """Check whether a rank will train on a micro-batch of one image, with batch norm of its own values."""
    num_steps = plan.num_epochs * loader.steps_per_epoch if plan.max_steps is None else plan.max_steps
    is_reached = not plan.config.TEST_ONLY and num_steps >= loader.steps_per_epoch
    return is_reached and loader.order.fewest == 1 and plan.sharding.sync_bn_group in (0, 1)


def _require_values(plan: ResolvedRun, model: nn.Module, method: Method, fakes: ImageBatch) -> None:
    """Refuse single images if batch norm has one value for each channel of them.

    Raises:
        ConfigError: it has; the message names the keys.
    """
    try:
        with torch.no_grad(), explaining_single_images():
            method.on_step(method.heaviest_step(), 0)
            set_random_key(plan.seed, 0, fakes.sample_ids)
            method.run_student(model, method.prepare(fakes))
    except ConfigError:
        raise
    except Exception:  # noqa: BLE001, S110 - the recording of the step says what else fails
        pass


class _Sketch:
    """Stands in for a model: runs only its largest pass, without graph, and returns outputs of the shapes of all.

    The first call runs the whole model, to find the shapes.

    Attributes:
        largest: largest pass of the last call.
        leaves: output tensors of the last call.
    """

    def __init__(self, model: nn.Module, plan: ResolvedRun):
        self._model, self._plan = model, plan
        self._whole: list[Any] | None = None

    def __call__(self, images: list[torch.Tensor], probe: torch.Tensor | None = None, **options: Any) -> list[Any]:
        passes = passes_of(images, probe, options, self._plan.crop_passes, self._plan.config.MODEL.VIEWS_APART)
        self.largest = max(passes, key=lambda one: sum(image.numel() for image in one.images))
        with torch.no_grad():
            if self._whole is None:
                self._whole = wide(self._model(images, probe, **options))
            else:
                self.largest.run(self._model)
        outputs = fresh(self._whole)
        self.leaves = pytree.tree_leaves(outputs)
        return outputs


def fresh(outputs: list[Any]) -> list[Any]:
    """Return new outputs of the same shapes, as leaves of a graph."""
    made: list[Any] = pytree.tree_map_only(
        torch.Tensor, lambda leaf: torch.empty_like(leaf, requires_grad=is_float(leaf)), outputs
    )
    return made


def _in_two_rounds(
    plan: ResolvedRun, method: Method, model: nn.Module, teacher: nn.Module | None, fakes: ImageBatch
) -> Callable[[], tuple[torch.Tensor, Any]]:
    """Return a function that runs a micro-batch like ``accumulate_exactly``: the loss over all, then one pass."""
    number = plan.accumulation_steps if plan.exact_accumulation else 1
    student, teaching = (_Sketch(one, plan) for one in (model, teacher or model))

    def run() -> tuple[torch.Tensor, Any]:
        method.on_step(method.heaviest_step(), 0)
        set_random_key(plan.seed, 0, fakes.sample_ids)
        batch, sizes, teacher_outputs = method.prepare(fakes), [fakes.num_local] * number, None
        if teacher is not None:
            teacher_outputs = method.run_teacher(cast(nn.Module, teaching), batch)
        parts = [method.run_student(cast(nn.Module, student), batch)]
        leaves = student.leaves
        if number > 1:
            parts += [fresh(parts[0]) for _ in sizes[1:]]
            leaves = pytree.tree_leaves(parts)
            part = fakes if method.loss_sees_images else replace(fakes, images=[])
            batch = join_batches([part] * number, number * fakes.num_global)
            if teacher_outputs is not None:
                teacher_outputs = method.join([teacher_outputs, *(fresh(teacher_outputs) for _ in sizes[1:])], sizes)
        whole = method.join(parts, sizes) if number > 1 else parts[0]
        loss = method.loss(whole, batch, teacher_outputs)
        wanted = [leaf for leaf in leaves if is_float(leaf)]
        each = iter(torch.autograd.grad(loss, wanted, allow_unused=True))
        gradients = [next(each) if is_float(leaf) else None for leaf in leaves]
        del loss, whole, parts, leaves, wanted, teacher_outputs, each
        student.leaves = teaching.leaves = []
        set_random_key(plan.seed, 0, fakes.sample_ids[:1])  # a pass has any number of rows
        again = pytree.tree_leaves(wide(student.largest.run(model)))
        return surrogate(again, gradients[: len(again)], [0] * len(again)), gradients

    return run


def dry_run(plan: ResolvedRun, check: Callable[[nn.Module], object] | None = None) -> DryRun:
    """Forecast the memory and the number of steps of a run; arguments, cost and errors are those of ``set_stage``."""
    stage = set_stage(plan, check)
    forecast = stage.forecast()
    per_epoch = stage.loader.steps_per_epoch
    num_steps, length = plan.num_steps(per_epoch), per_epoch * plan.num_epochs
    schedules = Schedules(plan, stage.groups, per_epoch)
    rates = [schedules.lr(step) for step in range(0, length, max(1, length // 1000))]
    params = list(stage.model.parameters())
    # A rank that keeps parameters whole holds the whole model all the time anyway.
    is_cut = shards_parameters(plan.sharding, forecast.wrap_plan.num_ranks, plan.world_size, plan.device)
    built_whole = why_whole(stage.model) if is_cut else ""
    return DryRun(
        plan=plan,
        forecast=forecast,
        num_params=sum(param.numel() for param in params),
        num_trained=sum(param.numel() for param in params if param.requires_grad),
        num_images=len(stage.loader.source),
        class_names=() if stage.assumed else stage.loader.source.class_names,
        left_out=() if stage.assumed else left_out_of_run(plan.config.DATA, stage.loader.source, plan.seed),
        crops=stage.crops,
        assumed=stage.assumed,
        steps_per_epoch=per_epoch,
        num_steps=num_steps,
        lr_first=rates[0],
        lr_peak=max(rates),
        lr_last=schedules.lr(max(num_steps - 1, 0)),
        built_whole=built_whole,
        start_bytes=whole_start_bytes(stage.model) if built_whole else 0,
    )


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Set the default dtype, because ``.to`` cannot replace parameters of fake modules. A context."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def described_machine(plan: ResolvedRun) -> MachineProfile | None:
    """Return the machine that ``ZERO.MACHINE_PROFILE`` describes; None if the key is not set."""
    profile = plan.config.ZERO.MACHINE_PROFILE
    return read_profile(profile) if profile else None


def _data(plan: ResolvedRun) -> tuple[Data, tuple[str, ...]]:
    """Return the DATA block, with synthetic images if none of the run's are here, and a sentence that says so."""
    data = plan.config.DATA
    named = [path for split in (data.TRAIN, data.TEST) for path in split.DATA_PATHS]
    if not named or any(Path(path).exists() for path in named):  # if only some are missing, that is a mistake
        return data, ()
    num_images = data.TRAIN.DATA_LIMIT if data.TRAIN.DATA_LIMIT > 0 else _ASSUMED_IMAGES
    train = replace(
        data.TRAIN,
        DATA_SOURCES=["digit_scenes" if data.TRAIN.DATA_SOURCES == [MASKED] else "synthetic"],
        DATA_PATHS=[],
        LABEL_SOURCES=[],
        LABEL_PATHS=[],
        SOURCE_PARAMS={},
        DATA_LIMIT=num_images,
        DEFAULT_GRAY_IMG_SIZE=_ASSUMED_SIDE,
    )
    test = replace(data.TEST, DATA_SOURCES=[], DATA_PATHS=[])
    return replace(data, TRAIN=train, TEST=test), (
        f"{num_images:,} images in {_ASSUMED_CLASSES:,} classes are assumed (config.DATA.TRAIN.DATA_LIMIT sets "
        f"another number): {', '.join(map(str, named))} is not on this machine.",
    )


def _dummy_batch(batch: ImageBatch, num_local: int, num_global: int, dtype: torch.dtype) -> ImageBatch:
    """Return a zero-filled micro-batch shaped like ``batch``, of ``num_local`` images; fake in ``FakeTensorMode``."""
    shapes = [(crops * num_local, *image.shape[1:]) for image, crops in zip(batch.images, batch.num_crops, strict=True)]
    return ImageBatch(
        images=[torch.zeros(shape, dtype=dtype) for shape in shapes],
        num_crops=batch.num_crops,
        targets=None if batch.targets is None else torch.zeros(num_local, dtype=torch.int64),
        masks=None if batch.masks is None else torch.zeros(num_local, *batch.masks.shape[1:], dtype=torch.uint8),
        boxes=None if batch.boxes is None else torch.zeros(sum(batch.num_crops) * num_local, 4),
        sample_ids=torch.arange(num_local),
        num_global=num_global,
    )
