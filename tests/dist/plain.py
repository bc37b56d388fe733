"""The reference: plain torch, one process, the whole batch.

It shares no code with the package but the layers and the choice of parameter groups: norms, LARC, clipping, freezing,
schedules, averages and weighting are written out. Whatever differs from it is a defect of sharding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from tests.dist.case import (
    PROTOTYPES,
    SEED,
    Case,
    Outcome,
    build,
    ema_decay,
    forward,
    groups_of,
    loss_of,
    micro_batches,
    rows_of,
    schedule,
)
from tests.float8_by_hand import multiply_by_hand
from vissl_zero.models.keyed_random import set_random_key
from vissl_zero.sharding.model.precision import dtype_of, widened


def train_plainly(case: Case, reverse_rows: bool = False, num_ranks: int = 1) -> Outcome:
    """The reference run.

    Args:
        case: what to train.
        reverse_rows: take the rows of every batch in the other order: the same mathematics, another order of summation,
            which gives the noise floor.
        num_ranks: emulate so many ranks where each has batch statistics of its own ("local_batch").
    """
    model = build(case)
    multiply_by_hand(model, case.float8)
    groups = groups_of(model, case)
    params = dict(model.named_parameters())
    optimizer = _optimizer(case.optimizer, [{"params": [params[n] for n in group.params]} for group in groups])
    num_chunks = num_ranks if case.norm == "local_batch" else 1
    buffers = [_copied(model.named_buffers()) for _ in range(num_chunks)]
    average: dict[str, Tensor] = {}
    outcome, scale = Outcome(), case.first_scale
    for step in range(case.num_steps):
        batches = list(micro_batches(case, step))
        num_samples = sum(batch[0].shape[1] for batch in batches)
        total = 0.0
        for batch in batches:
            for chunk, images in enumerate(_chunks(batch, num_chunks, reverse_rows)):
                _exchange(model, buffers[chunk])
                size = images[0].shape[1]
                _set_key(step, batch, num_chunks, chunk, reverse_rows)
                with torch.autocast("cpu", dtype_of(case.autocast)) if case.autocast else nullcontext():
                    outputs = widened(forward(model, case, images))
                loss = loss_of(outputs, size) * (size / num_samples)
                factor = math.inf if step == case.inf_step else scale if case.inf_step >= 0 else 1.0
                (loss * factor).backward()
                total += loss.item()
                buffers[chunk] = _copied(model.named_buffers())
        if case.inf_step >= 0:
            outcome.scales.append(scale)
            scale = _unscale([param.grad for param in params.values() if param.grad is not None], scale)
            if scale != outcome.scales[-1]:
                optimizer.zero_grad()
        if step < case.frozen_steps:
            params[PROTOTYPES].grad = None
        moving = [param for param in params.values() if param.grad is not None]
        outcome.losses.append(total if moving else 0.0)
        outcome.grad_norms.append(torch.stack([p.grad.norm() for p in moving]).norm().item() if moving else 0.0)
        for together in _clipped_together(params, case.clip_per) if case.clip is not None else ():
            nn.utils.clip_grad_norm_(together, case.clip)
        for group, settings in zip(groups, optimizer.param_groups, strict=True):
            settings["lr"], settings["weight_decay"] = schedule(case, step, group)
        if moving:
            _step_adapted(case.optimizer, optimizer)
        optimizer.zero_grad()
        if case.ema:
            values = _copied(params.items()) | _mean(buffers)
            decay = ema_decay(step)
            for name, value in values.items():
                is_followed = decay and value.is_floating_point()
                average[name] = decay * average[name] + (1 - decay) * value if is_followed else value
    outcome.state = _copied(params.items()) | _mean(buffers)
    outcome.state |= {f"ema:{name}": tensor for name, tensor in average.items()}
    return outcome


def _clipped_together(params: dict[str, nn.Parameter], per: str) -> list[list[nn.Parameter]]:
    """Parameters whose gradients are clipped by one norm."""
    key = {"model": lambda name: "", "part": lambda name: name.startswith("trunk."), "tensor": lambda name: name}[per]
    moving = {name: param for name, param in params.items() if param.grad is not None}
    return [[p for n, p in moving.items() if key(n) == wanted] for wanted in sorted({key(name) for name in moving})]


def _unscale(grads: list[Tensor], scale: float) -> float:
    """Undo the loss scale; the next one: half where a gradient is not finite."""
    for grad in grads:
        grad.mul_(1 / scale)
    return scale if all(bool(grad.isfinite().all()) for grad in grads) else scale / 2


def _chunks(batch: list[Tensor], num_chunks: int, reverse_rows: bool) -> Iterator[list[Tensor]]:
    for chunk in range(num_chunks):
        images = [crops[:, rows_of(chunk, num_chunks, crops.shape[1])] for crops in batch]
        yield [crops.flip(1) if reverse_rows else crops for crops in images]


def _set_key(step: int, batch: list[Tensor], num_chunks: int, chunk: int, reverse_rows: bool) -> None:
    samples = rows_of(chunk, num_chunks, batch[0].shape[1])
    set_random_key(SEED, step, samples.flip(0) if reverse_rows else samples)


def _copied(named: Any) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in named}


def _exchange(model: nn.Module, buffers: dict[str, Tensor]) -> None:
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])


def _mean(buffers: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Over the emulated ranks."""
    mean = {}
    for name, first in buffers[0].items():
        values = torch.stack([own[name] for own in buffers])
        mean[name] = values.mean(0) if first.is_floating_point() else first.clone()
    return mean


def _step_adapted(name: str, optimizer: torch.optim.Optimizer) -> None:
    """LARC as apex has it and LARS as Barlow Twins has it, parameter by parameter."""
    if not name.startswith("lar"):
        optimizer.step()
        return
    decays = [group["weight_decay"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.grad is None:
                continue
            decay, p, g = group["weight_decay"], param.detach().norm(), param.grad.norm()
            if name == "lars":
                update = param.grad + decay * param.detach()
                rate = 0.02 * p / (update.norm() + 1e-8) if p > 0 and update.norm() > 0 else 1.0
                param.grad.copy_(update * rate)
            elif p > 0 and g > 0:
                rate = 0.02 * p / (g + p * decay + 1e-8)
                rate = min(rate / group["lr"], 1.0) if name == "larc_clip" else rate
                param.grad.copy_((param.grad + decay * param.detach()) * rate)
        group["weight_decay"] = 0.0
    optimizer.step()
    for group, decay in zip(optimizer.param_groups, decays, strict=True):
        group["weight_decay"] = decay


def _optimizer(name: str, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    if name.startswith("adam"):
        return {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[name](groups, eps=1e-3)
    return torch.optim.SGD(groups, lr=0.0, momentum=0.9, nesterov=name == "nesterov")
