"""The script behind "Beside lightly, epoch by epoch" of ``docs/methods.md``: ``benchmarks/reference_curves.py``."""

from __future__ import annotations

import json
import sys

import pytest

from tests.benchmark_scripts import load_benchmark

curves = load_benchmark("reference_curves")

# The lines of lightly's script that are changed, between others.
SCRIPT = """
max_epochs = 200
num_workers = 8
lr = 0.06
batch_size = 128
path_to_train = "/datasets/cifar10/train/"
path_to_test = "/datasets/cifar10/test/"
swav = SwaVTransform(crop_min_scales=[0.14],)
resnet = ResNetGenerator("resnet-18")
head = heads.SimCLRProjectionHead(512, 512, 128)

models = [
"""


def test_the_page_has_the_table_of_the_curves():
    page = curves.PAGE.read_text()
    assert curves.with_table(page, json.loads(curves.CURVES.read_text())) == page


def test_sides_are_compared_by_the_spread_of_their_seeds():
    ours, theirs = [[20.0, 30.0], [22.0, 32.0]], [[21.0, 27.0], [21.0, 29.0]]
    # Variances 2, 2, 0 and 2: the mean is 1.5, and a mean of two seeds has half of it on each side.
    assert curves.differences(ours, theirs) == [(0.0, pytest.approx(1.5**0.5)), (3.0, pytest.approx(1.5**0.5))]


def test_lightlys_script_is_changed_where_it_says(tmp_path):
    changed = curves._lightly_source(SCRIPT, tmp_path, 3)
    for line in ("max_epochs = 3", "num_workers = 0", "lr = 0.06", f"path_to_test = '{tmp_path}/test'"):
        assert line in changed.splitlines()
    assert 'ResNetGenerator("resnet-18", width=0.25)' in changed and "SimCLRProjectionHead(128, 512, 128)" in changed
    assert "crop_max_scales=[1.0]" in changed and "models" not in changed


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["ours", "simclr"], "name a method and --data <folder with train/ and test/>"),
        (["lightly", "simclr", "--data", "."], "lightly needs --script"),
        (["lightly", "swav", "--data", "{images}", "--script", "{script}"], "take the one at e8d317fc"),
    ],
)
def test_wrong_input_is_refused_in_a_sentence(words, sentence, tmp_path, monkeypatch, capsys):
    for split in ("train", "test"):
        (tmp_path / split / "cat").mkdir(parents=True)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.replace("num_workers", "workers"))
    given = [word.format(images=tmp_path, script=script) for word in words]
    monkeypatch.setattr(sys, "argv", ["reference_curves.py", *given])
    with pytest.raises(SystemExit) as stopped:
        curves.main()
    assert stopped.value.code == 2 and sentence in capsys.readouterr().err


def test_without_lightly_it_says_what_to_install(tmp_path, monkeypatch):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    monkeypatch.setitem(sys.modules, "lightly", None)
    with pytest.raises(curves.RefusedError, match=r"pip install lightly==1\.6\.0"):
        curves._lightly(script, "simclr", tmp_path, 0, 1)


def test_the_picture_has_a_panel_for_each_method(tmp_path):
    run = {"knn_top1": [20.0, 25.0], "seconds": 1, "date": "2026-01-01"}
    both = {method: {"ours": {"0": run}, "lightly": {"0": run, "1": run}} for method in curves.METHODS}
    curves.draw(both, tmp_path / "curves.svg")
    text = (tmp_path / "curves.svg").read_text()
    assert all(f">{word}<" in text for word in ("SimCLR", "SwAV", "epoch", "ours", "lightly 1.6.0"))
