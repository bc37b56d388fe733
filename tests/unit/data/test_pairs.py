"""Images with masks: what a folder may hold, and that a mask goes where its image goes."""

from __future__ import annotations

import io
import shutil
import struct
import zlib
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.blocks import data_block, run_block
from tests.unit.data.conftest import MakeData
from vissl_zero.config.run_config import RunConfig
from vissl_zero.data.decode import BrokenImageError, Decoder
from vissl_zero.data.loader import build_loader, eval_images
from vissl_zero.data.source import SourceRequest, Subset, build_source, masks_of
from vissl_zero.data.sources.segmentation import SegmentationFolder, read_mask, voc_colors
from vissl_zero.errors import ConfigError, DataError
from vissl_zero.resolve.pairs import IGNORED, pairs, transforms_of_pairs

NUM_CLASSES, STEP = 11, 20
TO_TENSOR = {"name": "ToTensor"}
# Each moves pixels by random numbers; drawn twice, image and mask would part.
MOVING: list[dict[str, Any]] = [
    {"name": "RandomResizedCrop", "size": 24, "scale": [0.3, 0.9], "interpolation": "nearest"},
    {"name": "RandomHorizontalFlip"},
    {"name": "RandomAffine", "degrees": 20, "translate": [0.2, 0.2]},
    {"name": "RandomApply", "transforms": [{"name": "RandomGrayscale", "p": 0.0}], "p": 0.5},
    {"name": "RandomCrop", "size": 24, "padding": 3},
    {"name": "RandomVerticalFlip"},
    TO_TENSOR,
]


def make_folder(root: Path, num_images: int = 6, suffix: str = "png") -> Path:
    """Images whose color is ``STEP`` times the class of each pixel, and their masks, of palette, gray and color."""
    for name in ("images", "masks"):
        (root / name).mkdir(parents=True)
    for index in range(num_images):
        rng = np.random.default_rng(index)
        classes = np.kron(rng.integers(1, NUM_CLASSES, (5, 4)), np.ones((8, 8), int)).astype(np.uint8)
        Image.fromarray(classes * STEP).convert("RGB").save(root / "images" / f"{index}.{suffix}")
        path = root / "masks" / f"{index}.png"
        if index % 3 == 0:
            Image.fromarray(classes).save(path)
        elif index % 3 == 1:
            Image.fromarray(voc_colors()[classes]).save(path)
        else:
            mask = Image.fromarray(classes, mode="P")
            mask.putpalette(voc_colors().tobytes())
            mask.save(path)
    return root


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_folder(tmp_path / "pairs")


def folder_data(make_data: MakeData, folder: Path, **keys: Any) -> dict[str, Any]:
    data = make_data("segmentation_folder", folder, TRANSFORMS=MOVING, **keys)
    for split in ("TRAIN", "TEST"):
        data[split]["SOURCE_PARAMS"] = {"num_classes": NUM_CLASSES}
    return data


def test_a_mask_moves_as_its_image_does(make_data: MakeData, folder: Path) -> None:
    data = data_block(folder_data(make_data, folder))
    loader = build_loader(data, "TRAIN", 5, 3, 0, 1, 1)
    batches = [batch for epoch in range(3) for (batch,) in loader.epoch(epoch)]
    num_seen = 0
    for batch in batches:
        assert batch.masks is not None and batch.targets is None
        assert batch.masks.shape == (3, 24, 24) and batch.masks.dtype == torch.uint8
        classes = (batch.images[0][:, 0] * 255 / STEP).round().byte()
        is_inside = batch.masks != IGNORED
        assert torch.equal(batch.masks[is_inside], classes[is_inside])
        assert (classes[~is_inside] == 0).all()  # what a transform adds is black, and no class of these images
        num_seen += int(is_inside.sum())
    assert 0.3 < num_seen / (18 * 24 * 24) < 0.99


def test_masks_are_the_same_on_any_number_of_ranks_and_workers(make_data: MakeData, folder: Path) -> None:
    whole: dict[int, torch.Tensor] = {}
    for world_size, workers in ((1, 0), (2, 1)):
        data = data_block(folder_data(make_data, folder, num_workers=workers))
        for rank in range(world_size):
            for (batch,) in build_loader(data, "TRAIN", 5, 6 // world_size, rank, world_size, 1).epoch(1):
                for sample, mask in zip(batch.sample_ids.tolist(), batch.masks, strict=True):
                    assert torch.equal(whole.setdefault(sample, mask), mask)
    assert len(whole) == 6


def test_images_are_those_of_the_same_transforms_without_masks(make_data: MakeData, folder: Path) -> None:
    masked = data_block(folder_data(make_data, folder))
    plain = data_block({**make_data("disk_folder", folder / "images", TRANSFORMS=MOVING)})
    batches = [next(iter(build_loader(data, "TRAIN", 5, 6, 0, 1, 1).epoch(2)))[0] for data in (masked, plain)]
    assert torch.equal(batches[0].images[0], batches[1].images[0])


def test_evaluation_has_masks_of_a_limited_source(make_data: MakeData, folder: Path) -> None:
    data = folder_data(make_data, folder)
    data["TEST"] |= {"DATA_LIMIT": 4, "TRANSFORMS": [{"name": "Resize", "size": [8, 8]}, TO_TENSOR]}
    block = data_block(data)
    source = build_source(block, "TEST", 0)
    assert isinstance(source, Subset) and source.class_names == tuple(map(str, range(NUM_CLASSES)))
    read = masks_of(source)
    assert read is not None
    for batch in eval_images(source, block, 0).batches(4):
        assert batch.masks is not None
        for index, mask in zip(batch.sample_ids.tolist(), batch.masks, strict=True):
            assert set(mask.unique().tolist()) <= set(np.unique(np.asarray(read(index))).tolist())


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_gray_of_few_bits_is_read_as_stored(bits: int) -> None:
    classes = np.arange(16).reshape(4, 4) % 2**bits
    assert np.array_equal(Decoder().mask(_png_of_bits(classes, bits), "mask"), classes)


def _png_of_bits(values: np.ndarray, bits: int) -> bytes:
    """Gray, written by hand: Pillow writes 1 and 8 bits alone."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    rows = b""
    for row in values:
        text = "".join(f"{value:0{bits}b}" for value in row)
        rows += b"\0" + int(text.ljust(-(-len(text) // 8) * 8, "0"), 2).to_bytes(-(-len(text) // 8), "big")
    header = struct.pack(">IIBBBBB", values.shape[1], values.shape[0], bits, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def test_colors_are_those_of_pascal_voc(tmp_path: Path) -> None:
    # From the development kit's page: aeroplane, bicycle, bird, person, border.
    known = {1: (128, 0, 0), 2: (0, 128, 0), 3: (128, 128, 0), 15: (192, 128, 128), 255: (224, 224, 192)}
    for number, color in known.items():
        assert tuple(voc_colors()[number]) == color
    assert len(np.unique(voc_colors(), axis=0)) == 256
    path = tmp_path / "mask.png"
    Image.fromarray(np.array([list(known.values())], np.uint8)).save(path)
    assert read_mask(Decoder(), str(path), 16).tolist() == [list(known)]


def test_what_no_mask_can_be_is_named(tmp_path: Path) -> None:
    path = tmp_path / "mask.png"
    said = {}
    for name, image in (
        ("range", Image.new("L", (3, 3), 7)),
        ("color", Image.new("RGB", (3, 3), (1, 2, 3))),
        ("bits", Image.new("I;16", (3, 3), 700)),
    ):
        image.save(path)
        with pytest.raises(BrokenImageError) as raised:
            read_mask(Decoder(), str(path), 7)
        said[name] = raised.value.reason
    buffer = io.BytesIO()
    Image.new("L", (3, 3)).save(buffer, "JPEG")
    path.write_bytes(buffer.getvalue())
    with pytest.raises(BrokenImageError, match="no PNG"):
        read_mask(Decoder(), str(path), 7)
    assert said["range"] == "it has class 7, and classes end at 6, but for 255"
    assert "(1, 2, 3) is no class of PASCAL VOC" in said["color"]
    assert "16 bits" in said["bits"]


def _config(folder: Path, **train: Any) -> RunConfig:
    config = asdict(RunConfig())
    source = {"DATA_SOURCES": ["segmentation_folder"], "DATA_PATHS": [str(folder)]}
    config["DATA"]["TRAIN"] |= {**source, "TRANSFORMS": MOVING, "SOURCE_PARAMS": {"num_classes": NUM_CLASSES}, **train}
    config["DATA"]["TEST"] |= source
    return run_block(config)


def test_every_missing_mask_is_named_at_once(folder: Path) -> None:
    assert pairs(_config(folder), None) == []  # type: ignore[arg-type]
    (folder / "masks/1.png").unlink()
    (folder / "masks/3.png").rename(folder / "masks/3.gif")
    for problem in pairs(_config(folder), None):  # type: ignore[arg-type]
        assert "images/1.png has no mask" in problem.must and "masks/3.gif is no PNG" in problem.must
    with pytest.raises(DataError, match=r"images/1\.png has no mask"):
        SegmentationFolder(SourceRequest("TRAIN", (str(folder),)), NUM_CLASSES)
    shutil.copy(folder / "images/5.png", folder / "images/5.jpg")
    (found, _) = pairs(_config(folder), None)  # type: ignore[arg-type]
    assert f"{folder}/images/5.jpg and {folder}/images/5.png would have the same mask" in found.must
    (found, _) = pairs(_config(folder.parent), None)  # type: ignore[arg-type]
    assert "has no folder images and no folder masks" in found.must


def test_the_number_of_classes_is_written_or_named(folder: Path) -> None:
    (problem,) = pairs(_config(folder, SOURCE_PARAMS={}), None)  # type: ignore[arg-type]
    assert problem.key == "config.DATA.TRAIN.SOURCE_PARAMS.num_classes" and "classes.txt" in problem.fix
    (folder / "classes.txt").write_text("sky\nroad\n")
    assert pairs(_config(folder, SOURCE_PARAMS={}), None) == []  # type: ignore[arg-type]
    assert SegmentationFolder(SourceRequest("TRAIN", (str(folder),))).class_names == ("sky", "road")
    (problem,) = pairs(_config(folder), None)  # type: ignore[arg-type]
    assert f"{NUM_CLASSES}, and 2 names" in problem.got


def test_transforms_that_say_nothing_of_masks_are_refused(folder: Path) -> None:
    crops = {"name": "ImgPilToMultiCrop", "total_num_crops": 2, "num_crops": [2], "size_crops": [8]}
    inside = {"name": "RandomApply", "transforms": [{"name": "RandomCrop", "size": 4}], "p": 0.5}
    config = _config(folder, TRANSFORMS=[crops, inside, TO_TENSOR])
    config.DATA.BACKEND = "fast"
    found = transforms_of_pairs(config)
    assert [problem.got for problem in found] == ["ImgPilToMultiCrop", "RandomCrop", "fast"]


def test_a_mask_of_another_size_is_refused_or_skipped(make_data: MakeData, folder: Path) -> None:
    Image.new("L", (5, 5)).save(folder / "masks/2.png")
    data = folder_data(make_data, folder)
    with pytest.raises(DataError, match=r"different sizes, 32 x 40 and 5 x 5 pixels"):
        list(build_loader(data_block(data), "TRAIN", 5, 6, 0, 1, 1).epoch(0))
    source = build_source(data_block(data), "TRAIN", 0)
    with pytest.raises(BrokenImageError, match="different sizes"):
        source.check(2)  # type: ignore[attr-defined]
    data["ON_BROKEN_IMAGE"] = "skip"
    ((batch,),) = build_loader(data_block(data), "TRAIN", 5, 6, 0, 1, 1).epoch(0)
    assert len(batch.masks) == 6 and len(batch.stand_ins) == 1


def test_masks_need_the_backend_that_has_them(make_data: MakeData, folder: Path) -> None:
    data = folder_data(make_data, folder)
    data["BACKEND"] = "fast"
    data["TRAIN"]["TRANSFORMS"] = [TO_TENSOR]
    pytest.importorskip("cv2")
    with pytest.raises(ConfigError, match="must be pil for images with masks"):
        build_loader(data_block(data), "TRAIN", 5, 6, 0, 1, 1)


def test_scenes_of_digits_have_a_class_for_every_pixel(make_data: MakeData) -> None:
    data = make_data("digit_scenes", DEFAULT_GRAY_IMG_SIZE=32)
    source = build_source(data_block(data), "TRAIN", 3)
    read = masks_of(source)
    assert read is not None and len(source) == 1437 and source.label(0) is None
    masks = [np.asarray(read(index)) for index in range(40)]
    assert set(np.unique(masks)) == set(range(11))
    image = np.asarray(source.image(4).convert("L")).astype(int)
    assert image[masks[4] > 0].min() > image[masks[4] == 0].mean()
    assert np.array_equal(masks[7], np.asarray(masks_of(build_source(data_block(data), "TRAIN", 3))(7)))  # type: ignore[misc]
    assert not np.array_equal(masks[7], np.asarray(masks_of(build_source(data_block(data), "TRAIN", 4))(7)))  # type: ignore[misc]
