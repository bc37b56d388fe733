"""The same pixels from every kind of source, at any number of ranks and workers, resumed in mid-epoch or not."""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from tests.blocks import data_block
from tests.unit.data.conftest import MULTI_CROP
from vissl_zero.data import pack as packing
from vissl_zero.data.dataset import ImageBatch
from vissl_zero.data.loader import Loader, build_loader
from vissl_zero.data.source import UNLABELLED, Source, SourceRequest, encoded_image
from vissl_zero.data.sources.disk import DiskFolder

SOURCES = ("disk_folder", "disk_filelist", "webdataset", "arrow", "parquet", "lmdb", "hdf5", "npy")
BACKENDS = ("pil", "fast")
ON_DEVICE = "fast, on the device"
NUM_IMAGES, BATCH, SEED = 15, 6, 5  # the last batch has an image for each of three ranks


class Case(NamedTuple):
    """A cell of the matrix."""

    source: str
    ranks: int
    workers: int
    is_resumed: bool
    backend: str

    def __str__(self) -> str:
        resumed = "resumed" if self.is_resumed else "whole"
        return f"{self.source}-{self.ranks}-ranks-{self.workers}-workers-{resumed}-{self.backend}"


Hashes = dict[tuple[int, int], tuple[int, str]]  # (epoch, sample) -> label and hash of all its crops
WHOLE = [Case(*each) for each in itertools.product(SOURCES, (1, 2, 3), (0, 2, 3), (False, True), BACKENDS)]
# Without workers a case takes a tenth of a second; with them, several.
FAST = [Case(source, 3, 0, True, backend) for source in SOURCES for backend in BACKENDS]
FAST += [Case("disk_folder", 2, 0, True, ON_DEVICE)]
SLOW = [
    Case(source, 1 + index % 3, 2 + index % 2, index % 2 == 0, BACKENDS[index // 2 % 2])
    for index, source in enumerate(SOURCES)
]
SLOW += [Case("webdataset", 3, 2, True, ON_DEVICE)]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Name of a source -> the keys of DATA.TRAIN that read the same images. npy has those of ``pngs``."""
    root = tmp_path_factory.mktemp("same")
    files, pngs = root / "files", root / "pngs"
    rng = np.random.default_rng(0)
    for index in range(NUM_IMAGES):
        name = f"{'abc'[index % 3]}/{index}"
        for folder, size, ending in ((files, (20 + 7 * index, 90 - 3 * index), "jpg"), (pngs, (24, 20), "png")):
            path = folder / f"{name}.{ending if index % 5 else 'png'}"
            path.parent.mkdir(parents=True, exist_ok=True)
            coarse = Image.fromarray(rng.integers(0, 256, (5, 5, 3), np.uint8)).resize(size, Image.Resampling.BICUBIC)
            coarse.convert("L" if index == 7 else "RGB").save(path)
    found = {"disk_folder": {"DATA_PATHS": [files]}, "pngs": {"DATA_PATHS": [pngs], "DATA_SOURCES": ["disk_folder"]}}
    source, images = (DiskFolder(SourceRequest("TRAIN", (str(folder),))) for folder in (files, pngs))
    labels = [source.label(index) for index in range(NUM_IMAGES)]
    np.save(root / "labels.npy", labels)
    from_file = {"LABEL_SOURCES": ["disk_filelist"], "LABEL_PATHS": [root / "labels.npy"]}
    (root / "list.txt").write_text("".join(f"{source.name(index)}\n" for index in range(NUM_IMAGES)))
    found["disk_filelist"] = {"DATA_PATHS": [root / "list.txt"], **from_file}
    np.save(root / "images.npy", np.stack([np.asarray(images.image(index)) for index in range(NUM_IMAGES)]))
    found["npy"] = {"DATA_PATHS": [root / "images.npy"], **from_file}
    for form in packing.WRITERS:
        packing.pack(files, root / form, form, None, lambda line: None)
        found[form] = {"DATA_PATHS": [root / form]}
    write_parquet(root / "hub/data/train-00000-of-00002.parquet", source, range(8))
    write_parquet(root / "hub/data/train-00001-of-00002.parquet", source, range(8, NUM_IMAGES))
    found["parquet"] = {"DATA_PATHS": [root / "hub"]}
    with h5py.File(root / "images.h5", "w") as file:
        column = file.create_dataset("images", (NUM_IMAGES,), h5py.vlen_dtype(np.uint8))
        for index in range(NUM_IMAGES):
            column[index] = np.frombuffer(source.encoded(index), np.uint8)
        file["labels"] = labels
    found["hdf5"] = {"DATA_PATHS": [root / "images.h5"]}
    return found


def write_parquet(path: Path, source: Source, indices: Sequence[int], rows_per_group: int = 3) -> None:
    """Write images and labels as the Hugging Face hub has them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    images = [{"bytes": encoded_image(source, index), "path": None} for index in indices]
    labels = [UNLABELLED if (label := source.label(index)) is None else label for index in indices]
    image = pa.array(images, pa.struct([("bytes", pa.binary()), ("path", pa.string())]))
    about = '{"info": {"features": {"label": {"names": ["a", "b", "c"], "_type": "ClassLabel"}}}}'
    table = pa.table({"image": image, "label": labels}).replace_schema_metadata({"huggingface": about})
    pq.write_table(table, path, row_group_size=rows_per_group)


def loaders(keys: dict[str, Any], case: Case) -> list[Loader]:
    """The loader of each rank of a case."""
    paths = {name: [str(path) for path in keys.get(name, [])] for name in ("DATA_PATHS", "LABEL_PATHS")}
    train = {"DATA_SOURCES": [case.source], "TRANSFORMS": MULTI_CROP, **keys, **paths}
    backend, place = ("fast", "device") if case.backend == ON_DEVICE else (case.backend, "workers")
    keys = {"BACKEND": backend, "AUGMENT_ON": place, "NUM_DATALOADER_WORKERS": case.workers, "WORKER_TIMEOUT_S": 120.0}
    data = data_block({**keys, "TRAIN": train})
    return [build_loader(data, "TRAIN", SEED, BATCH // case.ranks, rank, case.ranks, 1) for rank in range(case.ranks)]


def add(found: Hashes, epoch: int, loaded: ImageBatch) -> None:
    """Note label and hash of each sample of a batch; a sample comes once."""
    batch = loaded.to("cpu", torch.float32)
    assert batch.targets is not None
    for row, sample in enumerate(batch.sample_ids.tolist()):
        crops = b"".join(images[row :: batch.num_local].numpy().tobytes() for images in batch.images)
        assert (epoch, sample) not in found
        found[epoch, sample] = int(batch.targets[row]), hashlib.sha256(crops).hexdigest()


def two_epochs(keys: dict[str, Any], case: Case) -> Hashes:
    """What all ranks of a case load; a resumed one starts anew after the first step, as after a crash."""
    found: Hashes = {}
    begun = loaders(keys, case)
    if case.is_resumed:
        for rank in begun:
            for batch in next(rank.epoch(0)):
                add(found, 0, batch)
        begun = loaders(keys, case)
    for rank in begun:
        for epoch in (0, 1):
            for step in rank.epoch(epoch, BATCH if case.is_resumed and epoch == 0 else 0):
                for batch in step:
                    add(found, epoch, batch)
    return found


@pytest.fixture(scope="module")
def expected(sources: dict[str, dict[str, Any]]) -> Callable[[Case], Hashes]:
    """What one rank without workers reads from the folder."""
    known: dict[tuple[str, str], Hashes] = {}

    def of(case: Case) -> Hashes:
        folder = "pngs" if case.source == "npy" else "disk_folder"
        key = folder, case.backend
        if key not in known:
            known[key] = two_epochs(sources[folder], Case("disk_folder", 1, 0, False, case.backend))
        return known[key]

    return of


def assert_same(case: Case, sources: dict[str, dict[str, Any]], expected: Callable[[Case], Hashes]) -> None:
    """Compare all crops and labels of two epochs with those of the folder."""
    found, wanted = two_epochs(sources[case.source], case), expected(case)
    assert len(wanted) == 2 * NUM_IMAGES == len({digest for _, digest in wanted.values()})
    assert found == wanted


@pytest.mark.parametrize("case", FAST, ids=str)
def test_every_source_gives_the_folders_pixels(case: Case, sources: Any, expected: Any) -> None:
    assert_same(case, sources, expected)


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW, ids=str)
def test_workers_give_the_folders_pixels(case: Case, sources: Any, expected: Any) -> None:
    assert_same(case, sources, expected)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_all_cases_give_the_folders_pixels(sources: Any, expected: Any) -> None:
    """288 cells, in a random order."""
    differing = []
    for case in random.sample(WHOLE, len(WHOLE)):
        if two_epochs(sources[case.source], case) != expected(case):
            differing.append(case)
    assert len(WHOLE) == 288 and not differing
