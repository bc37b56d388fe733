"""The registry: names, duplicates, typed options, plugins."""

from __future__ import annotations

import sys
from dataclasses import MISSING, fields
from importlib import import_module
from inspect import signature
from pathlib import Path

import pytest

from vissl_zero.errors import RegistryError
from vissl_zero.registry import REGISTRIES, Registry, load_plugins


def make_registry() -> Registry:
    return Registry("fruit", "config.FRUIT", {"queue": ("queue", "A built-in that is never imported here.")})


def test_registered_component_is_found_with_its_summary():
    fruits = make_registry()

    @fruits.register("apple")
    class Apple:
        """Grows on trees.

        More text.
        """

    component = fruits.get("apple")
    assert component.build is Apple
    assert component.summary == "Grows on trees."
    assert list(fruits) == ["apple", "queue"]


def test_duplicate_name_is_refused():
    fruits = make_registry()
    fruits.register("apple")(int)
    with pytest.raises(RegistryError, match="'apple' is already taken"):
        fruits.register("apple")(float)


def test_name_of_a_builtin_is_refused_before_the_builtin_is_imported():
    with pytest.raises(RegistryError, match="'queue' is already taken by queue"):
        make_registry().register("queue")(float)


def test_unknown_name_lists_the_closest():
    with pytest.raises(RegistryError, match="Did you mean 'queue'"):
        make_registry().get("queu")


@pytest.mark.parametrize("kind", sorted(REGISTRIES))
def test_every_builtin_is_registered_by_the_module_that_declares_it(kind):
    registry = REGISTRIES[kind]
    for name in registry:
        component = registry.get(name)
        assert component.name == name
        assert component.summary, f"{kind} {name} has no docstring"


def test_plugins_register_their_components(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "my_heads.py").write_text(
        "from vissl_zero.registry import HEADS\n@HEADS.register('head_of_a_test')\nclass Head:\n    '''A head.'''\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    load_plugins(["my_heads"])
    assert REGISTRIES["heads"].get("head_of_a_test").summary == "A head."
    sys.modules.pop("my_heads")
    import_module("my_heads")  # a second import of the same file is no duplicate


def test_missing_plugin_module_says_what_to_do():
    with pytest.raises(RegistryError, match=r"config.IMPORTS.*'no_such_module_here'.*PYTHONPATH"):
        load_plugins(["no_such_module_here"])


def test_a_plugin_that_ends_the_program_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "quitting_plugin.py").write_text("raise SystemExit(0)\n")
    info = tmp_path / "quitting_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: quitting-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[vissl_zero.components]\nquits = quitting_plugin\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    (problem,) = load_plugins([])
    assert str(problem).startswith("plugin 'quits': cannot be loaded and is left out (SystemExit: 0)")
    assert "'quitting-plugin'" in problem.fix


def _stated_twice() -> list[tuple[str, str, str, object, object]]:
    """Defaults of constructors beside those of their keys; None: the default depends on other keys."""
    pairs = []
    for kind in ("losses", "heads", "optimizers", "trunks", "sources"):
        for name in REGISTRIES[kind].builtin():
            component = REGISTRIES[kind].get(name)
            keys = {key.name: key for key in fields(component.config)} if component.config else {}
            for parameter in signature(component.build).parameters.values():
                key = keys.get(parameter.name)
                if key is None or parameter.default is parameter.empty or parameter.default is None:
                    continue
                default = key.default if key.default_factory is MISSING else key.default_factory()
                if default is not None and default is not MISSING:
                    pairs.append((kind, name, parameter.name, parameter.default, default))
    return pairs


def test_a_default_that_is_stated_twice_is_the_same():
    """A recipe gives a constructor all of its keys; what builds it directly must get the same component."""
    pairs = _stated_twice()
    assert len(pairs) > 200

    def plain(value: object) -> object:
        return list(value) if isinstance(value, list | tuple) else value

    assert [pair for pair in pairs if plain(pair[3]) != plain(pair[4])] == []
