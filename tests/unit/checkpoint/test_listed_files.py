"""Files that a checkpoint lists: only those beside it are read."""

from __future__ import annotations

from pathlib import Path

import pytest

from vissl_zero.checkpoint.foreign_layouts import _beside
from vissl_zero.errors import CheckpointError


@pytest.mark.parametrize("name", ["shard0.torch", "/on/another/machine/shard0.torch"])
def test_the_last_part_of_a_name_is_looked_for(name: str, tmp_path: Path) -> None:
    (tmp_path / "shard0.torch").touch()
    assert _beside(tmp_path / "list.torch", name, tmp_path) == tmp_path / "shard0.torch"


@pytest.mark.parametrize(
    ("name", "refusal"),
    [
        ("", "leads out of"),
        (".", "leads out of"),
        ("..", "leads out of"),
        ("/a/..", "leads out of"),
        ("../shard0.torch", "leads out of"),
        ("below/shard0.torch", "leads out of"),
        ("shard0.torch\0", "leads out of"),
        ("link.torch", "is a link"),
        ("gone.torch", "and there is no"),
    ],
)
def test_any_other_is_refused(name: str, refusal: str, tmp_path: Path) -> None:
    (tmp_path / "shard0.torch").touch()
    (tmp_path / "link.torch").symlink_to(tmp_path / "shard0.torch")
    with pytest.raises(CheckpointError, match=refusal):
        _beside(tmp_path / "list.torch", name, tmp_path)
