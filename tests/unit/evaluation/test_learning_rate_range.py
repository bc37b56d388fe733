"""The range test suggests a rate inside the fall of the loss, the same whatever level and ranks."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.command_line import run_command
from vissl_zero.cli import main
from vissl_zero.evaluation.learning_rate_range import HIGHEST, LOWEST, LearningRateRangeTest, suggested

RATES = np.geomspace(LOWEST, HIGHEST, 100).tolist()


def test_the_suggestion_lies_in_the_fall_of_the_loss() -> None:
    """Flat to 1e-4, falling to 1e-1, then exploding."""
    losses = [3.0 - np.clip(np.log10(rate) + 4, 0, 3) * 0.5 + max(rate - 0.1, 0) * 10 for rate in RATES]
    found, smooth = suggested(RATES, losses)
    assert found is not None and 1e-3 < found < 1e-1
    assert smooth[0] == losses[0] and len(smooth) == len(losses)
    assert suggested(RATES, [1.0 + index for index in range(100)])[0] is None


def test_rates_rise_in_equal_ratios_and_the_run_ends_where_the_loss_explodes() -> None:
    hook, run = LearningRateRangeTest(), SimpleNamespace(num_steps=100, lr_factor=1.0, step=0)
    hook.on_start(run)  # type: ignore[arg-type]
    seen = []
    for step in range(1, 101):
        seen.append(run.lr_factor)
        run.step = step
        hook.on_step(run, SimpleNamespace(step=step))  # type: ignore[arg-type]
        hook.on_record(run, SimpleNamespace(loss=1.0 if step < 90 else 1e4))  # type: ignore[arg-type]
        if step >= run.num_steps:
            break
    assert seen == pytest.approx(RATES[:90])


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["config.ZERO.LEVEL=3"], "must name a recipe"),
        (["config=quickstart/swav_digits", "--steps", "3"], "--steps: must be 20 or more"),
        (["config=quickstart/swav_digits", "config.TEST_ONLY=true"], "must train"),
    ],
)
def test_a_wrong_word_is_a_sentence(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lr-find", *words]) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize("still_falls", [True, False])
def test_a_fall_that_has_not_ended_is_named(
    still_falls: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    losses = [3.0 - 0.02 * step if step < 80 or still_falls else 9.0 for step in range(100)]
    rows = [SimpleNamespace(lr=rate, loss=loss) for rate, loss in zip(RATES, losses, strict=True)]
    monkeypatch.setattr("vissl_zero.commands.lr_find._train", lambda *_: 0)
    monkeypatch.setattr("vissl_zero.reporting.metrics_file.read_records", lambda _: rows)
    assert main(["lr-find", "config=digits/mae", "--png", str(tmp_path / "a.png")]) == 0
    assert ("It still fell at the last rate" in capsys.readouterr().out) == still_falls


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_one_rate_whatever_level_and_ranks_and_nothing_is_left(tmp_path: Path) -> None:
    found: list[dict[str, Any]] = []
    for level, ranks in ((0, 1), (3, 2)):
        words = [f"config.ZERO.LEVEL={level}", f"config.DISTRIBUTED.NUM_PROC_PER_NODE={ranks}"]
        words += [f"config.DATA.TRAIN.BATCHSIZE_PER_REPLICA={64 // ranks}", "config.TRAINER.DTYPE=float64"]
        done = run_command("lr-find", "config=digits/supervised", *words, "--steps", "40", "--json", cwd=tmp_path)
        found.append(json.loads(done.stdout.splitlines()[-1]))
        # Their folder is gone when they are read.
        assert "run folder" not in done.stdout + done.stderr and "report.png" not in done.stdout + done.stderr
    assert found[0]["suggestion"] == found[1]["suggestion"]
    assert found[0]["losses"] == pytest.approx(found[1]["losses"], rel=1e-8)
    assert [path.name for path in tmp_path.iterdir()] == ["lr_find.png"]
