"""``vissl-zero data check`` and ``stats``: the same findings in every format, exact figures, clear errors."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from PIL import Image, PngImagePlugin

from tests.unit.data.conftest import save_image
from vissl_zero.cli import main
from vissl_zero.data import one_pass, slow_work
from vissl_zero.data import pack as packing
from vissl_zero.data.check import FLAGS, Findings, look
from vissl_zero.data.pixel_statistics import statistics
from vissl_zero.data.source import SourceRequest
from vissl_zero.data.sources.disk import DiskFolder
from vissl_zero.data.sources.library_sets import Digits


@pytest.fixture
def odd(photos: Path) -> Path:
    """The photos, and an image of each kind that is worth a word."""
    save_image(photos / "a/turned.jpg", 50, (24, 12))
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.open(photos / "a/turned.jpg").save(photos / "a/turned.jpg", exif=exif)
    pixels = np.random.default_rng(1).integers(0, 256, (16, 16, 4), np.uint8)
    Image.fromarray(pixels[..., 0]).save(photos / "a/gray.png")
    Image.fromarray(pixels, "CMYK").save(photos / "a/cmyk.jpg")
    Image.fromarray(pixels).save(photos / "b/transparent.png")
    pixels[..., 3] = 255
    Image.fromarray(pixels).save(photos / "b/opaque.png")
    shutil.copy(photos / "a/0.jpg", photos / "a/copy.jpg")
    shutil.copy(photos / "b/0.png", photos / "a/relabeled.png")
    (photos / "b/broken.jpg").write_bytes((photos / "a/0.jpg").read_bytes()[:300])
    return photos


@pytest.fixture
def checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    def check(path: Path) -> dict[str, Any]:
        picture = tmp_path / "sheet.png"
        assert main(["data", "check", str(path), "--json", "--picture", str(picture)]) == 0
        with Image.open(picture) as sheet:
            assert sheet.width == 1600 and len(np.unique(np.asarray(sheet.convert("L")))) > 50
        return dict(json.loads(capsys.readouterr().out))

    return check


def test_a_check_finds_each_kind(odd: Path, checked: Any, tmp_path: Path) -> None:
    found = checked(odd)
    assert found["num_images"] == 19 and found["classes"] == {"a": 11, "b": 8}
    assert found["num_bytes"] == sum(path.stat().st_size for path in odd.rglob("*.*"))
    assert found["sizes"] == {"width": [16, 16, 24], "height": [12, 16, 16], "shorter side": [12, 16, 16]}
    formats = {"JPEG RGB": 8, "PNG RGB": 6, "PNG L": 1, "JPEG CMYK": 1, "PNG RGBA": 2}
    assert found["formats"] == formats and next(iter(found["formats"])) == "JPEG RGB"
    assert found["flagged"] == {"broken": 1, "exif_rotated": 1, "gray": 1, "cmyk": 1, "transparent": 1}
    ((name, reason),) = found["broken"]
    assert name == str(odd / "b/broken.jpg") and "truncated" in reason
    assert (found["num_duplicates"], found["num_relabeled"]) == (2, 1)
    assert found["duplicates"][1] == [str(odd / "b/0.png"), str(odd / "a/relabeled.png")]
    said = "\n".join(found["warnings"])
    for words in (
        "1 image cannot be used",
        "under another class",
        "a copy of another",
        "config.DATA.EXIF",
        "DATA.BACKGROUND",
    ):
        assert words in said
    for form in ("webdataset", "lmdb", "arrow"):
        packing.pack(odd, tmp_path / form, form, None, lambda line: None)
        other = checked(tmp_path / form)
        assert other["source"] == f"{form} {tmp_path / form}" and other["broken"][0][1] == reason
        by_place = {"source", "broken", "duplicates"}
        assert {key: other[key] for key in other.keys() - by_place} == {
            key: found[key] for key in found.keys() - by_place
        }


@pytest.mark.slow
def test_several_processes_find_the_same(
    odd: Path, checked: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = checked(odd)
    assert main(["data", "stats", str(odd), "--json"]) == 0
    counted = capsys.readouterr().out
    monkeypatch.setattr(one_pass, "FEW", 0)
    monkeypatch.setattr(one_pass, "PER_CHUNK", 4)
    monkeypatch.setattr(slow_work, "EVERY_S", 0.0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0})
    assert main(["data", "stats", str(odd), "--json"]) == 0
    said = capsys.readouterr()
    assert said.out == counted and said.err.splitlines()[0] == "4 of 19 images" and said.err.count("\n") == 5
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    assert checked(odd) == alone


def test_the_text_of_a_check(
    odd: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["data", "check", str(odd)]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"disk_folder {odd}: 19 images, ") and "classes       2; a 11, b 8\n" in said
    assert "shorter side  12 to 16 pixels, median 16\n" in said and (tmp_path / "data_check.png").is_file()
    assert f"    {odd}/b/broken.jpg: " in said and said.count("\nwarning: ") == 5
    for name in ("train", "val"):
        shutil.copytree(odd / "b", tmp_path / "root" / name)
    assert main(["data", "check", str(tmp_path / "root")]) == 0
    assert "train, val: these look like splits" in capsys.readouterr().out


def test_statistics_are_those_of_all_pixels(photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_image(photos / "a/large.png", 7, (64, 32))
    pixels = [np.asarray(Image.open(path).convert("RGB")).reshape(-1, 3) for path in photos.rglob("*.*g")]
    every = np.concatenate(pixels) / 255.0
    (photos / "a/00.png").write_bytes(b"x")  # among others: those after it count
    assert main(["data", "stats", str(photos), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["num_images"], found["num_broken"], found["channels"], found["bits"]) == (12, 1, 3, 8)
    np.testing.assert_allclose(found["mean"], every.mean(0), rtol=1e-12)
    np.testing.assert_allclose(found["std"], every.std(0), rtol=1e-12)
    mean = ", ".join(f"{value:.4f}" for value in every.mean(0))
    assert found["normalize"].startswith(f"- {{name: Normalize, mean: [{mean}], std: [")
    assert main(["data", "stats", str(photos)]) == 0
    assert f"\n  {found['normalize']}\n" in capsys.readouterr().out
    deep = np.random.default_rng(0).integers(0, 65_536, (8, 8), np.uint16)
    (tmp_path / "deep").mkdir()
    Image.fromarray(deep).save(tmp_path / "deep/0.png")
    assert main(["data", "stats", str(tmp_path / "deep"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["channels"], found["bits"]) == (1, 16) and found["mean"][0] == found["mean"][2]
    np.testing.assert_allclose(found["mean"][0], (deep / 65_535).mean(), atol=1 / 255)
    (tmp_path / "deep_color").mkdir()
    cv2.imwrite(str(tmp_path / "deep_color/0.png"), np.stack([deep, deep, 65_535 - deep], 2))
    assert main(["data", "stats", str(tmp_path / "deep_color"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["channels"], found["bits"]) == (3, 16)


def test_arrays_and_tables_are_checked(photos: Path, tmp_path: Path, checked: Any) -> None:
    np.save(tmp_path / "x.npy", np.zeros((3, 8, 6), np.uint8))
    found = checked(tmp_path / "x.npy")
    assert found["source"].startswith("npy ") and found["formats"] == {"pixels RGB": 3} and found["num_duplicates"] == 2
    (tmp_path / "x.csv").write_text("path,labels\nphotos/a/0.jpg,x|y\nphotos/b/0.png,y\nphotos/b/1.png,\n")
    assert checked(tmp_path / "x.csv")["classes"] == {"x": 1, "y": 2}


@pytest.mark.parametrize("verb", ["check", "stats"])
def test_what_cannot_be_read_is_one_sentence(
    tmp_path: Path, verb: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/0.png").write_bytes(b"x")
    (tmp_path / "empty").mkdir()
    (tmp_path / "x.parquet").mkdir()
    cases = [(["none"], "does not exist"), (["broken"], "can be read"), ([], "the following arguments")]
    cases += [(["empty"], "The data path empty holds no image files"), (["x.parquet"], "x.parquet")]
    for words, says in cases:
        assert main(["data", verb, *words]) == 2
        said = capsys.readouterr()
        assert says in said.err and said.err.count("\n") == 1 and said.out == ""
        assert "config." not in said.err
    save_image(tmp_path / "fine/0.png", 0)
    if verb == "check":
        for picture, says in (("x.jpg", "must end in .png"), ("none/x.png", "cannot be written")):
            assert main(["data", "check", "fine", "--picture", picture]) == 2
            assert says in capsys.readouterr().err


@pytest.mark.filterwarnings("error")
def test_a_check_names_what_it_leaves_out_and_says_nothing_of_fonts(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_image(photos / "猫/0.jpg", 1)
    (photos / "猫/1.heic").touch()
    assert main(["data", "check", str(photos), "--picture", str(tmp_path / "x.png")]) == 0
    said = capsys.readouterr()
    assert f"warning: 1 file in {photos} is left out: .heic 1 (convert it" in said.out and "Glyph" not in said.err
    assert main(["data", "stats", str(photos / "猫")]) == 0
    assert "猫: 1 image\n" in capsys.readouterr().out


def _turned(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


def _as_imagemagick_writes_it(exif: Image.Exif) -> PngImagePlugin.PngInfo:
    data, info = exif.tobytes(), PngImagePlugin.PngInfo()
    info.add_text("Raw profile type exif", f"\nexif\n{len(data)}\n{data.hex()}\n")
    return info


NOISE = np.random.default_rng(0).integers(0, 255, (8, 8, 4), np.uint8)
SOLID = np.concatenate([NOISE[..., :3], np.full((8, 8, 1), 255, np.uint8)], axis=2)
GRAY = np.repeat(NOISE[..., :1], 3, axis=2)
# mode, pixels, form, keys of Pillow's save, flags
FLAGGED: list[tuple[str, np.ndarray, str, dict[str, Any], set[str]]] = [
    *(("RGB", NOISE, form, {"exif": _turned(6)}, {"exif_rotated"}) for form in ("jpg", "png", "webp")),
    *(("RGB", NOISE, form, {"exif": _turned(upright)}, set()) for form in ("jpg", "png") for upright in (0, 1)),
    ("RGB", NOISE, "jpg", {"exif": b"Exif\0\0no TIFF"}, set()),
    ("RGB", NOISE, "png", {"pnginfo": _as_imagemagick_writes_it(_turned(8))}, {"exif_rotated"}),
    ("RGB", NOISE, "png", {}, set()),
    ("RGB", GRAY, "png", {}, {"gray"}),
    ("L", NOISE, "png", {}, {"gray"}),
    ("RGBA", NOISE, "png", {}, {"transparent"}),
    ("RGBA", SOLID, "png", {}, set()),
    ("LA", NOISE, "png", {}, {"gray", "transparent"}),
    ("LA", SOLID, "png", {}, {"gray"}),
    ("P", NOISE % 2, "png", {"transparency": 255}, set()),
    ("P", NOISE % 2, "png", {"transparency": 0}, {"transparent"}),
    ("CMYK", NOISE, "jpg", {}, {"cmyk"}),
]


@pytest.mark.parametrize(("mode", "pixels", "form", "keys", "flags"), FLAGGED)
def test_flags(tmp_path: Path, mode: str, pixels: np.ndarray, form: str, keys: dict[str, Any], flags: set[str]) -> None:
    channels = {"RGB": slice(3), "P": 0, "L": 0}.get(mode, slice(4))
    image = Image.fromarray(pixels[..., channels], {"LA": "RGBA"}.get(mode, mode))
    if mode == "P":
        image.putpalette([10, 20, 30, 200, 100, 0])
    (tmp_path / "a").mkdir()
    image.convert(mode).save(tmp_path / "a" / f"x.{form}", **keys)
    (row,) = look(DiskFolder(SourceRequest("TRAIN", (str(tmp_path),))), range(1)).rows
    assert {flag for flag in FLAGS if row[flag]} == flags


def test_what_a_source_makes_has_8_bits_and_processes_share_the_work(
    photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads stand for processes, whose start takes seconds."""
    digits = Digits(SourceRequest("TEST"))
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    monkeypatch.setattr(one_pass, "ProcessPoolExecutor", None)  # not for so few images
    alone = statistics(digits, lambda line: None)
    assert (alone.bits, alone.channels, alone.num_images) == (8, 1, 360)

    def pool(workers: int, _: object, start: Callable[..., None], arguments: tuple[object, ...]) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(workers, initializer=start, initargs=arguments)

    monkeypatch.setattr(one_pass, "FEW", 0)
    monkeypatch.setattr(one_pass, "ProcessPoolExecutor", pool)
    monkeypatch.setattr(one_pass, "_source", None)
    lines: list[str] = []
    monkeypatch.setattr(slow_work, "EVERY_S", 0.0)
    assert statistics(digits, lines.append) == alone and lines == ["256 of 360 images", "360 of 360 images"]


@pytest.mark.parametrize(
    ("classes", "sentence"),
    [
        ({"a": 1, "b": 0}, "There are no images of 1 class: b."),
        ({"a": 0, "b": 0, "c": 1}, "There are no images of 2 classes: a, b."),
        ({"train": 1, "val": 1}, "The classes are train, val: these look like splits. Name one of the folders."),
        ({"train": 1, "a": 1}, ""),
        ({}, ""),
    ],
)
def test_classes_that_are_none_are_warned_of(classes: dict[str, int], sentence: str) -> None:
    flagged = dict.fromkeys(FLAGS, 0)
    found = Findings("disk_folder x", 2, 0, classes, {}, {}, flagged, [], 0, 0, [], [])
    assert found.warnings() == ([sentence] if sentence else [])
