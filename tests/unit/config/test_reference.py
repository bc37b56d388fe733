"""docs/keys.md is what the code says, and every key has its sentence."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from vissl_zero.config.reference import keys_of, reference, with_differences
from vissl_zero.config.run_config import RunConfig
from vissl_zero.methods.spec import with_table


def test_the_page_is_up_to_date():
    page = Path(__file__).parents[3] / "docs" / "keys.md"
    assert page.read_text() == reference(), "run: python -m vissl_zero.config.reference"


def test_every_key_has_a_sentence():
    def silent(block: Any, path: str) -> list[str]:
        found = []
        for key in keys_of(type(block)):
            if not key.sentence.endswith("."):
                found.append(f"{path}.{key.name}")
            found += silent(getattr(block, key.name), f"{path}.{key.name}")
        return found

    assert silent(RunConfig(), "config") == []


def test_the_table_of_methods_is_up_to_date():
    page = (Path(__file__).parents[3] / "docs" / "methods.md").read_text()
    assert page == with_table(page), "run: python -m vissl_zero.methods.spec"


def test_the_table_of_differences_from_vissl_is_up_to_date():
    page = (Path(__file__).parents[3] / "docs" / "configuration.md").read_text()
    assert page == with_differences(page), "run: python -m vissl_zero.config.reference"
    assert "Convolutions begin as torchvision's" in page


@pytest.mark.parametrize(
    ("module", "pages"),
    [  # and what a row of the written table holds, which is left out first
        ("config.reference", {"keys.md": "| `", "configuration.md": "| any value |"}),
        ("methods.spec", {"methods.md": "](https://arxiv.org"}),
    ],
)
@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
def test_the_pages_are_written_again(
    module: str, pages: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    docs = Path(__file__).parents[3] / "docs"
    (tmp_path / "docs").mkdir()
    for page, row in pages.items():
        kept = [line for line in (docs / page).read_text().split("\n") if not (line.startswith("| `") and row in line)]
        (tmp_path / "docs" / page).write_text("\n".join(kept))
    monkeypatch.chdir(tmp_path)
    runpy.run_module(f"vissl_zero.{module}", run_name="__main__")
    for page in pages:
        assert (tmp_path / "docs" / page).read_text() == (docs / page).read_text()
