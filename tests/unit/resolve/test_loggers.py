from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from vissl_zero.config.compose import load
from vissl_zero.errors import ConfigError
from vissl_zero.resolve import logger_rules
from vissl_zero.resolve.logger_rules import logger_names
from vissl_zero.resolve.resolve import resolve


def test_vissl_switch_takes_tensorboard_out() -> None:
    block = {"LOGGERS": ["csv", "tensorboard", "csv"], "TENSORBOARD_SETUP": {"USE_TENSORBOARD": True}}
    assert logger_names(block) == ["csv", "tensorboard"]
    assert logger_names(block | {"TENSORBOARD_SETUP": {"USE_TENSORBOARD": False}}) == ["csv"]


def test_a_missing_package_is_one_sentence_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def find_spec(name: str) -> Any:
        return None if name == "wandb" else importlib.util.find_spec(name)

    monkeypatch.setattr(logger_rules, "find_spec", find_spec)
    cfg = load("quickstart/swav_digits", ["config.HOOKS.LOGGERS=[csv,wandb,tensorbord]"])
    with pytest.raises(ConfigError) as caught:
        resolve(cfg, "unused", recipe="quickstart/swav_digits")
    missing, unknown = str(caught.value).splitlines()
    assert missing == (
        "config.HOOKS.LOGGERS: needs the package wandb, which is not installed (got wandb). "
        "Run pip install 'vissl-zero[wandb]', or leave wandb out."
    )
    assert unknown.startswith("config.HOOKS.LOGGERS: must be a known logger (got 'tensorbord')")
