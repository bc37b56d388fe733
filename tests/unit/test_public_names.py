"""Every name that a user may import has a docstring and a place on the page of the API."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import vissl_zero
from vissl_zero.registry import HOOKS, LOGGERS

PAGE = (Path(__file__).parents[2] / "docs/api.md").read_text()
# `::: module.name`; a module alone lists its names in `members`.
ON_PAGE = re.findall(r"^::: ([\w.]+)(?:\n    options:(?:\n      .*)*\n      members: \[(.*)\])?", PAGE, re.MULTILINE)


def public_objects() -> list[tuple[str, Any]]:
    found = []
    for path, members in ON_PAGE:
        for name in members.split(", ") if members else [""]:
            module, _, attribute = f"{path}.{name}".rstrip(".").rpartition(".")
            found.append((attribute, getattr(importlib.import_module(module), attribute)))
    return found


def test_the_page_has_every_public_name():
    names = dict(public_objects())
    for name in set(vissl_zero.__all__) - {"__version__"}:
        assert names.get(name) is getattr(vissl_zero, name), f"docs/api.md lacks {name}"


def test_a_notebook_completes_the_public_names_before_their_first_use():
    assert dir(vissl_zero) == sorted(vissl_zero.__all__)


def test_every_public_name_has_a_docstring():
    bare = []
    for name, thing in public_objects():
        if not inspect.getdoc(thing):
            bare.append(name)
        for member, value in vars(thing).items() if inspect.isclass(thing) else ():
            is_own = inspect.isfunction(value) or isinstance(value, property | classmethod)
            if is_own and not member.startswith("_") and not inspect.getdoc(value):
                bare.append(f"{name}.{member}")
    assert not bare


def test_the_interfaces_on_the_page_are_those_of_the_registries():
    things = dict(public_objects())
    assert issubclass(LOGGERS.get("csv").build, things["Logger"])
    assert issubclass(HOOKS.get("feature_quality").build, things["Hook"])
