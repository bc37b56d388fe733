"""``vissl-zero lr-find config=<recipe> [overrides]``: find a learning rate with which a recipe trains well.

Trains in a temporary folder with a rate that rises from step to step, and keeps nothing of it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from vissl_zero.commands.arguments import CommandParser, config_dirs, output_file
from vissl_zero.commands.temporary_run import run_in
from vissl_zero.config.compose import compose
from vissl_zero.config.override_words import recipe_and_overrides, searchpath_override
from vissl_zero.errors import ConfigError, Problem
from vissl_zero.lifetime import Scratch

_FEWEST_STEPS = 20
_FORCED = (
    # The factor that the test sets is then the rate itself.
    "config.OPTIMIZER.param_schedulers.lr.name=constant",
    "config.OPTIMIZER.param_schedulers.lr.value=1.0",
    "config.OPTIMIZER.param_schedulers.lr.auto_lr_scaling.auto_scale=false",
    "config.OPTIMIZER.lr=null",
    "config.OPTIMIZER.head_optimizer_params.use_different_lr=false",
    # Measures and files of these few steps would only cost time.
    "config.NEAREST_NEIGHBOR.USE_KNN=false",
    "config.ONLINE_PROBE.USE_PROBE=false",
    "config.TEST_MODEL=false",
    "config.HOOKS.LOGGERS=[]",
    "config.HOOKS.EARLY_STOPPING.METRIC=''",
    "config.HOOKS.EMA_MODEL.SAVE_EMA_MODEL=false",
    "config.HOOKS.CAPTURE_BAD_STEP.USE_CAPTURE=false",  # the test ends with a loss that is not finite
    "config.CHECKPOINT.SAVE_BEST=false",
    "config.CHECKPOINT.CHECKPOINT_FREQUENCY=-1",
    "config.CHECKPOINT.CHECKPOINT_ITER_FREQUENCY=-1",
    "config.DISTRIBUTED.MAX_RESTARTS=0",
    # One run, here and now: its metrics are read when the command returns.
    "config.SLURM.USE_SLURM=false",
    "config.SEEDS=[]",
    "config.DRY_RUN=false",
)


def lr_find(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code.

    Raises:
        ConfigError: the arguments or the recipe are wrong, or no rate makes the loss fall.
    """
    parser = CommandParser(
        prog="vissl-zero lr-find",
        description="Train for a few steps with a learning rate that rises from 1e-7 to 10, and suggest one: the "
        "middle of the longest fall of the loss (https://arxiv.org/abs/1506.01186). It leaves no weights.",
    )
    parser.add_argument("words", nargs="+", metavar="config=<recipe> [config.A.B=value ...]", help="what to train")
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps, 100 by default")
    where = Path("lr_find.png")
    parser.add_argument("--png", type=output_file, metavar="FILE", default=where, help=f"picture to write ({where})")
    parser.add_argument("--json", action="store_true", help="print JSON on the last line")
    rest, folders = config_dirs(arguments)
    # Flags may stand between the words of a recipe.
    options = parser.parse_intermixed_args(rest)
    recipe, overrides = recipe_and_overrides([*searchpath_override(folders), *options.words])
    if recipe is None:
        raise ConfigError("vissl-zero lr-find: must name a recipe. Write config=<recipe>.")
    if options.steps < _FEWEST_STEPS:
        raise ConfigError(f"vissl-zero lr-find --steps: must be {_FEWEST_STEPS} or more (got {options.steps}).")
    with Scratch() as folder:
        if code := _train(recipe, overrides, options.steps, folder):
            return code
        from vissl_zero.evaluation.learning_rate_range import suggested
        from vissl_zero.reporting.metrics_file import FILE_NAME, read_records

        rows = [(row.lr, row.loss) for row in read_records(folder / FILE_NAME) if row.loss is not None]
    rates, losses = [lr for lr, _ in rows], [loss for _, loss in rows]
    rate, smooth = suggested(rates, losses)
    if rate is None:
        raise ConfigError("vissl-zero lr-find: the loss never falls at any rate. Give more --steps, or another seed.")
    from vissl_zero.reporting.learning_rate_curve import draw_rates

    draw_rates(rates, losses, smooth, rate, options.png)
    if options.json:
        print(json.dumps({"suggestion": rate, "rates": rates, "losses": losses}))
        return 0
    lowest = rates[smooth.index(min(smooth))]
    print(f"The smoothed loss is lowest at a learning rate of {lowest:.2g}; the middle of its fall is at {rate:.2g}.")
    if lowest == rates[-1]:
        print("It still fell at the last rate, so that higher rates than the suggestion may train as well.")
    print(f"Write config.OPTIMIZER.lr={rate:.2g}, the peak of the recipe's schedule. Drawn: {options.png}")
    return 0


def _train(recipe: str, overrides: Sequence[str], num_steps: int, folder: Path) -> int:
    """Run the test in ``folder`` and return its exit code, 0 also if it ended because the loss was not finite."""
    cfg = compose(recipe, overrides).run
    if cfg.TEST_ONLY or cfg.PROGRAM != "train" or cfg.DISTRIBUTED.NUM_NODES > 1:
        must = "must train, on one machine, to have a learning rate to find"
        raise ConfigError([Problem("vissl-zero lr-find", recipe, must, "Name a recipe that trains.")])
    hooks = ",".join([*cfg.HOOKS.EXTRA, "learning_rate_range_test"])
    forced = [
        *_FORCED,
        # An epoch has a step at least, so these are enough epochs for all steps.
        f"config.OPTIMIZER.num_epochs={max(cfg.OPTIMIZER.num_epochs, num_steps)}",
        f"config.TRAINER.MAX_STEPS={num_steps}",
        f"config.LOG_FREQUENCY={num_steps}",
        f"config.HOOKS.EXTRA=[{hooks}]",
    ]
    code = run_in(folder, [f"config={recipe}", *overrides, *forced])
    return 0 if (folder / "diverged.json").exists() else code
