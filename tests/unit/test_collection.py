"""Every folder of tests is run: pytest leaves out some names (``dist``, ``build``) unless told otherwise."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


def test_no_folder_of_tests_is_left_out(pytestconfig: pytest.Config) -> None:
    folders = {part for file in TESTS.rglob("test_*.py") for part in file.relative_to(TESTS).parts[:-1]}
    assert {"dist", "unit"} <= folders
    left_out = pytestconfig.getini("norecursedirs")
    assert not [name for name in folders if any(fnmatch(name, pattern) for pattern in left_out)]
