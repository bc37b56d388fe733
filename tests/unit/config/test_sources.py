from __future__ import annotations

from pathlib import Path

import pytest

from vissl_zero.config.compose import compose
from vissl_zero.config.sources import _parsed
from vissl_zero.errors import ConfigError


def test_a_file_is_parsed_once_for_each_text_that_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if it is changed within the clock's tick, to a text of the same length."""
    recipe = tmp_path / "configs" / "config" / "mine.yaml"
    recipe.parent.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)

    def seed(value: int) -> int:
        recipe.write_text(f"# @package _global_\nconfig:\n  SEED_VALUE: {value}\n")
        return compose("mine").run.SEED_VALUE

    assert [seed(1), seed(2)] == [1, 2]
    before = _parsed.cache_info().misses
    assert seed(1) == 1
    assert _parsed.cache_info().misses == before


def test_a_file_that_is_no_yaml_is_refused_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = tmp_path / "configs" / "config" / "broken.yaml"
    recipe.parent.mkdir(parents=True)
    recipe.write_text("config:\n  A: [1\n")
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"broken.yaml, line 3: is not YAML"):
            compose("broken")
