"""A recipe from four answers: it composes, has a plan, and a wrong answer is one sentence."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vissl_zero.cli import main
from vissl_zero.commands.new import Place, look_at, recipe
from vissl_zero.config.compose import compose


@pytest.fixture
def images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(0)
    for split, count in (("train", 10), ("val", 2)):
        for name in ("cat", "dog"):
            folder = tmp_path / "images" / split / name
            folder.mkdir(parents=True)
            for index in range(count):
                pixels = random.integers(0, 256, (70, 100, 3), np.uint8)
                Image.fromarray(pixels).save(folder / f"{index}.png")
    return tmp_path / "images"


@pytest.mark.parametrize(("labels", "num_classes"), [("auto", 2), ("no", 0)])
def test_a_recipe_is_short_and_says_what_each_line_is(images: Path, labels: str, num_classes: int) -> None:
    facts = look_at(images, labels)
    assert (facts.num_images, facts.num_classes, facts.side, facts.is_gray) == (20, num_classes, 70, False)
    lines = recipe(facts, Place(2.0, "a100x8"), 5, 16).splitlines()
    assert len(lines) <= 25
    assert all("  # " in line for line in lines[1:])
    assert any(line.startswith("    IMG_SIZE: 64 ") for line in lines)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["../x", "--images", "images"], "must be letters"),
        (["x"], "--images: must be given"),
        (["x", "--images", "nowhere"], "must be a folder with images"),
        (["x", "--images", "images", "--epochs", "0"], "--epochs: must be a whole number"),
        (["x", "--images", "images", "--memory-gb", "much"], "--memory-gb: must be a number above 0"),
        (["x", "--images", "images", "--machine", "a100x9"], "Did you mean 'a100x8'"),
        (["x", "--images", "images", "--hours", "-1"], "--hours: must be a number above 0"),
        (["x", "--images", "images", "--hours", "1", "--epochs", "2"], "--hours: must be left out beside --epochs"),
        (["x", "--images", "images", "--labels", "some"], "--labels: must be yes, no or auto"),
        (["x", "--images", "images/train", "--labels", "yes"], "must hold train/ and val/"),
    ],
)
def test_a_wrong_answer_is_one_sentence_and_writes_nothing(
    images: Path, words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["new", *words]) == 2
    assert sentence in capsys.readouterr().err
    assert not (images.parent / "configs").exists()


def test_a_machine_and_hours_become_processes_and_epochs(
    images: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Answered at a terminal, where a wrong answer is asked for again; the forecast of eight GPUs gives the epochs."""
    answers = iter(["", "nowhere", "images", "some", "no", "a100x9", "a100x8", "soon", "0.5h"])
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("builtins.input", lambda _: next(answers))
    for split in ("train", "val"):
        for index in range(100):
            Image.new("RGB", (64, 64), (index, 0, 0)).save(images / split / "cat" / f"more{index}.png")
    assert main(["new", "big"]) == 0
    printed = capsys.readouterr().out
    for refused in (
        "--images : must be",
        "--images nowhere: must",
        "--labels: must",
        "--memory-gb: must",
        "--epochs: must",
    ):
        assert printed.count(refused) == 1
    assert "0.5 hours are about" in printed and "the planner's forecast for a100x8" in printed
    written = compose("big", []).run
    assert written.ZERO.MACHINE_PROFILE == "a100x8" and written.MACHINE.DEVICE == "gpu"
    assert written.DISTRIBUTED.NUM_PROC_PER_NODE == 8 and written.OPTIMIZER.num_epochs > 10


def test_ctrl_d_at_a_question_is_one_sentence(
    images: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def closed(_: str) -> str:
        raise EOFError

    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("builtins.input", closed)
    assert main(["new", "x"]) == 2
    assert "--images: must be given" in capsys.readouterr().err


@pytest.mark.slow
def test_the_recipe_trains_as_it_stands(images: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import vissl_zero

    words = ["new", "mine", "--images", str(images), "--hours", "0.0001", "--memory-gb", "2"]
    assert main(words) == 0
    assert "hours are about 1 epochs" in (printed := capsys.readouterr().out) and "measured in 8 steps here" in printed
    run = vissl_zero.train("mine", {"config.CHECKPOINT.DIR": str(images.parent / "run")})
    assert run.is_complete and run.summary
