"""Write ``docs/keys.md``, a table of every typed key, and ``docs/configuration.md``'s table of VISSL's differences.

Run ``python -m vissl_zero.config.reference``.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

from vissl_zero.config.blocks.data import MixingConfig
from vissl_zero.config.blocks.optimizer import LinearEvalHead, ParamGroupKeys
from vissl_zero.config.components import builtin_keys
from vissl_zero.config.constraints import Choice, Range
from vissl_zero.config.run_config import RunConfig
from vissl_zero.vissl.keys import DIFFERENCES

_HEADER = """\
# Every key
Written by `python -m vissl_zero.config.reference`; a test holds it to the code.
[configuration.md](configuration.md) says how keys are given, and which of VISSL's other keys are accepted.
"""
# Keys of YAML maps and lists, which are typed where they are read.
_BELOW_PLAIN_KEYS = {
    "config.DATA.TRAIN.COLLATE_FUNCTION_PARAMS": MixingConfig,
    "config.OPTIMIZER.param_groups[i]": ParamGroupKeys,
    "config.OPTIMIZER.linear_eval_heads[i]": LinearEvalHead,
}
# The other trunks have their keys under config.MODEL.TRUNK.
_LIBRARY_TRUNKS = ("timm", "torchvision")
_YAML = {None: "null", True: "true", False: "false", "": '""', "???": "(needed)"}


@dataclass(frozen=True)
class Key:
    """One field as its source says it."""

    name: str
    type: str
    sentence: str


def reference() -> str:
    """Write the page: a table per block under ``config:``, then those of components that are not blocks."""
    tables = list(_blocks(RunConfig(), "config"))
    tables += [_table(f"`{path}`", schema()) for path, schema in _BELOW_PLAIN_KEYS.items()]
    trunks = builtin_keys("trunk")
    tables += [_table(f"trunk `{name}`", trunks[name]()) for name in _LIBRARY_TRUNKS]
    for kind in ("head", "base optimizer"):
        tables += [_table(f"{kind} `{name}`", schema()) for name, schema in builtin_keys(kind).items()]
    return "\n".join([_HEADER, *tables])


_BEGIN, _END = "<!-- differences -->\n", "<!-- end of differences -->\n"


def with_differences(page: str) -> str:
    """Fill the table of ``docs/configuration.md``: keys that mean something else in VISSL, from ``vissl/keys.yaml``."""
    before, _, rest = page.partition(_BEGIN)
    rows = ["| key | at | here, and in VISSL |", "| --- | --- | --- |"]
    for entry in DIFFERENCES:
        values = ", ".join(f"`{_YAML.get(v, v) if isinstance(v, bool) else v}`" for v in entry.get("values", ()))
        rows.append(f"| `{entry['key']}` | {values or 'any value'} | {entry['why']} |")
    return "".join([before, _BEGIN, "\n".join(rows), "\n", _END, rest.partition(_END)[2]])


def _blocks(block: Any, path: str) -> Iterator[str]:
    yield _table(f"`{path}`", block)
    for key in keys_of(type(block)):
        value = getattr(block, key.name)
        below = value.items() if key.name == "LOSS" else [("", value)]
        for name, child in below:
            if is_dataclass(child):
                yield from _blocks(child, ".".join(filter(None, [path, key.name, name])))


def _table(title: str, block: Any) -> str:
    rows = []
    constraints = {item.name: item.metadata["constraint"] for item in fields(block) if "constraint" in item.metadata}
    for key in keys_of(type(block)):
        value = getattr(block, key.name)
        if not is_dataclass(value):
            kind = f"`{key.type}`".replace("|", "\\|")
            kind += f", {_allowed(constraints[key.name])}" if key.name in constraints else ""
            rows.append(f"| `{key.name}` | {kind} | {_default(value)} | {key.sentence} |")
    heading = f"## {title}\n{inspect.cleandoc(type(block).__doc__ or '')}\n"
    head = ["| key | type | default | |", "| --- | --- | --- | --- |"] if rows else []
    return "\n".join([heading, *head, *rows, ""])


def _allowed(constraint: Range | Choice) -> str:
    """Write a range in words, and the options of a choice as code."""
    return str(constraint) if isinstance(constraint, Range) else " or ".join(f"`{word}`" for word in constraint.words)


def _default(value: Any) -> str:
    if isinstance(value, dict) and value:
        return ""
    text = f"`{_YAML.get(value, value) if isinstance(value, (bool, str)) or value is None else value}`"
    return text.replace("|", "\\|")


def keys_of(schema: type) -> list[Key]:
    """List the fields written in a dataclass's source or its bases', with the sentence under each."""
    keys: dict[str, Key] = {}
    # Bases first, so that what a subclass says about a key wins.
    for cls in reversed(schema.__mro__):
        body = _class_body(cls.__module__, cls.__name__)
        for statement, following in zip(body, [*body[1:], None], strict=False):
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                name, annotation = statement.target.id, ast.unparse(statement.annotation)
                if not annotation.startswith("ClassVar"):
                    keys[name] = Key(name, annotation, _text(following))
    return list(keys.values())


@cache
def _class_body(module: str, name: str) -> list[ast.stmt]:
    if not module.startswith("vissl_zero"):
        return []
    # Parse the source, because Python drops the docstrings of fields.
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return next((node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name), [])


def _text(statement: ast.stmt | None) -> str:
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return " ".join(str(statement.value.value).split())
    return ""


if __name__ == "__main__":
    Path("docs/keys.md").write_text(reference())
    configuration = Path("docs/configuration.md")
    configuration.write_text(with_differences(configuration.read_text()))
