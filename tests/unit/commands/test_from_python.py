from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

import vissl_zero
from vissl_zero.config.override_words import as_word
from vissl_zero.engine.stopping import JobNote
from vissl_zero.errors import CheckpointError, ConfigError


@pytest.mark.parametrize(
    "value",
    [1, 2.5, 1e-9, True, None, "a", "two words", "it's", "/my, photos", "a\\", "null", "", [1, "x y"], {"a": [True]}],
)
def test_a_value_arrives_as_it_was_given(value: Any) -> None:
    found = OverridesParser.create().parse_override(f"key={as_word(value)}").value()
    assert (str(found) if isinstance(value, str) and found is not None else found) == value


def test_importing_the_package_costs_no_torch() -> None:
    code = "import sys, vissl_zero; vissl_zero.train; vissl_zero.plan; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_a_wrong_key_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match=r"config.ZERO.LEVL: is not a key"):
        vissl_zero.train("quickstart/swav_digits", {"config.ZERO.LEVL": 3})


@pytest.mark.parametrize(
    ("recipe", "overrides", "wanted"),
    [
        (
            Path("runs/mine"),
            None,
            r"recipe: must be the name of a recipe, a text \(got .*runs/mine.*config.CHECKPOINT.DIR",
        ),
        ("digits/simsiam", "config.SEED_VALUE=1", r"overrides: must be a dict of keys and values, or a list of words"),
        ("digits/simsiam", [("config.SEED_VALUE", 1)], r"overrides: must be a dict .*Write "),
        ("digits/simsiam", ["config.ZERO.LEVL=3"], r"config.ZERO.LEVL: is not a key"),
    ],
)
def test_what_is_no_recipe_or_no_overrides_gets_a_sentence(
    recipe: Any, overrides: Any, wanted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=wanted):
        vissl_zero.train(recipe, overrides)


@pytest.mark.slow
def test_overrides_are_words_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = vissl_zero.train("quickstart/swav_digits", ["config.CHECKPOINT.DIR='it is'", "config.DRY_RUN=true"])
    assert run.folder == tmp_path / "it is" and run.is_complete and run.summary == {} and run.seeds == []


def test_a_run_of_several_seeds_has_means_and_a_run_for_each_seed(tmp_path: Path) -> None:
    for name, loss in {"0": 1.0, "1": 2.0, "10": 3.0}.items():
        JobNote([], 0).write(tmp_path / name)
        (tmp_path / name / "summary.json").write_text(json.dumps({"loss_last": loss}))
    group = {"name": "", "runs": [], "figures": {"loss_last": {"mean": 2.0, "low": 1.0, "high": 3.0}}}
    (tmp_path / "seeds.json").write_text(json.dumps([group]))
    run = vissl_zero.Run(tmp_path, 0)
    assert run.summary == {"loss_last": 2.0}
    assert [seed.summary["loss_last"] for seed in run.seeds] == [1.0, 2.0, 3.0]
    assert vissl_zero.Run(tmp_path, 75).summary == {}
    with pytest.raises(CheckpointError, match=f"holds several runs. Name one of them: {tmp_path}/0, {tmp_path}/1"):
        run.load_trunk()


def test_a_folder_without_splits_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"must be a folder that holds train/ and val/"):
        vissl_zero.evaluate("a.pth", tmp_path)
    with pytest.raises(ConfigError, match="there is no such file or folder"):
        vissl_zero.embed("a.pth", tmp_path / "nowhere")


SHORT = {"config.NEAREST_NEIGHBOR.USE_KNN": False, "config.DISTRIBUTED.NUM_PROC_PER_NODE": 1}


@pytest.mark.slow
def test_an_interrupt_saves_and_the_run_resumes(tmp_path: Path) -> None:
    # Python leaves SIGINT ignored where a shell has started it in the background; a notebook does not.
    code = f"""
        import signal
        import vissl_zero
        signal.signal(signal.SIGINT, signal.default_int_handler)
        run = vissl_zero.train("quickstart/swav_digits", {SHORT | {"config.CHECKPOINT.DIR": str(tmp_path / "run")}!r})
        print("code", run.exit_code, run.summary)
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True)
    metrics = tmp_path / "run/metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(2)
    assert "code 130 {}" in process.communicate(timeout=120)[0]
    steps = len(metrics.read_text().splitlines())
    overrides = SHORT | {"config.CHECKPOINT.DIR": str(tmp_path / "run"), "config.TRAINER.MAX_STEPS": steps + 3}
    run = vissl_zero.train("quickstart/swav_digits", overrides)
    assert run.is_complete and run.summary["num_steps"] == steps + 3
    assert run.load_trunk() is not None


def test_a_budget_with_a_unit_is_refused_in_a_sentence():
    with pytest.raises(ConfigError, match=r"config.ZERO.MEMORY_GB: must be a number \(got '40GB'\)"):
        vissl_zero.plan("digits/supervised", memory_gb="40GB")
