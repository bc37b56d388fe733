"""Seeded mutations of recipes through the front door: compose, check, resolve. No traceback; no change without a word.

What is accepted and changes nothing of the plan is a key that the run reads from its configuration as it stands, or is
named in a note.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import cache
from typing import Any

import hydra
import pytest
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tests.unit.config.example_config import CPU_HOST
from vissl_zero.config.compose import compose, register, typed
from vissl_zero.config.recipes import list_recipes
from vissl_zero.errors import VisslZeroError
from vissl_zero.resolve.resolve import resolve
from vissl_zero.resolve.resolved import ResolvedRun
from vissl_zero.resolve.saved import config_data

RECIPES = ("quickstart/swav_digits", "supervised/digits")
NUMBERS = [
    0,
    1,
    -1,
    2,
    3,
    7,
    64,
    1e-30,
    -0.5,
    0.5,
    1.5,
    1e30,
    float("nan"),
    float("inf"),
    -float("inf"),
    10**80,
    -(10**80),
]
WORDS = ["", "x", "auto", "none", "a\0b", "a\nb", "${oc.env:HOME}", "../..", "None", "1e5", "\u0661", "x" * 5000]
STRUCTURES: list[Any] = [
    None,
    [],
    {},
    [[]],
    [{}],
    {"a": 1},
    [1, {}, "x"],
    [[1]],
    {"name": []},
    [None],
    {"name": "x", "": 0},
]
POOL: list[Any] = [*NUMBERS, 10**80, -(10**80), *WORDS, *STRUCTURES, True, False]
# Blocks that are read from the configuration as they stand: a change there need not show in the plan's other fields.
READ_AS_WRITTEN = (
    "DATA",
    "MODEL",
    "LOSS",
    "METERS",
    "HOOKS",
    "CHECKPOINT",
    "NEAREST_NEIGHBOR",
    "ONLINE_PROBE",
    "DISTRIBUTED",
    "SLURM",
    "IMPORTS",
)
READ_AS_WRITTEN += ("IMPORTS", "LOG_FREQUENCY", "DRY_RUN", "TEST_ONLY", "OPTIMIZER.num_epochs")


@cache
def composed(recipe: str) -> DictConfig:
    """What Hydra gives for a recipe."""
    register()
    with hydra.initialize_config_module("vissl_zero.conf", version_base="1.3", job_name="vissl-zero"):
        return hydra.compose("defaults", [f"config={recipe}"])


@cache
def unchanged(recipe: str) -> ResolvedRun:
    run = compose(recipe)
    return resolve(run.run, "runs/x", recipe=recipe, notes=run.notes, host=CPU_HOST)


@cache
def tree(recipe: str) -> dict[str, Any]:
    """The configuration that a run keeps, as plain containers."""
    plan = unchanged(recipe)
    return config_data(plan.config, plan.learns_from_other)


def places(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every block, list and value of a tree."""
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for name, child in items:
        yield (*path, name)
        yield from places(child, (*path, name))


@cache
def all_places(recipe: str) -> list[tuple[Any, ...]]:
    """Places that a run reads: VISSL's keys without effect are another test's."""
    return list(places(tree(recipe)))


def mutation(rng: random.Random, recipe: str) -> tuple[str, Any]:
    """A key path and a value: another one, a nearby one, or a structure with a part changed."""
    path = rng.choice(all_places(recipe))
    node: Any = tree(recipe)
    for part in path:
        node = node[part]
    kind = rng.random()
    value: Any = copy.deepcopy(rng.choice(POOL))
    if kind < 0.2 and isinstance(node, (int, float)) and not isinstance(node, bool):
        value = rng.choice([-node, node + 1, node * 2, node * 10**30, node / 3])
    elif kind < 0.4 and isinstance(node, (list, dict)) and node:
        value = copy.deepcopy(node)
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        place = rng.choice(keys)
        if rng.random() < 0.3:
            del value[place]
        else:
            value[place] = copy.deepcopy(rng.choice(POOL))
    key = ".".join(map(str, path[: _open_from(path)]))
    return key, _inside(tree(recipe), path, value)


def _open_from(path: tuple[Any, ...]) -> int:
    """Lists are given whole, as on a command line."""
    return next((index for index, part in enumerate(path) if isinstance(part, int)), len(path))


def _inside(tree: Any, path: tuple[Any, ...], value: Any) -> Any:
    """``value``, or the whole list that it is put into."""
    place = _open_from(path)
    if place == len(path):
        return value
    for part in path[:place]:
        tree = tree[part]
    whole = copy.deepcopy(tree)
    node = whole
    for part in path[place:-1]:
        node = node[part]
    node[path[-1]] = value
    return whole


def outcome(recipe: str, key: str, value: Any) -> ResolvedRun | str:
    """The plan, or the refusal; anything else is a traceback, which fails the test."""
    cfg = copy.deepcopy(composed(recipe))
    try:
        OmegaConf.update(cfg, f"config.{key}", value, merge=True)
    except OmegaConfBaseException as error:  # explained by `compose`, as tests of messages show
        return str(error)
    except ValueError as error:
        return str(error)
    try:
        run = typed(cfg, recipe, [f"config.{key}=x"])
        return resolve(run.run, "runs/x", recipe=recipe, notes=run.notes, host=CPU_HOST)
    except VisslZeroError as error:
        text = str(error)
        assert text and "Traceback" not in text
        return text


def has_effect_or_note(recipe: str, key: str, value: Any, plan: ResolvedRun) -> bool:
    before = unchanged(recipe)
    left, right = asdict(plan), asdict(before)
    notes = set(plan.notes) - set(before.notes)
    given, base = left.pop("config"), right.pop("config")
    for side in (left, right):
        side.pop("notes")
    if repr(left) != repr(right) or notes or given == base or repr(given) == repr(base):  # -0.0 changes nothing
        return True
    if repr(given).replace("None", "False") == repr(base).replace("None", "False"):  # says what null means anyway
        return True
    return key.startswith(READ_AS_WRITTEN)


def fuzz(seed: int, count: int, recipes: Sequence[str] = RECIPES) -> tuple[int, int]:
    rng = random.Random(seed)
    accepted, silent = 0, []
    for index in range(count):
        recipe = rng.choice(recipes)
        key, value = mutation(rng, recipe)
        try:
            found = outcome(recipe, key, value)
        except Exception as error:
            raise AssertionError(f"mutation {index} of seed {seed}: {recipe} config.{key}={value!r:.300}") from error
        if isinstance(found, ResolvedRun):
            accepted += 1
            if not has_effect_or_note(recipe, key, value, found):
                silent.append((recipe, key, repr(value)[:80]))
    assert not silent
    return accepted, count - accepted


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_few_mutations() -> None:
    accepted, refused = fuzz(seed=1, count=80)
    assert accepted > 3 and refused > 15


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_two_thousand_mutations() -> None:
    every = [found.name for found in list_recipes() if found.name.startswith("digits/") and not found.is_part]
    accepted, refused = fuzz(seed=2, count=2000, recipes=[*RECIPES, *every])
    print(f"{len(every) + 2} recipes: {accepted} mutations accepted, {refused} refused")
    assert accepted > 100 and refused > 400


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("MODEL.HEAD.PARAMS", [["swav_head", -1]], "must hold"),
        ("MODEL.HEAD.PARAMS", [["swav_head", {"dims": [64, {}, 32], "num_clusters": [3]}]], "list of whole numbers"),
        ("MODEL.HEAD.PARAMS", [["swav_head", {"dims": [64, 32], "num_clusters": [[1]]}]], "list of whole numbers"),
        ("LOSS.swav_loss", -7, ""),
        ("DATA.TRAIN.TRANSFORMS", [{"name": "Normalize", "mean": [0.5] * 2, "std": [0.5] * 4}], "must be 3 numbers"),
        ("DATA.TRAIN.TRANSFORMS", [{"name": "Normalize", "mean": [0.5] * 3, "std": [0.5, 0.5, 0]}], "above 0"),
        ("DATA.TRAIN.TRANSFORMS", [{"name": "ImgPilToMultiCrop", "num_crops": 3}], "must list whole numbers"),
        ("OPTIMIZER.num_epochs", 10**80, "must be at most 9223372036854775807"),
        ("SEED_VALUE", -(10**80), "config.SEED_VALUE"),
        ("LOSS.swav_loss.temperature", 1e-30, "must be at least 0.0001"),
        ("LOSS.swav_loss.epsilon", float("nan"), "must be a finite number"),
        ("OPTIMIZER.lr", float("nan"), "must be a finite number"),
        ("OPTIMIZER.param_schedulers.lr.start_value", float("inf"), "must be a finite number"),
        ("OPTIMIZER.param_schedulers.lr", {"name": "cosine", "start_value": -0.1}, "start_value: must be at least 0"),
        (
            "OPTIMIZER.param_schedulers.lr.schedulers",
            [{"name": "linear", "start_value": -1, "end_value": 1}] * 2,
            "least 0",
        ),
        ("OPTIMIZER.weight_decay", -1.0, "must be at least 0"),
        ("DISTRIBUTED.TIMEOUT_S", float("inf"), "must be a finite number"),
        ("CHECKPOINT.DIR", "a\0b", "must name a folder"),
        ("DATA.TRAIN.LABEL_PATHS", ["x" * 5000], "must name files that exist"),
        ("DATA.TRAIN.DATA_PATHS", ["x" * 5000], "must name a folder that exists"),
        ("MODEL.WEIGHTS_INIT.PARAMS_FILE", "x" * 5000, "weights that exists"),
        ("ZERO", "${oc.env:HOME}", "config.ZERO: must be a block of keys"),
        ("IMPORTS", [{}], "must be a list of texts"),
        ("NEAREST_NEIGHBOR.ALSO_TOPK", [[1]], "must be a list of whole numbers"),
        ("OPTIMIZER.param_schedulers.lr.schedulers", [{"name": "multistep", "values": [{}]}] * 2, "list"),
        ("OPTIMIZER.base_optimizer.PARAMS", "${oc.env:HOME}", "PARAMS: must be a block of keys"),
    ],
)
def test_values_that_make_no_sense_are_refused(key: str, value: Any, text: str) -> None:
    found = outcome(RECIPES[0], key, value)
    assert isinstance(found, str) and text in found
