"""``vissl-zero verify config=<recipe> [overrides]``: check that sharding does not change what a recipe trains.

Runs the recipe for a few steps twice in float64, unsharded (level 0, torch engine, no offload) and as it says, and
compares every loss and every parameter after every step. Run it before trusting a long job.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from vissl_zero.commands.arguments import config_dirs
from vissl_zero.config.compose import compose
from vissl_zero.config.override_words import recipe_and_overrides, searchpath_override
from vissl_zero.config.run_config import RunConfig
from vissl_zero.errors import ConfigError, Problem
from vissl_zero.resolve.resolve import resolve

_DEFAULT_STEPS = 5
_DEFAULT_TOLERANCE = 1e-10
USAGE = """\
vissl-zero verify config=<recipe> [config.A.B=value ...] [--steps N] [--tolerance T] [--config-dir FOLDER]

Trains the recipe for N steps (5) in float64, once unsharded and once as the recipe says (level, engine, offload), with
the same processes, and prints the largest difference of losses and parameters after each step.
Exit codes: 0 equal within T (1e-10), 1 different, 2 an error in your input.
"""

_COMMON = (
    "config.TRAINER.DTYPE=float64",
    "config.MODEL.AMP_PARAMS.USE_AMP=false",
    "config.MODEL.FSDP_CONFIG.compute_dtype=float32",
    "config.NEAREST_NEIGHBOR.USE_KNN=false",
    "config.HOOKS.LOGGERS=[]",
    "config.CHECKPOINT.CHECKPOINT_FREQUENCY=-1",
    "config.CHECKPOINT.CHECKPOINT_ITER_FREQUENCY=-1",
    "config.SLURM.USE_SLURM=false",
    "config.DRY_RUN=false",
)
_UNSHARDED = (
    "config.ZERO.LEVEL=0",
    "config.ZERO.type=null",
    "config.ZERO.ENGINE=torch",
    "config.ZERO.SHARD_GROUP_SIZE=-1",
    "config.ZERO.offload_optimizer_config.device=none",
    "config.ZERO.offload_param_config.device=none",
)


@dataclass(frozen=True)
class StepDifference:
    """The distance of two runs after one step.

    Attributes:
        step: number of the step, from 1.
        loss: absolute difference of the losses.
        parameter: largest absolute difference of an element of a parameter or buffer.
        name: name of this parameter or buffer.
    """

    step: int
    loss: float
    parameter: float
    name: str


def verify(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code.

    Raises:
        ConfigError: the arguments or the recipe are wrong.
    """
    if not arguments or "--help" in arguments or "-h" in arguments:
        print(USAGE, end="")
        return 0 if arguments else 2
    rest, places = config_dirs(arguments)
    words, num_steps, tolerance = _parse(rest)
    recipe, overrides = recipe_and_overrides([*searchpath_override(places), *words])
    if recipe is None:
        raise ConfigError(f"vissl-zero verify: must name a recipe. Write config=<recipe>.\n{USAGE}")
    _require_trainable(compose(recipe, overrides).run)
    with tempfile.TemporaryDirectory(prefix="vissl_zero_verify_") as scratch:
        folders = [Path(scratch) / "unsharded", Path(scratch) / "sharded"]
        print("Training unsharded, in float64, in a temporary folder ...", flush=True)
        code = _train(recipe, [*overrides, *_UNSHARDED], num_steps, folders[0])
        if code == 0:
            print("Training as the recipe says, in float64 ...", flush=True)
            code = _train(recipe, overrides, num_steps, folders[1])
        if code:
            return code
        differences = compare(*folders)
    return _report(differences, tolerance)


def _require_trainable(cfg: RunConfig) -> None:
    """Check that there are steps to compare, and that this machine can run them."""
    problems = []
    if cfg.TEST_ONLY:
        problems.append(
            Problem("config.TEST_ONLY", "True", "must be false to verify", "A run without steps proves nothing.")
        )
    if cfg.DISTRIBUTED.NUM_NODES > 1:
        key, number = "config.DISTRIBUTED.NUM_NODES", str(cfg.DISTRIBUTED.NUM_NODES)
        fix = f"Write {key}=1, with config.DISTRIBUTED.NUM_PROC_PER_NODE processes in all."
        problems.append(Problem(key, number, "must be 1 to verify, which runs on this machine", fix))
    if problems:
        raise ConfigError(problems)


def _parse(arguments: Sequence[str]) -> tuple[list[str], int, float]:
    words, num_steps, tolerance = list(arguments), _DEFAULT_STEPS, _DEFAULT_TOLERANCE
    try:
        if "--steps" in words:
            place = words.index("--steps")
            num_steps = int(words[place + 1])
            del words[place : place + 2]
        if "--tolerance" in words:
            place = words.index("--tolerance")
            tolerance = float(words[place + 1])
            del words[place : place + 2]
    except (IndexError, ValueError) as error:
        raise ConfigError("vissl-zero verify: --steps takes a whole number, --tolerance a number.") from error
    if num_steps < 1 or not tolerance > 0:
        raise ConfigError("vissl-zero verify: --steps and --tolerance must be positive.")
    return words, num_steps, tolerance


def _train(recipe: str, overrides: Sequence[str], num_steps: int, folder: Path) -> int:
    from vissl_zero.launch.run import run
    from vissl_zero.planner.planning import fitted

    extra = compose(recipe, overrides).run.HOOKS.EXTRA
    forced = [*_COMMON, f"config.TRAINER.MAX_STEPS={num_steps}", f"config.CHECKPOINT.DIR={folder}"]
    forced.append(f"config.HOOKS.EXTRA=[{','.join([*extra, 'weight_trace'])}]")
    composed = compose(recipe, [*overrides, *forced])
    one = fitted(composed)
    return run(resolve(one.run, folder, recipe=recipe, written=one.written, notes=one.notes), composed.user_yaml())


def compare(reference: Path, other: Path) -> list[StepDifference]:
    """Compare two run folders with metrics.jsonl and weight_trace/, after each step."""
    from safetensors import safe_open

    losses = [_losses(folder / "metrics.jsonl") for folder in (reference, other)]
    result = []
    for step, (loss_a, loss_b) in enumerate(zip(*losses, strict=True), start=1):
        name = f"weight_trace/{step:06d}.safetensors"
        worst, worst_name = 0.0, ""
        with safe_open(reference / name, "pt") as a, safe_open(other / name, "pt") as b:
            if set(a.keys()) != set(b.keys()):
                only = sorted(set(a.keys()) ^ set(b.keys()))[0]
                result.append(StepDifference(step, abs(loss_a - loss_b), math.inf, only))
                continue
            for key in a.keys():  # noqa: SIM118 - safe_open is no mapping
                gap = (a.get_tensor(key).double() - b.get_tensor(key).double()).abs()
                largest = float(gap.max()) if gap.numel() else 0.0
                if largest > worst or math.isnan(largest):
                    worst, worst_name = largest, key
        result.append(StepDifference(step, abs(loss_a - loss_b), worst, worst_name))
    return result


def _losses(metrics: Path) -> list[float]:
    records = map(json.loads, metrics.read_text().splitlines())
    # A loss that is not finite is stored as null.
    return [math.nan if record["loss"] is None else record["loss"] for record in records]


def _report(differences: Sequence[StepDifference], tolerance: float) -> int:
    console = Console()
    table = Table(box=None, pad_edge=False)
    for title in ("step", "loss differs by", "weights differ by", "at"):
        table.add_column(title, justify="left" if title == "at" else "right")
    for row in differences:
        table.add_row(str(row.step), f"{row.loss:.1e}", f"{row.parameter:.1e}", row.name)
    console.print(table)
    # Not ``>``, which is false for NaN.
    bad = next((row for row in differences if not (row.loss <= tolerance and row.parameter <= tolerance)), None)
    if bad is None:
        console.print(f"The same model: every loss and weight within {tolerance:g} over {len(differences)} steps.")
        return 0
    where = f"parameter {bad.name}" if not bad.parameter <= tolerance else "the loss"
    console.print(f"NOT the same model: first at step {bad.step}, {where}.", style="bold red")
    return 1
