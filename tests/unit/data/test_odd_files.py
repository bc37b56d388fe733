"""Odd files: each is read as docs/data.md says or named, alike by both backends; none ends a run under ``skip``."""

from __future__ import annotations

import io
import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.blocks import data_block
from tests.unit.data.conftest import MakeData
from tests.unit.data.odd_files import OddFile, odd_files, table, write
from vissl_zero.data import workers
from vissl_zero.data.decode import BrokenImageError, Decoder, read_array
from vissl_zero.data.fast.pipeline import build_fast_pipeline
from vissl_zero.data.loader import build_loader

ROOT = Path(__file__).parents[3]
ODD = odd_files()


def read_fast(odd: OddFile) -> np.ndarray:
    """(H, W, 3) as the fast backend reads it."""
    whole = build_fast_pipeline([{"name": "ToTensor"}], "t", Decoder())
    (crop,) = whole(whole.open(odd.content, odd.name, Decoder()))
    return 255 * crop.numpy().transpose(1, 2, 0)


@pytest.mark.parametrize("odd", ODD, ids=[ascii(odd.name) for odd in ODD])
def test_an_odd_file_is_read_as_documented_or_named(odd: OddFile) -> None:
    if odd.reason:
        for read in (lambda: Decoder().image(odd.content, odd.name), lambda: read_fast(odd)):
            with pytest.raises(BrokenImageError, match=rf"(?i)^The image {re.escape(odd.name)} .*({odd.reason})"):
                read()
        return
    image = Decoder().image(odd.content, odd.name)
    assert (image.mode, image.size) == ("RGB", odd.size)
    if odd.pixels is not None:
        assert np.abs(np.asarray(image).astype(float) - odd.pixels).mean() <= odd.within
    assert np.abs(read_fast(odd) - np.asarray(image)).mean() < 1.5  # another decoder of JPEG


@pytest.mark.parametrize("backend", ["pil", "fast"])
def test_no_odd_file_ends_a_run_under_skip(
    make_data: MakeData,
    tmp_path: Path,
    backend: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(workers, "_reported", set())
    folder = tmp_path / "odd"
    broken = {str(folder / odd.name) for odd in write(folder) if odd.reason}
    (folder / "folder.jpg").mkdir()  # passed over, as are the next ones
    (folder / "._hidden.jpg").write_bytes(b"AppleDouble")
    (folder / "nowhere.jpg").symlink_to(folder / "none.jpg")
    os.mkfifo(folder / "pipe.jpg")
    data = data_block(make_data("disk_folder", folder, broken="skip") | {"BACKEND": backend})
    steps = list(build_loader(data, "TRAIN", 1, 8, 0, 1, 1).epoch(0))
    assert sorted(i for step in steps for i in step[0].sample_ids.tolist()) == list(range(len(ODD)))
    said = [message for message in caplog.messages if message.startswith("Skipping")]
    assert len(broken) == len(said) == sum(any(name in message for name in broken) for message in said)


def test_the_documentation_lists_them_all() -> None:
    assert len(ODD) >= 40 and len({odd.name for odd in ODD}) == len(ODD)
    fix = "write the table that `python -m tests.unit.data.odd_files` prints into docs/data.md"
    assert table() in (ROOT / "docs/data.md").read_text(), fix


@pytest.mark.parametrize(("exif", "size"), [("ignore", (8, 6)), ("apply", (6, 8))])
def test_the_key_says_whether_a_picture_is_turned(exif: str, size: tuple[int, int]) -> None:
    file = io.BytesIO()
    turn = Image.Exif()
    turn[0x0112] = 6
    Image.new("RGB", (8, 6)).save(file, "JPEG", exif=turn)
    assert Decoder.of(data_block({"EXIF": exif})).image(file.getvalue(), "turned.jpg").size == size


def test_text_with_the_last_character_of_unicode_is_read_and_what_lies_beyond_is_not(tmp_path: Path) -> None:
    np.save(tmp_path / "names.npy", np.array(["a" + chr(sys.maxunicode)]))
    assert read_array(tmp_path / "names.npy").tolist() == ["a" + chr(sys.maxunicode)]
    content = (tmp_path / "names.npy").read_bytes()
    (tmp_path / "names.npy").write_bytes(content[:-4] + (sys.maxunicode + 1).to_bytes(4, sys.byteorder))
    with pytest.raises(ValueError, match="text that is damaged"):
        read_array(tmp_path / "names.npy")


def test_an_array_has_one_dimension_where_no_more_are_asked_for(tmp_path: Path) -> None:
    np.save(tmp_path / "names.npy", np.array([["a", "b"]]))
    assert read_array(tmp_path / "names.npy", max_dims=2).shape == (1, 2)
    with pytest.raises(ValueError, match="it has no 1-d array"):
        read_array(tmp_path / "names.npy")


@pytest.mark.filterwarnings("error")
def test_a_palette_with_transparency_is_read_without_a_warning() -> None:
    image, file = Image.new("P", (8, 8), 1), io.BytesIO()
    image.putpalette([10, 20, 30, 200, 100, 50])
    image.save(file, "PNG", transparency=bytes([255, 128]))
    assert Decoder().image(file.getvalue(), "a.png").getpixel((0, 0)) == (200, 100, 50)


def test_pillows_own_limit_is_raised_to_the_keys_and_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    file = io.BytesIO()
    Image.new("L", (8, 6)).save(file, "PNG")
    for read in (Decoder().image, Decoder().mask, Decoder().size):
        read(file.getvalue(), "x.png")
        assert Image.MAX_IMAGE_PIXELS == 10
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10**6)
    with pytest.raises(BrokenImageError, match="its 8 x 6 pixels are more than the 4 that are read"):
        Decoder(max_pixels=4).image(file.getvalue(), "x.png")
