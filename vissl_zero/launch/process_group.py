"""Joining the other ranks, and leaving them cleanly.

The ranks of several machines meet through ``NetworkStore``, torch's Store over ``KeyValueServer``; those of torchrun
through the store that its agent serves.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from threading import Thread

import torch
import torch.distributed as dist

from vissl_zero.errors import ProcessLostError
from vissl_zero.launch.key_value_store import (
    ADDRESS_VARIABLE,
    GENERATION_VARIABLE,
    SECRET_VARIABLE,
    STORE_PATH_VARIABLE,
    Client,
    interface_towards,
)
from vissl_zero.launch.own_peers import LISTEN, connections, own_connections, own_peers_only

_FAILED = "vissl_zero/failed"
_ANSWER_S = 2.0  # the store may be on a machine that is gone
_store: dist.Store | None = None  # of the group that this process has joined last


@contextmanager
def process_group(backend: str, device: torch.device, timeout_s: float) -> Iterator[None]:
    """The world's process group, destroyed on the way out unless an error is on its way (peers may be gone by then).

    Rank and world size come from torchrun's environment variables. Every collective of the group times out.

    Args:
        backend: such as "gloo" or "cpu:gloo,cuda:nccl".
        device: of this rank; selected as the current one if it is a GPU.
        timeout_s: of every collective, in seconds.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store: dist.Store
    if address := os.environ.get(ADDRESS_VARIABLE):
        host, _, port = address.rpartition(":")
        secret = bytes.fromhex(os.environ[SECRET_VARIABLE])
        served = NetworkStore(Client((host, int(port)), secret, min(60.0, timeout_s)), timeout_s)
        store = dist.PrefixStore(os.environ[GENERATION_VARIABLE], served)  # apart from ranks of a start before this one
    elif path := os.environ.get(STORE_PATH_VARIABLE):
        store = dist.FileStore(path, world_size)
    else:
        _choose_interface(world_size)
        # What torch would do itself; but it would keep the store, which ``is_first_to_fail`` needs, to itself.
        store, _, _ = next(dist.rendezvous("env://", rank, world_size, timeout=timedelta(seconds=timeout_s)))
    global _store
    _store = store
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with own_peers_only() as is_guarded:
        dist.init_process_group(
            backend,
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
            device_id=device if device.type == "cuda" else None,
        )
        if not is_guarded:
            require_own_peers()
        yield
        dist.barrier()  # or a fast rank would close connections that a slower one still uses
        dist.destroy_process_group()
    _store = None


def is_first_to_fail() -> bool:
    """Whether no other rank of this process group has failed before this one; a rank that fails asks once.

    The others fail because the first one ends, and it asks before it does: what their errors say need not be read.
    False if nobody answers: then the machine that keeps count is gone.
    """
    if _store is None:
        return True  # it has not met the others, so they have not taken it down
    store, counts = _store, list[int]()

    def count() -> None:
        with suppress(RuntimeError):
            counts.append(store.add(_FAILED, 1))

    asking = Thread(target=count, daemon=True, name="first to fail")  # the call itself has no timeout
    asking.start()
    asking.join(_ANSWER_S)
    return counts == [1]


def require_own_peers() -> None:
    """Check that no other user has connected to this rank on this machine, whichever interface gloo listens on (Linux).

    Over loopback ``own_peers_only`` keeps others out; over an interface that other machines use, this finds a user of
    this one.

    Raises:
        ProcessLostError: somebody has; a crash, after which a run may start again.
    """
    rows, own = connections(), own_connections()
    listening = {row.local for row in rows if row.inode in own and row.state == LISTEN}
    ends = {(row.local, row.remote): row for row in rows}
    for row in rows:
        if row.inode not in own or row.local not in listening:
            continue
        other = ends.get((row.remote, row.local))
        if other is not None and other.inode != "0" and not other.is_own:  # one that is closed fails by itself
            raise ProcessLostError(
                f"Another user of this machine (uid {other.uid}) has connected to this rank while it was starting. "
                "Start again, or in a network namespace of your own: unshare -rn sh -c 'ip link set lo up; exec "
                "vissl-zero ...'"
            )


def _choose_interface(world_size: int) -> None:
    """Under torchrun on several machines: let gloo use the interface that leads to the first, unless the user says."""
    master, is_alone = os.environ.get("MASTER_ADDR"), world_size == int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    if master is None or is_alone or "GLOO_SOCKET_IFNAME" in os.environ:
        return
    if interface := interface_towards(master, int(os.environ.get("MASTER_PORT", "1"))):
        os.environ["GLOO_SOCKET_IFNAME"] = interface


class NetworkStore(dist.Store):
    """See the module. The C++ side of torch calls these methods, from any thread."""

    def __init__(self, client: Client, timeout_s: float):
        super().__init__()
        self._client = client
        self._timeout_s = timeout_s

    def set(self, key: str, value: str | bytes) -> None:
        """Store a value."""
        self._client.call(b"set", key.encode(), value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        """Wait for a key and give its value."""
        self.wait([key], timedelta(seconds=self._timeout_s))
        return self._client.call(b"get", key.encode())[0]

    def add(self, key: str, amount: int) -> int:
        """Add to a counter. Returns its new value."""
        return int(self._client.call(b"add", key.encode(), str(amount).encode())[0])

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Replace a value if it is as expected. Returns the value after that."""
        words = [word.encode() if isinstance(word, str) else bytes(word) for word in (key, expected, desired)]
        return self._client.call(b"swap", *words)[0]

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there."""
        return self._client.call(b"check", *(key.encode() for key in keys))[0] == b"1"

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are there.

        Raises:
            dist.DistStoreError: they are not, in time.
        """
        limit = timeout.total_seconds() if timeout is not None else self._timeout_s
        words = [str(limit).encode(), *(key.encode() for key in keys)]
        if self._client.call(b"wait", *words, answer_within_s=limit + 5.0)[0] != b"1":
            raise dist.DistStoreError(f"no value of {', '.join(keys)} within {limit:g} s: a rank is missing")

    def delete_key(self, key: str) -> bool:
        """Remove a key. Returns whether it was there."""
        return self._client.call(b"delete", key.encode())[0] == b"1"

    def num_keys(self) -> int:
        """How many there are."""
        return int(self._client.call(b"count")[0])

    def has_extended_api(self) -> bool:
        """No append, multi_get and multi_set: torch does without them."""
        return False

    def clone(self) -> NetworkStore:
        """The same store; calls never share a connection."""
        return self
