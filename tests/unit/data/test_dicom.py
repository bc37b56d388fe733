"""DICOM files: values as pydicom's own window shows them, refusals, and a missing library."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from pydicom import dcmread
from pydicom.data import get_testdata_file
from pydicom.dataset import Dataset
from pydicom.pixels import apply_voi_lut, pixel_array
from pydicom.sequence import Sequence

from tests.blocks import data_block
from tests.unit.data.conftest import MakeData, save_image
from vissl_zero.cli import main
from vissl_zero.data import dicom
from vissl_zero.data.decode import BrokenImageError, Decoder, read_image
from vissl_zero.data.loader import build_loader
from vissl_zero.data.source import SourceRequest
from vissl_zero.data.sources.disk import DiskFolder
from vissl_zero.errors import DataError


def file(name: str) -> Path:
    """A file that pydicom's package holds."""
    return Path(str(get_testdata_file(name, download=False)))


def test_a_window_is_pydicoms() -> None:
    dataset = dcmread(file("MR_small.dcm"))
    shown = apply_voi_lut(pixel_array(dataset), dataset)  # from -2 ** 15 to 2 ** 15 - 1
    gray = np.asarray(read_image(file("MR_small.dcm")))
    assert gray.shape == (64, 64, 3) and (gray[..., 0] == gray[..., 2]).all()
    assert np.abs(gray[..., 0] - (shown + 2**15) * 255 / (2**16 - 1)).max() <= 0.5
    assert np.ptp(gray) > 100


def test_rescaled_values_without_a_window_are_spread(tmp_path: Path) -> None:
    dataset = dcmread(file("CT_small.dcm"))
    values = dataset.pixel_array.astype(float)
    expected = (values - values.min()) * 255 / np.ptp(values)
    gray = np.asarray(read_image(file("CT_small.dcm")))[..., 0]
    assert np.abs(gray - expected).max() <= 0.5
    dataset.PhotometricInterpretation = "MONOCHROME1"
    dataset.save_as(tmp_path / "inverted.dcm")
    assert np.abs(255.0 - gray - np.asarray(read_image(tmp_path / "inverted.dcm"))[..., 0]).max() <= 1
    dataset.RescaleSlope, dataset.RescaleIntercept = 2, -1024
    dataset.WindowCenter, dataset.WindowWidth = 100, 400
    dataset.PhotometricInterpretation = "MONOCHROME2"
    dataset.save_as(tmp_path / "window.dcm")
    window = ((2 * values - 1024 - 99.5) / 399 + 0.5).clip(0, 1) * 255
    assert np.abs(np.asarray(read_image(tmp_path / "window.dcm"))[..., 0] - window).max() <= 0.5


@pytest.mark.parametrize(("bits", "first"), [(8, 2142), (10, 600)])  # 8 bits do not hold a place above 255
def test_a_table_of_values_to_show_fills_the_range_that_its_bits_have(tmp_path: Path, bits: int, first: int) -> None:
    dataset = dcmread(file("MR_small.dcm"))
    table = Dataset()
    table.add_new("LUTDescriptor", "US", [4, first, bits])
    values = [1, 100, 200, 2**bits - 1]
    table.add_new("LUTData", "US", values)
    del dataset.WindowCenter, dataset.WindowWidth
    dataset.VOILUTSequence = Sequence([table])
    dataset.save_as(tmp_path / "table.dcm")
    expected = np.take(values, (pixel_array(dataset).astype(int) - first).clip(0, 3)) * 255 / (2**bits - 1)
    assert np.abs(np.asarray(read_image(tmp_path / "table.dcm"))[..., 0] - expected).max() <= 0.5


@pytest.mark.parametrize("name", ["SC_rgb_rle_2frame.dcm", "SC_ybr_full_422_uncompressed.dcm", "SC_rgb_rle_16bit.dcm"])
def test_color_is_the_first_frame_in_8_bits(name: str) -> None:
    dataset = dcmread(file(name))
    pixels = pixel_array(dataset, index=0).astype(float)
    found = np.asarray(read_image(file(name)))
    assert np.abs(found - pixels * (255 / (2**dataset.BitsStored - 1))).max() <= 0.5 and np.ptp(found) > 100


def test_a_palette_is_applied() -> None:
    assert np.ptp(np.asarray(read_image(file("examples_palette.dcm"))), axis=2).max() > 50


@pytest.mark.parametrize(
    ("name", "reason"),
    [("MR_truncated.dcm", "less than expected"), ("rtplan.dcm", "no pixel data"), ("JPEG-lossy.dcm", "12-bit")],
)
def test_what_cannot_be_decoded_is_named(name: str, reason: str) -> None:
    with pytest.raises(BrokenImageError, match=f"{name} cannot be used: .*{reason}"):
        read_image(file(name))


def test_an_image_of_too_many_pixels_is_not_decoded() -> None:
    with pytest.raises(BrokenImageError, match="64 x 64 pixels are more than the 4,000"):
        Decoder(max_pixels=4000).image(file("MR_small.dcm").read_bytes(), "MR_small.dcm")


@pytest.mark.parametrize("backend", ["pil", "fast"])
def test_a_folder_may_mix_them_with_other_files(make_data: MakeData, tmp_path: Path, backend: str) -> None:
    for name in ("CT_small.dcm", "MR_small.dcm"):
        shutil.copy(file(name), tmp_path / name)
    save_image(tmp_path / "photo.png", 0, (40, 40))
    data = data_block(make_data("disk_folder", tmp_path) | {"BACKEND": backend})
    ((batch,),) = build_loader(data, "TRAIN", 1, 3, 0, 1, 1).epoch(0)
    assert sorted(batch.sample_ids.tolist()) == [0, 1, 2]
    assert len({image.sum().item() for image in batch.images[0]}) == len(batch.images[0])


def test_data_check_and_stats_read_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copy(file("CT_small.dcm"), tmp_path / "CT_SMALL.DCM")
    assert main(["data", "check", str(tmp_path), "--picture", str(tmp_path / "check.png")]) == 0
    assert "DICOM" in capsys.readouterr().out
    (tmp_path / "check.png").unlink()
    assert main(["data", "stats", str(tmp_path)]) == 0
    assert "channels      1" in capsys.readouterr().out


def test_a_missing_library_is_named_before_anything_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(file("CT_small.dcm"), tmp_path / "a.dcm")
    monkeypatch.setattr(dicom, "find_spec", lambda name: None)
    for read in (lambda: DiskFolder(SourceRequest("TRAIN", (str(tmp_path),))), lambda: read_image(tmp_path / "a.dcm")):
        with pytest.raises(DataError, match=r"need pydicom. Run pip install vissl-zero\[dicom\]") as caught:
            read()
        assert not isinstance(caught.value, BrokenImageError)  # which would be skipped


def test_other_images_do_not_import_pydicom() -> None:
    script = "import sys, vissl_zero.data.decode as d; assert 'pydicom' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_its_size_is_known_as_other_files_sizes_are() -> None:
    assert Decoder().size(file("CT_small.dcm").read_bytes(), "CT_small.dcm") == (128, 128)
