"""``vissl-zero replay <run folder>/bad_steps/<step>``: run a captured bad step again, and watch every module.

Nothing is written, neither into the run folder nor into the folder of the step.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from vissl_zero.commands.arguments import CommandParser
from vissl_zero.errors import CheckpointError, ConfigError, Problem
from vissl_zero.resolve.host import this_host
from vissl_zero.resolve.resolved import OffloadPlan, Precision, ResolvedRun, with_ranks
from vissl_zero.resolve.saved import RESOLVED_FILE, load_resolved, save_resolved

_WORD = "vissl-zero replay"
_PRECISIONS = ("float32", "float64")


def replay(arguments: Sequence[str]) -> int:
    """Run the command; return its exit code.

    Raises:
        ConfigError: the arguments are wrong, or this machine cannot run the step.
        CheckpointError: the folder has no captured step, is damaged, or was written by a later version.
    """
    parser = CommandParser(
        prog=_WORD,
        description="Run a step that HOOKS.CAPTURE_BAD_STEP has captured again, on its own batch: loss, gradient norm, "
        "the largest activation and gradient of each module, and the first whose output is not finite. At the level "
        "and number of processes that captured it, loss and gradient norm are equal, bit for bit.",
    )
    parser.add_argument("folder", type=Path, help="of the step: <run folder>/bad_steps/<step>")
    parser.add_argument("--precision", choices=_PRECISIONS, help="compute in this format: does it still overflow?")
    parser.add_argument("--level", type=int, choices=range(4), help="ZeRO level (that of the run)")
    parser.add_argument("--processes", type=int, metavar="N", help="processes on this machine (as many as captured it)")
    parser.add_argument("--modules", type=int, default=20, metavar="N", help="modules to print: those of large values")
    parser.add_argument("--json", action="store_true", help="print everything as JSON on one line")
    options = parser.parse_args(arguments)
    from vissl_zero.checkpoint.bad_step import open_state, read_facts
    from vissl_zero.launch.launcher import launch_local
    from vissl_zero.launch.replay import REQUEST_NAME
    from vissl_zero.lifetime import Scratch

    folder: Path = options.folder.expanduser().absolute()
    read_facts(folder)
    with open_state(folder) as state:
        # A damaged tensor would be replayed as another step, which may well be finite.
        if problems := list(state.verify()):
            raise CheckpointError("\n".join(problems))
    plan = _plan(folder, options.precision, options.level, options.processes)
    with Scratch() as scratch:
        # The folder of the step is only read: it may be replayed again, and in another way.
        plan = replace(plan, run_dir=str(scratch))
        save_resolved(plan, scratch / RESOLVED_FILE)
        request = {
            "folder": str(folder),
            "json": options.json,
            "modules": options.modules,
            "with_optimizer": options.precision is None,
        }
        (scratch / REQUEST_NAME).write_text(json.dumps(request), encoding="utf-8")
        return launch_local(plan, work="replay")


def _plan(folder: Path, precision: str | None, level: int | None, processes: int | None) -> ResolvedRun:
    """Return the plan of the captured run, with the requested changes.

    Raises:
        ConfigError: the changed plan is not possible, or not on this machine.
        CheckpointError: the folder has no plan.
    """
    try:
        plan = load_resolved(folder / RESOLVED_FILE)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder / RESOLVED_FILE} cannot be read ({error}).") from error
    number = plan.world_size if processes is None else processes
    changed = with_ranks(plan, number) if number >= 1 else None
    fix = f"Write --processes {plan.world_size}, as the step was captured."
    if changed is None:
        must = "must be 1 or more, and a multiple of the ranks of a shard group or a batch-norm group"
        raise ConfigError([Problem(f"{_WORD} --processes", str(number), must, fix)])
    gpus = this_host().num_gpus
    if plan.device == "cuda" and number > gpus:
        must = f"needs as many GPUs, and this machine has {gpus}"
        raise ConfigError([Problem(f"{_WORD} --processes", str(number), must, "Give fewer processes, or a machine.")])
    sharding = changed.sharding
    # The engine and the tiers of the run may not have the other level.
    if level is not None and level != sharding.level:
        sharding = replace(
            sharding, level=level, engine="torch", offload_optimizer=OffloadPlan(), offload_params=OffloadPlan()
        )
    if precision is not None:
        sharding = replace(sharding, precision=Precision(precision, None, precision, precision))
    # Modules inside a compiled unit cannot be watched.
    sharding = replace(sharding, compile="")
    # A step that crashes would only crash again.
    config = replace(plan.config, DISTRIBUTED=replace(plan.config.DISTRIBUTED, MAX_RESTARTS=0))
    config = replace(config, CHECKPOINT=replace(config.CHECKPOINT, TIME_LIMIT_MIN=None))
    return replace(changed, sharding=sharding, config=config, max_steps=None)
