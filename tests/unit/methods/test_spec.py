"""The tables of docs/methods.md: what is written of a method, and what was measured of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.written_pages import require_written_again
from vissl_zero.methods import spec
from vissl_zero.methods.spec import table, with_table


def test_the_table_of_methods_is_up_to_date() -> None:
    page = (Path(__file__).parents[3] / "docs" / "methods.md").read_text()
    assert page == with_table(page), "run: python -m vissl_zero.methods.spec"


def test_the_page_is_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require_written_again("vissl_zero.methods.spec", {"methods.md": "](https://arxiv.org"}, tmp_path, monkeypatch)


KNN = {"untrained": 1, "trained": 2, "raw_pixels": 3}
SEGMENTS = {"miou_untrained": 4, "miou_trained": 5}


@pytest.mark.parametrize(
    ("figures", "reached"),
    [
        (KNN, "1 -> 2 % (3 %)"),
        (SEGMENTS, "mIoU: 4 -> 5 %"),
        (KNN | SEGMENTS, "mIoU: 4 -> 5 %"),
        ({"cifar10": {}}, "not measured"),
        (None, "not measured"),
    ],
)
def test_a_row_says_what_was_measured(
    figures: dict[str, Any] | None, reached: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = {} if figures is None else {"swav": figures}
    (tmp_path / "figures.json").write_text(json.dumps(measured))
    monkeypatch.setattr(spec, "FIGURES", tmp_path / "figures.json")
    (row,) = [line for line in table().split("\n") if line.startswith("| `swav` |")]
    _, name, title, losses, views, *_, recipe, last, _ = (cell.strip() for cell in row.split("|"))
    assert (name, title) == ("`swav`", "[SwAV](https://arxiv.org/abs/2006.09882)")
    assert (losses, recipe, last) == ("`swav_loss`", "`digits/swav`", reached) and "crops" in views
