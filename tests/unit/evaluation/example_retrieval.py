"""Small data sets to find images in, in the folders of VISSL's."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tests.unit.evaluation.example_run import make_config


def _photo(path: Path, place: int, number: int) -> None:
    """A picture of one of a few places, with its own noise, proportions and size."""
    path.parent.mkdir(parents=True, exist_ok=True)
    random, scene = np.random.default_rng([place, number]), np.random.default_rng(place)
    width, height = (40, 30) if number % 2 else (30, 36 + number % 5)
    pixels = np.array(Image.fromarray(scene.integers(0, 255, (5, 5, 3), dtype=np.uint8)).resize((width, height)), float)
    pixels += random.normal(0, 55, pixels.shape)
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(path, quality=95)


def make_revisited(root: Path, name: str, num_places: int = 4, num_each: int = 6) -> None:
    """``gnd_<name>.pkl`` and jpg/: two easy, two hard, one junk image of each place, and one query."""
    stems = [f"p{place}_{number}" for place in range(num_places) for number in range(num_each)]
    for place in range(num_places):
        for number in range(num_each + 1):
            stem = f"q{place}" if number == num_each else f"p{place}_{number}"
            _photo(root / name / "jpg" / f"{stem}.jpg", place + 10 * (name == "rparis6k"), number)
    gnd = [
        {
            "bbx": [2.0, 3.0, 25.5, 29.0],
            "easy": [place * num_each, place * num_each + 1],
            "hard": np.array([place * num_each + 2, place * num_each + 3]),
            "junk": [place * num_each + 4],
        }
        for place in range(num_places)
    ]
    lists = {"imlist": stems, "qimlist": [f"q{place}" for place in range(num_places)], "gnd": gnd}
    (root / name / f"gnd_{name}.pkl").write_bytes(pickle.dumps(lists))


def make_oxford(root: Path, name: str) -> None:
    """The same places as ``make_revisited``'s, as Oxford's lists have them; the queries are in the database."""
    make_revisited(root, name)
    lab = root / name / "lab"
    lab.mkdir()
    for place in range(4):
        (lab / f"place_{place}_query.txt").write_text(f"oxc1_q{place} 2 3 25.5 29\n")
        for kind, numbers in (("ok", (0, 1)), ("good", (2, 3)), ("junk", (4,))):
            (lab / f"place_{place}_{kind}.txt").write_text("".join(f"p{place}_{number}\n" for number in numbers))


def make_copydays(root: Path) -> None:
    """Four originals, two distractors, and changed copies to ask for; a folder ``train`` to whiten by."""
    folder = root / "copydays"
    for place in range(4):
        _photo(folder / "database_and_distractors" / f"original_{200000 + 100 * place}.jpg", place, 0)
        _photo(folder / "database" / f"original_{200000 + 100 * place}.jpg", place, 0)
        for number, change in enumerate(("original", "strong", "jpegqual_3", "jpegqual_30", "crops_10")):
            _photo(folder / "queries" / f"{change}_{200000 + 100 * place + number}.jpg", place, number)
        _photo(folder / "train" / f"t{place}.jpg", place + 20, 0)
        _photo(folder / "train" / f"u{place}.jpg", place + 30, 1)
    for number in range(2):
        _photo(folder / "database_and_distractors" / f"distractor_{number}.jpg", 50 + number, 0)


def retrieval_config(root: Path, **options: Any) -> dict[str, Any]:
    """A run of instance_retrieval_test as resolved; ``options``: keys of IMG_RETRIEVAL."""
    config = make_config(USE_KNN=False)
    config["TEST_ONLY"], config["PROGRAM"] = True, "instance_retrieval_test"
    config["DATA"]["TEST"] |= {"DATA_SOURCES": []}
    config["MODEL"]["FEATURE_EVAL_SETTINGS"] |= {
        "EVAL_MODE_ON": True,
        "FREEZE_TRUNK_ONLY": True,
        "EXTRACT_TRUNK_FEATURES_ONLY": True,
        "SHOULD_FLATTEN_FEATS": False,
        "LINEAR_EVAL_FEAT_POOL_OPS_MAP": [["res3", ["Identity", []]]],
    }
    config["IMG_RETRIEVAL"] |= {"DATASET_PATH": str(root), "RESIZE_IMG": 32, "N_PCA": 8, **options}
    return config
