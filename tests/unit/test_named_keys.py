"""Every key that the README and the pages for users name is a key of ``RunConfig``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest

from vissl_zero.config.run_config import RunConfig

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "UPGRADING.md", *sorted(ROOT.glob("docs/*.md")), *ROOT.glob("docs/tutorials/*.md")]


SOURCES = sorted((ROOT / "vissl_zero").rglob("*.py"))


def through_lists(source: str) -> list[str]:
    """List the keys in full that go on behind a list: nobody can write them."""
    found = []
    for key in re.findall(r"\bconfig\.([A-Z]\w*(?:\.\w+)*)", source):
        block: Any = RunConfig()
        for name in key.split("."):
            if isinstance(block, list):
                found.append(f"config.{key}")
                break
            block = getattr(block, name, {})
    return found


def unknown(page: str) -> list[str]:
    """List the keys written in full, ``config.A.B``, that no block has."""
    found = []
    for key in re.findall(r"\bconfig\.([A-Z]\w*(?:\.\w+)*)", page):
        if key == "A.B":
            continue  # the placeholder of command lines
        block: Any = RunConfig()
        for name in key.split("."):
            if isinstance(block, Mapping) and name not in block:
                break  # keys of the user's own: parameters of a component
            if is_dataclass(block) and name not in {field.name for field in fields(block)}:
                found.append(f"config.{key}")
                break
            block = block[name] if isinstance(block, Mapping) else getattr(block, name, {})
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_keys_exist(page):
    assert not unknown(page.read_text())


def test_a_mistyped_key_is_found():
    assert unknown("`config.HOOKS.EVALUATED_MODEL=teacher`") == ["config.HOOKS.EVALUATED_MODEL"]


def test_no_message_names_a_key_behind_a_list():
    assert [key for file in SOURCES for key in through_lists(file.read_text())] == []
    assert through_lists("config.MODEL.HEAD.PARAMS.mlp.dims") == ["config.MODEL.HEAD.PARAMS.mlp.dims"]
