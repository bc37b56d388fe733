from __future__ import annotations

from vissl_zero.config.recipes import find_recipe, list_recipes


def test_each_recipe_is_found_by_its_name() -> None:
    recipes = list_recipes()
    assert len(recipes) > 100
    assert [find_recipe(recipe.name) for recipe in recipes] == recipes


def test_no_recipe_is_found_by_a_name_that_no_file_has() -> None:
    assert [find_recipe(name) for name in ("", "digits", "digits/no_such", "a\0b", "a" * 300)] == [None] * 5
