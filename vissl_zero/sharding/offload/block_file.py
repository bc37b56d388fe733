"""Files of this rank on the user's disk: its own folder, numbered records in a preallocated file, and their pipeline.

The folder: ``<nvme_path>/vissl-zero-<run>-<random>/rank<k>/``, folders 0700, files 0600, created exclusively, links
not followed. The random part ensures that a run never takes files of another run, or of a crashed one, for its own.
Later runs never read these files. ``<run>`` names the run folder, so that the next attempt of a run can remove what a
killed one has left.

Reads and writes go around the page cache (O_DIRECT) into page-aligned memory: state that is streamed once a step would
push everything else out of the cache, and through the cache the same traffic runs at half of the speed or less
(docs/offload.md). The pipeline reads the next records while one is updated; parameters are read ahead in the order of
the last step.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import logging
import mmap
import os
import secrets
import stat
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from queue import SimpleQueue
from threading import Barrier

import torch
import xxhash
from torch import Tensor

from vissl_zero import collectives
from vissl_zero.errors import VisslZeroError

PREFIX = "vissl-zero-"
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class OffloadFolder:
    """This rank's folder, held open and locked for as long as the process lives.

    Args:
        nvme_path: an existing folder of the user's, on the disk to use.
        run_name: name of this run, the same on every rank; see ``new_run_name``.
        rank: global.
        keep: leave the files at ``remove``.
    Raises:
        OffloadError: the folder is missing, a link, not a folder or not writable.
    """

    def __init__(self, nvme_path: str, run_name: str, rank: int, keep: bool = False):
        self._keep = keep
        self.path = Path(nvme_path) / run_name / f"rank{rank}"
        base = _open_base(nvme_path)
        try:
            run = _enter_run(base, run_name, nvme_path)
            try:
                # By descriptors, not paths: nobody can exchange a folder for a link between two calls.
                os.mkdir(self.path.name, 0o700, dir_fd=run)
                self.fd = os.open(self.path.name, _FOLDER, dir_fd=run)
                # Tells a later run that this one is alive. It waits for another run that looks (``_is_locked``).
                fcntl.flock(self.fd, fcntl.LOCK_EX)
            except OSError as error:
                raise _refused(str(self.path), error) from error
            finally:
                os.close(run)
        finally:
            os.close(base)

    def file(self, name: str, sizes: Sequence[int], is_touched: bool) -> BlockFile:
        """Create a new file of records in this folder; the arguments and errors are those of ``BlockFile``."""
        return BlockFile(self, name, sizes, is_touched)

    def remove(self) -> None:
        """Delete this rank's files and, with the last rank, the run's folder; nothing if they are to be kept."""
        if self._keep:
            os.close(self.fd)
            return
        # By the descriptor, not by the path, which somebody may have pointed to another folder.
        for name in _names(self.fd):
            os.unlink(name, dir_fd=self.fd)
        os.close(self.fd)
        # A folder that somebody has put something else into, or has removed, is left as it is.
        with suppress(OSError):
            self.path.rmdir()
            self.path.parent.rmdir()


def new_run_name(run: str = "", keep: bool = False) -> str:
    """Return a name that no other run has, the same on every rank. Collective.

    Args:
        run: the run folder; empty: no later attempt can continue this run.
        keep: the files stay after the run: no later attempt may remove them as those of a killed attempt.
    """
    return collectives.broadcast_object(f"{PREFIX}{'' if keep else _of_run(run)}{secrets.token_hex(8)}")


def _of_run(run: str) -> str:
    """Return the part of a name that all attempts of a run share."""
    return hashlib.sha256(os.fsencode(Path(run).absolute())).hexdigest()[:16] + "-" if run else ""


def remove_dead_attempts(nvme_path: str, run: str) -> None:
    """Remove the folders of a run's killed attempts, so that the disk needs room for one state only. Collective.

    Args:
        nvme_path: an existing folder.
        run: the run folder; no other run may be alive in it. Empty: nothing is removed.
    Raises:
        OffloadError: the folder cannot be used.
    """
    if not run:
        return
    base = _open_base(nvme_path)
    try:
        for name in _names(base):
            # An attempt that was killed before it made a rank's folder is dead too: no other attempt begins now.
            if name.startswith(PREFIX + _of_run(run)) and not any(_locks(base, name)):
                _remove(base, name)
    finally:
        os.close(base)


def _remove(base: int, name: str) -> None:
    """Remove a run's folder by descriptors; ranks of one machine do it at the same time."""
    with suppress(OSError):  # another rank was faster, or it is another user's
        run = os.open(name, _FOLDER, dir_fd=base)
        try:
            for rank in _names(run):
                with suppress(OSError):
                    folder = os.open(rank, _FOLDER, dir_fd=run)
                    try:
                        for file in _names(folder):
                            with suppress(FileNotFoundError):
                                os.unlink(file, dir_fd=folder)
                    finally:
                        os.close(folder)
                    os.rmdir(rank, dir_fd=run)
        finally:
            os.close(run)
        os.rmdir(name, dir_fd=base)


def stale_runs(nvme_path: str) -> list[str]:
    """List the folders that dead runs have left under ``nvme_path``. Not a collective."""
    base = _open_base(nvme_path)
    try:
        names = [name for name in sorted(_names(base)) if name.startswith(PREFIX)]
        # A folder without ranks may be of a run that is about to make them.
        return [name for name in names if (locks := _locks(base, name)) and not any(locks)]
    finally:
        os.close(base)


def _names(folder: int) -> list[str]:
    with os.scandir(folder) as entries:
        return [entry.name for entry in entries]


def _locks(base: int, name: str) -> list[bool]:
    """Return for each rank's folder of a run whether a living process has locked it."""
    try:
        run = os.open(name, _FOLDER, dir_fd=base)
    except OSError:
        return []
    try:
        return [_is_locked(run, entry) for entry in _names(run) if entry.startswith("rank")]
    finally:
        os.close(run)


def _is_locked(run: int, entry: str) -> bool:
    try:
        fd = os.open(entry, _FOLDER, dir_fd=run)
    except OSError:
        return False
    try:
        # The kernel releases a process's lock when it ends, however it ends; ours is released by the close below. It is
        # shared: two runs that look at once must not take each other for the run that owns the folder.
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False


def _open_base(nvme_path: str) -> int:
    try:
        return os.open(nvme_path, _FOLDER)
    except OSError as error:
        raise _refused(nvme_path, error) from error


def _enter_run(base: int, run_name: str, nvme_path: str) -> int:
    """Open the run's folder, made by whichever rank of this machine came first."""
    try:
        with suppress(FileExistsError):
            os.mkdir(run_name, 0o700, dir_fd=base)
        run = os.open(run_name, _FOLDER, dir_fd=base)
    except OSError as error:
        raise _refused(nvme_path, error) from error
    status = os.fstat(run)
    # Where others may write to nvme_path, one of them may have made a folder of this name first.
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        os.close(run)
        raise OffloadError(f"{nvme_path}/{run_name} is not a folder of this user alone. Use another nvme_path.")
    return run


def _refused(path: str, error: OSError) -> OffloadError:
    is_link = Path(path).is_symlink()
    reason = {
        errno.ENOENT: "does not exist",
        errno.ENOTDIR: "is a link" if is_link else "is not a folder",
        errno.ELOOP: "is a link",
        errno.EACCES: "is not writable by this user",
        errno.EPERM: "is not writable by this user",
        errno.EROFS: "is on a file system that is read only",
    }.get(error.errno or 0, f"cannot be used: {error.strerror}")
    fix = "Give the folder it points to" if is_link else "Give an existing folder of yours on a local disk"
    return OffloadError(f"nvme_path: {path} {reason}. {fix}.")


class OffloadError(VisslZeroError):
    """Offloaded state cannot be stored, or differs from what was stored: training must not continue with it."""


PAGE = mmap.PAGESIZE
HUGE_PAGE = 2 * 2**20


class PageBuffer:
    """Page-aligned memory, as a torch tensor of bytes and as a buffer for system calls."""

    def __init__(self, memory: mmap.mmap, first: int, num_bytes: int):
        self.num_bytes = num_bytes
        # Tensor and view share the mapping, which lives as long as one of them.
        self.bytes = torch.frombuffer(memory, dtype=torch.uint8)[first : first + num_bytes]
        self._view = memoryview(memory)[first : first + num_bytes]

    def view(self, num_bytes: int) -> memoryview:
        """Return a view of the first bytes for a system call."""
        return self._view[:num_bytes]


def page_buffers(sizes: Sequence[int]) -> list[PageBuffer]:
    """Allocate adjacent buffers of zeros, ``sizes`` in bytes, each rounded up to whole pages.

    Memory is taken when it is first written. Forked children do not inherit it.
    """
    starts = [0, *accumulate(map(pages, sizes))]
    num_huge = -(-starts[-1] // HUGE_PAGE)
    # Private, unlike mmap's default: shared memory has no huge pages. One page more, as mmap aligns to small pages.
    memory = mmap.mmap(-1, (num_huge + 1) * HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # A fork during direct I/O, by a data loader for example, could leave the data in the child's copy of the page
    # (open(2), O_DIRECT).
    memory.madvise(mmap.MADV_DONTFORK)
    # In a huge page a request is one segment, else one per page. Then several requests fit into the queue of a virtual
    # disk, which otherwise delays one for as long as there are others (docs/offload.md).
    if starts[-1] >= HUGE_PAGE:
        with suppress(OSError):  # a kernel built without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    first = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % HUGE_PAGE
    return [PageBuffer(memory, first + start, stop - start) for start, stop in pairwise(starts)]


class BlockFile:
    """Records of fixed sizes in one file. Threads may read and write different records at the same time.

    Args:
        folder: folder to create it in.
        name: name of the file.
        sizes: bytes of each record; each takes whole pages.
        is_touched: write zeros to the whole file now; False: its blocks are first written with their records.
    Raises:
        OffloadError: the disk has no room for it.
    """

    def __init__(self, folder: OffloadFolder, name: str, sizes: Sequence[int], is_touched: bool):
        self._path = folder.path / name
        self._sizes = [pages(size) for size in sizes]
        self._offsets = [0, *accumulate(self._sizes)][:-1]
        self.num_bytes = sum(self._sizes)
        self._fd = _open_direct(folder, name)
        try:
            _allocate(self._fd, self.num_bytes, str(self._path))
        except OffloadError:
            self.close()
            raise
        # A record that has not been written is zero, whatever the disk holds.
        self._checksums: list[int | None] = [None] * len(self._sizes)
        if is_touched:
            self._touch()

    def read(self, index: int, buffer: PageBuffer) -> None:
        """Fill ``buffer`` with a record.

        Raises:
            OffloadError: it is not what was written last: the file was cut or changed, or the disk failed.
        """
        size, expected = self._sizes[index], self._checksums[index]
        # Never written: zero by definition, whatever the disk holds.
        if expected is None:
            buffer.bytes[:size].zero_()
            return
        try:
            num_read = os.preadv(self._fd, [buffer.view(size)], self._offsets[index])
        except OSError as error:
            raise self._failed("read", error) from error
        if num_read != size or checksum(buffer.bytes[:size]) != expected:
            what = "shorter than it was written" if num_read != size else "not what was written"
            raise OffloadError(
                f"{self._path}: record {index} is {what}. The file was changed, or the disk is failing; "
                "the state in memory can no longer be trusted. Resume from the last checkpoint."
            )

    def write(self, index: int, buffer: PageBuffer) -> None:
        """Store the record from ``buffer``.

        Raises:
            OffloadError: the disk took less than all of it.
        """
        size = self._sizes[index]
        digest = checksum(buffer.bytes[:size])
        # No record has this checksum: one that is partly written equals neither the old nor the new one.
        self._checksums[index] = -1
        try:
            num_written = os.pwritev(self._fd, [buffer.view(size)], self._offsets[index])
        except OSError as error:
            raise self._failed("write", error) from error
        if num_written != size:
            raise OffloadError(f"{self._path}: the disk took {num_written} of {size} bytes. Is it full?")
        self._checksums[index] = digest

    def forget(self) -> None:
        """Forget the values: all records are zero again."""
        self._checksums = [None] * len(self._sizes)

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def _touch(self) -> None:
        largest = max(self._sizes, default=0)
        [buffer] = page_buffers([largest])
        for index in range(len(self._sizes)):
            self.write(index, buffer)

    def _failed(self, verb: str, error: OSError) -> OffloadError:
        return OffloadError(f"{self._path}: cannot {verb}: {error.strerror}. Resume from the last checkpoint.")


def checksum(data: Tensor) -> int:
    """Compute XXH3 of the bytes of ``data``, contiguous on the CPU, 64 bits. It depends on the position of each byte.

    Accidental damage goes undetected once in 2^64. Runs at the speed of memory (15 GB/s), where CRC-32 would be slower
    than the disk; releases the interpreter's lock, and starts no threads.
    """
    digest = xxhash.xxh3_64()
    # Not through NumPy, after which torch could not free the storage of a gathered parameter (resize it to 0).
    digest.update((ctypes.c_char * data.nbytes).from_address(data.data_ptr()))  # xxh3_64_intdigest would hold the lock
    return digest.intdigest()


def pages(num_bytes: int) -> int:
    """Round ``num_bytes`` up to whole pages."""
    return -(-num_bytes // PAGE) * PAGE


def _open_direct(folder: OffloadFolder, name: str) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(name, flags | getattr(os, "O_DIRECT", 0), 0o600, dir_fd=folder.fd)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise OffloadError(f"{folder.path / name} cannot be created: {error.strerror}.") from error
    logging.getLogger(__name__).warning(
        "%s is on a file system without direct access, so state takes room in the page cache and streams slower.",
        folder.path,
    )
    # O_DIRECT is refused after the file has been made.
    return os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder.fd)


def _allocate(fd: int, num_bytes: int, path: str) -> None:
    """Reserve the blocks now, so that a full disk is found before the first step."""
    if not num_bytes:
        return
    disk = os.fstatvfs(fd)
    num_free = disk.f_bavail * disk.f_frsize
    full = f"needs {_amount(num_bytes)} and the disk has {_amount(num_free)} left"
    fix = "Free some, give another nvme_path, or use more ranks"
    if num_bytes > num_free:
        raise OffloadError(f"{path} {full}. {fix}.")
    try:
        os.posix_fallocate(fd, 0, num_bytes)
    except OSError as error:
        raise OffloadError(f"{path} {full}: {error.strerror}. {fix}.") from error


def _amount(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 // 10 else f"{num_bytes / 2**20:.2f} MiB"


NUM_TRAYS = 8
NUM_THREADS = 6  # requests under way; the calls release the interpreter's lock


@dataclass(frozen=True)
class Cell:
    """One record that an item needs.

    Attributes:
        file, index: file and number of the record.
        is_read: False if all of the record is overwritten: the buffer's contents are then undefined.
    """

    file: BlockFile
    index: int
    is_read: bool = True


# What is updated at once: at most one cell for each column of buffers.
Item = Sequence[Cell | None]
Tray = list[PageBuffer]


class RecordPipeline:
    """Streams items through a fixed number of trays, which have one buffer per column.

    Args:
        column_bytes: size of the largest record in each column; 0 for an unused column.
    """

    def __init__(self, column_bytes: Sequence[int]):
        self.num_columns = len(column_bytes)
        buffers = iter(page_buffers([*column_bytes] * NUM_TRAYS))
        self._trays: list[Tray] = [[next(buffers) for _ in column_bytes] for _ in range(NUM_TRAYS)]
        self._threads = _started_threads(NUM_THREADS, "offload")
        self._behind: set[Future[tuple[int, Tray] | None]] = set()
        self._failure: BaseException | None = None

    @property
    def memory(self) -> list[Tensor]:
        """The buffers."""
        return [buffer.bytes for tray in self._trays for buffer in tray if buffer.num_bytes]

    def run(
        self, items: Sequence[Item], update: Callable[[int, Tray], Collection[int]], is_behind: bool = False
    ) -> None:
        """Call ``update(position, tray)`` for each item, and store the columns that it names.

        Items are updated as the disk delivers them, not in order. No two of them may share a record.

        Args:
            items: records to stream.
            update: changes the buffers of one item; returns the columns to write.
            is_behind: return once every item is updated, while the last ones are still being written. Call ``finish``
                before these records are read in another way than by this object.
        Raises:
            OffloadError: a record could not be read or stored; all requests have ended.
        """
        # Trays are about to be reused, and items may be records that are still being written.
        self.finish()
        coming = deque(enumerate(items))
        ready: SimpleQueue[Future[tuple[int, Tray] | None]] = SimpleQueue()
        requests: set[Future[tuple[int, Tray] | None]] = set()

        def send(tray: Tray, old: Item, columns: Collection[int]) -> None:
            new = coming.popleft() if coming else None
            request = self._threads.submit(_exchange, tray, old, columns, new)
            requests.add(request)
            request.add_done_callback(ready.put)

        try:
            num_left = len(items)
            for tray in self._trays[: len(items)]:
                send(tray, (), ())
            while requests and (num_left or not is_behind):
                # In the order of completion: a disk may delay one request for as long as there are others.
                request = ready.get()
                requests.remove(request)
                if (turn := request.result()) is not None:
                    position, tray = turn
                    columns = update(position, tray)
                    num_left -= 1
                    # With nothing to write and nothing more to read, the tray has done its part.
                    if columns or coming:
                        send(tray, items[position], columns)
            self._behind, requests = requests, set()
        finally:
            wait(requests)  # their buffers are about to be reused

    def finish(self) -> None:
        """Wait until all updated records are stored.

        Raises:
            OffloadError: a record could not be stored; every later call raises too.
        """
        behind, self._behind = self._behind, set()
        for request in wait(behind).done:
            self._failure = self._failure or request.exception()
        # The call that updated these records has returned without an error, so every later one must raise.
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """End the threads, once all requests are done."""
        wait(self._behind)  # the caller is about to close the file
        # Joined by no one: a garbage collection may close this in any thread, such as one that starts, and under any
        # lock. Joining a thread takes a lock of ``threading`` that the interrupted code may hold.
        self._threads.shutdown(wait=False)


class NoRecords(RecordPipeline):
    """A pipeline without files: updates items one after another, without buffers."""

    def __init__(self) -> None:
        self.num_columns, self._trays = 0, []

    def run(
        self, items: Sequence[Item], update: Callable[[int, Tray], Collection[int]], is_behind: bool = False
    ) -> None:
        """Run the updates; see ``RecordPipeline``."""
        for position in range(len(items)):
            update(position, [])

    def finish(self) -> None:
        """Finish; see ``RecordPipeline``."""

    def close(self) -> None:
        """Close; see ``RecordPipeline``."""


def _exchange(tray: Tray, old: Item, columns: Collection[int], new: tuple[int, Item] | None) -> tuple[int, Tray] | None:
    """Write ``columns`` of the item in ``tray``, then read the next item into it; return its position and the tray."""
    # One request does both, so that a thread reuses the tray without a return to the main thread.
    for column in columns:
        cell = old[column]
        assert cell is not None
        cell.file.write(cell.index, tray[column])
    if new is None:
        return None
    position, item = new
    for cell, buffer in zip(item, tray, strict=True):
        if cell is not None and cell.is_read:
            cell.file.read(cell.index, buffer)
    return position, tray


_Pair = tuple[int | None, int | None]


class PrefetchOrder:
    """Learns the order of units, which repeats from step to step. Pure.

    The last two units predict the next one. One unit would not do: it has different successors in the forward and in
    the backward pass.
    """

    def __init__(self) -> None:
        self._next: dict[_Pair, int] = {}
        self._last: _Pair = (None, None)

    def came(self, unit: int) -> None:
        """Record that ``unit`` is fetched now."""
        self._next[self._last] = unit
        self._last = (self._last[1], unit)

    def restart(self) -> None:
        """Begin a step: the order of the last step is expected again."""
        # Else the last units of one step would be the context of the first unit of the next.
        self._last = (None, None)

    def expected(self) -> Iterator[int]:
        """Yield units in the order in which they are expected; may be endless."""
        last = self._last
        while last in self._next:
            unit = self._next[last]
            yield unit
            last = (last[1], unit)


def _started_threads(number: int, name: str) -> ThreadPoolExecutor:
    """Start a pool with all its threads, so that a run's number of threads does not grow."""
    # By default a pool starts threads on demand, some of them after hundreds of steps.
    pool = ThreadPoolExecutor(number, thread_name_prefix=name)
    all_started = Barrier(number)  # holds each thread, so that the next request starts another
    for _ in range(number):
        pool.submit(all_started.wait)
    return pool


NUM_BUFFERS = 16
_NUM_THREADS = 4


class ReadAhead:
    """A fixed number of buffers that are filled with the next records as soon as they are free.

    Args:
        file: file of the records; call ``forget`` before a record is changed.
        record_bytes: size of the largest record.
    """

    def __init__(self, file: BlockFile, record_bytes: int):
        self._file = file
        self._buffers = page_buffers([record_bytes] * NUM_BUFFERS)
        self._free = deque(self._buffers)
        self._todo: deque[int] = deque()
        self._reads: deque[tuple[int, PageBuffer, Future[None]]] = deque()
        self._threads = _started_threads(_NUM_THREADS, "prefetch")

    @property
    def memory(self) -> list[Tensor]:
        """The buffers."""
        return [buffer.bytes for buffer in self._buffers]

    @property
    def expected(self) -> list[int]:
        """The expected records, in order; those already read or being read are first."""
        return [*(index for index, _, _ in self._reads), *self._todo]

    def follow(self, records: Sequence[int]) -> None:
        """Expect these records next, in this order. Reads that match their beginning are kept."""
        num_kept = 0
        for (index, _, _), record in zip(self._reads, records, strict=False):
            if index != record:
                break
            num_kept += 1
        self._drop(len(self._reads) - num_kept)
        self._todo = deque(records[num_kept:])
        self._fill()

    def take(self) -> tuple[int, PageBuffer]:
        """Return the next expected record; ``give_back`` its buffer before the next call.

        Raises:
            OffloadError: it could not be read, or is not what was written.
        """
        index, buffer, reading = self._reads.popleft()
        try:
            reading.result()
        # A failed read must not lose its buffer: their number is fixed.
        except BaseException:
            self._free.append(buffer)
            raise
        return index, buffer

    def give_back(self, buffer: PageBuffer) -> None:
        """Let ``buffer`` be filled again."""
        self._free.append(buffer)
        self._fill()

    def forget(self) -> None:
        """Expect no records, and drop those that were read ahead."""
        self._todo.clear()
        self._drop(len(self._reads))

    def close(self) -> None:
        """End the threads, once all reads are done."""
        self.forget()
        self._threads.shutdown(wait=False)  # see ``RecordPipeline.close``

    def _fill(self) -> None:
        while self._todo and self._free:
            index, buffer = self._todo.popleft(), self._free.popleft()
            self._reads.append((index, buffer, self._threads.submit(self._file.read, index, buffer)))

    def _drop(self, number: int) -> None:
        for _ in range(number):
            # From the end, since what is kept is the front.
            _, buffer, reading = self._reads.pop()
            reading.exception()  # wait: the buffer is about to be reused
            self._free.append(buffer)
