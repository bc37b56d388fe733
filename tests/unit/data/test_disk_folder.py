from __future__ import annotations

import os
import pickle
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.blocks import data_block
from tests.unit.data.conftest import MakeData, save_image
from vissl_zero.config.blocks.data import Split
from vissl_zero.config.run_config import RunConfig
from vissl_zero.data import slow_work
from vissl_zero.data.source import Source, build_eval_sources, build_source, left_out, left_out_of_run
from vissl_zero.data.sources import disk
from vissl_zero.errors import DataError
from vissl_zero.resolve.data_plan import paths
from vissl_zero.resolve.image_files import image_files


def names(source: Source, root: Path) -> list[str]:
    return [str(Path(source.name(i)).relative_to(root)) for i in range(len(source))]


def labels(source: Source) -> list[int | None]:
    return [source.label(i) for i in range(len(source))]


def test_class_folders_in_order_of_name(make_data: MakeData, photos: Path) -> None:
    source = build_source(data_block(make_data("disk_folder", photos)), "TRAIN", 0)
    assert names(source, photos) == [f"a/{i}.jpg" for i in range(6)] + [f"b/{i}.png" for i in range(5)]
    assert source.class_names == ("a", "b")
    assert labels(source) == [0] * 6 + [1] * 5
    image = source.image(0)
    assert (image.mode, image.size) == ("RGB", (16, 16))


def test_images_deeper_inside_a_class_folder_count_to_it(make_data: MakeData, photos: Path) -> None:
    save_image(photos / "a/2019/beach.JPG", 7)
    source = build_source(data_block(make_data("disk_folder", photos)), "TRAIN", 0)
    assert names(source, photos)[:7] == [
        "a/0.jpg",
        "a/1.jpg",
        "a/2.jpg",
        "a/2019/beach.JPG",
        "a/3.jpg",
        "a/4.jpg",
        "a/5.jpg",
    ]
    assert labels(source) == [0] * 7 + [1] * 5


def test_long_listings_are_made_in_parts_and_say_how_far_they_are(
    make_data: MakeData, photos: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = build_source(data_block(make_data("disk_folder", photos)), "TRAIN", 0)
    assert not caplog.messages
    monkeypatch.setattr(slow_work, "EVERY_S", -1.0)
    for per_part in (4, 11):
        monkeypatch.setattr(disk, "_PER_PART", per_part)
        source = build_source(data_block(make_data("disk_folder", photos)), "TRAIN", 0)
        assert names(source, photos) == names(whole, photos) and labels(source) == labels(whole)
    assert caplog.messages == [f"Listing {photos}: {number} images" for number in (4, 8, 11)]


def test_a_flat_folder_is_unlabeled_with_the_folders_beneath_it(make_data: MakeData, photos: Path) -> None:
    save_image(photos / "loose.png", 8)
    source = build_source(data_block(make_data("disk_folder", photos)), "TRAIN", 0)
    assert len(source) == 12
    assert source.class_names == ()
    assert set(labels(source)) == {None}


def test_one_folder_alone_is_not_a_class(make_data: MakeData, tmp_path: Path) -> None:
    save_image(tmp_path / "all/one.png", 1)
    assert build_source(data_block(make_data("disk_folder", tmp_path)), "TRAIN", 0).class_names == ()


def test_hidden_files_other_files_and_pipes_are_passed_over(make_data: MakeData, photos: Path) -> None:
    save_image(photos / "a/._0.jpg", 1)
    save_image(photos / ".thumbnails/0.jpg", 1)
    (photos / "a/notes.txt").write_text("hello")
    (photos / "empty class").mkdir()
    os.mkfifo(photos / "a/pipe.jpg")
    source = build_source(data_block(make_data("disk_folder", photos)), "TRAIN", 0)
    assert len(source) == 11
    assert source.class_names == ("a", "b")


def test_several_paths_are_joined_and_share_classes(make_data: MakeData, photos: Path, tmp_path: Path) -> None:
    save_image(tmp_path / "more/b/9.png", 9)
    save_image(tmp_path / "more/c/9.png", 9)
    source = build_source(data_block(make_data("disk_folder", photos, tmp_path / "more")), "TRAIN", 0)
    assert source.class_names == ("a", "b", "c")
    assert labels(source) == [0] * 6 + [1] * 5 + [1, 2]


def test_a_class_has_one_number_in_train_and_test(make_data: MakeData, photos: Path, tmp_path: Path) -> None:
    save_image(tmp_path / "test/b/9.png", 9)
    data = make_data("disk_folder", photos, TEST={"DATA_PATHS": [str(tmp_path / "test")]})
    _, test = build_eval_sources(data_block(data), 0)
    assert test is not None
    assert labels(test) == [1]
    train = build_source(data_block(data), "TRAIN", 0)
    (note,) = left_out_of_run(data_block(data), train, 0)
    assert note.startswith("config.DATA.TEST.DATA_PATHS has no images of 1 of TRAIN's 2 classes: a. ")
    save_image(tmp_path / "test/B/9.png", 9)
    with pytest.raises(DataError, match=r"DATA.TEST.DATA_PATHS has class folders that DATA.TRAIN does not have: B\. "):
        build_eval_sources(data_block(data), 0)


def test_images_of_test_outside_of_classes_are_noted(make_data: MakeData, photos: Path, tmp_path: Path) -> None:
    save_image(tmp_path / "test/9.png", 9)
    data = data_block(make_data("disk_folder", photos, TEST={"DATA_PATHS": [str(tmp_path / "test")]}))
    (note,) = left_out_of_run(data, build_source(data, "TRAIN", 0), 0)
    assert "images outside of class folders, so no accuracy on TEST is measured" in note


def test_an_empty_path_is_not_the_working_directory(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(photos)
    cfg = RunConfig()
    cfg.DATA.TRAIN = Split(DATA_SOURCES=["disk_folder"], DATA_PATHS=[""])
    (problem,) = paths(cfg)
    assert str(problem).startswith("config.DATA.TRAIN.DATA_PATHS: must name a folder with images (got '').")
    cfg.DATA.TRAIN.DATA_PATHS = ["."]
    assert paths(cfg) == []


def test_a_copy_for_a_worker_is_the_same_source(make_data: MakeData, photos: Path) -> None:
    # A name that is not UTF-8 must survive too.
    save_image(photos / "a/x.png", 3).rename(os.fsdecode(os.fsencode(photos) + b"/a/\xff.png"))
    source = build_source(data_block(make_data("disk_folder", photos)), "TRAIN", 0)
    copy: Any = pickle.loads(pickle.dumps(source))
    assert [copy.name(i) for i in range(len(copy))] == [source.name(i) for i in range(len(source))]
    assert copy.image(6).size == (16, 16)


def test_no_path_is_refused(make_data: MakeData) -> None:
    with pytest.raises(DataError, match="disk_folder needs a folder"):
        build_source(data_block(make_data("disk_folder")), "TRAIN", 0)


def test_a_missing_path_shows_how_far_it_exists(make_data: MakeData, tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        build_source(data_block(make_data("disk_folder", tmp_path / "no/such")), "TRAIN", 0)
    assert str(caught.value) == (
        f"The data path {tmp_path}/no/such does not exist ({tmp_path} does). Correct config.DATA.TRAIN.DATA_PATHS."
    )


def test_a_single_folder_is_refused_as_classes(make_data: MakeData, photos: Path) -> None:
    shutil.rmtree(photos / "b")
    data = make_data("disk_folder", photos, LABEL_SOURCES=["disk_folder"])
    with pytest.raises(DataError, match="has no class folders, or a single one, which is no class"):
        build_source(data_block(data), "TRAIN", 0)


def test_a_file_as_path_is_refused(make_data: MakeData, photos: Path) -> None:
    with pytest.raises(
        DataError, match=r"a/0.jpg is a file, not a folder or files of one kind: \.csv, \.jsonl, .*\. Correct"
    ):
        build_source(data_block(make_data("disk_folder", photos / "a/0.jpg")), "TRAIN", 0)


def test_a_folder_without_images_says_what_it_does_hold(make_data: MakeData, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"holds no image files \(\.jpg, .*\)\. Correct"):
        build_source(data_block(make_data("disk_folder", tmp_path)), "TRAIN", 0)
    for index in range(3):
        (tmp_path / f"{index}.HEIC").touch()
    with pytest.raises(DataError, match=r"holds no image files .* It does hold 3 \.heic files\."):
        build_source(data_block(make_data("disk_folder", tmp_path)), "TRAIN", 0)


def test_links_to_folders_above_end(make_data: MakeData, photos: Path) -> None:
    for name in ("one", "two"):  # two loops: a walk that only counts depth takes 2^32 steps
        (photos / "a" / name).symlink_to(photos / "a", target_is_directory=True)
        (photos / "b" / name).symlink_to(photos, target_is_directory=True)
    source = build_source(data_block(make_data("disk_folder", photos)), "TRAIN", 0)
    names = [source.name(index) for index in range(len(source))]
    assert len(names) == 6 + 5 and source.class_names == ("a", "b")
    assert sorted(names) == sorted(image_files(photos))
    (photos / "c").mkdir()
    for name in ("one", "two"):
        (photos / "c" / name).symlink_to(photos / "c", target_is_directory=True)
    assert list(image_files(photos / "c")) == []


def test_folders_of_a_class_may_be_32_deep(make_data: MakeData, photos: Path) -> None:
    folder = photos / "a" / "/".join("f" * 32)
    folder.mkdir(parents=True)
    (folder / "1.png").touch()
    assert len(build_source(data_block(make_data("disk_folder", photos)), "TRAIN", 0)) == 6 + 5 + 1
    (folder / "g").mkdir()
    with pytest.raises(DataError, match="more than 32 folders deep"):
        build_source(data_block(make_data("disk_folder", photos)), "TRAIN", 0)


def test_a_class_may_be_a_link_to_another(make_data: MakeData, photos: Path) -> None:
    (photos / "again").symlink_to(photos / "a", target_is_directory=True)
    source = build_source(data_block(make_data("disk_folder", photos)), "TRAIN", 0)
    assert source.class_names == ("a", "again", "b") and len(source) == 6 + 6 + 5


def test_pictures_that_are_not_read_are_named_and_so_are_folders_without_images(
    make_data: MakeData, photos: Path, tmp_path: Path
) -> None:
    data = data_block(make_data("disk_folder", photos))
    assert left_out(build_source(data, "TRAIN", 0)) == []
    for name in ("a/1.HEIC", "a/deep/2.heic", "b/3.avif", "b/notes.txt", "b/.hidden.heic"):
        (photos / name).parent.mkdir(exist_ok=True)
        (photos / name).touch()
    (photos / "c").mkdir()
    assert left_out(build_source(replace(data, TRAIN=replace(data.TRAIN, DATA_LIMIT=3)), "TRAIN", 0)) == [
        f"3 files in {photos} are left out: .heic 2, .avif 1 (convert them to JPEG or PNG).",
        "1 folder has no images, and is no class: c.",
    ]
    (tmp_path / "phone").mkdir()
    (tmp_path / "phone/1.heic").touch()
    sentence = "It does hold 1 .heic file. Convert them to JPEG or PNG."
    with pytest.raises(DataError) as caught:
        build_source(data_block(make_data("disk_folder", tmp_path / "phone")), "TRAIN", 0)
    assert sentence in str(caught.value)
    split = Split(DATA_SOURCES=["disk_folder"], DATA_PATHS=[str(tmp_path / "phone")])
    (problem,) = paths(RunConfig(DATA=replace(data, TRAIN=split, TEST=Split())), None)  # type: ignore[arg-type]
    assert problem.fix.endswith(sentence)


def test_what_a_folder_of_both_splits_leaves_out_is_said_once(make_data: MakeData, photos: Path) -> None:
    (photos / "a/phone.heic").write_bytes(b"heic")
    data = data_block(make_data("disk_folder", photos))
    assert data.TEST.DATA_PATHS == data.TRAIN.DATA_PATHS
    (note,) = left_out_of_run(data, build_source(data, "TRAIN", 0), 0)
    assert ".heic" in note
