"""The program of a rank that replays a bad step, from the state before it and its batch, and watches each module."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from vissl_zero import collectives
from vissl_zero.atomic import read_object
from vissl_zero.checkpoint.bad_step import open_state, read_batches, read_facts
from vissl_zero.checkpoint.first_weights import load_teacher
from vissl_zero.checkpoint.resume import restore
from vissl_zero.engine.build import build_run
from vissl_zero.engine.hook import Hook, Run
from vissl_zero.engine.loop import DivergedError, take_step
from vissl_zero.engine.module_watch import ModuleWatch
from vissl_zero.launch.process_group import process_group
from vissl_zero.launch.worker import fail, prepare_process, rank_device, take_place
from vissl_zero.reporting.replay_lines import replay_lines
from vissl_zero.resolve.resolved import ResolvedRun
from vissl_zero.resolve.saved import RESOLVED_FILE, load_resolved
from vissl_zero.terminal import print_line

if TYPE_CHECKING:
    from vissl_zero.data.dataset import ImageBatch

REQUEST_NAME = "replay.json"  # the command's request, in the folder of the plan


class _LossAndNorm(Hook):
    """Reads loss and gradient norm before the update."""

    def __init__(self) -> None:
        self.loss = self.grad_norm = math.nan

    def before_update(self, run: Run, figures: Callable[[], tuple[float, float]]) -> None:
        self.loss, self.grad_norm = figures()


def main() -> int:
    """Replay as one rank that ``RankGroup`` has started: folder ``argv[1]`` has the plan and the request."""
    take_place()
    try:
        folder = Path(sys.argv[1])
        plan = load_resolved(folder / RESOLVED_FILE)
        request = read_object(folder / REQUEST_NAME)
        with process_group(plan.backend, rank_device(plan), plan.sharding.timeout_s):
            prepare_process(plan)
            result = replay(plan, Path(request["folder"]), with_optimizer=request["with_optimizer"])
            if collectives.rank() == 0:
                lines = [json.dumps(result)] if request["json"] else replay_lines(result, request["modules"])
                for line in lines:
                    print_line(line)
        return 0
    except BaseException as error:  # noqa: BLE001 - whatever ended this rank must be reported to the launcher
        return fail(error)


def replay(plan: ResolvedRun, folder: Path, with_optimizer: bool = True) -> dict[str, Any]:
    """Run the captured step in ``folder`` again under ``plan``. Collective.

    Args:
        plan: plan of the run, or a plan with another level, number of ranks, or number format.
        folder: folder of the bad step.
        with_optimizer: whether to restore the optimizer's state too; loss and gradient norm do not depend on it.
    Returns:
        Loss and gradient norm, as captured and as replayed; statistics of each module; samples with pixels that are not
        finite.
    Raises:
        CheckpointError: the folder is incomplete, or belongs to another model.
    """
    facts = read_facts(folder)
    # Weights come from the captured state, but it lacks those of a frozen teacher.
    run, schedules, frozen = build_run(plan, rank_device(plan), None, lambda teacher: load_teacher(teacher, plan))
    with open_state(folder) as state:
        manifest = state.manifest
        batches = read_batches(state, run.rank, run.world_size)
        restore(run, (), state, with_optimizer)
    run.lr_factor = facts.lr_factor
    run.sharded.model.train()
    watch, figures = ModuleWatch(), _LossAndNorm()
    loss_scale = (run.sharded.loss_scale_state() or {}).get("scale", 1.0)
    models = [("", run.sharded.model)]
    if run.method.has_teacher and run.teacher_features is None:
        models.append(("teacher: ", run.sharded.teacher))
    try:
        with watch.watching(models), suppress(DivergedError):
            take_step(run, schedules, frozen, batches, [figures], (0.0, 0.0))
        modules = watch.over_ranks(loss_scale)
        samples = [row for rows in collectives.all_gather_objects(_broken_samples(run, batches)) for row in rows]
    finally:
        run.sharded.close()
    return {
        "step": facts.step,
        "why": facts.why,
        "recipe": plan.recipe,
        "level": run.sharded.layout()["level"],
        "world_size": run.world_size,
        "precision": _format(dataclasses.asdict(plan.sharding.precision)),
        "written": {
            "level": manifest.level,
            "world_size": manifest.world_size,
            "precision": _format(manifest.config["sharding"]["precision"]),
            "vissl_zero": manifest.vissl_zero,
            "torch": manifest.torch,
            "compile": manifest.config["sharding"]["compile"],
            "loss": facts.loss,
            "grad_norm": facts.grad_norm,
        },
        "loss": repr(figures.loss),
        "grad_norm": repr(figures.grad_norm),
        "is_equal": (facts.loss, facts.grad_norm) == (repr(figures.loss), repr(figures.grad_norm)),
        "modules": [{key: _text(value) for key, value in dataclasses.asdict(module).items()} for module in modules],
        "first_not_finite": next((module.name for module in modules if not module.is_finite), None),
        "samples_not_finite": samples,
    }


def _format(precision: Mapping[str, Any]) -> str:
    """Return the name of the forward pass's number format."""
    name: str = precision["autocast"] or precision["compute"]
    return name


def _text(value: Any) -> Any:
    """Return a value for JSON; numbers that JSON lacks become strings."""
    return repr(value) if isinstance(value, float) and not math.isfinite(value) else value


def _broken_samples(run: Run, batches: list[ImageBatch]) -> list[dict[str, Any]]:
    """List this rank's samples with pixels that are not finite."""
    broken = []
    for batch in batches:
        is_bad = torch.zeros(batch.num_local, dtype=torch.bool)
        for images, count in zip(batch.images, batch.num_crops, strict=True):
            is_bad |= ~images.unflatten(0, (count, batch.num_local)).isfinite().flatten(2).all(2).all(0)
        ids = batch.sample_ids[is_bad].tolist()
        broken += [{"sample": id_, "name": run.loader.source.name(id_)} for id_ in ids]
    return broken
