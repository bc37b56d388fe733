"""What becomes of a recipe, key by key: used, without effect, different from VISSL, yours to give, refused.

No model is built and torch is not imported. All problems come at once, though Hydra stops at the first mistyped key.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from vissl_zero.atomic import is_there
from vissl_zero.config.blocks.model_and_loss import WeightsInit
from vissl_zero.config.catalogue import missing, public_equivalent, use_catalogue
from vissl_zero.config.compose import (
    EXPLAINABLE,
    Composed,
    every_mistake,
    explain,
    explained,
    of_another_program,
    plain_words,
    typed,
    unknown_engine,
    untyped,
)
from vissl_zero.config.derive.components import takes_other_model
from vissl_zero.config.host import Host
from vissl_zero.config.recipes import RecipeFile
from vissl_zero.config.resolve import resolve
from vissl_zero.config.resolved import ResolvedRun
from vissl_zero.config.run_config import RunConfig, schema
from vissl_zero.config.vissl import DIFFERENCES, vissl_keys
from vissl_zero.config.vissl_programs import PROGRAMS, RETRIEVAL, TRAIN
from vissl_zero.errors import ConfigError, Problem

_CORES = 64  # of the machines that are assumed
_SENTENCE = re.compile(r"(?P<keys>config\.\S+(?:, config\.\S+)*) (?:has|have) no effect: (?P<why>.*)")


@dataclass
class Account:
    """What becomes of one recipe.

    Attributes:
        name: of the recipe, with the parts that were added to it.
        file: the recipe's own file, where it is known.
        used: keys that it writes and that count.
        without_effect: key -> why it changes nothing here.
        differs: key -> what is meant otherwise than in VISSL.
        yours: what every user gives: paths of images and weights. A recipe that lacks only these is accepted.
        refused: what is wrong.
        notes: sentences that a run would say at its start.
    """

    name: str
    file: str = ""
    used: list[str] = field(default_factory=list)
    without_effect: dict[str, str] = field(default_factory=dict)
    differs: dict[str, str] = field(default_factory=dict)
    yours: list[Problem] = field(default_factory=list)
    refused: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def is_accepted(self) -> bool:
        """Whether it would run, given paths."""
        return not self.refused


def account_of(
    recipe: RecipeFile, overrides: Sequence[str] = (), then: Callable[[ResolvedRun], object] | None = None
) -> Account:
    """Compose and check a recipe as ``--dry-run`` does, on the machines that it asks for.

    Args:
        recipe: what to account for.
        overrides: of the command line.
        then: further called with an accepted run, while stand-ins are there; may raise ConfigError.
    """
    account = Account(str(recipe), str(recipe.file) if recipe.folder else "")
    words = [f"config={recipe.recipe}", *recipe.overrides, "config.DRY_RUN=true", *overrides]
    try:
        tree = untyped(plain_words(words))
    except EXPLAINABLE as error:
        account.refused += explained(error, words).problems
        return account
    if problems := of_another_program(tree):
        account.refused += problems
        return account
    written = _written(tree)
    try:
        composed = _typed(tree, recipe.recipe, words, account)
    except ConfigError as error:
        account.refused += error.problems
        return account
    with ExitStack() as stack:
        _fill_in(composed.run, account, stack)
        procs = max(1, composed.run.DISTRIBUTED.NUM_PROC_PER_NODE)
        host = Host(num_gpus=procs, why_no_gpu="", num_cores=_CORES)
        try:
            plan = resolve(composed.run, ".", recipe=recipe.recipe, written=composed.written, host=host)
            notes = plan.notes
            if then is not None:
                then(plan)
        except ConfigError as error:
            notes = ()
            account.refused += error.problems or [Problem("config", "", str(error), "")]
    _sort_keys(account, composed.run, written, [*composed.notes, *notes])
    return account


def _written(tree: DictConfig) -> dict[str, Any]:
    """Keys under ``config:`` that the files write, with their values."""
    plain = OmegaConf.to_container(tree.config, resolve=False)
    assert isinstance(plain, dict)
    return dict(_leaves({key: value for key, value in plain.items() if key != "DRY_RUN"}))


def _leaves(tree: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Key paths with what is no block; a list is one value."""
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _typed(tree: DictConfig, recipe: str, words: Sequence[str], account: Account) -> Composed:
    """The tree as dataclasses, without the keys and values that are none: those go into ``account.refused``."""
    if tree.get("engine_name", TRAIN) not in (TRAIN, *PROGRAMS):
        account.refused.append(unknown_engine(tree.engine_name))
        tree.engine_name = TRAIN
    for problem in every_mistake(tree):
        account.refused.append(problem)
        _drop(tree, problem.key)
    if isinstance(tree.get("config"), DictConfig):
        OmegaConf.set_struct(tree, False)
    try:
        return typed(OmegaConf.merge(schema(), tree), recipe, words)  # type: ignore[arg-type]
    except EXPLAINABLE as error:
        raise explain(error) from error


def _drop(tree: DictConfig, key: str) -> None:
    *parents, last = key.lstrip("+").split(".")
    node: Any = tree
    for part in parents:
        node = node.get(part) if isinstance(node, DictConfig) else None
    if isinstance(node, DictConfig) and last in node:
        OmegaConf.set_struct(node, False)
        del node[last]


def _fill_in(run: RunConfig, account: Account, stack: ExitStack) -> None:
    """Put stand-ins where a user gives paths, and say which."""
    account.yours += missing(run.DATA)
    for problem in account.yours:
        split = getattr(run.DATA, problem.key.split(".")[2])
        split.DATA_PATHS = [f"/path/to/{name}" for name in split.DATASET_NAMES]
        if "disk_filelist" in split.LABEL_SOURCES or "everstore" in split.LABEL_SOURCES:
            split.LABEL_PATHS = split.LABEL_PATHS or [f"{path}_labels.npy" for path in split.DATA_PATHS]
    use_catalogue(run.DATA, None)
    images = run.IMG_RETRIEVAL.DATASET_PATH
    if run.PROGRAM == RETRIEVAL and not is_there(Path(images).expanduser()):
        fix = "Write config.IMG_RETRIEVAL.DATASET_PATH=<folder>."
        must = "must name the folder that holds the data sets"
        account.yours.append(Problem("config.IMG_RETRIEVAL.DATASET_PATH", images, must, fix))
        run.IMG_RETRIEVAL.DATASET_PATH = images or "/path/to/images"
    _weights(run.MODEL.WEIGHTS_INIT, "MODEL", account, stack)
    teacher = run.DISTILLATION.TEACHER_MODEL.WEIGHTS_INIT
    if not teacher.PARAMS_FILE and takes_other_model(run):
        teacher.PARAMS_FILE = "/path/to/weights"
    _weights(teacher, "DISTILLATION.TEACHER_MODEL", account, stack)


def _weights(weights: WeightsInit, path: str, account: Account, stack: ExitStack) -> None:
    if weights.PARAMS_FILE and not is_there(Path(weights.PARAMS_FILE).expanduser()):
        must, fix = "must name weights that exist", f"Write config.{path}.WEIGHTS_INIT.PARAMS_FILE=<file>."
        if public := public_equivalent(weights.PARAMS_FILE):
            fix = f"Facebook-internal; public: {public}. {fix}"
        account.yours.append(Problem(f"config.{path}.WEIGHTS_INIT.PARAMS_FILE", weights.PARAMS_FILE, must, fix))
        weights.PARAMS_FILE = stack.enter_context(_stand_in())


@contextmanager
def _stand_in() -> Iterator[str]:
    """A file that exists; of weights only that is checked."""
    with tempfile.NamedTemporaryFile(suffix=".torch") as file:
        yield file.name


def _sort_keys(account: Account, run: RunConfig, written: Mapping[str, Any], notes: Sequence[str]) -> None:
    """Each written key into its list; the sentences that are about no key into ``notes``."""
    loss = run.LOSS.get("name")
    inactive: dict[str, str] = {key.path: key.why for key in vissl_keys() if not key.is_refused}
    inactive |= {f"LOSS.{name}": f"the loss is {loss}." for name in run.LOSS if name not in ("name", loss)}
    if not run.SLURM.USE_SLURM:
        inactive["SLURM"] = "SLURM.USE_SLURM is off."
    for note in notes:
        if found := _SENTENCE.fullmatch(note):
            inactive |= {key.removeprefix("config."): found["why"] for key in found["keys"].split(", ")}
        elif not note.startswith("Keys without effect here"):
            account.notes.append(note)
    refused = {re.sub(r"\[\d+\]", "", problem.key).removeprefix("config.") for problem in account.refused}
    for key, value in written.items():
        if why := next((why for path, why in inactive.items() if _is_within(key, path)), ""):
            account.without_effect[key] = why
        elif not any(_is_within(key, path) for path in refused):
            account.used.append(key)
            for difference in DIFFERENCES:
                is_there = re.fullmatch(difference["key"].replace(".", r"\.").replace("*", r"\w+"), key)
                if is_there and ("values" not in difference or value in difference["values"]):
                    account.differs[key] = difference["why"]


def _is_within(key: str, path: str) -> bool:
    return key == path or key.startswith((f"{path}.", f"{path}["))
