"""A memory cgroup of one's own, version 1 or 2: what processes in it may take, and what they hold."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

NO_LIMIT = 2**40
_SLACK = 2**24  # bytes: what the kernel counts in batches, and its own records
_VERSIONS = (  # root, and the files of the limit and of what was killed
    (
        "/sys/fs/cgroup/memory",
        ("memory.limit_in_bytes", "memory.oom_control"),
    ),
    ("/sys/fs/cgroup", ("memory.max", "memory.events")),
)


class MemoryGroup:
    """A group that processes enter; what a process held before is not counted in it.

    Args:
        name: of this group among those of this process.
        num_bytes: that all processes in it may take together; beyond, the kernel kills one.
    Attributes:
        kind: the file of the limit, for people.
    Raises:
        RuntimeError: none can be made here.
    """

    def __init__(self, name: str, num_bytes: int = NO_LIMIT):
        for root, files in _VERSIONS:
            path = Path(root) / f"vissl_zero_{os.getpid()}_{name}"
            with suppress(OSError):
                path.mkdir()
                self._path, self.kind = path, files[0]
                self._limit, self._events = (path / file for file in files)
                try:
                    self.limit(num_bytes)
                except OSError:
                    path.rmdir()
                    continue
                return
        raise RuntimeError("No memory cgroup can be made here. Run as root, outside a container that forbids it.")

    def limit(self, num_bytes: int) -> None:
        """Change the limit.

        Raises:
            OSError: version 1, and the processes hold more that cannot be taken from them.
        """
        self._limit.write_text(str(num_bytes))

    def lower(self, num_bytes: int, seconds: float = 10.0) -> int:
        """Lower the limit while processes run, to this or to as little as the kernel lets go; returns the limit.

        Version 1 refuses a limit below what is held and cannot be taken: pages of files are let go first, and what is
        held then, and some, is the limit. Version 2 takes any limit, and kills a process at once.
        """
        end = time.monotonic() + seconds
        while True:
            with suppress(OSError):
                self.limit(num_bytes)
                return num_bytes
            with suppress(OSError):
                (self._path / "memory.force_empty").write_text("0")
            if time.monotonic() > end:
                break
            time.sleep(0.1)
        least = self.held() + _SLACK
        self.limit(least)
        return least

    def enter(self) -> None:
        """Put this process into it; also for ``preexec_fn``."""
        (self._path / "cgroup.procs").write_text(str(os.getpid()))

    def held(self) -> int:
        """Bytes that its processes hold and that the kernel cannot take from them: no cached files."""
        lines = dict(line.split() for line in (self._path / "memory.stat").read_text().splitlines())
        names = ("total_rss", "total_shmem") if "total_rss" in lines else ("anon", "shmem")
        return sum(int(lines[name]) for name in names)

    def kills(self) -> int:
        """How many processes in it the kernel has killed so far."""
        lines = self._events.read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))

    def close(self) -> None:
        """Remove it. Its processes must have ended; the kernel may be a moment behind."""
        for _ in range(50):
            with suppress(OSError):
                self._path.rmdir()
                return
            time.sleep(0.1)
