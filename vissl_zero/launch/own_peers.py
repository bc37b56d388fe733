"""gloo's connections on this machine: between processes of one user only.

gloo listens on a loopback port and takes whoever comes first with a small number for the peer it waits for, and it ends
the process when strangers have taken the last descriptor. Every user of the machine can connect to that port. So the
kernel is told to hold back what comes over a new connection (a socket filter on the listener, which its connections
inherit) until the kernel's own list says that the other end belongs to this user. What strangers say is never heard.
Once all peers are connected, the port accepts no one else.

The first bytes of a peer are held back too, and come again after the kernel's 0.2 s: that is what a group costs.
"""

from __future__ import annotations

import ctypes
import os
import resource
import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from threading import Event, Thread
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from vissl_zero.errors import ProcessLostError

INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
LOOPBACK = "lo"
_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27  # Linux; Python's socket has no names for them
# Classic BPF: code, jumps if true and false, constant. A packet begins with its TCP header; 0 bytes of it are kept.
_NOTHING = ((0x06, 0, 0, 0),)
_NO_DATA = (
    (0x30, 0, 0, 12),  # length of the header, in the upper half of byte 12, in words of 4 bytes
    (0x54, 0, 0, 0xF0),
    (0x74, 0, 0, 2),
    (0x07, 0, 0, 0),
    (0x80, 0, 0, 0),  # length of the packet
    (0x1D, 0, 1, 0),
    (0x06, 0, 0, 0xFFFFFFFF),
    (0x06, 0, 0, 0),
)
LISTEN = "0A"
_ESTABLISHED, _SYN_SENT = "01", "02"
_MOST_TRIES = 1000  # a stranger may sometimes be faster than the filter, but not every time
_POLL_S = 0.002


@contextmanager
def own_peers_only() -> Iterator[bool]:
    """Inside, gloo groups over loopback connect processes of this user only; groups over other interfaces are torch's.

    Yields:
        Whether that is so: ``GLOO_SOCKET_IFNAME`` is the loopback interface, and the kernel has what it takes.
    Raises:
        ProcessLostError: when a group is made, a stranger was faster every time.
    """
    before = distributed_c10d.ProcessGroupGloo
    if os.environ.get(INTERFACE_VARIABLE) != LOOPBACK or not _can_filter():
        yield False
        return
    # gloo accepts strangers faster than we can close them, and crashes without a free descriptor.
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    distributed_c10d.ProcessGroupGloo = _OwnPeersGloo  # type: ignore[misc]
    try:
        yield True
    finally:
        distributed_c10d.ProcessGroupGloo = before  # type: ignore[misc]


def own_connections() -> dict[str, int]:
    """Inode -> descriptor of this process's sockets."""
    found = {}
    for path in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            target = str(path.readlink())
            if target.startswith("socket:["):
                found[target[8:-1]] = int(path.name)
    return found


def connections() -> list[Connection]:
    """All TCP sockets of this machine (of this network namespace), as the kernel lists them."""
    found = []
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        with suppress(OSError):
            found += [Connection(line.split()) for line in table.read_text().splitlines()[1:]]
    return found


class Connection:
    """A row of the kernel's list.

    Attributes:
        local, remote: address and port, as text.
        state: such as "01": established.
        uid: owner; of no meaning where ``inode`` is "0".
        inode: "0" where no process has it open, or has accepted it yet.
    """

    def __init__(self, row: list[str]):
        self.local, self.remote, self.state = row[1:4]
        self.uid, self.inode = int(row[7]), row[9]

    @property
    def is_own(self) -> bool:
        """Whether a process of this user has it open. The kernel lists a closed one as root's."""
        return self.state == _ESTABLISHED and self.inode != "0" and self.uid == os.geteuid()


class _Gloo(type(dist.ProcessGroupGloo)):  # type: ignore[misc]
    """Makes a class that torch can call for a gloo group, and can name in ``isinstance`` later."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, dist.ProcessGroupGloo)

    def __call__(cls, store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroupGloo:
        device, door = _closed_door()
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices, options._timeout = [device], timeout
        with door:
            return dist.ProcessGroupGloo(store, rank, size, options)


class _OwnPeersGloo(dist.ProcessGroupGloo, metaclass=_Gloo):
    """Replaces torch's class inside ``own_peers_only``. It has no instances."""


def _closed_door() -> tuple[Any, _Door]:
    """A gloo device whose listener was guarded before anyone could connect."""
    for _ in range(_MOST_TRIES):
        before = own_connections()
        # gloo opens its listener here and does not give us the socket: we find it as the new one of this process.
        device = dist.ProcessGroupGloo.create_device(interface=LOOPBACK, lazy_init=False)  # all connect at once
        listeners = {inode: fd for inode, fd in own_connections().items() if inode not in before}
        door = _Door({inode: fd for inode, fd in listeners.items() if _set_filter(fd, _NO_DATA)})
        # A stranger may connect between listen and filter. Then this port is lost; try another.
        if not door.was_open():
            return device, door
        del device
    raise ProcessLostError(
        "Another user of this machine connects to every port that a rank listens on. Start in a network namespace of "
        "your own: unshare -rn sh -c 'ip link set lo up; exec vissl-zero ...'"
    )


class _Door:
    """A guarded listener. Use it as a context while peers connect; afterwards it refuses everyone.

    Args:
        listeners: inode -> descriptor of the one socket.
    """

    def __init__(self, listeners: dict[str, int]):
        self._listeners = listeners
        self._judged: set[str] = set(own_connections())
        self._addresses = {row.local for row in connections() if row.inode in listeners}
        self._is_over = Event()
        self._watch = Thread(target=self._watch_door, daemon=True, name="door of a process group")

    def was_open(self) -> bool:
        """Whether someone connected before the filter was set."""
        return any(row.local in self._addresses and row.state != LISTEN for row in connections())

    def __enter__(self) -> None:
        self._watch.start()

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        self._watch.join()
        for fd in self._listeners.values():
            _set_filter(fd, _NOTHING)
        self._look()  # connections since the last look

    def _watch_door(self) -> None:
        while not self._is_over.wait(_POLL_S):
            self._look()

    def _look(self) -> None:
        with suppress(OSError):  # no descriptor is free at the moment
            new = {inode: fd for inode, fd in own_connections().items() if inode not in self._judged}
            if new:
                self._judge(new)

    def _judge(self, new: dict[str, int]) -> None:
        """Accept peers, and close connections of strangers."""
        rows = connections()
        ends = {(row.local, row.remote): row for row in rows}
        for row in rows:
            if row.inode not in new:
                continue
            other = ends.get((row.remote, row.local))
            if row.local not in self._addresses:  # one that we have made
                self._judged.add(row.inode)
            elif other is not None and other.state != _SYN_SENT:  # else the list was read while it changed
                self._judged.add(row.inode)
                _let_in(new[row.inode]) if other.is_own else _hang_up(new[row.inode])


def _let_in(fd: int) -> None:
    with _socket(fd) as sock:
        sock.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)


def _hang_up(fd: int) -> None:
    with _socket(fd) as sock:
        sock.shutdown(socket.SHUT_RDWR)


def _can_filter() -> bool:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return Path("/proc/net/tcp").exists() and _set_filter(listener.fileno(), _NOTHING)


def _set_filter(fd: int, program: tuple[tuple[int, int, int, int], ...]) -> bool:
    """Set a listener's filter; False if it does not listen for TCP, or the kernel has no filters."""
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
    with _socket(fd) as sock:
        if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.getsockopt(
            socket.SOL_SOCKET, socket.SO_ACCEPTCONN
        ):
            filter_ = struct.pack("HP", len(program), ctypes.addressof(code))
            sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, filter_)
            return True
    return False


@contextmanager
def _socket(fd: int) -> Iterator[socket.socket]:
    """A descriptor of gloo's as Python's socket, gloo's own left open. Errors of a closed one are ignored."""
    with suppress(OSError), ExitStack() as stack:
        yield stack.enter_context(socket.socket(fileno=os.dup(fd)))
