"""What goes wrong with a disk while parameters and optimizer state rest on it: said at once, never trained on."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import vissl_zero
from tests.ranks import run_on_ranks
from vissl_zero.sharding.offload.errors import OffloadError

WIDTH, NUM_BLOCKS = 128, 4


def _build(folder: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_BLOCKS)))
    tier = {"device": "nvme", "nvme_path": folder}
    zero = {"level": 3, "offload_param_config": tier, "offload_optimizer_config": tier}
    return vissl_zero.initialize(model, {"type": "AdamW", "lr": 1e-2}, zero)


def _step(model: nn.Module, optimizer: Any, seed: int) -> None:
    rows = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))
    optimizer.backward(model(rows).square().mean())
    optimizer.step()
    optimizer.zero_grad()


def _told(call: Callable[[], object]) -> str:
    try:
        call()
    except OffloadError as error:
        return str(error)
    return ""


def _start(folder: str) -> str:
    return _told(lambda: _build(folder)[1].close())


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a small file system needs root")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.timeout(60)
def test_a_path_that_cannot_be_used_is_refused_before_anything_is_built(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    reasons = {"missing": "does not exist", "file": "is not a folder", "link": "is a link"}
    for name, reason in reasons.items():
        told = run_on_ranks(2, _start, str(tmp_path / name))
        assert all(f"nvme_path: {tmp_path / name} {reason}." in message for message in told)
    assert list((tmp_path / "real").iterdir()) == []


@pytest.mark.timeout(60)
def test_a_full_disk_is_found_at_the_start(small_disk: Path) -> None:
    (small_disk / "other").write_bytes(bytes(3 * 2**20 + 2**19))
    assert "the disk has 0.00 GiB left. Free some" in run_on_ranks(1, _start, str(small_disk))[0]
    assert [path.name for path in small_disk.iterdir()] == ["other"], "no files of a run that never began"


def _fill_in_mid_run(folder: str, checkpoint: str) -> tuple[str, str, float]:
    """What is told when the disk fills up, and later; distance of a run resumed from the checkpoint to one unharmed."""
    model, optimizer = _build(folder)
    _step(model, optimizer, 0)
    torch.save(optimizer.state_dict(), checkpoint)
    _step(model, optimizer, 1)
    expected = optimizer.full_state()
    path = next(Path(folder).rglob("gradients"))
    # Take the blocks away that were reserved, as a file system does that writes elsewhere than it has reserved.
    subprocess.run(["fallocate", "--punch-hole", "-l", str(path.stat().st_size), str(path)], check=True)
    (Path(folder) / "other").write_bytes(bytes(os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize))
    first = _told(lambda: [_step(model, optimizer, seed) for seed in range(2, 4)])
    second = _told(lambda: _step(model, optimizer, 4))
    optimizer.close()
    (Path(folder) / "other").unlink()
    model, optimizer = _build(folder)
    optimizer.load_state_dict(torch.load(checkpoint))
    _step(model, optimizer, 1)
    found = optimizer.full_state()
    optimizer.close()
    return first, second, max(float((found[name] - expected[name]).abs().max()) for name in expected)


@pytest.mark.timeout(100)
def test_a_disk_that_fills_up_stops_the_run_and_the_last_checkpoint_goes_on(small_disk: Path, tmp_path: Path) -> None:
    first, second, distance = run_on_ranks(1, _fill_in_mid_run, str(small_disk), str(tmp_path / "state.pt"))[0]
    assert "gradients: cannot write: No space left on device. Go on from the last checkpoint" in first
    assert "Go on from the last checkpoint" in second
    assert distance == 0.0


def _damaged(folder: str, file: str, how: str) -> tuple[str, str]:
    model, optimizer = _build(folder)
    _step(model, optimizer, 0)
    path = next(Path(folder).rglob(file))
    if how == "cut":
        os.truncate(path, path.stat().st_size // 2)
    else:
        with path.open("r+b") as stored:
            stored.seek(path.stat().st_size // 2)
            stored.write(b"\x01\x02\x03")
    told = _told(lambda: _step(model, optimizer, 1)), _told(lambda: _step(model, optimizer, 2))
    optimizer.close()
    return told


@pytest.mark.timeout(100)
@pytest.mark.parametrize("file", ["parameters", "optimizer.state"])
def test_a_file_that_was_cut_or_altered_is_never_trained_on(file: str, tmp_path: Path) -> None:
    for how in ("cut", "altered"):
        for told in run_on_ranks(1, _damaged, str(tmp_path), file, how)[0]:
            assert "Go on from the last checkpoint" in told
    assert list(tmp_path.iterdir()) == []
