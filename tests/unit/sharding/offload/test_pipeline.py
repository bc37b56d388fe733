"""Items pass through a few buffers, each once, whatever order the disk answers in."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from vissl_zero.sharding.offload.block_file import (
    NUM_TRAYS,
    PAGE,
    BlockFile,
    Cell,
    OffloadError,
    OffloadFolder,
    PageBuffer,
    RecordPipeline,
    Tray,
    page_buffers,
)

NUM_RECORDS = 5 * NUM_TRAYS


class SlowOnce(BlockFile):
    """A disk that lets the first record wait until it is asked for nothing else."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.others_are_done = threading.Event()

    def read(self, index: int, buffer: PageBuffer) -> None:
        """See ``BlockFile``."""
        if index == 0:
            assert self.others_are_done.wait(timeout=20)
        super().read(index, buffer)


class Watched(BlockFile):
    """A disk that takes its time, and knows which records it is reading."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.under_way: set[int] = set()

    def read(self, index: int, buffer: PageBuffer) -> None:
        """See ``BlockFile``."""
        self.under_way.add(index)
        time.sleep(0.01 * (1 + index))
        super().read(index, buffer)
        self.under_way.discard(index)


def _updated(file: BlockFile, pipeline: RecordPipeline) -> list[int]:
    """Positions in the order of their updates, each of which adds one to every byte."""
    order: list[int] = []

    def update(position: int, tray: Tray) -> tuple[int, ...]:
        tray[0].bytes.add_(1)
        order.append(position)
        if len(order) == NUM_RECORDS - 1 and isinstance(file, SlowOnce):
            file.others_are_done.set()
        return (0,)

    pipeline.run([[Cell(file, index)] for index in range(NUM_RECORDS)], update)
    return order


@pytest.mark.timeout(60)
def test_a_record_that_the_disk_lets_wait_holds_up_no_other(tmp_path: Path) -> None:
    file = SlowOnce(OffloadFolder(str(tmp_path), "vissl-zero-1", rank=0), "records", [PAGE] * NUM_RECORDS, True)
    pipeline = RecordPipeline([PAGE])
    order = _updated(file, pipeline)
    assert order[-1] == 0 and sorted(order) == list(range(NUM_RECORDS))
    found: list[int] = []

    def look(position: int, tray: Tray) -> tuple[int, ...]:
        found.extend(tray[0].bytes.unique().tolist())
        return ()

    pipeline.run([[Cell(file, index)] for index in range(NUM_RECORDS)], look)
    assert found == [1] * NUM_RECORDS, "every record was updated once, and stored"
    pipeline.close()


@pytest.mark.timeout(60)
def test_after_an_error_nothing_is_under_way_and_the_buffers_can_be_used_again(tmp_path: Path) -> None:
    file = Watched(OffloadFolder(str(tmp_path), "vissl-zero-1", rank=0), "records", [PAGE] * NUM_RECORDS, True)
    pipeline = RecordPipeline([PAGE])

    def fail(position: int, tray: Tray) -> tuple[int, ...]:
        assert file.under_way, "else nothing is shown"
        raise OffloadError(f"at {position}")

    with pytest.raises(OffloadError, match="at "):
        pipeline.run([[Cell(file, index)] for index in range(NUM_RECORDS)], fail)
    assert not file.under_way
    assert sorted(_updated(file, pipeline)) == list(range(NUM_RECORDS))
    pipeline.close()


class Held(BlockFile):
    """A disk that stores nothing until it is told to, and then perhaps fails."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.may_go, self.is_full = threading.Event(), False

    def write(self, index: int, buffer: PageBuffer) -> None:
        """See ``BlockFile``."""
        assert self.may_go.wait(timeout=20)
        if self.is_full:
            raise OffloadError("full")
        super().write(index, buffer)


def _filled_behind(path: Path) -> tuple[Held, RecordPipeline]:
    """The first records are ones, and none of them is stored yet."""
    file = Held(OffloadFolder(str(path), "vissl-zero-1", rank=0), "records", [PAGE] * NUM_TRAYS, False)
    pipeline = RecordPipeline([PAGE])

    def fill(position: int, tray: Tray) -> tuple[int, ...]:
        tray[0].bytes.fill_(1)
        return (0,)

    pipeline.run([[Cell(file, index, is_read=False)] for index in range(NUM_TRAYS)], fill, is_behind=True)
    return file, pipeline


@pytest.mark.timeout(60)
def test_the_last_records_are_stored_behind_the_callers_back_and_before_they_are_read(tmp_path: Path) -> None:
    file, pipeline = _filled_behind(tmp_path)
    threading.Timer(0.2, file.may_go.set).start()
    found: list[int] = []

    def look(position: int, tray: Tray) -> tuple[int, ...]:
        found.extend(tray[0].bytes.unique().tolist())
        return ()

    pipeline.run([[Cell(file, index)] for index in range(NUM_TRAYS)], look)
    assert found == [1] * NUM_TRAYS
    pipeline.close()


@pytest.mark.timeout(60)
def test_a_record_that_could_not_be_stored_is_told_in_every_later_call(tmp_path: Path) -> None:
    file, pipeline = _filled_behind(tmp_path)
    file.is_full = True
    file.may_go.set()
    for call in (pipeline.finish, pipeline.finish, lambda: pipeline.run([], lambda *_: ())):
        with pytest.raises(OffloadError, match="full"):
            call()
    pipeline.close()


def test_buffers_lie_on_huge_pages_apart_from_each_other_and_stay_out_of_forks() -> None:
    sizes = [2**20, 0, 3 * 2**20 + 1, 5]
    buffers = page_buffers(sizes)
    assert [buffer.num_bytes for buffer in buffers] == [2**20, 0, 3 * 2**20 + PAGE, PAGE]
    assert buffers[0].bytes.data_ptr() % 2**21 == 0
    for value, buffer in enumerate(buffers):
        assert not buffer.bytes.any()
        buffer.bytes.fill_(value)
    for value, buffer in enumerate(buffers):
        assert bool((buffer.bytes == value).all())
        assert bytes(buffer.view(buffer.num_bytes)) == bytes(buffer.bytes.tolist())
    flags = _kernel_flags(buffers[0].bytes)
    assert "dc" in flags, "not copied by a fork"
    assert "hg" in flags or not Path("/sys/kernel/mm/transparent_hugepage").exists()


def _kernel_flags(memory: torch.Tensor) -> list[str]:
    """What the kernel has noted of the mapping that holds ``memory``; hg: huge pages, dc: no copy in a child."""
    is_here = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            start, stop = (int(address, 16) for address in first.split("-"))
            is_here = start <= memory.data_ptr() < stop
        elif is_here and first == "VmFlags:":
            return line.split()[1:]
    raise LookupError("no such mapping")
