"""Packed images: the same pixels as the folder's, in every format, with and without workers, resumed in mid-epoch."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

from tests.blocks import data_block
from tests.unit.data.conftest import MakeData, save_image
from vissl_zero.commands.data import data as data_command
from vissl_zero.config.catalog import source_of
from vissl_zero.data import pack as packing
from vissl_zero.data import slow_work
from vissl_zero.data.decode import BrokenImageError
from vissl_zero.data.loader import build_loader
from vissl_zero.data.source import build_source, encoded_image
from vissl_zero.data.sources import packed as packed_sources
from vissl_zero.data.sources.packed import CLASSES_KEY, LABELS_KEY
from vissl_zero.errors import ConfigError, DataError

FORMATS = ("webdataset", "arrow", "lmdb")


def hashes(data: dict[str, Any], epoch: int, start: int = 0, ranks: int = 1) -> dict[int, tuple[int | None, str]]:
    """Sample id -> label and hash of its crops."""
    found: dict[int, tuple[int | None, str]] = {}
    for rank in range(ranks):
        for step in build_loader(data_block(data), "TRAIN", 1, 4 // ranks, rank, ranks, 1).epoch(epoch, start):
            for batch in step:
                for row, sample in enumerate(batch.sample_ids.tolist()):
                    crops = [images[row :: batch.num_local].numpy().tobytes() for images in batch.images]
                    label = None if batch.targets is None else int(batch.targets[row])
                    found[sample] = label, hashlib.sha256(b"".join(crops)).hexdigest()
    return found


@pytest.fixture
def packed(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    monkeypatch.setattr(packing, "PER_PART", 4)  # three parts
    for form in FORMATS:
        assert data_command(["pack", str(photos), str(tmp_path / form), "--to", form]) == 0
    return {form: tmp_path / form for form in FORMATS}


@pytest.mark.parametrize("backend", ["pil", "fast"])
def test_every_format_gives_the_folders_pixels(
    make_data: MakeData, photos: Path, packed: dict[str, Path], backend: str
) -> None:
    keys = {"BACKEND": backend}
    folder = make_data("disk_folder", photos) | keys
    whole = {epoch: hashes(folder, epoch) for epoch in (0, 1)}
    late = hashes(folder, 1, start=4)
    assert len(whole[0]) == 11 and whole[0] != whole[1] and late.items() < whole[1].items()
    for form, path in packed.items():
        assert source_of([str(path)]) == form
        data = make_data(form, path) | keys
        assert build_source(data_block(data), "TRAIN", 0).class_names == ("a", "b")
        assert {epoch: hashes(data, epoch) for epoch in (0, 1)} == whole
        assert hashes(data, 1, start=4) == late and hashes(data, 1, ranks=2) == whole[1]


@pytest.mark.parametrize("form", FORMATS)
def test_two_workers_give_the_same(make_data: MakeData, photos: Path, packed: dict[str, Path], form: str) -> None:
    assert hashes(make_data(form, packed[form], num_workers=2), 0) == hashes(make_data("disk_folder", photos), 0)


@pytest.mark.parametrize("form", FORMATS)
def test_packing_goes_on_where_it_stopped(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, make_data: MakeData
) -> None:
    monkeypatch.setattr(packing, "PER_PART", 4)
    seen: list[str] = []

    def stop(line: str) -> None:
        seen.append(line)
        if len(seen) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        packing.pack(photos, tmp_path / "out", form, None, stop)
    before = json.loads((tmp_path / "out/packed.json").read_text())["parts"]
    written: list[int] = []
    write = packing.WRITERS[form]
    monkeypatch.setitem(packing.WRITERS, form, lambda out, part, *rest: (written.append(part), write(out, part, *rest)))
    assert packing.pack(photos, tmp_path / "out", form, None, lambda line: None) == 11
    after = json.loads((tmp_path / "out/packed.json").read_text())["parts"]
    assert list(before) == ["0", "1"] and written == [2] and after.items() > before.items()
    assert hashes(make_data(form, tmp_path / "out"), 0) == hashes(make_data("disk_folder", photos), 0)
    with pytest.raises(DataError, match="was begun with another folder"):
        packing.pack(photos, tmp_path / "out", form, 8, lambda line: None)
    with pytest.raises(DataError, match="is not empty"):
        packing.pack(photos, photos, form, None, lambda line: None)


def test_packing_says_what_it_leaves_out(photos: Path, tmp_path: Path) -> None:
    (photos / "a/phone.heic").write_bytes(b"heic")
    said: list[str] = []
    packing.pack(photos, tmp_path / "out", "webdataset", None, said.append)
    assert "1 file in" in said[0] and ".heic" in said[0] and said[-1] == "11 of 11 images"


@pytest.mark.parametrize("form", FORMATS)
def test_images_without_classes_are_packed_without_any(
    form: str, photos: Path, tmp_path: Path, make_data: MakeData
) -> None:
    packing.pack(photos / "a", tmp_path / "out", form, None, lambda line: None)
    source = build_source(data_block(make_data(form, tmp_path / "out")), "TRAIN", 0)
    assert len(source) == 6 and source.class_names == () and source.label(0) is None
    assert not (tmp_path / "out/classes.json").exists()


def test_larger_images_are_reduced(photos: Path, tmp_path: Path, make_data: MakeData) -> None:
    save_image(photos / "a/large.png", 9, (60, 40))
    exact = save_image(photos / "a/exact.png", 8, (30, 20)).read_bytes()  # packed as it is
    packing.pack(photos, tmp_path / "out", "webdataset", 20, lambda line: None)
    source = build_source(data_block(make_data("webdataset", tmp_path / "out")), "TRAIN", 0)
    sizes = {source.image(index).size for index in range(len(source))}
    assert sizes == {(16, 16), (30, 20)}
    files = [encoded_image(source, index) for index in range(len(source))]
    like = io.BytesIO()
    Image.new("RGB", (30, 20)).save(like, "JPEG", quality=95)  # as docs/data.md says
    (reduced,) = (image for image in map(_opened, files) if (image.size, image.format) == ((30, 20), "JPEG"))
    assert reduced.quantization == _opened(like.getvalue()).quantization
    assert files.count(exact) == 1


def _opened(file: Any) -> Any:
    return Image.open(io.BytesIO(file))


def test_reading_many_tars_says_how_far_it_is(
    packed: dict[str, Path], make_data: MakeData, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slow_work, "EVERY_S", -1.0)
    build_source(data_block(make_data("webdataset", packed["webdataset"])), "TRAIN", 0)
    assert caplog.messages == [f"Reading the index of tars: {number} of 3" for number in (1, 2, 3)]
    for index in packed["webdataset"].glob(".*.npz"):
        index.unlink()
    monkeypatch.setattr(slow_work, "EVERY_S", 100.0)
    build_source(data_block(make_data("webdataset", packed["webdataset"])), "TRAIN", 0)
    assert len(caplog.messages) == 3  # where it is quick, nothing is said


def test_long_work_is_reported_once_each_time_that_it_has_taken_long(monkeypatch: pytest.MonkeyPatch) -> None:
    now, lines = [0.0], list[str]()
    monkeypatch.setattr(slow_work.time, "monotonic", lambda: now[0])
    progress = slow_work.SlowProgress(lines.append)
    for now[0] in (2.0, 5.0, 5.5, 6.0, 10.4, 10.6):  # after 5 s, and after 5 s more
        progress.update(f"at {now[0]:g} s")
    assert lines == ["at 5.5 s", "at 10.6 s"]


def test_an_index_is_made_again_when_a_tar_changes(packed: dict[str, Path], make_data: MakeData) -> None:
    tar = packed["webdataset"] / "part-000000.tar"
    data = make_data("webdataset", tar)
    assert len(build_source(data_block(data), "TRAIN", 0)) == 4
    (index,) = [path for path in packed["webdataset"].glob(".*.npz") if "part-000000" in path.name]
    index.write_bytes(b"damaged")
    assert len(build_source(data_block(data), "TRAIN", 0)) == 4
    with tarfile.open(tar, "a") as opened:
        opened.add(packed["webdataset"].parent / "photos/b/0.png", "extra.png")
    with pytest.raises(DataError, match="1 of 5 images have no label"):
        build_source(data_block(data), "TRAIN", 0)
    with tarfile.open(tar, "a") as opened:
        label = tarfile.TarInfo("extra.cls")
        label.size = 1
        opened.addfile(label, io.BytesIO(b"1"))
    grown = build_source(data_block(data), "TRAIN", 0)
    assert len(grown) == 5 and grown.label(4) == 1
    content = tar.read_bytes()
    os.truncate(tar, 600)
    with pytest.raises(BrokenImageError, match="its tar is truncated"):
        grown.image(4)
    tar.write_bytes(b"no tar" + content)
    with pytest.raises(DataError, match="cannot be read as a tar"):
        build_source(data_block(data), "TRAIN", 0)


def test_an_index_whose_parts_do_not_go_together_is_made_again(packed: dict[str, Path], make_data: MakeData) -> None:
    data = data_block(make_data("webdataset", packed["webdataset"] / "part-000000.tar"))
    build_source(data, "TRAIN", 0)
    (kept,) = packed["webdataset"].glob(".part-000000*.npz")
    with np.load(kept) as arrays:
        index = dict(arrays)
    np.savez(kept, **{**index, "size": index["size"][:2]})  # type: ignore[arg-type]
    assert len(build_source(data, "TRAIN", 0).image(3).getbands()) == 3


def test_a_member_that_is_too_large_for_a_label_is_none(
    tmp_path: Path, photos: Path, make_data: MakeData, monkeypatch: pytest.MonkeyPatch
) -> None:
    label = b'{"label": 0}'
    tar = write_tar(tmp_path / "mine.tar", photos / "b/0.png", x_json=label)
    data = data_block(make_data("webdataset", tar))
    for most, found in ((len(label), 0), (len(label) - 1, None)):
        monkeypatch.setattr(packed_sources, "_MOST_JSON", most)
        assert build_source(data, "TRAIN", 0).label(0) == found
        next(tmp_path.glob(".mine.tar*.npz")).unlink()


def write_tar(path: Path, image: Path, **members: bytes) -> Path:
    """A tar of one image for each label: ``x_cls`` is the content of ``x.cls``, beside ``x.png``."""
    with tarfile.open(path, "w") as opened:
        for name, content in members.items():
            stem, _, extension = name.rpartition("_")
            opened.add(image, f"{stem}.png")
            member = tarfile.TarInfo(f"{stem}.{extension}")
            member.size = len(content)
            opened.addfile(member, io.BytesIO(content))
    return path


def test_a_file_that_macos_packs_beside_an_image_is_none(tmp_path: Path, photos: Path, make_data: MakeData) -> None:
    tar = write_tar(tmp_path / "mine.tar", photos / "b/0.png", x_cls=b"0", y_cls=b"1")
    with tarfile.open(tar, "a") as opened:
        opened.add(photos / "b/0.png", "._x.png")
    assert len(build_source(data_block(make_data("webdataset", tar)), "TRAIN", 0)) == 2


def test_labels_of_webdataset_are_in_cls_or_json(tmp_path: Path, photos: Path, make_data: MakeData) -> None:
    def labels(**members: bytes) -> tuple[list[int | None], tuple[str, ...]]:
        tar = write_tar(tmp_path / "mine.tar", photos / "b/0.png", **members)
        source = build_source(data_block(make_data("webdataset", tar)), "TRAIN", 0)
        return [source.label(index) for index in range(len(source))], source.class_names

    numbers = labels(x_json=b'{"label": 3}', y_cls=b" 1\n", z_json=b'{"label": "0", "caption": "a"}')
    assert numbers == ([3, 1, 0], ("0", "1", "2", "3"))
    assert labels(x_json=b'{"label": "dog"}', y_cls=b"cat\n", z_cls=b"dog") == ([1, 0, 1], ("cat", "dog"))
    for nothing in (b'{"label": null}', b'{"label": -1}', b'{"caption": "a"}', b"[3]"):
        assert labels(x_json=nothing) == ([None], ())
        with pytest.raises(DataError, match=r"1 of 2 images have no label\. Give every image the same kind of label"):
            labels(x_json=nothing, y_cls=b"3")
    with pytest.raises(DataError, match="some labels are names and others numbers"):
        labels(x_cls=b"3", y_cls=b"cat")
    for content, says in ((b'{"label": true}', "has True for a label"), (b"{", "cannot be read as a label")):
        with pytest.raises(DataError, match=rf"mine\.tar:x\.json {says}.*rite .*whole number"):
            labels(x_json=content)
    (tmp_path / "classes.json").write_text('["dog", "cat", "cow"]')
    assert labels(x_cls=b"cat", y_cls=b"dog") == ([1, 0], ("dog", "cat", "cow"))
    with pytest.raises(DataError, match=r"labels that classes\.json does not have: cot\. Did you mean 'cow', 'cat'"):
        labels(x_cls=b"cot")


def test_an_index_with_labels_of_an_earlier_form_is_made_again(
    tmp_path: Path, photos: Path, make_data: MakeData
) -> None:
    tar = write_tar(tmp_path / "mine.tar", photos / "b/0.png", x_cls=b"cat")
    data = data_block(make_data("webdataset", tar))
    build_source(data, "TRAIN", 0)
    (kept,) = tmp_path.glob(".mine.tar*.npz")
    with np.load(kept) as arrays:
        index = {name: arrays[name] for name in arrays.files if name != "label_text"}
    np.savez(kept, label=np.array([-1]), **index)  # names were read as no label
    assert build_source(data, "TRAIN", 0).class_names == ("cat",)


def test_a_pickled_source_holds_no_images(packed: dict[str, Path], make_data: MakeData, photos: Path) -> None:
    for form, path in packed.items():
        source = build_source(data_block(make_data(form, path)), "TRAIN", 0)
        first = np.asarray(source.image(0))
        copy = pickle.dumps(source)
        assert len(copy) < 4000 and np.array_equal(np.asarray(pickle.loads(copy).image(0)), first)


def test_wrong_arguments_and_folders_are_one_sentence(tmp_path: Path, photos: Path, make_data: MakeData) -> None:
    for words in (["pack"], ["pack", "a", "b", "--to", "zip"], ["pack", "a", "b", "--to", "lmdb", "--size", "x"], []):
        with pytest.raises(ConfigError, match=r"^vissl-zero data( pack)?: "):
            data_command(words)
    with pytest.raises(DataError, match="does not exist"):
        data_command(["pack", str(tmp_path / "none"), str(tmp_path / "out"), "--to", "lmdb"])
    for form in FORMATS:
        with pytest.raises(DataError, match=r"DATA_PATHS|has no"):
            build_source(data_block(make_data(form, tmp_path / "none")), "TRAIN", 0)
        with pytest.raises(DataError, match=r"has no|cannot be read"):
            build_source(data_block(make_data(form, photos)), "TRAIN", 0)
    file = io.BytesIO()
    np.save(file, np.zeros(2))  # what an Arrow file is not
    (tmp_path / "x.arrow").write_bytes(file.getvalue())
    with pytest.raises(DataError, match="cannot be read as an Arrow file"):
        build_source(data_block(make_data("arrow", tmp_path / "x.arrow")), "TRAIN", 0)


def write_arrow(folder: Path, rows: list[Any], column: str = "image", **columns: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    table = pa.table({column: rows, **columns})
    with pa.OSFile(str(folder / "data.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table)
    return folder


def test_an_image_of_arrow_is_a_file_or_names_one(tmp_path: Path, photos: Path, make_data: MakeData) -> None:
    content, other = (photos / "b/0.png").read_bytes(), str(photos / "b/1.png")
    rows = [{"bytes": content, "path": other}, {"bytes": None, "path": other}, {"bytes": None, "path": None}, None]
    source = build_source(data_block(make_data("arrow", write_arrow(tmp_path / "x", rows))), "TRAIN", 0)
    assert [source.encoded(0), source.encoded(1)] == [content, Path(other).read_bytes()]  # type: ignore[attr-defined]
    assert source.name(1) == f"{tmp_path}/x row 1" and source.label(0) is None
    for empty in (2, 3):
        with pytest.raises(BrokenImageError, match="its row has no image"):
            source.image(empty)
    (tmp_path / "x/data.arrow").rename(tmp_path / "x/first.arrow")
    source = build_source(data_block(make_data("arrow", write_arrow(tmp_path / "x", rows))), "TRAIN", 0)
    assert [source.label(index) for index in range(len(source))] == [None] * 8  # two files, without labels
    texts = write_arrow(tmp_path / "y", ["a"], "caption")
    with pytest.raises(DataError, match="has no column of image files; its columns are caption"):
        build_source(data_block(make_data("arrow", texts)), "TRAIN", 0)
    labelled = write_arrow(tmp_path / "z", [content] * 3, label=[2, 0, 1])
    source = build_source(data_block(make_data("arrow", labelled)), "TRAIN", 0)
    assert [source.label(index) for index in range(3)] == [2, 0, 1] and source.class_names == ("0", "1", "2")
    some = write_arrow(tmp_path / "some", [content] * 3, label=[2, None, 1])
    with pytest.raises(DataError, match=r"some: 1 of 3 images have no label"):
        build_source(data_block(make_data("arrow", some)), "TRAIN", 0)


def test_splits_of_arrow_are_called_as_hugging_face_calls_them(
    tmp_path: Path, photos: Path, make_data: MakeData
) -> None:
    content, folder = (photos / "b/0.png").read_bytes(), tmp_path / "hub"
    for number, split in enumerate(("train", "val", "test"), 1):
        write_arrow(folder / split, [content] * number)
    (folder / "dataset_dict.json").write_text("{}")
    data = data_block(make_data("arrow", folder, TEST={"DATA_SOURCES": ["arrow"], "DATA_PATHS": [str(folder)]}))
    assert [len(build_source(data, split, 0)) for split in ("TRAIN", "TEST")] == [1, 3]
    (folder / "test/data.arrow").unlink()
    (folder / "test").rmdir()
    assert len(build_source(data, "TEST", 0)) == 2
    for split in ("val", "train"):
        (folder / split / "data.arrow").unlink()
        (folder / split).rmdir()
    with pytest.raises(DataError, match="has no split train"):
        build_source(data, "TRAIN", 0)
    (folder / "dataset_dict.json").unlink()
    (folder / "state.json").write_text(json.dumps({"_indices_files": [{"filename": "i"}], "_data_files": []}))
    with pytest.raises(DataError, match="selects rows by an index"):
        build_source(data, "TRAIN", 0)
    (folder / "state.json").unlink()
    with pytest.raises(DataError, match="has no Arrow files"):
        build_source(data, "TRAIN", 0)


def test_names_of_classes_are_a_list_as_long_as_the_labels(
    packed: dict[str, Path], make_data: MakeData, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = packed["webdataset"]
    data = data_block(make_data("webdataset", folder))
    for text, says in (('["a"]', "has labels up to 1, but 1 classes"), ("{}", "must be a JSON list"), ("[", "be read")):
        (folder / "classes.json").write_text(text)
        with pytest.raises(DataError, match=says):
            build_source(data, "TRAIN", 0)
    (folder / "classes.json").unlink()
    assert build_source(data, "TRAIN", 0).class_names == ("0", "1")


def test_a_key_that_is_gone_is_one_broken_image(packed: dict[str, Path], make_data: MakeData) -> None:
    source: Any = build_source(data_block(make_data("lmdb", packed["lmdb"])), "TRAIN", 0)
    assert source.name(0).startswith(f"{packed['lmdb']}:")
    assert (LABELS_KEY, CLASSES_KEY) == (b"__labels__", b"__classes__")  # as databases that exist have them
    source._keys[0] = b"gone"
    with pytest.raises(BrokenImageError, match="its key is gone"):
        source.encoded(0)
    with pytest.raises(DataError, match="must name an LMDB database that exists"):
        build_source(data_block(make_data("lmdb", packed["lmdb"], packed["lmdb"])), "TRAIN", 0)


@pytest.mark.parametrize("form", ["webdataset", "lmdb"])
def test_a_file_that_was_cut_off_is_refused(form: str, photos: Path, tmp_path: Path, make_data: MakeData) -> None:
    """A tar between two images, which reads as a shorter tar; a database, whose reader would end by a signal."""
    out = tmp_path / form
    assert data_command(["pack", str(photos), str(out), "--to", form]) == 0
    if form == "lmdb":
        file = out / "data.mdb"
        os.truncate(file, file.stat().st_size // 2)
    else:
        (file,) = out.glob("*.tar")
        with tarfile.open(file) as opened:
            os.truncate(file, opened.getmembers()[4].offset)
        for index in out.glob(".*.npz"):
            index.unlink()
    with pytest.raises(DataError, match="it was cut off"):
        build_source(data_block(make_data(form, out)), "TRAIN", 0)


@pytest.mark.parametrize("names", [("a", "b"), ()])
def test_arrow_files_say_their_classes_if_there_are_any(names: tuple[str, ...], tmp_path: Path) -> None:
    packing._finish(tmp_path, "arrow", SimpleNamespace(class_names=names), 2)  # type: ignore[arg-type]
    labels = {"label": {"names": ["a", "b"], "_type": "ClassLabel"}} if names else {}
    features = json.loads((tmp_path / "dataset_info.json").read_text())["features"]
    assert features == {"image": {"_type": "Image"}, **labels}
    state = json.loads((tmp_path / "state.json").read_text())
    assert [file["filename"] for file in state["_data_files"]] == [
        "data-00000-of-00002.arrow",
        "data-00001-of-00002.arrow",
    ]
    assert (state["_output_all_columns"], state["_format_type"]) == (False, None)
