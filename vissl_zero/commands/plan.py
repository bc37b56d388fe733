"""``vissl-zero plan config=<recipe>``: every plan of a recipe, with its forecast memory and time."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console

from vissl_zero.commands.arguments import config_dirs, output
from vissl_zero.config.compose import compose
from vissl_zero.config.override_words import searchpath_override
from vissl_zero.config.recipes import RecipeFile, recipe_file, recipe_names, recipe_text
from vissl_zero.errors import ConfigError, Problem, did_you_mean
from vissl_zero.planner.machine_profile import read_profile
from vissl_zero.terminal import print_line

USAGE = """\
vissl-zero plan <recipe | file.yaml> [<another> ...] [config.A.B=value ...]
  --ranks N            processes; more than 8 are machines of 8
  --gpus               plan for GPUs even if this machine has none
  --memory-gb X        GiB for a rank's tensors on its device: 38 for a card of 40 GB (config.ZERO.MEMORY_GB)
  --host-memory-gb X   GiB of host memory that a rank on a GPU may use (config.ZERO.HOST_MEMORY_GB)
  --disk-gb X          GiB of disk a rank may use (config.ZERO.DISK_GB)
  --machine X          a profile (h100x8, h200x8, a100x8 of 80 GB, a100_40gbx8, cpu_core) or a YAML file
                       (config.ZERO.MACHINE_PROFILE); one of GPUs implies --gpus
  --images N           images to assume (config.DATA.TRAIN.DATA_LIMIT)
  --png FILE           plot memory over a step into this file
  --config-dir FOLDER  where else recipes are looked for: FOLDER/config
  --json               print JSON to standard output

Lists every combination of level, recomputation, tier and number of micro-batches that trains the same model, with its
forecast, cheapest first, and marks the cheapest that fits. Needs no data, GPU or processes. Plans use a disk only if
an nvme_path is given (config.ZERO.offload_optimizer_config.nvme_path=<folder>). Unknown figures are "?" and null,
never 0.
vissl-zero plan --history <folder> shows forecast against measured memory of all plans of all runs under it.
Exit codes: 0 every recipe has a plan that fits, 1 some recipe has none, 2 an error in your input.
"""
_VALUES = {
    "--memory-gb": "config.ZERO.MEMORY_GB",
    "--host-memory-gb": "config.ZERO.HOST_MEMORY_GB",
    "--disk-gb": "config.ZERO.DISK_GB",
    "--machine": "config.ZERO.MACHINE_PROFILE",
    "--images": "config.DATA.TRAIN.DATA_LIMIT",
}
_FLAGS = ("--history", "--ranks", "--gpus", "--png", "--json", "--config-dir", *_VALUES)
_NOTHING_FITS = 1
_PER_MACHINE = 8
_WIDTH = 260  # characters; a wrapped table is better than a cropped one


def plan(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code.

    Raises:
        ConfigError: the arguments or the recipe are wrong.
    """
    if not arguments or "--help" in arguments or "-h" in arguments:
        print(USAGE, end="")
        return 0 if arguments else 2
    if arguments[0] == "--history":
        return _history(arguments[1:])
    recipes, overrides, assumed, is_json, png = _parse(arguments)
    profile = next((word.split("=", 1)[1] for word in assumed if word.startswith(f"{_VALUES['--machine']}=")), None)
    is_device_given = any(word.startswith("config.MACHINE.DEVICE=") for word in overrides)
    if profile and not is_device_given and read_profile(profile).capability is not None:
        # An override of the run, not only of the plan: the printed command needs it too.
        overrides.append("config.MACHINE.DEVICE=gpu")
    with TemporaryDirectory(prefix="vissl_zero_plan_") as scratch:
        files = [_recipe(name, Path(scratch)) for name in recipes]
        images = [_images_a_step(file, overrides) if _sets_ranks(overrides) else None for file in files]
        composed = [
            replace(compose(file.recipe, [*file.overrides, *overrides, *assumed]), recipe=name)
            for name, file in zip(recipes, files, strict=True)
        ]
    from vissl_zero.planner.planning import plan_run
    from vissl_zero.reporting.plan_table import as_json, draw_plans, plan_lines, plan_table

    logging.getLogger("torch").setLevel(logging.ERROR)
    plans = [plan_run(run.run, run.recipe) for run in composed]
    if is_json:
        print(json.dumps(as_json(plans[0]) if len(plans) == 1 else {"plans": [as_json(one) for one in plans]}))
    else:
        console = Console(width=max(_WIDTH, Console().width), soft_wrap=True)
        for one, recipe_images in zip(plans, images, strict=True):
            first, *rest = plan_lines(one, overrides, recipe_images)
            print_line(first, console)
            console.print(plan_table(one))
            for line in rest:
                print_line(line, console)
    if png is not None and draw_plans(plans, png) and not is_json:
        print(f"drawn: {png}")
    return 0 if all(one.chosen is not None for one in plans) else _NOTHING_FITS


def _sets_ranks(overrides: Sequence[str]) -> bool:
    """Check whether the user sets the number of ranks."""
    return any(word.startswith(("config.DISTRIBUTED.NUM_PROC", "config.DISTRIBUTED.NUM_NODES")) for word in overrides)


def _images_a_step(file: RecipeFile, overrides: Sequence[str]) -> int:
    """Return the images of a step in a recipe without overrides, but for those that say where it is."""
    places = [word for word in overrides if word.startswith("hydra.searchpath=")]
    written = compose(file.recipe, [*file.overrides, *places]).run
    num_ranks = written.DISTRIBUTED.NUM_PROC_PER_NODE * written.DISTRIBUTED.NUM_NODES
    return num_ranks * written.DATA.TRAIN.BATCHSIZE_PER_REPLICA * written.ZERO.gradient_accumulation_steps


def _history(words: Sequence[str]) -> int:
    """Print forecast against measured memory, plan by plan."""
    if len(words) != 1 or not Path(words[0]).is_dir():
        got = " ".join(words) or "nothing"
        fix = "Write vissl-zero plan --history runs."
        raise ConfigError([Problem("vissl-zero plan --history", got, "must be one folder that is there", fix)])
    from vissl_zero.reporting.past_plans import history
    from vissl_zero.reporting.plan_table import history_table

    logging.getLogger("torch").setLevel(logging.ERROR)
    Console(width=max(_WIDTH, Console().width), soft_wrap=True).print(history_table([*history(Path(words[0]))]))
    return 0


def _parse(arguments: Sequence[str]) -> tuple[list[str], list[str], list[str], bool, Path | None]:
    """Parse recipes, overrides of the run, overrides only of the plan, whether to print JSON, and the plot's file."""
    rest, folders = config_dirs(arguments)
    words = [part for word in rest for part in (word.split("=", 1) if word.startswith("--") else [word])]
    recipes: list[str] = []
    overrides = searchpath_override(folders)
    assumed = ["config.DRY_RUN=true"]
    is_json, png = False, None
    while words:
        word = words.pop(0)
        if word == "--json":
            is_json = True
        elif word == "--gpus":
            overrides.append("config.MACHINE.DEVICE=gpu")
        elif word == "--ranks":
            overrides += _ranks(_value(word, words))
        elif word == "--png":
            png = output(_value(word, words))
        elif word in _VALUES:
            assumed.append(f"{_VALUES[word]}={_value(word, words)}")
        elif word.startswith("-"):
            raise ConfigError(f"vissl-zero plan: {word} is not a flag.{did_you_mean(word, _FLAGS)}\n{USAGE}")
        elif word.startswith("config=") or ("=" not in word and not word.startswith(("+", "~"))):
            recipes.append(word.removeprefix("config="))
        else:
            overrides.append(word)
    if not recipes:
        raise ConfigError(f"vissl-zero plan: must name a recipe. Write config=<recipe>.\n{USAGE}")
    return recipes, overrides, assumed, is_json, png


def _recipe(name: str, scratch: Path) -> RecipeFile:
    """Find a recipe by its name, or by any path, such as a run's config.user.yaml."""
    path = Path(name).expanduser()
    if path.suffix != ".yaml" or not path.is_file():
        if path.suffix == ".yaml" and name.removesuffix(".yaml") not in recipe_names():
            raise ConfigError(
                [Problem("vissl-zero plan", repr(name), "must be a file that exists", "Correct the path.")]
            )
        return RecipeFile(name.removesuffix(".yaml"))
    text = recipe_text(path)
    if "config" in path.absolute().parent.parts:
        return recipe_file(path)
    # Hydra reads recipes only from a folder called config.
    folder = scratch / str(len([*scratch.iterdir()]))
    copy = folder / "config" / f"{path.stem.replace('.', '_')}.yaml"
    copy.parent.mkdir(parents=True)
    copy.write_text(text if text.startswith("# @package") else f"# @package _global_\n{text}", encoding="utf-8")
    return RecipeFile(copy.stem, folder=str(folder))


def _value(flag: str, words: list[str]) -> str:
    if not words:
        raise ConfigError(f"vissl-zero plan: {flag} needs a value. Write {flag} <value>.")
    return words.pop(0)


def _ranks(text: str) -> list[str]:
    number = int(text) if text.isdecimal() else 0
    if number < 1 or (number > _PER_MACHINE and number % _PER_MACHINE):
        must = f"must be 1 to {_PER_MACHINE}, or a multiple of {_PER_MACHINE}"
        raise ConfigError(f"vissl-zero plan: --ranks: {must} (got {text!r}). See vissl-zero plan --help.")
    procs = min(number, _PER_MACHINE)
    return [f"config.DISTRIBUTED.NUM_PROC_PER_NODE={procs}", f"config.DISTRIBUTED.NUM_NODES={number // procs}"]
