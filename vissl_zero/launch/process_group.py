"""Joining the other ranks, and leaving them cleanly."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from vissl_zero.errors import ProcessLostError
from vissl_zero.launch.interface import interface_towards
from vissl_zero.launch.key_value_client import (
    ADDRESS_VARIABLE,
    GENERATION_VARIABLE,
    SECRET_VARIABLE,
    STORE_PATH_VARIABLE,
    Client,
)
from vissl_zero.launch.network_store import NetworkStore
from vissl_zero.launch.own_peers import LISTEN, connections, own_connections, own_peers_only


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
    store: dist.Store | None = None
    if address := os.environ.get(ADDRESS_VARIABLE):
        host, _, port = address.rpartition(":")
        secret = bytes.fromhex(os.environ[SECRET_VARIABLE])
        served = NetworkStore(Client((host, int(port)), secret, min(60.0, timeout_s)), timeout_s)
        store = dist.PrefixStore(os.environ[GENERATION_VARIABLE], served)  # apart from ranks of a start before this one
    elif path := os.environ.get(STORE_PATH_VARIABLE):
        store = dist.FileStore(path, world_size)
    else:
        _choose_interface(world_size)
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
