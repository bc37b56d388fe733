"""Records on a disk: what was written comes back, or an error does."""

from __future__ import annotations

import os
import shutil
import stat

import pytest
import torch

from tests.unit.sharding.offload.test_nvme_folder import in_child
from vissl_zero.sharding.offload.block_file import (
    NUM_BUFFERS,
    PAGE,
    BlockFile,
    OffloadError,
    OffloadFolder,
    PageBuffer,
    ReadAhead,
    checksum,
    page_buffers,
    pages,
)

SIZES = [PAGE, 3 * PAGE - 5, 1]


@pytest.fixture
def folder(tmp_path):
    return OffloadFolder(str(tmp_path), "vissl-zero-1", rank=0)


def _buffer(num_bytes: int) -> PageBuffer:
    return page_buffers([num_bytes])[0]


def _written(folder, is_touched=False):
    file, buffer = BlockFile(folder, "records", SIZES, is_touched), _buffer(3 * PAGE)
    for index in range(len(SIZES)):
        buffer.bytes.fill_(index + 1)
        file.write(index, buffer)
    return file


def test_what_was_written_comes_back(folder):
    file, buffer = _written(folder), _buffer(3 * PAGE)
    for index in (1, 0, 2):
        file.read(index, buffer)
        assert bool((buffer.bytes[: pages(SIZES[index])] == index + 1).all())


@pytest.mark.parametrize("is_touched", [False, True])
def test_a_record_never_written_is_zero(folder, is_touched):
    file, buffer = BlockFile(folder, "records", SIZES, is_touched), _buffer(3 * PAGE)
    buffer.bytes.fill_(7)
    file.read(1, buffer)
    assert not buffer.bytes.any()


def test_the_file_has_its_room_from_the_start_and_one_reader(folder):
    BlockFile(folder, "records", SIZES, is_touched=False)
    found = (folder.path / "records").stat()
    assert found.st_size == 5 * PAGE and found.st_blocks * 512 >= 5 * PAGE
    assert stat.S_IMODE(found.st_mode) == 0o600


def test_a_file_that_is_there_already_is_not_opened(folder):
    (folder.path / "records").write_text("somebody else's")
    with pytest.raises(OffloadError, match="records cannot be created: File exists"):
        BlockFile(folder, "records", SIZES, is_touched=False)
    (folder.path / "link").symlink_to(folder.path / "records")
    with pytest.raises(OffloadError, match="link cannot be created"):
        BlockFile(folder, "link", SIZES, is_touched=False)
    assert (folder.path / "records").read_text() == "somebody else's"


def test_a_disk_without_room_is_found_at_the_start(folder):
    num_free = shutil.disk_usage(folder.path).free
    with pytest.raises(OffloadError, match=r"needs .* GiB and the disk has .* GiB left. Free some"):
        BlockFile(folder, "records", [2 * num_free], is_touched=False)


def _with_limit(path: str) -> str:
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (PAGE, PAGE))
    try:
        BlockFile(OffloadFolder(path, "vissl-zero-2", rank=0), "records", [3 * PAGE], is_touched=False)
    except OffloadError as error:
        return str(error)
    return ""


def test_an_allocation_that_the_system_refuses(tmp_path):
    assert ": File too large. Free some" in in_child(_with_limit, str(tmp_path))


def _write_past_limit(path: str) -> list[str]:
    import resource

    file = BlockFile(OffloadFolder(path, "vissl-zero-2", rank=0), "records", [PAGE, PAGE], is_touched=False)
    buffer = _buffer(PAGE)
    file.write(1, buffer)
    resource.setrlimit(resource.RLIMIT_FSIZE, (PAGE, PAGE))
    told = []
    for use in (file.write, file.read):
        try:
            use(1, buffer)
        except OffloadError as error:
            told.append(str(error))
    return told


def test_a_write_that_fails_in_mid_run_leaves_nothing_to_read(tmp_path):
    told = in_child(_write_past_limit, str(tmp_path))
    assert "cannot write: File too large" in told[0]
    assert "record 1 is not what was written" in told[1]


def _flip(path):
    with path.open("r+b") as file:
        file.seek(PAGE + 100)
        byte = file.read(1)
        file.seek(PAGE + 100)
        file.write(bytes([byte[0] ^ 1]))


def _zero_page(path):
    with path.open("r+b") as file:
        file.seek(2 * PAGE)
        file.write(bytes(PAGE))


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (_flip, "is not what was written"),
        (_zero_page, "is not what was written"),
        (lambda path: os.truncate(path, 2 * PAGE), "is shorter than it was written"),
    ],
)
def test_a_file_changed_behind_our_back_is_found(folder, damage, what):
    file, buffer = _written(folder), _buffer(3 * PAGE)
    damage(folder.path / "records")
    file.read(0, buffer)
    with pytest.raises(OffloadError, match=what):
        file.read(1, buffer)


@pytest.mark.parametrize("width", [1, 4, 8, 64, PAGE])
def test_checksum_depends_on_the_place_of_every_word(width):
    data = torch.randint(0, 256, (8 * PAGE,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    words = data.view(-1, width)
    before = checksum(data)
    for first, second in ((0, 1), (0, len(words) - 1), (len(words) // 2, len(words) // 2 + 1)):
        order = torch.arange(len(words))
        order[[first, second]] = order[[second, first]]
        if not torch.equal(words[first], words[second]):
            assert checksum(words[order].flatten()) != before
    assert checksum(words.flip(0).flatten()) != before and checksum(data) == before


def _exchanged_pages(path):
    with path.open("r+b") as file:
        whole = file.read()
        file.seek(0)
        file.write(whole[: 2 * PAGE] + whole[3 * PAGE : 4 * PAGE] + whole[2 * PAGE : 3 * PAGE] + whole[4 * PAGE :])


def test_exchanged_pages_of_a_record_are_found(folder):
    file, [buffer] = BlockFile(folder, "records", [PAGE, 3 * PAGE], False), page_buffers([3 * PAGE])
    buffer.bytes.copy_(torch.arange(3 * PAGE) // 7 % 251)
    for index in range(2):
        file.write(index, buffer)
    _exchanged_pages(folder.path / "records")
    file.read(0, buffer)
    with pytest.raises(OffloadError, match="record 1 is not what was written"):
        file.read(1, buffer)


def test_checksum_sees_every_bit():
    data = torch.arange(PAGE).to(torch.uint8)
    before = checksum(data)
    for place in (0, 1, 777, PAGE - 1):
        for bit in (1, 128):
            data[place] ^= bit
            assert checksum(data) != before
            data[place] ^= bit
    assert checksum(data) == before


def test_records_are_read_ahead_in_the_order_that_is_expected(folder):
    size = PAGE
    file, buffer = BlockFile(folder, "records", [size] * 40, False), _buffer(size)
    for index in range(40):
        buffer.bytes.fill_(index)
        file.write(index, buffer)
    ahead = ReadAhead(file, size)
    ahead.follow(range(40))
    assert ahead.expected == list(range(40)) and len(ahead.memory) == NUM_BUFFERS
    for expected in range(20):  # more than there are buffers: each is filled again
        index, filled = ahead.take()
        assert index == expected == int(filled.bytes[0]) == int(filled.bytes[-1])
        ahead.give_back(filled)
    ahead.follow([20, 21, 39, 3])
    assert ahead.expected == [20, 21, 39, 3]
    index, filled = ahead.take()
    ahead.forget()
    ahead.give_back(filled)
    assert index == 20 and ahead.expected == [], "nothing more is read"
    ahead.follow([5])
    index, filled = ahead.take()
    assert index == int(filled.bytes[0]) == 5
    ahead.give_back(filled)
    ahead.follow(range(40))
    ahead.close()
    assert ahead.expected == []
    file.close()


def test_a_read_that_fails_keeps_its_buffer(folder):
    file = _written(folder)
    os.truncate(folder.path / "records", 0)
    ahead = ReadAhead(file, 3 * PAGE)
    for _ in range(NUM_BUFFERS + 1):  # more often than there are buffers
        ahead.follow([1])
        with pytest.raises(OffloadError):
            ahead.take()
    ahead.close()
