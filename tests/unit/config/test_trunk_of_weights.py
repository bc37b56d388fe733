"""``MODEL.TRUNK.NAME: auto`` takes the trunk from a saved run, as data."""

from __future__ import annotations

import sys

import pytest
import torch

from tests.unit.commands.example_checkpoint import write_checkpoint
from tests.unit.config.example_config import CPU_HOST
from vissl_zero.config.compose import compose
from vissl_zero.config.resolve import resolve
from vissl_zero.errors import ConfigError

REGNET = {"depth": 3, "w_0": 16, "w_a": 16.0, "w_m": 2.0, "group_width": 8, "block_type": "RES_BASIC_BLOCK"}


def resolved(weights, *overrides):
    words = ([f"config.MODEL.WEIGHTS_INIT.PARAMS_FILE={weights}"] if weights else []) + list(overrides)
    composed = compose("benchmark/linear", words)
    return resolve(composed.run, "runs/x", recipe="benchmark/linear", written=composed.written, host=CPU_HOST)


def _run(folder, trunk, **more):
    state = {"model/trunk.weight": torch.ones(3)}
    write_checkpoint(folder, state, config={"MODEL": {"TRUNK": trunk}, **more})
    return folder


def test_it_comes_from_a_run_folder_or_a_checkpoint_in_it(tmp_path, monkeypatch):
    run = _run(tmp_path / "run", {"NAME": "regnet", "REGNET": REGNET})
    for weights in (run, run / "checkpoints" / "step_000000004"):
        plan = resolved(weights)
        trunk = plan.config["MODEL"]["TRUNK"]
        assert trunk["NAME"] == "regnet" and REGNET.items() <= trunk["REGNET"].items()
        assert plan.config["MODEL"]["NON_TRAINABLE_PARAMS"] == ["trunk"]
    monkeypatch.chdir(tmp_path)
    assert resolved("run").config["MODEL"]["WEIGHTS_INIT"]["PARAMS_FILE"] == str(run)  # workers may start elsewhere
    assert resolved("run", "config.MODEL.TRUNK.NAME=resnet").config["MODEL"]["TRUNK"]["NAME"] == "resnet"


def test_nothing_in_it_is_run(tmp_path, monkeypatch):
    (tmp_path / "canary_module.py").write_text("raise SystemExit('ran')")
    monkeypatch.syspath_prepend(str(tmp_path))
    trunk = {"NAME": "regnet", "REGNET": {**REGNET, "_target_": "os.system", "name": None}, "PARAMS": {"x": "${env:Y}"}}
    run = _run(tmp_path / "run", trunk, IMPORTS=["canary_module"], SLURM={"SETUP": ["touch canary"]})
    with pytest.raises(ConfigError, match=r"config.MODEL.TRUNK.PARAMS: is for trunks of your own"):
        resolved(run)
    del trunk["PARAMS"]
    plan = resolved(_run(tmp_path / "other", trunk, IMPORTS=["canary_module"]))
    assert "canary_module" not in sys.modules and plan.config["IMPORTS"] == []
    assert "_target_" not in plan.config["MODEL"]["TRUNK"]["REGNET"]


def test_a_trunk_of_ones_own_must_be_imported_by_the_user(tmp_path):
    run = _run(tmp_path / "run", {"NAME": "theirs", "PARAMS": {"width": 3}}, IMPORTS=["their_module"])
    with pytest.raises(ConfigError, match=r"must be a known trunk \(got 'theirs'\)"):
        resolved(run)


def test_without_a_run_it_says_what_to_write(tmp_path):
    with pytest.raises(ConfigError, match=r"TRUNK.NAME: needs weights to begin with"):
        resolved(None)
    with pytest.raises(ConfigError, match=r"PARAMS_FILE: must name a run folder, .* that exists \(got '/none'\)"):
        resolved("/none")
    (tmp_path / "w.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match="needs a run folder or a checkpoint of one"):
        resolved(tmp_path / "w.safetensors")
