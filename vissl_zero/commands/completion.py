"""Recipes' names for the shell's completion: Hydra knows the options of a group, but not of the folders below it."""

from __future__ import annotations

import os
from collections.abc import Sequence

from vissl_zero.config.recipes import recipe_names


def completed_recipes(arguments: Sequence[str]) -> list[str]:
    """What ``config=...`` at the cursor may become, for ``-sc query=<shell>``; empty where that is not asked.

    The shell's script sets ``COMP_LINE``, the line up to the cursor.
    """
    if not any(word.startswith("query=") for word in arguments):
        return []
    word = os.environ.get("COMP_LINE", "").rpartition(" ")[2]
    if not word.startswith("config="):
        return []
    return [f"config={name}" for name in recipe_names() if f"config={name}".startswith(word)]
