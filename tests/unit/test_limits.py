"""SECURITY.md says how much is read of a file; here its table meets the code's limits."""

from __future__ import annotations

from pathlib import Path

import pytest

from vissl_zero.checkpoint import adapter_folder, folder, foreign_layouts, library_folder, shard_file, torch_file
from vissl_zero.config import catalog, expansion, recipes
from vissl_zero.config.blocks.data import Data
from vissl_zero.data import decode
from vissl_zero.data.sources import packed
from vissl_zero.resolve import components

MIB = 2**20
ROWS: dict[str, tuple[int, ...]] = {
    "recipe": (
        *(recipes._MAX_BYTES // MIB, recipes._MAX_DEPTH, recipes._MAX_VALUES, recipes._MAX_DIGITS),
        expansion.MOST_CHARACTERS,
    ),
    "dataset catalog": (catalog._MAX_BYTES // MIB,),
    "image": (decode._MAX_FILE_BYTES // 2**30, decode.MAX_PIXELS, decode.MAX_SCANS, decode.MAX_SCANNED),
    "label in a tar": (packed._MOST_JSON // MIB,),
    "manifest of a checkpoint": (folder._MAX_JSON_BYTES // MIB, folder._MAX_DEPTH),
    "header of a `.safetensors` file": (shard_file._MAX_HEADER_BYTES, shard_file._MAX_DIMS),
    "pickle in a `.torch`, `.pt` or `.pth` file": (torch_file._MAX_PICKLE_BYTES // MIB, torch_file._MAX_TUPLE),
    "VISSL's list of shards": (foreign_layouts._MOST_SHARDS,),
    "index or configuration of a library's model": (library_folder._MAX_BYTES // MIB,),
    "`adapter_config.json`": (adapter_folder._MAX_BYTES // MIB,),
}


def _table() -> dict[str, list[int]]:
    page = (Path(__file__).parents[2] / "SECURITY.md").read_text()
    lines = page.partition("| file | at most |\n| --- | --- |\n")[2].partition("\n\n")[0].splitlines()
    cells = (line.strip("| ").split(" | ") for line in lines)
    words = {name: limits.replace(",", "").split() for name, limits in cells}
    return {name: [int(word) for word in limits if word.isdigit()] for name, limits in words.items()}


@pytest.mark.parametrize("file", ROWS)
def test_the_page_has_the_limits_of_the_code(file: str) -> None:
    assert _table()[file] == [*ROWS[file]]


def test_the_page_has_a_limit_of_each_file() -> None:
    assert [*_table()] == [*ROWS]


def test_limits_that_are_stated_twice_are_the_same() -> None:
    assert components._MAX_MANIFEST_BYTES == folder._MAX_JSON_BYTES
    assert Data().MAX_PIXELS == decode.MAX_PIXELS
