"""What goes wrong with a disk while parameters or optimizer state rest on it: said at once, never trained on.

Each fault is tried on either tier alone or in a file of either. What ``kill -9`` leaves is in
``tests/unit/sharding/offload/test_streamed_optimizer.py``.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import vissl_zero
from tests.ranks import run_on_ranks
from vissl_zero.sharding.offload.block_file import OffloadError

WIDTH, NUM_BLOCKS = 128, 4
TIERS = ("offload_param_config", "offload_optimizer_config")
each_tier = pytest.mark.parametrize("tier", TIERS)


def _build(folder: str, tiers: Sequence[str] = TIERS) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_BLOCKS)))
    zero = {"level": 3} | {tier: {"device": "nvme", "nvme_path": folder} for tier in tiers}
    return vissl_zero.initialize(model, {"type": "AdamW", "lr": 1e-2}, zero)


def _step(model: nn.Module, optimizer: Any, seed: int) -> None:
    rows = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))
    optimizer.backward(model(rows).square().mean())
    optimizer.step()
    optimizer.zero_grad()


def _stated(call: Callable[[], object]) -> str:
    try:
        call()
    except OffloadError as error:
        return str(error)
    return ""


def _start(folder: str, tier: str) -> str:
    return _stated(lambda: _build(folder, [tier])[1].close())


@contextmanager
def _bound_by_permissions() -> Iterator[None]:
    """Without the right that lets root write anywhere (CAP_DAC_OVERRIDE, bit 1 of capabilities(7))."""
    libc = ctypes.CDLL(None, use_errno=True)
    header, before = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()  # effective, permitted, ... twice
    assert libc.capget(header, before) == 0
    without = (ctypes.c_uint32 * 6)(before[0] & ~2, *before[1:])
    assert libc.capset(header, without) == 0
    try:
        yield
    finally:
        assert libc.capset(header, before) == 0


def _start_bound(folder: str, tier: str) -> str:
    with _bound_by_permissions():
        return _start(folder, tier)


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
@each_tier
def test_a_path_that_cannot_be_used_is_refused_before_anything_is_built(tier: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    reasons = {"missing": "does not exist", "file": "is not a folder", "link": "is a link"}
    for name, reason in reasons.items():
        told = run_on_ranks(2, _start, str(tmp_path / name), tier)
        assert all(f"nvme_path: {tmp_path / name} {reason}." in message for message in told)
    assert list((tmp_path / "real").iterdir()) == []


@pytest.mark.timeout(60)
@each_tier
def test_a_folder_that_cannot_be_written_is_refused(tier: str, small_disk: Path) -> None:
    small_disk.chmod(0o555)
    told = run_on_ranks(2, _start_bound, str(small_disk), tier)
    assert all(f"nvme_path: {small_disk} is not writable by this user." in message for message in told)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    told = run_on_ranks(2, _start, str(small_disk), tier)
    assert all(f"nvme_path: {small_disk} is on a file system that is read only." in message for message in told)
    assert list(small_disk.iterdir()) == []


@pytest.mark.timeout(60)
@each_tier
def test_a_full_disk_is_found_at_the_start(tier: str, small_disk: Path) -> None:
    (small_disk / "other").write_bytes(bytes(3 * 2**20 + 2**19))
    assert " MiB left. Free some" in run_on_ranks(1, _start, str(small_disk), tier)[0]
    assert [path.name for path in small_disk.iterdir()] == ["other"], "no files of a run that never began"


def _fill_in_mid_run(folder: str, file: str, num_steps: int, checkpoint: str) -> tuple[str, str, float]:
    """What is told when the disk fills up, and later; distance of a run resumed from the checkpoint to one unharmed."""
    model, optimizer = _build(folder)
    for seed in range(num_steps):
        _step(model, optimizer, seed)
    torch.save(optimizer.state_dict(), checkpoint)
    path = next(Path(folder).rglob(file))
    # Take the blocks away that were reserved, as a file system does that writes elsewhere than it has reserved.
    subprocess.run(["fallocate", "--punch-hole", "-l", str(path.stat().st_size), str(path)], check=True)
    (Path(folder) / "other").write_bytes(bytes(os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize))
    first = _stated(lambda: [_step(model, optimizer, num_steps + index) for index in range(2)])
    second = _stated(lambda: _step(model, optimizer, 9))
    optimizer.close()
    (Path(folder) / "other").unlink()
    resumed = _trained(folder, range(num_steps, 3), checkpoint)
    unharmed = _trained(folder, range(3), "")
    return first, second, max(float((resumed[name] - unharmed[name]).abs().max()) for name in unharmed)


def _trained(folder: str, seeds: Sequence[int], checkpoint: str) -> dict[str, torch.Tensor]:
    model, optimizer = _build(folder)
    if checkpoint:
        optimizer.load_state_dict(torch.load(checkpoint))
    for seed in seeds:
        _step(model, optimizer, seed)
    found: dict[str, torch.Tensor] = optimizer.full_state()
    optimizer.close()
    return found


@pytest.mark.timeout(100)
@pytest.mark.parametrize(("file", "num_steps"), [("gradients", 1), ("optimizer.state", 0)])  # no data in it just then
def test_a_disk_that_fills_up_stops_the_run_and_the_last_checkpoint_goes_on(
    file: str, num_steps: int, small_disk: Path, tmp_path: Path
) -> None:
    arguments = str(small_disk), file, num_steps, str(tmp_path / "state.pt")
    first, second, distance = run_on_ranks(1, _fill_in_mid_run, *arguments)[0]
    assert f"{file}: cannot write: No space left on device. Resume from the last checkpoint" in first
    assert "Resume from the last checkpoint" in second
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
    told = _stated(lambda: _step(model, optimizer, 1)), _stated(lambda: _step(model, optimizer, 2))
    optimizer.close()
    return told


@pytest.mark.timeout(100)
@pytest.mark.parametrize("file", ["parameters", "optimizer.state"])
def test_a_file_that_was_cut_or_altered_is_never_trained_on(file: str, tmp_path: Path) -> None:
    for how in ("cut", "altered"):
        for told in run_on_ranks(1, _damaged, str(tmp_path), file, how)[0]:
            assert "Resume from the last checkpoint" in told
    assert list(tmp_path.iterdir()) == []
