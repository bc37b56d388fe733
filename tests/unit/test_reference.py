"""docs/keys.md is what the code says, and every key has its sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.written_pages import require_written_again
from vissl_zero.config.reference import keys_of, reference, with_differences
from vissl_zero.config.run_config import RunConfig


def test_the_page_is_up_to_date():
    page = Path(__file__).parents[2] / "docs" / "keys.md"
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


def test_the_table_of_differences_from_vissl_is_up_to_date():
    page = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text()
    assert page == with_differences(page), "run: python -m vissl_zero.config.reference"
    assert "Convolutions begin as torchvision's" in page


def test_the_pages_are_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {"keys.md": "| `", "configuration.md": "| any value |"}
    require_written_again("vissl_zero.config.reference", rows, tmp_path, monkeypatch)
