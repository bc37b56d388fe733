"""``vissl-zero explain <recipe, file or folder>``: what becomes of each key of a recipe, before anything is built."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from vissl_zero.config.account import Account, account_of
from vissl_zero.config.catalogue import Replacement, with_public_paths
from vissl_zero.config.recipes import RecipeFile, recipe_file, recipe_files, recipe_text
from vissl_zero.errors import ConfigError, Problem, did_you_mean, printable

USAGE = """\
vissl-zero explain <recipe | file.yaml | folder> [config.A.B=value ...] [hydra.searchpath=[file:///my/vissl/configs]]
  --parts        of a folder: also files that name no more than a trunk, on the nearest complete recipe
  --fix FOLDER   write copies there, with what only Facebook has replaced, a comment for each
  --json         for scripts, on standard output

Says of each key that the recipe writes whether it is used, has no effect (and why), means something else than in VISSL
or is refused, all at once. Checks as --dry-run does, builds no model and needs no data, weights or GPU.
Exit codes: 0 all are accepted, 1 some are refused, 2 your input.
"""
_FLAGS = ("--parts", "--fix", "--json")
REFUSED = 1


def explain(arguments: Sequence[str]) -> int:
    """Run the command; returns its exit code.

    Raises:
        ConfigError: the arguments name nothing that can be explained.
    """
    if not arguments or "--help" in arguments or "-h" in arguments:
        print(USAGE, end="")
        return 0 if arguments else 2
    words = [part for word in arguments for part in (word.split("=", 1) if word.startswith("--") else [word])]
    asked, overrides, flags, out = list[str](), list[str](), set[str](), ""
    while words:
        word = words.pop(0)
        if word == "--fix":
            if not words:
                raise ConfigError("vissl-zero explain: --fix needs a folder. Write --fix <folder>.")
            out = words.pop(0)
        elif word in _FLAGS:
            flags.add(word)
        elif word.startswith("-"):
            raise ConfigError(f"vissl-zero explain: {word} is not a flag.{did_you_mean(word, _FLAGS)}\n{USAGE}")
        elif word.startswith("config=") or ("=" not in word and not word.startswith(("+", "~"))):
            asked.append(word.removeprefix("config="))
        else:
            overrides.append(word)
    if len(asked) != 1:
        raise ConfigError(f"vissl-zero explain: must name one recipe, file or folder (got {len(asked)}).\n{USAGE}")
    files = _files(asked[0], "--parts" in flags)
    accounts = accounts_of(files, overrides)
    fixed = _fix(files, Path(out)) if out else {}
    is_folder = Path(asked[0]).is_dir()
    if "--json" in flags:
        rows = [_row(account) | {"replaced": _rows(fixed.get(account.name, ()))} for account in accounts]
        print(json.dumps(rows if is_folder else rows[0], indent=1))
    elif is_folder:
        _print_folder(accounts)
    else:
        _print_one(accounts[0])
    if out and "--json" not in flags:
        print(f"written: {len(fixed)} files in {out}, {sum(map(len, fixed.values()))} lines replaced")
    return 0 if all(account.is_accepted for account in accounts) else REFUSED


def accounts_of(files: Sequence[RecipeFile], overrides: Sequence[str] = (), processes: int = 0) -> list[Account]:
    """An account of each recipe, in their order; several are shared among processes (0: one a core)."""
    account = partial(account_of, overrides=overrides)
    workers = min(len(files), processes or os.cpu_count() or 1)
    if workers < 2:
        return [account(file) for file in files]
    with ProcessPoolExecutor(workers) as pool:
        return list(pool.map(account, files, chunksize=4))


def topic(problem: Problem) -> str:
    """What a problem is about, for counting: its key, and the name of a component that is not there."""
    key = re.sub(r"\[\d+\]", "", problem.key).removeprefix("config.")
    is_name = key.endswith(("NAME", "name", "SOURCES", "TRANSFORMS", "HEAD.PARAMS", "COLLATE_FUNCTION"))
    return f"{key} {problem.got}" if is_name and re.fullmatch(r"'[^']*'|[\w.]+", problem.got) else key


def _files(asked: str, with_parts: bool) -> list[RecipeFile]:
    path = Path(asked).expanduser()
    if path.is_dir():
        found = list(recipe_files(path.absolute(), with_parts))
        if not found:
            must = "must hold recipes: files that name a trunk, data and an optimizer"
            fix = "Name another folder; --parts takes in files that name no more than a trunk."
            raise ConfigError([Problem("vissl-zero explain", repr(asked), must, fix)])
        return found
    if path.suffix == ".yaml":
        if not path.is_file():
            raise ConfigError([Problem("vissl-zero explain", repr(asked), "must exist", "Correct the path.")])
        recipe_text(path)
        return [recipe_file(path)]
    return [RecipeFile(asked)]


def _fix(files: Sequence[RecipeFile], out: Path) -> dict[str, list[Replacement]]:
    """Write copies with public paths; what was replaced in each, by the recipe's name."""
    if not all(file.folder for file in files):
        raise ConfigError("vissl-zero explain: --fix needs a file or a folder, not the name of a recipe.")
    found = {}
    for file in files:
        text, replaced = with_public_paths(recipe_text(file.file))
        target = out / "config" / file.file.relative_to(Path(file.folder) / "config")
        if target.resolve() == file.file.resolve():
            raise ConfigError(f"vissl-zero explain: --fix {out}: must be another folder than {file.folder}.")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
        found[str(file)] = replaced
    return found


def _row(account: Account) -> dict[str, Any]:
    return {"accepted": account.is_accepted, **asdict(account)}


def _rows(replaced: Iterable[Replacement]) -> list[dict[str, Any]]:
    return [asdict(one) for one in replaced]


def _print_one(account: Account) -> None:
    console = Console(width=None if os.isatty(1) else 10_000)
    verdict = "accepted" if account.is_accepted else f"refused: {len(account.refused)} problems"
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
    """How many are accepted, and what blocks the others: how many it takes part in, and in how many it is alone."""
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
