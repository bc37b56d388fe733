"""Waits in shared memory for a rank that has ended, or is late, end with its name. Both ranks are in this process."""

from __future__ import annotations

import mmap
import os
import subprocess

import pytest
import torch

from vissl_zero.sharding.engines import cpu_communicator
from vissl_zero.sharding.engines.cpu_communicator import CpuCommunicator, LostRankError, SharedMemoryCommunicator

_SLOT_BYTES = 64


def _ended() -> int:
    with subprocess.Popen(["true"]) as process:
        process.wait()
    return process.pid


@pytest.mark.parametrize(
    ("has_ended", "message"), [(True, "peer rank 1 .* has ended"), (False, "No answer from peer rank 1 .* for 0 s")]
)
def test_a_wait_for_a_lost_rank_ends_with_its_name(
    has_ended: bool, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_communicator, "_CHECK_S", 0.01)
    memories = [mmap.mmap(-1, mmap.PAGESIZE + _SLOT_BYTES * 2 * CpuCommunicator.LAG) for _ in range(2)]
    pids = [os.getpid(), _ended() if has_ended else os.getpid()]
    comm = SharedMemoryCommunicator(memories, pids, 0, _SLOT_BYTES, 100.0 if has_ended else 0.05)
    with pytest.raises(LostRankError, match=message):
        comm.all_gather(torch.empty(2), torch.zeros(1))


def test_a_message_has_come_once_every_rank_has_sent_it() -> None:
    """What depends on it may then go on without a wait."""
    memories = [mmap.mmap(-1, mmap.PAGESIZE + _SLOT_BYTES * 2 * CpuCommunicator.LAG) for _ in range(2)]
    first, second = (SharedMemoryCommunicator(memories, [os.getpid()] * 2, rank, _SLOT_BYTES, 5.0) for rank in range(2))
    assert not first._has_come(0)
    for comm in (first, second):
        assert not first._has_come(0)
        comm._publish(0, torch.zeros(1), is_scatter=False)
    assert first._has_come(0) and second._has_come(0) and not first._has_come(1)
