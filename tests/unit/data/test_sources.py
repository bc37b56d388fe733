from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression

from tests.blocks import data_block
from tests.unit.data.conftest import MakeData
from vissl_zero.config.run_config import RunConfig
from vissl_zero.data.labels import ordered_classes
from vissl_zero.data.source import (
    Source,
    SourceRequest,
    Subset,
    _lacking,
    array_of,
    build_eval_sources,
    build_source,
    checks_of,
    described_splits,
    label_matrix,
    masks_of,
    relabel,
    splits_to_read,
)
from vissl_zero.errors import ConfigError, DataError
from vissl_zero.registry import DATA_SOURCES


def gradients(source: Source) -> np.ndarray:
    """Histograms of gradient directions, (N, 12): a hand-made feature that sees orientation and not color."""
    rows = []
    for index in range(len(source)):
        dy, dx = np.gradient(np.asarray(source.image(index).convert("L"), dtype=float))
        angle = np.arctan2(dy, dx) % np.pi
        rows.append(np.histogram(angle, bins=12, range=(0, np.pi), weights=np.hypot(dx, dy))[0])
    features = np.array(rows)
    return features / features.sum(1, keepdims=True)


def test_digits_are_split_as_documented(make_data: MakeData) -> None:
    train, test = build_eval_sources(data_block(make_data("digits")), 0)
    assert test is not None
    assert (len(train), len(test)) == (1437, 360)
    data = load_digits()
    assert [train.label(0), test.label(0), test.label(359)] == [data.target[0], data.target[1437], data.target[1796]]
    image = test.image(2)
    assert (image.mode, image.size) == ("RGB", (8, 8))
    assert np.allclose(np.asarray(image)[..., 0], data.images[1439] * 255 / 16, atol=0.5)
    assert (train.name(2), test.name(2)) == ("digit 2", "digit 1439")


def test_programs_read_each_image_once(make_data: MakeData) -> None:
    def read(**keys: Any) -> dict[str, int]:
        sources = splits_to_read(data_block(make_data("digits", **keys)), 0)
        return {split: len(source) for split, source in sources.items()}

    assert read() == {"TRAIN": 1437, "TEST": 360}
    assert read(TEST={"DATA_SOURCES": []}) == {"TRAIN": 1437}
    assert read(TRANSFORMS=[]) == {"TEST": 360}  # both are the same block: TEST's images stood for TRAIN's


def test_synthetic_images_depend_on_seed_split_and_index_alone(make_data: MakeData) -> None:
    data = make_data("synthetic", DATA_LIMIT=20)
    train, test = build_eval_sources(data_block(data), 5)
    again, other = build_source(data_block(data), "TRAIN", 5), build_source(data_block(data), "TRAIN", 6)
    assert test is not None
    assert len(train) == 20
    assert train.image(3).size == (16, 16)
    assert train.image(3) == again.image(3)
    assert train.image(3) not in (other.image(3), test.image(3), train.image(13))


@pytest.mark.parametrize(
    ("source", "split", "index", "name", "mean", "std"),
    [
        ("synthetic", "TRAIN", 0, "synthetic image 0", (110.5, 78.4, 96.1), 50.9),
        ("synthetic", "TEST", 13, "synthetic image 13", (153.7, 100.8, 94.1), 61.3),
        ("digit_scenes", "TRAIN", 0, "scene 0", (69.5, 69.5, 69.5), 47.8),
        ("digit_scenes", "TEST", 13, "scene 13", (75.1, 75.1, 75.1), 50.1),
    ],
)
def test_images_that_are_made_are_those_of_every_other_release(
    source: str, split: str, index: int, name: str, mean: tuple[float, ...], std: float
) -> None:
    made = DATA_SOURCES.get(source).build(SourceRequest(split, limit=20, image_size=32, seed=5))
    pixels = np.asarray(made.image(index)).astype(float)
    assert (made.name(index), len(made), pixels.shape) == (name, 20, (32, 32, 3))
    assert pixels.mean(axis=(0, 1)) == pytest.approx(mean, abs=0.1) and pixels.std() == pytest.approx(std, abs=0.1)


def test_the_classes_of_a_scene_are_those_of_its_digits_strokes() -> None:
    scenes = DATA_SOURCES.get("digit_scenes").build(SourceRequest("TRAIN", limit=20, image_size=32, seed=5))
    mask, gray = np.asarray(scenes.mask(0)), np.asarray(scenes.image(0))[..., 0]
    assert np.bincount(mask.flatten()).tolist() == [853, 52, 0, 0, 0, 0, 61, 0, 0, 58]
    assert gray[mask > 0].min() >= 96 > gray[mask == 0].max()
    assert scenes.label(0) is None and scenes.class_names[6] == "digit 5"


def test_synthetic_classes_can_be_learned(make_data: MakeData) -> None:
    keys = {"DATA_LIMIT": 300, "DEFAULT_GRAY_IMG_SIZE": 32}
    train, test = build_eval_sources(data_block(make_data("synthetic", **keys, TEST=keys)), 0)
    assert test is not None
    labels = [[source.label(i) for i in range(len(source))] for source in (train, test)]
    model = LogisticRegression(C=100, max_iter=1000).fit(gradients(train), labels[0])
    assert model.score(gradients(test), labels[1]) > 0.9
    colors = [[np.asarray(s.image(i)).mean((0, 1)) for i in range(len(s))] for s in (train, test)]
    by_color = LogisticRegression(C=100, max_iter=1000).fit(np.array(colors[0]), labels[0])
    assert by_color.score(np.array(colors[1]), labels[1]) < 0.3


def test_data_limit_draws_from_all_classes_and_always_the_same(make_data: MakeData) -> None:
    whole = build_source(data_block(make_data("digits")), "TRAIN", 0)
    some = build_source(data_block(make_data("digits", DATA_LIMIT=100)), "TRAIN", 0)
    again = build_source(data_block(make_data("digits", DATA_LIMIT=100)), "TRAIN", 77)
    names = [some.name(i) for i in range(100)]
    assert len(some) == len(set(names)) == 100
    assert names == [again.name(i) for i in range(100)]
    assert {some.label(i) for i in range(100)} == set(range(10))
    at = int(names[40].split()[1])
    assert some.image(40) == whole.image(at)
    more = build_source(data_block(make_data("digits", DATA_LIMIT=len(whole) + 1)), "TRAIN", 0)
    assert [more.name(i) for i in range(len(more))] == [whole.name(i) for i in range(len(whole))]
    with pytest.raises(DataError, match="DATA_LIMIT is 0"):
        build_source(data_block(make_data("digits", DATA_LIMIT=0)), "TRAIN", 0)


def test_classes_are_ordered_as_numbers_if_all_are_written_in_plain_digits() -> None:
    assert ordered_classes(["10", "2", "10"]) == ("2", "10")
    assert ordered_classes(["10", "2", "a"]) == ("10", "2", "a")
    assert ordered_classes(["10", "\N{FULLWIDTH DIGIT TWO}"]) == ("10", "\N{FULLWIDTH DIGIT TWO}")


def test_labels_from_a_file(make_data: MakeData, photos: Path, tmp_path: Path) -> None:
    file = tmp_path / "labels.npy"
    np.save(file, [30, 10, 20, 10, 10, 10, 30, 30, 30, 30, 30])
    keys = {"LABEL_SOURCES": ["disk_filelist"], "LABEL_PATHS": [str(file)]}
    data = make_data("disk_folder", photos, **keys, TEST={**keys, "DATA_PATHS": [str(photos / "a")]})
    source = build_source(data_block(data), "TRAIN", 0)
    assert [source.label(i) for i in range(4)] == [2, 0, 1, 0]
    assert source.class_names == ("10", "20", "30")
    np.save(file, np.array([[30], [10], [20]] + [[10]] * 8))  # a column
    assert [build_source(data_block(data), "TRAIN", 0).label(i) for i in range(4)] == [2, 0, 1, 0]
    with pytest.raises(DataError, match=r"labels.npy has 11 labels for 6 images"):
        build_eval_sources(data_block(data), 0)
    np.save(file, [0.5] * 11)
    with pytest.raises(DataError, match="must hold integers"):
        build_source(data_block(data), "TRAIN", 0)
    np.save(file, np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(DataError, match=r"is not a plain \.npy array"):
        build_source(data_block(data), "TRAIN", 0)
    file.unlink()
    with pytest.raises(DataError, match=r"labels.npy does not exist"):
        build_source(data_block(data), "TRAIN", 0)


def test_asking_for_labels_that_are_not_there(make_data: MakeData, photos: Path) -> None:
    labeled = make_data("disk_folder", photos, LABEL_SOURCES=["disk_folder"])
    assert build_source(data_block(labeled), "TRAIN", 0).class_names == ("a", "b")
    flat = make_data("disk_folder", photos / "a", LABEL_SOURCES=["disk_folder"])
    with pytest.raises(DataError, match=r"LABEL_SOURCES asks for labels, but the images have none: .*/a has no class"):
        build_source(data_block(flat), "TRAIN", 0)
    with pytest.raises(ConfigError, match="LABEL_SOURCES: must say"):
        build_source(data_block(make_data("disk_folder", photos, LABEL_SOURCES=["digits"])), "TRAIN", 0)


def test_exactly_one_known_source(make_data: MakeData) -> None:
    with pytest.raises(
        ConfigError, match=r"DATA_SOURCES: must be a known data source \(got 'digit'\).*Did you mean 'dig"
    ):
        build_source(data_block(make_data("digit")), "TRAIN", 0)
    for names in ([], ["digits", "synthetic"]):
        with pytest.raises(ConfigError, match="DATA_SOURCES: must name one data source"):
            build_source(data_block(make_data("digits", DATA_SOURCES=names)), "TRAIN", 0)
    assert build_eval_sources(data_block(make_data("digits", TEST={"DATA_SOURCES": []})), 0)[1] is None


@dataclass
class GreyConfig:
    """Keys of the source below."""

    level: int = 128
    num_images: int = 4


@DATA_SOURCES.register("grey", config=GreyConfig)
class Gray:
    """A user's own source, with keys of its own."""

    class_names = ()

    def __init__(self, request: SourceRequest, level: int, num_images: int):
        self.level, self.num_images, self.size = level, num_images, request.image_size

    def __len__(self) -> int:
        return self.num_images

    def image(self, index: int) -> Image.Image:
        return Image.new("RGB", (self.size, self.size), (self.level,) * 3)

    def label(self, index: int) -> int | None:
        return None

    def name(self, index: int) -> str:
        return f"gray {index}"


def test_a_source_of_ones_own_has_typed_keys(make_data: MakeData) -> None:
    source = build_source(data_block(make_data("grey", SOURCE_PARAMS={"level": 7})), "TRAIN", 0)
    assert len(source) == 4
    assert source.image(0).getpixel((0, 0)) == (7, 7, 7)
    with pytest.raises(ConfigError) as caught:
        build_source(data_block(make_data("grey", SOURCE_PARAMS={"levle": 7, "level": "bright"})), "TRAIN", 0)
    unknown, wrong = map(str, caught.value.problems)
    assert unknown == "config.DATA.TRAIN.SOURCE_PARAMS.levle: is not a key. Did you mean 'level'?"
    assert wrong.startswith("config.DATA.TRAIN.SOURCE_PARAMS.level: ") and "bright" in wrong
    with pytest.raises(ConfigError, match=r"config.DATA.TRAIN.SOURCE_PARAMS: must be empty"):
        build_source(data_block(make_data("digits", SOURCE_PARAMS={"level": 7})), "TRAIN", 0)


def _drawn(limit: int, **sampling: Any) -> tuple[tuple[int, ...], list[int | None]]:
    """Digits that DATA_LIMIT takes: their indices and labels."""
    data = asdict(RunConfig())["DATA"]
    data["TRAIN"] |= {"DATA_SOURCES": ["digits"], "DATA_LIMIT": limit, "DATA_LIMIT_SAMPLING": sampling}
    source = build_source(data_block(data), "TRAIN", 0)
    assert isinstance(source, Subset)
    return source.indices, [source.label(index) for index in range(len(source))]


def test_a_balanced_limit_takes_as_many_of_each_class() -> None:
    indices, labels = _drawn(53, IS_BALANCED=True, SEED=0)
    counts = [labels.count(label) for label in range(10)]
    assert counts == [6, 6, 6, 5, 5, 5, 5, 5, 5, 5] and len(set(indices)) == 53
    assert sorted(map(str, _drawn(10, IS_BALANCED=True)[1])) == [*"0123456789"]
    assert _drawn(53, IS_BALANCED=True, SEED=0)[0] == indices != _drawn(53, IS_BALANCED=True, SEED=1)[0]


@pytest.mark.parametrize("is_balanced", [True, False])
def test_skipped_images_are_in_no_other_run_of_the_seed(is_balanced: bool) -> None:
    first, _ = _drawn(50, IS_BALANCED=is_balanced, SEED=4)
    second, _ = _drawn(50, IS_BALANCED=is_balanced, SEED=4, SKIP_NUM_SAMPLES=50)
    assert len(second) == 50 and not set(first) & set(second)


def test_a_balanced_limit_that_cannot_be_drawn_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"at least the 10 classes"):
        _drawn(9, IS_BALANCED=True)
    with pytest.raises(ConfigError, match=r"needs 143 images of class 2"):
        _drawn(1430, IS_BALANCED=True)
    with pytest.raises(ConfigError, match=r"SKIP_NUM_SAMPLES: must leave"):
        _drawn(1000, SKIP_NUM_SAMPLES=1000)


def test_a_limit_of_all_images_leaves_none_to_skip() -> None:
    """The digits to train on are 1,437."""
    assert len(_drawn(1436)[0]) == len(_drawn(1436, SKIP_NUM_SAMPLES=1)[0]) == 1436
    with pytest.raises(ConfigError, match=r"SKIP_NUM_SAMPLES: must leave DATA_LIMIT \(1437\) of the 1437 images"):
        _drawn(1437, SKIP_NUM_SAMPLES=1)
    with pytest.raises(DataError, match="DATA_LIMIT is 0"):
        _drawn(0)


def test_only_images_with_classes_are_said_to_be_measured_on(make_data: MakeData, photos: Path) -> None:
    data = data_block(make_data("disk_folder", photos, TEST={"DATA_SOURCES": []}))
    config = RunConfig(DATA=data)
    config.NEAREST_NEIGHBOR.USE_KNN = True
    assert described_splits(config, is_labeled=True) == f"disk_folder {photos}; measured on some of them"
    assert described_splits(config, is_labeled=False) == f"disk_folder {photos}"


class _Pairs:
    """A source of masks, arrays and checks, as its numbers."""

    class_names = ("a",)

    def __len__(self) -> int:
        return 4

    def mask(self, index: int) -> str:
        return f"mask {index}"

    def array(self, index: int) -> str:
        return f"array {index}"

    def check(self, index: int) -> str:
        return f"check {index}"


def test_what_a_source_has_of_an_image_is_found_below_its_limits() -> None:
    source: Any = Subset(Subset(_Pairs(), (3, 1, 2)), (2, 0))  # type: ignore[arg-type]
    for find, what in ((masks_of, "mask"), (array_of, "array"), (checks_of, "check")):
        of_index: Any = find(source)
        assert [of_index(index) for index in range(2)] == [f"{what} 2", f"{what} 3"]
        assert find(Subset(cast("Source", object()), (0,))) is None


class _Nothing(_Pairs):
    """Without images."""

    def __len__(self) -> int:
        return 0


def _labels_file(folder: Path, values: Any, name: str = "labels.npy") -> str:
    np.save(folder / name, np.array(values))
    return str(folder / name)


def test_rows_of_labels_are_1_0_or_minus_1(tmp_path: Path) -> None:
    source = cast("Source", _Pairs())
    rows = [[1, 0, -1], [0, 0, 0], [1, 1, 1], [0, -1, 0]]
    labeled = relabel(source, (_labels_file(tmp_path, rows),), ())
    matrix = label_matrix(labeled)
    assert matrix is not None and matrix.tolist() == rows and matrix.dtype == np.int8
    assert labeled.label(0) is None and labeled.class_names == ()
    part = label_matrix(Subset(labeled, (3, 0)))
    assert part is not None and part.tolist() == [rows[3], rows[0]]
    none = label_matrix(_Nothing(), num_classes=3)  # type: ignore[arg-type]
    assert none is not None and none.shape == (0, 3)
    for wrong in (2, -2):
        with pytest.raises(DataError, match=r"labels.npy has rows of labels: each must be 1, 0 or -1"):
            relabel(source, (_labels_file(tmp_path, [*rows[:3], [0, wrong, 0]]),), ())
    with pytest.raises(DataError, match=r"is not a plain .npy array of integers \(it has no 1-d or 2-d array\)"):
        relabel(source, (_labels_file(tmp_path, np.zeros((4, 1, 1), int)),), ())


def test_files_of_labels_follow_each_other_and_are_of_one_kind(tmp_path: Path) -> None:
    source = cast("Source", _Pairs())
    first, second = _labels_file(tmp_path, [7, 3], "1.npy"), _labels_file(tmp_path, [3, 5], "2.npy")
    labeled = relabel(source, (first, second), ())
    assert labeled.class_names == ("3", "5", "7") and [labeled.label(index) for index in range(4)] == [2, 0, 0, 1]
    labeled = relabel(source, (first, second), ("7", "5", "3", "1"))  # TRAIN's
    assert [labeled.label(index) for index in range(4)] == [0, 2, 2, 1]
    with pytest.raises(DataError, match=r"1\.npy, .*3\.npy must all have as many labels per image"):
        relabel(source, (first, _labels_file(tmp_path, [[1, 0], [0, 1]], "3.npy")), ())
    with pytest.raises(DataError, match=r"1\.npy has 2 labels for 4 images"):
        relabel(source, (first,), ())
    many = _labels_file(tmp_path, [11, 12, 3, 5], "4.npy")
    with pytest.raises(DataError, match=r"labels that DATA\.TRAIN does not have: 11, 12\.$"):
        relabel(source, (many,), ("3", "5"))


@pytest.mark.parametrize(("count", "dots"), [(10, ""), (11, ", ...")])
def test_of_many_classes_without_images_ten_are_named(count: int, dots: str) -> None:
    class Whole:
        class_names = tuple(f"c{number}" for number in range(count + 1))

        def __len__(self) -> int:
            return 2

        def label(self, index: int) -> int:
            return count

    (sentence,) = _lacking(cast("Source", Whole()))
    named = ", ".join(f"c{number}" for number in range(10)) + dots
    assert f"no images of {count} of TRAIN's {count + 1} classes: {named}. Figures" in sentence
