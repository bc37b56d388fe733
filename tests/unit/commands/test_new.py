"""A recipe from four answers: it composes, has a plan, and a wrong answer is one sentence."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vissl_zero.cli import main
from vissl_zero.commands.new import look_at, recipe


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
    lines = recipe(facts, 2.0, 5, 16).splitlines()
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
def test_the_recipe_trains_as_it_stands(images: Path) -> None:
    import vissl_zero

    words = ["new", "mine", "--images", str(images), "--epochs", "1", "--memory-gb", "2"]
    assert main(words) == 0
    run = vissl_zero.train("mine", {"config.CHECKPOINT.DIR": str(images.parent / "run")})
    assert run.is_complete and run.figures
