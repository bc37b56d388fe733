"""``vissl-zero explain <recipe, file or folder>``: the effect of each key of a recipe, before anything is built.

A key is used, without effect, different from VISSL, yours to give, or refused. No model is built and torch is not
imported. All problems come at once, though Hydra stops at the first mistyped key.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.table import Table
from rich.text import Text

from vissl_zero.atomic import is_there
from vissl_zero.commands.arguments import config_dirs
from vissl_zero.config.blocks.model_and_loss import WeightsInit
from vissl_zero.config.catalog import Replacement, missing, public_equivalent, use_catalog, with_public_paths
from vissl_zero.config.compose import (
    EXPLAINABLE,
    IN_A_LIST,
    Composed,
    every_mistake,
    explained,
    of_another_program,
    plain_words,
    typed,
    unknown_engine,
    untyped,
)
from vissl_zero.config.compose import explain as in_words
from vissl_zero.config.override_words import searchpath_override
from vissl_zero.config.programs import PROGRAMS, RETRIEVAL, TRAIN
from vissl_zero.config.recipes import RecipeFile, recipe_file, recipe_files, recipe_text
from vissl_zero.config.run_config import RunConfig, schema
from vissl_zero.errors import CheckpointError, ConfigError, Problem, did_you_mean, printable, problems_of
from vissl_zero.resolve.components import left_to_weights, takes_other_model
from vissl_zero.resolve.host import Host
from vissl_zero.resolve.measuring import saved_features
from vissl_zero.resolve.named_teacher import teacher_name
from vissl_zero.resolve.resolve import resolve
from vissl_zero.resolve.resolved import ResolvedRun
from vissl_zero.vissl.keys import DIFFERENCES, vissl_keys

USAGE = """\
vissl-zero explain <recipe | file.yaml | folder> [config.A.B=value ...] [hydra.searchpath=[file:///my/vissl/configs]]
  --parts        of a folder: also files that name no more than a trunk, on the nearest complete recipe
  --fix FOLDER   write copies with Facebook-internal paths replaced, and a comment on each replaced line
  --config-dir FOLDER   where else recipes are looked for: FOLDER/config
  --json         for scripts, on standard output

Sorts the keys that the recipe sets: used, without effect (and why), different from VISSL, refused. Reports all
problems at once. Checks what --dry-run checks, builds no model, and needs no data, weights or GPU.
Exit codes: 0 all are accepted, 1 some are refused, 2 an error in your input.
"""
_FLAGS = ("--parts", "--fix", "--json")
REFUSED = 1


def explain(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code.

    Raises:
        ConfigError: the arguments name nothing that can be explained.
    """
    if not arguments or "--help" in arguments or "-h" in arguments:
        print(USAGE, end="")
        return 0 if arguments else 2
    recipe, overrides, flags, out = _parse(arguments)
    files = _files(recipe, "--parts" in flags)
    accounts = _accounts_of(files, overrides)
    fixed = _fix(files, Path(out)) if out else {}
    is_folder = Path(recipe).is_dir()
    if "--json" in flags:
        rows = [
            {
                "accepted": account.is_accepted,
                **asdict(account),
                "replaced": [asdict(replaced) for replaced in fixed.get(account.name, ())],
            }
            for account in accounts
        ]
        print(json.dumps(rows if is_folder else rows[0], indent=1))
    elif is_folder:
        _print_folder(accounts)
    else:
        _print_one(accounts[0])
    if out and "--json" not in flags:
        print(f"written: {len(fixed)} files in {out}, {sum(map(len, fixed.values()))} lines replaced")
    return 0 if all(account.is_accepted for account in accounts) else REFUSED


def _parse(arguments: Sequence[str]) -> tuple[str, list[str], set[str], str]:
    """Split the words into the recipe, file or folder, the overrides, the flags, and the folder of --fix."""
    rest, folders = config_dirs(arguments)
    words = [part for word in rest for part in (word.split("=", 1) if word.startswith("--") else [word])]
    recipes, overrides, flags, out = list[str](), searchpath_override(folders), set[str](), ""
    while words:
        word = words.pop(0)
        if word == "--fix":
            if not words:
                raise ConfigError("vissl-zero explain: --fix needs a folder. Write --fix <folder>.")
            out = words.pop(0)
        elif word in _FLAGS:
            flags.add(word)
        elif word.startswith("-"):
            near = did_you_mean(word, (*_FLAGS, "--config-dir"))
            raise ConfigError(f"vissl-zero explain: {word} is not a flag.{near}\n{USAGE}")
        elif word.startswith("config=") or ("=" not in word and not word.startswith(("+", "~"))):
            recipes.append(word.removeprefix("config="))
        else:
            overrides.append(word)
    if len(recipes) != 1:
        raise ConfigError(f"vissl-zero explain: must name one recipe, file or folder (got {len(recipes)}).\n{USAGE}")
    return recipes[0], overrides, flags, out


def _accounts_of(files: Sequence[RecipeFile], overrides: Sequence[str]) -> list[Account]:
    """Explain each recipe, in order, in one process per core."""
    account = partial(account_of, overrides=overrides)
    workers = min(len(files), os.cpu_count() or 1)
    if workers < 2:
        return [account(file) for file in files]
    # Processes, not threads: Hydra keeps its state in globals, and composing is all Python.
    with ProcessPoolExecutor(workers) as pool:
        return list(pool.map(account, files, chunksize=4))


def topic(problem: Problem) -> str:
    """Return the subject of a problem, for counting: its key, and the missing component if there is one."""
    key = re.sub(r"\[\d+\]", "", problem.key).removeprefix("config.") or problem.must
    is_name = key.endswith(("NAME", "name", "SOURCES", "TRANSFORMS", "HEAD.PARAMS", "COLLATE_FUNCTION"))
    return f"{key} {problem.got}" if is_name and re.fullmatch(r"'[^']*'|[\w.]+", problem.got) else key


def _files(name: str, with_parts: bool) -> list[RecipeFile]:
    path = Path(name).expanduser()
    if path.is_dir():
        files = list(recipe_files(path.absolute(), with_parts))
        if not files:
            must = "must hold recipes: files that name a trunk, data and an optimizer"
            fix = "Name another folder; --parts takes in files that name no more than a trunk."
            raise ConfigError([Problem("vissl-zero explain", repr(name), must, fix)])
        return files
    if path.suffix == ".yaml":
        if not path.is_file():
            raise ConfigError([Problem("vissl-zero explain", repr(name), "must exist", "Correct the path.")])
        recipe_text(path)
        return [recipe_file(path)]
    return [RecipeFile(name)]


def _fix(files: Sequence[RecipeFile], out: Path) -> dict[str, list[Replacement]]:
    """Write copies with public paths and return the replacements of each recipe, by its name."""
    if not all(file.folder for file in files):
        raise ConfigError("vissl-zero explain: --fix needs a file or a folder, not the name of a recipe.")
    replacements = {}
    for file in files:
        text, replaced = with_public_paths(recipe_text(file.file))
        target = out / "config" / file.file.relative_to(Path(file.folder) / "config")
        # The user's own files are never overwritten, not even through a link.
        if target.resolve() == file.file.resolve():
            raise ConfigError(f"vissl-zero explain: --fix {out}: must be another folder than {file.folder}.")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
        replacements[str(file)] = replaced
    return replacements


def _print_one(account: Account) -> None:
    # In a pipe each row keeps its line, for grep.
    console = Console(width=None if os.isatty(1) else 10_000)
    number = len(account.refused)
    verdict = "accepted" if account.is_accepted else f"refused: {number} {'problem' if number == 1 else 'problems'}"
    counts = f"{len(account.used)} keys used, {len(account.without_effect)} without effect"
    _line(f"{account.name}: {verdict}; {counts}")
    for title, problems in (("Refused", account.refused), ("Yours to give", account.yours)):
        if problems:
            _line(f"\n{title}")
            for problem in problems:
                _line(f"  {problem}")
    for title, keys in (("Without effect", account.without_effect), ("Differs from VISSL", account.differs)):
        if keys:
            _line(f"\n{title}")
            table = Table(box=None, pad_edge=False, show_header=False)
            for key, why in keys.items():
                table.add_row(Text(f"  {key}"), Text(why))
            console.print(table)
    for title, lines in (("The run will say", account.notes), ("Used", account.used)):
        if lines:
            _line(f"\n{title}")
            for line in lines:
                _line(f"  {line}")


def _print_folder(accounts: Sequence[Account]) -> None:
    console = Console(width=None if os.isatty(1) else 10_000)
    table = Table(box=None, pad_edge=False)
    for column in ("", "recipe", "used", "no effect", "differs", "yours", "refused for"):
        table.add_column(column, overflow="fold")
    for account in accounts:
        topics = ", ".join(dict.fromkeys(topic(problem) for problem in account.refused))
        counts = (account.used, account.without_effect, account.differs, account.yours)
        mark = "ok" if account.is_accepted else "no"
        table.add_row(*map(Text, (mark, account.name, *(str(len(count)) for count in counts), topics)))
    console.print(table)
    _line("\n" + "\n".join(scoreboard(accounts)))


def scoreboard(accounts: Sequence[Account]) -> list[str]:
    """Count accepted recipes and, for each problem, the recipes that have it, and those that have only it."""
    accepted = sum(account.is_accepted for account in accounts)
    lines = [f"{accepted} of {len(accounts)} recipes are accepted"]
    part: Counter[str] = Counter()
    alone: Counter[str] = Counter()
    for account in accounts:
        topics = {topic(problem) for problem in account.refused}
        part.update(topics)
        alone.update(topics if len(topics) == 1 else ())
    if part:
        lines.append(f"{'blocks':>7} {'alone':>6}")
        lines += [f"{count:7} {alone[name]:6}  {name}" for name, count in part.most_common(60)]
    return lines


def _line(text: str) -> None:
    print(printable(text))


_CORES = 64  # cores of the assumed machines
_SENTENCE = re.compile(r"(?P<keys>config\.\S+(?:, config\.\S+)*) (?:has|have) no effect: (?P<why>.*)")


@dataclass
class Account:
    """The verdict on one recipe.

    Attributes:
        name: name of the recipe, with the parts that were added to it.
        file: the recipe's own file, if it is known.
        used: keys of the recipe that have an effect.
        without_effect: key -> why it has no effect.
        differs: key -> how its meaning differs from VISSL.
        yours: settings that every user provides: paths of images and weights. A recipe may lack them.
        refused: problems of the recipe.
        notes: sentences that a run would print at its start.
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
        """Return whether the recipe would run once the user has set its paths."""
        return not self.refused


def account_of(
    recipe: RecipeFile, overrides: Sequence[str] = (), then: Callable[[ResolvedRun], object] | None = None
) -> Account:
    """Compose and check a recipe as ``--dry-run`` does, on the machines that it asks for.

    Args:
        recipe: recipe to check.
        overrides: overrides of the command line.
        then: function called with an accepted run, while placeholders of its files exist; may raise ConfigError.
    """
    account = Account(str(recipe), str(recipe.file) if recipe.folder else "")
    words = [f"config={recipe.recipe}", *recipe.overrides, "config.DRY_RUN=true", *overrides]
    try:
        tree = untyped(plain_words(words))
    except ConfigError as error:  # a file that is not YAML, or too large
        account.refused += error.problems
        return account
    except (*EXPLAINABLE, *IN_A_LIST) as error:
        account.refused += explained(error, words).problems
        return account
    if problems := of_another_program(tree):
        account.refused += problems
        return account
    # Before ``_typed``, which drops the refused keys from the tree.
    written = _written(tree)
    try:
        composed = _typed(tree, recipe.recipe, words, account)
    except ConfigError as error:
        account.refused += error.problems
        return account
    with ExitStack() as stack:
        _fill_in(composed.run, account, stack)
        procs = max(1, composed.run.DISTRIBUTED.NUM_PROC_PER_NODE)
        # With all GPUs that the recipe asks for: whether it is right does not depend on this machine.
        host = Host(num_gpus=procs, why_no_gpu="", num_cores=_CORES)
        try:
            plan = resolve(composed.run, ".", recipe=recipe.recipe, written=composed.written, host=host)
            notes = plan.notes
            if then is not None:
                then(plan)
        except (ConfigError, CheckpointError) as error:
            notes = ()
            account.refused += problems_of(error)
    _sort_keys(account, composed.run, written, [*composed.notes, *notes])
    return account


def _written(tree: DictConfig) -> dict[str, Any]:
    """Collect the keys under ``config:`` that the files write, with their values."""
    plain = OmegaConf.to_container(tree.config, resolve=False)
    assert isinstance(plain, dict)
    # ``account_of`` sets DRY_RUN; the recipe did not write it.
    return dict(_leaves({key: value for key, value in plain.items() if key != "DRY_RUN"}))


def _leaves(tree: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the key path and value of each leaf; a list is one value."""
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _typed(tree: DictConfig, recipe: str, words: Sequence[str], account: Account) -> Composed:
    """Convert the tree to dataclasses; unknown keys and wrong values move to ``account.refused``."""
    if tree.get("engine_name", TRAIN) not in (TRAIN, *PROGRAMS):
        account.refused.append(unknown_engine(tree.engine_name))
        tree.engine_name = TRAIN
    for problem in every_mistake(tree):
        account.refused.append(problem)
        # Dropped, so that the rest can be composed and its problems are found too.
        _drop(tree, problem.key)
    if isinstance(tree.get("config"), DictConfig):
        OmegaConf.set_struct(tree, False)
    try:
        return typed(OmegaConf.merge(schema(), tree), recipe, words)  # type: ignore[arg-type]
    except EXPLAINABLE as error:
        raise in_words(error) from error


def _drop(tree: DictConfig, key: str) -> None:
    *parents, last = key.lstrip("+").split(".")
    node: Any = tree
    for part in parents:
        node = node.get(part) if isinstance(node, DictConfig) else None
    if isinstance(node, DictConfig) and last in node:
        OmegaConf.set_struct(node, False)
        del node[last]


def _fill_in(run: RunConfig, account: Account, stack: ExitStack) -> None:
    """Insert placeholders where a user gives paths, and list them."""
    account.yours += missing(run.DATA)
    for problem in account.yours:
        split = getattr(run.DATA, problem.key.split(".")[2])
        split.DATA_PATHS = [f"/path/to/{name}" for name in split.DATASET_NAMES]
        if "disk_filelist" in split.LABEL_SOURCES or "everstore" in split.LABEL_SOURCES:
            split.LABEL_PATHS = split.LABEL_PATHS or [f"{path}_labels.npy" for path in split.DATA_PATHS]
    use_catalog(run.DATA, None)
    images = run.IMG_RETRIEVAL.DATASET_PATH
    if run.PROGRAM == RETRIEVAL and not is_there(Path(images).expanduser()):
        fix = "Write config.IMG_RETRIEVAL.DATASET_PATH=<folder>."
        must = "must name the folder that holds the data sets"
        account.yours.append(Problem("config.IMG_RETRIEVAL.DATASET_PATH", images, must, fix))
        run.IMG_RETRIEVAL.DATASET_PATH = images or "/path/to/images"
    if saved_features(run):  # the user has the weights of the features
        run.MODEL.WEIGHTS_INIT.PARAMS_FILE = "/path/to/weights"
    # Nothing stands in for weights that say what the network is.
    if not left_to_weights(run):
        _weights(run.MODEL.WEIGHTS_INIT, "MODEL", account, stack)
    teacher = run.DISTILLATION.TEACHER_MODEL.WEIGHTS_INIT
    if not teacher.PARAMS_FILE and takes_other_model(run) and not teacher_name(run):
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
    """Create a placeholder file, because only the existence of weights is checked."""
    with tempfile.NamedTemporaryFile(suffix=".torch") as file:
        yield file.name


def _sort_keys(account: Account, run: RunConfig, written: Mapping[str, Any], notes: Sequence[str]) -> None:
    """Sort each written key into its list, and sentences without a key into ``notes``."""
    loss = run.LOSS.get("name")
    inactive: dict[str, str] = {key.path: key.why for key in vissl_keys() if not key.is_refused}
    # A recipe of VISSL often carries the blocks of several losses, and ``name`` picks one.
    inactive |= {f"LOSS.{name}": f"the loss is {loss}." for name in run.LOSS if name not in ("name", loss)}
    if not run.SLURM.USE_SLURM:
        inactive["SLURM"] = "SLURM.USE_SLURM is off."
    for note in notes:
        if parts := _SENTENCE.fullmatch(note):
            inactive |= {key.removeprefix("config."): parts["why"] for key in parts["keys"].split(", ")}
        # That note sums up the keys that are listed here one by one.
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
