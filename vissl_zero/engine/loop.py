"""The training loop: steps, epochs and hooks. No code here depends on a level, an engine, a method or a file."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import fields
from functools import cache, partial

import torch
from torch import Tensor

from vissl_zero.collectives import all_gather_rows, rank, sum_later
from vissl_zero.data.dataset import ImageBatch
from vissl_zero.engine import stopping
from vissl_zero.engine.exact_accumulation import accumulate_exactly
from vissl_zero.engine.hook import Hook, Run, Step, StepRecord
from vissl_zero.errors import ConfigError, Problem, VisslZeroError, did_you_mean
from vissl_zero.models.keyed_random import refuse_unkeyed_randomness, set_random_key
from vissl_zero.models.weight_names import without_wrappers
from vissl_zero.optim.param_groups import ParamGroup
from vissl_zero.optim.schedules import build_schedule
from vissl_zero.resolve.optimizer_plan import peak
from vissl_zero.resolve.resolved import ResolvedRun
from vissl_zero.sharding.model.batch_norm import frozen_statistics
from vissl_zero.sharding.sharded_model import ShardedModel
from vissl_zero.sharding.update.stepper import StepResult

Schedule = Callable[[int], float]


class Schedules:
    """The learning rates and weight decays of parameter groups as functions of the optimizer step.

    Args:
        plan: plan of the run.
        groups: groups as passed to the strategy; matched with the optimizer's groups by ``name``.
        steps_per_epoch: optimizer steps of one epoch.
    """

    def __init__(self, plan: ResolvedRun, groups: Sequence[ParamGroup], steps_per_epoch: int):
        optimizer = plan.optimizer

        def build(config: dict | None) -> Schedule | None:
            return build_schedule(config, steps_per_epoch, plan.num_epochs) if config else None

        lr, lr_head = build(optimizer.lr), build(optimizer.lr_head)
        wd, wd_head = build(optimizer.wd_schedule), build(optimizer.wd_head_schedule)
        assert lr is not None
        self._lr = lr
        self._groups = {group.name: group for group in groups}
        self._lr_of = {g.name: (lr_head or lr) if g.is_head else lr for g in groups}
        for group in groups:
            if group.has_constant_lr:
                self._lr_of[group.name] = _constant(peak(optimizer.lr_head if group.is_head else optimizer.lr))
        self._wd_of = {g.name: wd_head if g.is_head else wd for g in groups if g.is_decayed}

    def lr(self, step: int) -> float:
        """Return the trunk's learning rate at optimizer step ``step`` (from 0)."""
        return self._lr(step)

    def apply(self, sharded: ShardedModel, step: int, lr_factor: float = 1.0) -> float:
        """Set ``lr`` and ``weight_decay`` of every group for step ``step`` (from 0). Return the trunk's rate."""
        for group in sharded.optimizer.param_groups:
            name = group["name"]
            group["lr"] = self._lr_of[name](step) * self._groups[name].lr_factor * lr_factor
            schedule = self._wd_of.get(name)
            if schedule is not None:
                group["weight_decay"] = schedule(step) * self._groups[name].wd_factor
        return self._lr(step) * lr_factor


def _constant(value: float) -> Schedule:
    return lambda _: value


class Frozen:
    """Parameters that are frozen for the first steps (VISSL's ``TEMP_FROZEN_PARAMS_ITER_MAP``).

    Args:
        entries: pairs of full parameter name (prefixes of DDP and FSDP are allowed) and number of steps.
        known: names of the model's parameters.
    Raises:
        ConfigError: a name is not a parameter.
    """

    def __init__(self, entries: Iterable[Sequence], known: Iterable[str]):
        names = set(known)
        self._until: dict[str, int] = {}
        problems = []
        for entry in entries:
            name, num_steps = without_wrappers(str(entry[0])).removeprefix("module."), int(entry[1])
            if name not in names:
                problems.append(
                    Problem(
                        "config.MODEL.TEMP_FROZEN_PARAMS_ITER_MAP",
                        repr(name),
                        "must name parameters of the model",
                        f"Use a full parameter name.{did_you_mean(name, names)}",
                    )
                )
            self._until[name] = num_steps
        if problems:
            raise ConfigError(problems)

    def at(self, step: int) -> set[str]:
        """Return the names of parameters that are frozen at optimizer step ``step`` (from 0)."""
        return {name for name, until in self._until.items() if step < until}


def train(run: Run, schedules: Schedules, frozen: Frozen, hooks: Sequence[Hook]) -> None:
    """Train until ``run.num_steps``, or until a hook sets ``run.stop``. Collective.

    A resumed run continues at its checkpoint, which may be in the middle of an epoch. Every rank must pass its hooks in
    the same order, because some hooks call collectives.

    Raises:
        DivergedError: the loss is not finite, or the gradients are not finite at any loss scale.
    """
    try:
        if not run.is_resumed:
            run.sharded.normalize_rows(run.method.normalized_rows())
            if run.method.has_teacher and run.method.teacher_follows:
                # Momentum 0 copies the student: its weights may have changed since the teacher was made.
                run.sharded.follow(0.0, moves_anchor=True)
        for hook in hooks:
            hook.on_start(run)
        run.sharded.model.train()
        if run.method.needs_initial_embeddings and not run.is_resumed:
            _embed_dataset(run)
        while run.step < run.num_steps and run.stop is None:
            _train_epoch(run, schedules, frozen, hooks)
        if run.stop is None:
            for hook in hooks:
                hook.on_end(run)
    finally:
        if run.teacher_features is not None:
            run.teacher_features.close()
        for hook in hooks:
            hook.close(run)


@torch.no_grad()
def _embed_dataset(run: Run) -> None:
    """Initialize the method's state from the untrained model's outputs for every image, in the first epoch's views."""
    dtype = getattr(torch, run.plan.sharding.precision.master)
    run.method.on_step(0, 0)
    # Running statistics begin with the first step, as in a run whose method needs no embeddings.
    with frozen_statistics(run.sharded.model):
        for micro_batches in run.loader.epoch(0):
            for cpu_batch in micro_batches:
                batch = cpu_batch.to(run.device, dtype)
                set_random_key(run.plan.seed, 0, batch.sample_ids)
                batch = run.method.prepare(batch)
                outputs = run.method.run_student(run.sharded.model, batch)
                run.method.update_state([run.method.observe(outputs, batch)])


def _train_epoch(run: Run, schedules: Schedules, frozen: Frozen, hooks: Sequence[Hook]) -> None:
    for hook in hooks:
        hook.on_epoch_start(run)
    # A run that resumes in mid-epoch called it before it stopped.
    if run.epoch_samples == 0:
        run.method.on_epoch(run.epoch)
    started = time.perf_counter()
    for micro_batches in run.loader.epoch(run.epoch, run.epoch_samples):
        loaded = time.perf_counter()
        step = take_step(run, schedules, frozen, micro_batches, hooks, (started, loaded))
        for hook in hooks:
            hook.on_step(run, step)
        if run.stop is not None or run.step >= run.num_steps:
            break
        started = time.perf_counter()
    # Hooks must receive the record of the last step before the end of the epoch.
    run.settle()
    # The epoch has not ended: a resumed run continues in it.
    if run.stop is not None:
        return
    for hook in hooks:
        hook.on_epoch_end(run)
    run.epoch, run.epoch_samples = run.epoch + 1, 0


def take_step(
    run: Run,
    schedules: Schedules,
    frozen: Frozen,
    micro_batches: Sequence[ImageBatch],
    hooks: Sequence[Hook],
    times: tuple[float, float],
) -> Step:
    """Run one optimizer step over its micro-batches. ``times``: clock (s) before and after they were loaded.

    The step's record may be incomplete when this returns: the next step or ``run.settle`` completes it.
    """
    lr = schedules.apply(run.sharded, run.step, run.lr_factor)
    run.sharded.freeze(frozen.at(run.step))
    for hook in hooks:
        hook.on_batch(run, micro_batches)
    return _train_step(run, micro_batches, lr, times, hooks)


def _train_step(
    run: Run, micro_batches: Sequence[ImageBatch], lr: float, times: tuple[float, float], hooks: Sequence[Hook]
) -> Step:
    """Run forward, backward and update; ``take_step`` has set rates and frozen parameters."""
    sharded, method = run.sharded, run.method
    num_samples = sum(batch.num_global for batch in micro_batches)
    dtype = getattr(torch, run.plan.sharding.precision.master)
    if run.device.type == "cpu" and _is_logged(run, run.step):
        # Sums of health may be a matrix as wide as the embeddings: free it before there are activations.
        run.settle()
    method.on_step(run.step, run.epoch)
    watch = _watched(run) if run.step == run.first_step else nullcontext()
    is_joint = run.plan.exact_accumulation and len(micro_batches) > 1
    accumulate = accumulate_exactly if is_joint or run.plan.crop_passes > 1 else _accumulate
    with explaining_single_images():
        loss_sum = accumulate(run, micro_batches, dtype, watch)
    is_logged = _is_logged(run, run.step + 1)
    if is_logged:
        run.bytes = sharded.ledger()  # before the step, while gradients exist
    every = run.plan.config.HOOKS.HISTOGRAMS_EVERY

    def before_update(grad_norm: Tensor) -> None:
        figures = cache(partial(_figures, loss_sum, grad_norm))
        for hook in hooks:
            hook.before_update(run, figures)

    result = sharded.step(every > 0 and (run.step + 1) % every == 0, before_update)
    run.histograms = result.histograms
    sharded.zero_grad()
    # After the update, as SwAV's prototypes must have unit length in every forward pass.
    sharded.normalize_rows(method.normalized_rows())
    if method.has_teacher and method.teacher_follows and not result.skipped:
        # Before ``run.step`` is raised: momentum schedules count the step that was just made from 0. A skipped update
        # has left no new weights to follow.
        sharded.follow(method.momentum(run.step), method.normalized_rows(), method.moves_anchor(run.step))
    # One all-reduce for all values, as latency dominates. Every rank has the same norm, so only one rank adds it.
    is_stop_requested = torch.full_like(loss_sum, stopping.requested_stop() is not None)
    norm = result.grad_norm.to(loss_sum) if run.is_main else torch.zeros_like(loss_sum)
    parts = [torch.stack((loss_sum, is_stop_requested, norm))]
    if is_logged:
        parts.append(method.health_sums().to(loss_sum))
    totals = sum_later(torch.cat(parts))
    run.step += 1
    run.position += num_samples
    run.epoch_samples += num_samples
    (started, loaded), now = times, time.perf_counter()
    step = Step(
        step=run.step,
        epoch=run.epoch,
        lr=lr,
        images_per_s=num_samples / (now - started),
        data_wait=(loaded - started) / (now - started),
        bytes=run.bytes,
        skipped=result.skipped,
        loss_scale=result.loss_scale,
        num_samples=num_samples,
    )
    # Only now, with the kernels of this step launched, wait for the record of the step before.
    run.settle()
    run.unsettled = partial(_settle, run, hooks, step, result, loss_sum, totals, is_logged)
    # Gradients overflow without any loss scaling, so no later step can succeed: raise now, on every rank.
    if result.is_stuck:
        run.settle()
    return step


def _figures(local_loss: Tensor, grad_norm: Tensor) -> tuple[float, float]:
    """Return the loss of all ranks and the gradients' norm, equal to the record's. Collective; waits for the device."""
    norm = grad_norm.to(local_loss) if rank() == 0 else torch.zeros_like(local_loss)
    loss, norm_everywhere = sum_later(torch.stack((local_loss, norm)))().tolist()
    return loss, norm_everywhere


def _settle(
    run: Run,
    hooks: Sequence[Hook],
    step: Step,
    result: StepResult,
    local_loss: Tensor,
    totals: Callable[[], Tensor],
    is_logged: bool,
) -> None:
    """Complete the record of ``step`` and call ``on_record``: the one place where the loop waits for the device."""
    figures = totals()
    loss, num_asked, grad_norm = figures[:3].tolist()
    run.is_asked_to_stop = num_asked > 0
    # The loss is the sum over all ranks, so every rank raises at the same step.
    if result.is_stuck or (not result.skipped and not math.isfinite(loss)):
        raise diverged(run, step, result, loss, local_loss)
    record = StepRecord(
        **{item.name: getattr(step, item.name) for item in fields(step)},
        loss=None if result.skipped else loss,
        grad_norm=None if result.skipped else grad_norm,
        watch=run.method.health(figures[3:]) if is_logged else {},
    )
    run.records.append(record)
    for hook in hooks:
        hook.on_record(run, record)


@contextmanager
def explaining_single_images() -> Iterator[None]:
    """Name the key where batch norm has a single value for each channel: torch's error names the shape alone."""
    try:
        yield
    except ValueError as error:
        if "Expected more than 1 value per channel" not in str(error):
            raise
        must = "must leave more than one image to a rank: batch norm has no variance of one value for each channel"
        fix = "Write config.DATA.TRAIN.DROP_LAST=True, or another BATCHSIZE_PER_REPLICA, or add images, or larger ones."
        raise ConfigError([Problem("config.DATA.TRAIN", "a step with one image on a rank", must, fix)]) from error


@contextmanager
def _watched(run: Run) -> Iterator[None]:
    """Measure activations in the context, and raise if a layer draws from torch's global generator."""
    with run.sharded.measure_activations(), refuse_unkeyed_randomness(run.sharded.model):
        yield


def _accumulate(
    run: Run, micro_batches: Sequence[ImageBatch], dtype: torch.dtype, watch: AbstractContextManager[None]
) -> Tensor:
    """Accumulate gradients of the mean of the micro-batches' losses; arguments as for ``accumulate_exactly``."""
    sharded, method = run.sharded, run.method
    num_samples = sum(batch.num_global for batch in micro_batches)
    loss_sum = torch.zeros((), dtype=torch.float64, device=run.device)
    observed = []
    for index, cpu_batch in enumerate(micro_batches):
        batch = cpu_batch.to(run.device, dtype)
        set_random_key(run.plan.seed, run.step, batch.sample_ids)
        batch = method.prepare(batch)
        teacher_outputs = run.run_teacher(batch) if method.has_teacher else None
        with sharded.micro_batch(is_last=index == len(micro_batches) - 1):
            with watch if index == 0 else nullcontext():
                outputs = method.run_student(sharded.model, batch)
                loss = method.loss(outputs, batch, teacher_outputs)
            # Gradients are averaged over ranks. The factor undoes that, and weights each micro-batch by its share of
            # the samples.
            sharded.backward(loss, batch.num_local * run.world_size / num_samples)
        run.show_probe(batch)
        observed.append(method.observe(outputs, batch, teacher_outputs))
        loss_sum += loss.detach() * (batch.num_local / num_samples)
    method.update_state(observed)
    return loss_sum


def _is_logged(run: Run, step: int) -> bool:
    """Check whether memory and health are measured in a step: the first two, every LOG_FREQUENCY-th and the last."""
    # Not in every step: walking over all tensors takes a tenth of a small model's step, and health metrics may need
    # eigenvalues. The second step is the first one with optimizer state.
    is_new = step - run.first_step <= 2
    return is_new or step % run.plan.config.LOG_FREQUENCY == 0 or step >= run.num_steps


FILE_NAME = "diverged.json"
_MOST_NAMED = 3


class DivergedError(VisslZeroError):
    """The loss, or the gradients at every loss scale, became NaN or infinite; all ranks raise at the same step."""


def diverged(run: Run, step: Step, result: StepResult, loss: float, local_loss: Tensor) -> DivergedError:
    """Return the error to raise; rank 0 writes ``diverged.json`` into the run folder.

    Args:
        run: run in progress, possibly one step ahead of ``step``.
        step: step that diverged.
        result: result of its update.
        loss: loss of all ranks.
        local_loss: this rank's share of it, 0-d.
    Cost: collective; one all-gather of a number per rank.
    """
    shares = all_gather_rows(local_loss.reshape(1))
    ranks = (~shares.isfinite()).nonzero().flatten().tolist()
    params = result.nonfinite_gradients()
    if run.is_main:
        facts = {
            "step": step.step,
            "epoch": step.epoch,
            "learning_rate": step.lr,
            "loss": str(loss),
            "loss_by_rank": [str(share) for share in shares.tolist()],
            "ranks": ranks,
            "parameters": params,
        }
        with suppress(OSError):  # a full disk or a moved folder must not hide the error below
            (run.folder / FILE_NAME).write_text(json.dumps(facts, indent=1) + "\n")
    named = ", ".join(params[:_MOST_NAMED]) + (f" and {len(params) - _MOST_NAMED} more" * (len(params) > _MOST_NAMED))
    gradients = f"Gradients that are not finite: {named or 'none'}"
    when = f"at step {step.step} (learning rate {step.lr:g})"
    if ranks:
        what = f"The loss became {loss} {when} on rank {', '.join(map(str, ranks))}."
    else:
        what = f"The gradients overflow {when} at a loss scale of 1."
    again = "The same command with config.HOOKS.CAPTURE_BAD_STEP.USE_CAPTURE=true captures the step, to be replayed."
    if run.captured is not None:
        again = f"Step {run.captured.name} was captured; to look into it: vissl-zero replay {run.captured}"
    elif run.plan.config.HOOKS.CAPTURE_BAD_STEP.USE_CAPTURE:
        again = f"It was not captured: the run has its {run.plan.config.HOOKS.CAPTURE_BAD_STEP.MOST}, or lacked room."
    return DivergedError(
        f"{what} "
        f"{gradients}; {FILE_NAME} in the run folder has the details. "
        "Lower the learning rate, lengthen the warm-up, or clip gradients with config.ZERO.clip_grad=1.0. "
        f"{again}"
    )
