"""Joining the process group of all ranks, and leaving it cleanly.

The ranks of several machines meet through ``NetworkStore``, torch's Store over ``KeyValueServer``; torchrun's ranks
meet through the store that its agent serves.

gloo's connections on this machine are between processes of one user only. gloo listens on a loopback port, accepts the
first connection that sends the small number of an expected peer, and ends the process when strangers have used the
last descriptor. Every user of the machine can connect to that port. So a socket filter on the listener, which its
connections inherit, holds back the data of a new connection until the kernel's list of sockets shows that the other
end belongs to this user. Data from other users are never read. Once all peers are connected, the port accepts no more
connections. The first bytes of a peer are held back too, and the kernel sends them again after 0.2 s: this is the cost
of each group.
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

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from vissl_zero.errors import ProcessLostError
from vissl_zero.launch.key_value_store import (
    ADDRESS_VARIABLE,
    GENERATION_VARIABLE,
    SECRET_VARIABLE,
    STORE_PATH_VARIABLE,
    Client,
    interface_towards,
)

_FAILED = "vissl_zero/failed"
_ANSWER_S = 2.0  # the store may be on a machine that is gone
_store: dist.Store | None = None  # store of the last process group that this process has joined


@contextmanager
def process_group(backend: str, device: torch.device, timeout_s: float) -> Iterator[None]:
    """Create the world's process group; destroy it at the end, except after an error (peers may be gone by then).

    Rank and world size come from torchrun's environment variables. Every collective of the group times out.

    Args:
        backend: such as "gloo" or "cpu:gloo,cuda:nccl".
        device: device of this rank; a GPU becomes the current device.
        timeout_s: timeout of every collective, in seconds.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store: dist.Store
    if address := os.environ.get(ADDRESS_VARIABLE):
        host, _, port = address.rpartition(":")
        secret = bytes.fromhex(os.environ[SECRET_VARIABLE])
        served = NetworkStore(Client((host, int(port)), secret, min(60.0, timeout_s)), timeout_s)
        store = dist.PrefixStore(os.environ[GENERATION_VARIABLE], served)  # apart from keys of earlier starts
    elif path := os.environ.get(STORE_PATH_VARIABLE):
        store = dist.FileStore(path, world_size)
    else:
        _choose_interface(world_size)
        # As in torch, which would not give us the store that ``is_first_to_fail`` needs.
        store, _, _ = next(dist.rendezvous("env://", rank, world_size, timeout=timedelta(seconds=timeout_s)))
    global _store
    _store = store
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with _own_peers_only() as is_guarded:
        dist.init_process_group(
            backend,
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
            device_id=device if device.type == "cuda" else None,
        )
        if not is_guarded:
            _require_own_peers()
        yield
        dist.barrier()  # else a fast rank would close connections that a slower rank still uses
        dist.destroy_process_group()
    _store = None


def is_first_to_fail() -> bool:
    """Check whether this rank is the first of its group to fail. A failing rank calls this once, before it ends.

    The other ranks fail because the first ends, so their errors explain nothing. Returns False if the store does not
    answer, because its machine is gone.
    """
    if _store is None:
        return True  # this rank has not joined a group, so no other rank caused its failure
    store, counts = _store, list[int]()

    def count() -> None:
        with suppress(RuntimeError):
            counts.append(store.add(_FAILED, 1))

    asking = Thread(target=count, daemon=True, name="first to fail")  # the call itself has no timeout
    asking.start()
    asking.join(_ANSWER_S)
    return counts == [1]


def _require_own_peers() -> None:
    """Check that no other user of this machine has connected to this rank, on any interface (Linux).

    On loopback, ``_own_peers_only`` keeps other users out. On an interface to other machines, this check finds them.

    Raises:
        ProcessLostError: another user has connected; it counts as a crash, after which a run may restart.
    """
    rows, inodes = connections(), _own_connections()
    listening = {row.local for row in rows if row.inode in inodes and row.state == LISTEN}
    ends = {(row.local, row.remote): row for row in rows}
    for row in rows:
        if row.inode not in inodes or row.local not in listening:
            continue
        other = ends.get((row.remote, row.local))
        if other is not None and other.inode != "0" and not other.is_own:  # a closed connection fails by itself
            raise ProcessLostError(
                f"Another user of this machine (uid {other.uid}) has connected to this rank while it was starting. "
                "Start again, or in a network namespace of your own: unshare -rn sh -c 'ip link set lo up; exec "
                "vissl-zero ...'"
            )


def _choose_interface(world_size: int) -> None:
    """Let gloo use the interface to the first machine, if torchrun runs on several and the user has chosen none."""
    master, is_alone = os.environ.get("MASTER_ADDR"), world_size == int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    if master is None or is_alone or "GLOO_SOCKET_IFNAME" in os.environ:
        return
    if interface := interface_towards(master, int(os.environ.get("MASTER_PORT", "1"))):
        os.environ["GLOO_SOCKET_IFNAME"] = interface


class NetworkStore(dist.Store):
    """torch's Store over ``KeyValueServer``. The C++ side of torch calls these methods, from any thread."""

    def __init__(self, client: Client, timeout_s: float):
        super().__init__()
        self._client = client
        self._timeout_s = timeout_s

    def set(self, key: str, value: str | bytes) -> None:
        """Store a value."""
        self._client.call(b"set", key.encode(), value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        """Wait for a key and return its value."""
        self.wait([key], timedelta(seconds=self._timeout_s))
        return self._client.call(b"get", key.encode())[0]

    def add(self, key: str, amount: int) -> int:
        """Add ``amount`` to a counter and return the new value."""
        return int(self._client.call(b"add", key.encode(), str(amount).encode())[0])

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Replace a value if it equals ``expected``. Return the value after that."""
        words = [word.encode() if isinstance(word, str) else bytes(word) for word in (key, expected, desired)]
        return self._client.call(b"swap", *words)[0]

    def check(self, keys: list[str]) -> bool:
        """Check whether all keys are set."""
        return self._client.call(b"check", *(key.encode() for key in keys))[0] == b"1"

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are set.

        Raises:
            dist.DistStoreError: a key is missing after the timeout.
        """
        limit = timeout.total_seconds() if timeout is not None else self._timeout_s
        words = [str(limit).encode(), *(key.encode() for key in keys)]
        # The server itself waits for the limit; the rest is for its answer to arrive.
        if self._client.call(b"wait", *words, answer_within_s=limit + 5.0)[0] != b"1":
            raise dist.DistStoreError(f"no value of {', '.join(keys)} within {limit:g} s: a rank is missing")

    def delete_key(self, key: str) -> bool:
        """Remove a key and return whether it was set."""
        return self._client.call(b"delete", key.encode())[0] == b"1"

    def num_keys(self) -> int:
        """Count the keys."""
        return int(self._client.call(b"count")[0])

    def has_extended_api(self) -> bool:
        """Return False: append, multi_get and multi_set do not exist here, and torch does not need them."""
        return False

    def clone(self) -> NetworkStore:
        """Return the same store; calls never share a connection."""
        return self


_INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
_LOOPBACK = "lo"
_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27  # Linux; Python's socket has no names for them
# Classic BPF: code, jumps if true and false, constant. A packet begins with its TCP header; a result of 0 drops it.
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
def _own_peers_only() -> Iterator[bool]:
    """Let gloo groups on the loopback interface connect only to processes of this user. A context.

    Yields:
        Whether groups are protected: ``GLOO_SOCKET_IFNAME`` is the loopback interface, and the kernel has filters.
    Raises:
        ProcessLostError: in each of many tries to make a group, strangers connected before the filter was set.
    """
    before = distributed_c10d.ProcessGroupGloo
    if os.environ.get(_INTERFACE_VARIABLE) != _LOOPBACK or not _can_filter():
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


def _own_connections() -> dict[str, int]:
    """Return the sockets of this process: inode -> descriptor."""
    inodes = {}
    for path in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            target = str(path.readlink())
            if target.startswith("socket:["):
                inodes[target[8:-1]] = int(path.name)
    return inodes


def connections() -> list[Connection]:
    """List all TCP sockets of this network namespace, from the kernel's list."""
    connections = []
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        with suppress(OSError):
            connections += [Connection(line.split()) for line in table.read_text().splitlines()[1:]]
    return connections


class Connection:
    """A socket in the kernel's list.

    Attributes:
        local, remote: address and port, as strings.
        state: state as a hexadecimal number, such as "01" for established.
        uid: user id of the owner; meaningless if ``inode`` is "0".
        inode: inode; "0" if no process has the socket open or has accepted it.
    """

    def __init__(self, row: list[str]):
        self.local, self.remote, self.state = row[1:4]
        self.uid, self.inode = int(row[7]), row[9]

    @property
    def is_own(self) -> bool:
        """Return whether a process of this user has the socket open. The kernel lists closed sockets as root's."""
        return self.state == _ESTABLISHED and self.inode != "0" and self.uid == os.geteuid()


class _Gloo(type(dist.ProcessGroupGloo)):  # type: ignore[misc]
    """The metaclass of a class that torch can call to make a gloo group, and use in ``isinstance``."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, dist.ProcessGroupGloo)

    def __call__(cls, store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroupGloo:
        device, listener = _guarded_listener()
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices, options._timeout = [device], timeout
        with listener:
            return dist.ProcessGroupGloo(store, rank, size, options)


class _OwnPeersGloo(dist.ProcessGroupGloo, metaclass=_Gloo):
    """Replaces torch's class inside ``_own_peers_only``. It has no instances."""


def _guarded_listener() -> tuple[Any, _GuardedListener]:
    """Make a gloo device and the guard of its listener; the filter was set before anyone connected."""
    for _ in range(_MOST_TRIES):
        before = _own_connections()
        # gloo opens its listener here and does not give us the socket, so we search this process's new sockets.
        device = dist.ProcessGroupGloo.create_device(interface=_LOOPBACK, lazy_init=False)  # all peers connect at once
        listeners = {inode: fd for inode, fd in _own_connections().items() if inode not in before}
        listener = _GuardedListener({inode: fd for inode, fd in listeners.items() if _attach_filter(fd, _NO_DATA)})
        # If a stranger connects before the filter is set, the port is lost, and another is tried.
        if not listener.was_reached():
            return device, listener
        del device
    raise ProcessLostError(
        "Another user of this machine connects to every port that a rank listens on. Start in a network namespace of "
        "your own: unshare -rn sh -c 'ip link set lo up; exec vissl-zero ...'"
    )


class _GuardedListener:
    """A listener that only processes of this user can reach. Use it as a context while peers connect.

    After the context, it refuses everyone.

    Args:
        listeners: inode -> descriptor of the listening socket, the only entry.
    """

    def __init__(self, listeners: dict[str, int]):
        self._listeners = listeners
        self._judged: set[str] = set(_own_connections())
        self._addresses = {row.local for row in connections() if row.inode in listeners}
        self._is_over = Event()
        self._watch = Thread(target=self._watch_listener, daemon=True, name="listener of a process group")

    def was_reached(self) -> bool:
        """Check whether someone connected before the filter was set."""
        return any(row.local in self._addresses and row.state != LISTEN for row in connections())

    def __enter__(self) -> None:
        self._watch.start()

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        self._watch.join()
        for fd in self._listeners.values():
            _attach_filter(fd, _NOTHING)
        self._look()  # connections that came after the last look

    def _watch_listener(self) -> None:
        while not self._is_over.wait(_POLL_S):
            self._look()

    def _look(self) -> None:
        with suppress(OSError):  # no descriptor is free at the moment
            new = {inode: fd for inode, fd in _own_connections().items() if inode not in self._judged}
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
            if row.local not in self._addresses:  # an outgoing connection
                self._judged.add(row.inode)
            elif other is not None and other.state != _SYN_SENT:  # otherwise the list changed while it was read
                self._judged.add(row.inode)
                with _socket(new[row.inode]) as sock:
                    if other.is_own:
                        sock.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)
                    else:
                        sock.shutdown(socket.SHUT_RDWR)


def _can_filter() -> bool:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return Path("/proc/net/tcp").exists() and _attach_filter(listener.fileno(), _NOTHING)


def _attach_filter(fd: int, program: tuple[tuple[int, int, int, int], ...]) -> bool:
    """Attach a filter to a TCP listener and return False for any other socket, or if the kernel has no filters."""
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
    """Wrap a copy of gloo's descriptor as a Python socket; errors of a closed socket are ignored. A context."""
    with suppress(OSError), ExitStack() as stack:
        yield stack.enter_context(socket.socket(fileno=os.dup(fd)))
