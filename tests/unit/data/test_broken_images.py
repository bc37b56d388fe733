from __future__ import annotations

import gzip
import io
import os
import pickle
import struct
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from tests.blocks import data_block
from tests.unit.data.conftest import MakeData, save_image
from vissl_zero.data.decode import MAX_PIXELS, BrokenImageError, Decoder, decode_image, read_image
from vissl_zero.data.loader import Loader, build_loader
from vissl_zero.data.source import relabel
from vissl_zero.data.sources.disk import read_list
from vissl_zero.errors import DataError


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def scramble(path: Path) -> None:
    path.write_bytes(b"not an image at all")


def empty(path: Path) -> None:
    path.write_bytes(b"")


def postscript(path: Path) -> None:
    path.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n")


def flip_a_byte_of_a_png(path: Path) -> None:
    content = bytearray(save_image(path.with_suffix(".png"), 5).read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(bytes(content))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (truncate, "truncated"),
        (scramble, "it is not an image in one of the formats JPEG, PNG"),
        (empty, "it is not an image"),
        (postscript, "it is not an image"),
        (flip_a_byte_of_a_png, "png|broken|crc|checksum|incorrect"),
        (Path.unlink, "the file does not exist"),
    ],
)
def test_a_broken_file_is_named_with_the_reason(tmp_path: Path, damage: Callable[[Path], Any], reason: str) -> None:
    path = save_image(tmp_path / "x.jpg", 1, (64, 64))
    damage(path)
    with pytest.raises(
        BrokenImageError, match=rf"(?i)^The image {path} cannot be used: .*({reason}).* Delete or repair"
    ):
        read_image(path)


def test_an_image_in_memory_is_decoded_like_its_file(tmp_path: Path) -> None:
    path = save_image(tmp_path / "x.png", 1, (64, 64))
    assert np.array_equal(np.asarray(decode_image(path.read_bytes(), "row 7")), np.asarray(read_image(path)))
    with pytest.raises(BrokenImageError, match=r"^The image row 7 cannot be used: "):
        decode_image(path.read_bytes()[:100], "row 7")


@pytest.mark.timeout(20)
def test_a_named_pipe_in_a_list_of_images_does_not_wait_for_a_writer(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.png")
    with pytest.raises(BrokenImageError, match="it is a named pipe, not a file"):
        read_image(tmp_path / "x.png")


def _npy(header: str, content: bytes = b"") -> bytes:
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode() + content


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"PK\x03\x04",
        _npy('"""'),
        _npy("(" * 9000),
        _npy("{'descr': '<i8', 'fortran_order': False, 'shape': (1000000000000000,), }"),
        _npy(f"{{'descr': '<i8', 'fortran_order': False, 'shape': ({10**60},), }}"),
        _npy(f"{{'descr': '<U0', 'fortran_order': False, 'shape': ({2**62},), }}"),
        _npy("{'descr': '<U1', 'fortran_order': False, 'shape': (2,), }", b"\xff" * 8),
        None,
    ],
)
@pytest.mark.timeout(20)
def test_a_hostile_npy_file_is_one_sentence(tmp_path: Path, content: bytes | None) -> None:
    """numpy's own parsers raise TokenError, EOFError, OverflowError, MemoryError and BadZipFile."""
    path = tmp_path / "x.npy"
    if content is None:
        os.mkfifo(path)
    else:
        path.write_bytes(content)
    source: Any = range(3)
    with pytest.raises(DataError, match=r"The label file .*x\.npy"):
        relabel(source, (str(path),), ())
    with pytest.raises(DataError, match=r"The list of images .*x\.npy"):
        read_list(path, "config.DATA.TRAIN.DATA_PATHS")


def claim_size(path: Path, width: int, height: int) -> None:
    """Write a PNG of a few bytes whose header claims a size, as a decompression bomb's does."""
    content = bytearray(save_image(path, 1).read_bytes())
    content[16:24] = struct.pack(">II", width, height)
    content[29:33] = struct.pack(">I", zlib.crc32(content[12:29]))
    path.write_bytes(bytes(content))


@pytest.mark.parametrize("size", [(10_000, MAX_PIXELS // 10_000 + 1), (60_000, 60_000)])
def test_oversized_images_and_bombs_are_refused_by_their_header(tmp_path: Path, size: tuple[int, int]) -> None:
    path = tmp_path / "bomb.png"
    claim_size(path, *size)
    with (
        warnings.catch_warnings(action="error"),
        pytest.raises(BrokenImageError, match=rf"{path} cannot be used: its .* pixels are more than the 89,478,485"),
    ):
        read_image(path)


def loader(data: dict[str, Any], rank: int = 0, world_size: int = 1) -> Loader:
    return build_loader(data_block(data), "TRAIN", 0, 6 // world_size, rank, world_size, 1)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_broken_image_stops_the_run_with_one_sentence(make_data: MakeData, photos: Path, num_workers: int) -> None:
    truncate(photos / "a/3.jpg")
    with pytest.raises(DataError) as caught:
        list(loader(make_data("disk_folder", photos, num_workers=num_workers)).epoch(0))
    assert str(caught.value).startswith(f"The image {photos}/a/3.jpg cannot be used: ")
    assert "set config.DATA.ON_BROKEN_IMAGE=skip" in str(caught.value)
    assert "Traceback" not in str(caught.value)


def test_a_skipped_image_is_replaced_by_the_next_readable_one(
    make_data: MakeData, photos: Path, caplog: pytest.LogCaptureFixture
) -> None:
    truncate(photos / "a/5.jpg")
    scramble(photos / "b/0.png")
    plain = [{"name": "ToTensor"}]
    batches = [step[0] for step in loader(make_data("disk_folder", photos, TRANSFORMS=plain, broken="skip")).epoch(0)]
    rows = {int(i): row for batch in batches for row, i in zip(batch.images[0], batch.sample_ids, strict=True)}
    assert sorted(rows) == list(range(11))
    labels = {
        (int(i), int(t)) for b in batches if b.targets is not None for i, t in torch.stack([b.sample_ids, b.targets], 1)
    }
    assert labels == {(i, int(i >= 5)) for i in range(11)}
    for broken in (5, 6):  # index 7, b/1.png, stands in for both, with its label
        assert torch.equal(rows[broken], rows[7])
    said = [message for message in caplog.messages if message.startswith("Skipping")]
    assert sorted(Path(message.split(":")[0]).name for message in said) == ["0.png", "5.jpg"]
    assert all(message.endswith(". The next readable image takes its place.") for message in said)


def test_the_name_of_a_skipped_image_cannot_reach_the_terminal_as_a_command(
    make_data: MakeData, photos: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (photos / "a/5.jpg").rename(photos / "a/5\x1b[2J\udc80.jpg")
    scramble(photos / "a/5\x1b[2J\udc80.jpg")
    list(loader(make_data("disk_folder", photos, broken="skip")).epoch(0))
    (said,) = [message for message in caplog.messages if message.startswith("Skipping")]
    assert r"a/5\x1b[2J\udc80.jpg" in said and "\x1b" not in said


def test_a_skipped_image_is_said_once_and_the_same_everywhere(
    make_data: MakeData, photos: Path, caplog: pytest.LogCaptureFixture
) -> None:
    truncate(photos / "b/4.png")  # the last one: the first image of all stands in
    data = make_data("disk_folder", photos, broken="skip")
    alone, ranks = loader(data), [loader(data, rank, 2) for rank in range(2)]
    for epoch in (0, 1):
        for whole, *parts in zip(alone.epoch(epoch), *(rank.epoch(epoch) for rank in ranks), strict=True):
            crops = [part[0].images[0].unflatten(0, (2, -1)) for part in parts]
            assert torch.equal(torch.cat(crops, dim=1).flatten(0, 1), whole[0].images[0])
    # By the process, though it has three loaders here, as it has for training, kNN and a probe.
    assert len([m for m in caplog.messages if "b/4.png" in m]) == 1


def test_nothing_readable_is_an_error_even_when_skipping(make_data: MakeData, photos: Path) -> None:
    for path in photos.glob("*/*"):
        scramble(path)
    with pytest.raises(DataError, match=r"None of the 11 images can be used \(\S+/[ab]/\d\.\w+: it is not an image"):
        list(loader(make_data("disk_folder", photos, broken="skip")).epoch(0))


@pytest.mark.parametrize("name", ["gray.png", "gray.tif", "gray.pgm"])
def test_grey_of_16_bits_becomes_grey_of_8(tmp_path, name):
    """Pillow alone would make everything above 255 white."""
    gray = np.arange(2**16, dtype=np.uint16).reshape(1, -1)
    if name == "gray.pgm":
        (tmp_path / name).write_bytes(b"P5 65536 1 65535\n" + gray.astype(">u2").tobytes())
    else:
        Image.fromarray(gray).save(tmp_path / name)
    pixels = np.asarray(read_image(tmp_path / name))[0]
    assert np.array_equal(pixels, np.rint(np.arange(2**16) * 255 / 65_535).astype(np.uint8)[:, None].repeat(3, axis=1))


@pytest.mark.parametrize(("kind", "says"), [("f4", "floating-point numbers"), ("i4", "32-bit integers")])
def test_pixels_whose_range_is_not_known_are_refused(tmp_path, kind, says):
    """Pillow alone would make them black, or white."""
    Image.fromarray(np.array([[0, 1], [0.5, 0.25]]).astype(kind)).save(tmp_path / "image.tif")
    with pytest.raises(BrokenImageError, match=f"its pixels are {says}, with an unknown white level"):
        read_image(tmp_path / "image.tif")


def test_a_broken_image_error_survives_pickling_with_its_parts() -> None:
    error = pickle.loads(pickle.dumps(BrokenImageError("a.jpg", "it is truncated")))
    assert (error.name, error.reason) == ("a.jpg", "it is truncated") and "a.jpg cannot be used" in str(error)


@pytest.mark.parametrize("backend", ["pil", "fast"])
def test_skipping_keeps_no_exception_and_no_image(make_data: MakeData, photos: Path, backend: str) -> None:
    truncate(photos / "a/1.jpg")
    data = make_data("disk_folder", photos, broken="skip") | {"BACKEND": backend}
    loader = build_loader(data_block(data), "TRAIN", 1, 4, 0, 1, 1)
    dataset = loader._stream._dataset
    first, again = ([list(step[0].images) for step in loader.epoch(epoch)] for epoch in (0, 0))
    assert all(torch.equal(a, b) for x, y in zip(first, again, strict=True) for a, b in zip(x, y, strict=True))
    assert list(dataset._broken) == [1] and all(isinstance(text, str) for text in dataset._broken[1])


def test_a_jpeg_of_many_scans_is_refused_before_it_is_decoded() -> None:
    file = io.BytesIO()
    Image.new("RGB", (3000, 2000)).save(file, "JPEG", progressive=True)
    data = file.getvalue()
    assert decode_image(data, "x").size == (3000, 2000)
    at = data.rindex(b"\xff\xda")
    scan = data[at:-2]
    with pytest.raises(BrokenImageError, match="pixels take too long"):
        decode_image(data[:at] + scan * 5000 + data[-2:], "x")
    small = io.BytesIO()
    Image.new("RGB", (16, 16)).save(small, "JPEG", progressive=True)
    data, at = small.getvalue(), small.getvalue().rindex(b"\xff\xda")
    assert decode_image(data[:at] + data[at:-2] * 100 + data[-2:], "x").size == (16, 16)  # they cost little


def test_odd_files_are_read_as_documented(tmp_path: Path) -> None:
    notes = PngInfo()
    notes.add_text("parameters", "x" * 3_000_000, zip=True)
    save_image(tmp_path / "x.png", 3)
    Image.open(tmp_path / "x.png").save(tmp_path / "text.png", pnginfo=notes)
    assert np.array_equal(np.asarray(read_image(tmp_path / "text.png")), np.asarray(read_image(tmp_path / "x.png")))
    Image.new("RGBA", (4, 4), (255, 0, 0, 0)).save(tmp_path / "clear.png")
    data = (tmp_path / "clear.png").read_bytes()
    assert np.asarray(Decoder(background=(0, 0, 255)).image(data, "c"))[0, 0].tolist() == [0, 0, 255]
    assert np.asarray(Decoder().image(data, "c"))[0, 0].tolist() == [255, 0, 0]
    with pytest.raises(BrokenImageError, match="compressed with gzip"):
        decode_image(gzip.compress(data), "c.jpg")
    with pytest.raises(BrokenImageError, match="4 x 4 pixels are more than the 15"):
        Decoder(max_pixels=15).image(data, "c")


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("backend", ["pil", "fast"])
def test_memory_is_flat_over_50_epochs_with_broken_files(make_data: MakeData, tmp_path: Path, backend: str) -> None:
    """Resident memory of two workers, of 200 images of which 5 % are cut off."""
    for index in range(200):
        save_image(tmp_path / "p" / f"{index:03d}.jpg", index, (160, 120))
    for index in range(0, 200, 20):
        truncate(tmp_path / "p" / f"{index:03d}.jpg")
    data = data_block(make_data("disk_folder", tmp_path / "p", broken="skip", num_workers=2) | {"BACKEND": backend})
    loader = build_loader(data, "TRAIN", 1, 20, 0, 1, 1)
    resident = []
    for epoch in range(50):
        assert sum(len(step) for step in loader.epoch(epoch)) == 10
        workers: Any = loader._stream._workers
        pages = [int(Path(f"/proc/{worker.pid}/statm").read_text().split()[1]) for worker in workers]
        resident.append(sum(pages))
    assert max(resident[1:]) < 1.02 * resident[0], resident


@pytest.mark.parametrize("side", [4, 5])
def test_a_mask_of_too_many_pixels_is_refused_too(side: int) -> None:
    file = io.BytesIO()
    Image.new("L", (side, 4)).save(file, "PNG")
    if side == 4:
        assert Decoder(max_pixels=16).mask(file.getvalue(), "m.png").shape == (4, 4)
        return
    with pytest.raises(BrokenImageError, match="its 5 x 4 pixels are more than the 16"):
        Decoder(max_pixels=16).mask(file.getvalue(), "m.png")
