from __future__ import annotations

from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from vissl_zero.config import recipes
from vissl_zero.config.recipes import find_recipe, list_recipes, recipe_folders, recipe_packages, require_moderate


def test_each_recipe_is_found_by_its_name() -> None:
    recipes = list_recipes()
    assert len(recipes) > 100
    assert [find_recipe(recipe.name) for recipe in recipes] == recipes


def test_the_recipes_of_a_checkout_come_before_those_of_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "configs").mkdir()
    monkeypatch.chdir(tmp_path)
    checkout = Path(__file__).parents[3] / "configs"
    assert recipe_folders()[:2] == [checkout, tmp_path / "configs"]


def test_no_recipe_is_found_by_a_name_that_no_file_has() -> None:
    assert [find_recipe(name) for name in ("", "digits", "digits/no_such", "a\0b", "a" * 300)] == [None] * 5


def test_a_number_may_not_have_more_digits_than_a_thousand_and_a_text_may_be_long() -> None:
    require_moderate(f"a: {'1' * 1000}\nb: {'x' * 9000}\nc: {'1' * 9000}x")
    for sign in ("", "-", "+"):
        with pytest.raises(ValueError, match="digits"):
            require_moderate(f"a: {sign}{'1' * 1001}")


def test_a_package_of_recipes_is_found_and_a_broken_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    values = ("vissl_zero.conf", "vissl_zero.nowhere", "nowhere.at_all", "vissl_zero.errors")
    points = [EntryPoint(f"plugin {value}", value, "vissl_zero.recipes") for value in values]
    monkeypatch.setattr(recipes, "entry_points", lambda group: [point for point in points if point.group == group])
    folders, broken = recipe_packages.__wrapped__()
    assert folders == [Path(recipes.__file__).parents[1] / "conf"]
    assert [problem.got for problem in broken] == list(values[1:])
    assert "there is no package vissl_zero.nowhere" in str(broken[0]) and "No module named 'nowhere'" in str(broken[1])
