"""torch's Store over ``KeyValueServer``: what the ranks of several machines meet through."""

from __future__ import annotations

import json
import socket
import threading
import time
from datetime import timedelta

import torch.distributed as dist

from vissl_zero.launch.key_value_server import RefusedError, prove, receive, send

# Set for the ranks of a run on several machines.
ADDRESS_VARIABLE = "VISSL_ZERO_STORE_ADDRESS"
SECRET_VARIABLE = "VISSL_ZERO_STORE_SECRET"
ROUND_VARIABLE = "VISSL_ZERO_ROUND"
_RETRY_S = 0.2


class Client:
    """Talks to the server; safe to use from several threads, each call on a connection of its own.

    Args:
        address: of the server.
        secret: of the run.
        timeout_s: to connect, and to wait for an answer.
    """

    def __init__(self, address: tuple[str, int], secret: bytes, timeout_s: float):
        self._address = address
        self._secret = secret
        self._timeout_s = timeout_s
        self._idle: list[socket.socket] = []
        self._lock = threading.Lock()

    def call(self, *fields: bytes, answer_within_s: float | None = None) -> list[bytes]:
        """One question and its answer.

        Raises:
            RefusedError: the server has another secret.
            OSError: the server cannot be reached, or does not answer in time.
        """
        with self._lock:
            sock = self._idle.pop() if self._idle else None
        sock = sock or self._connect(time.monotonic() + self._timeout_s)
        try:
            sock.settimeout(answer_within_s or self._timeout_s)
            send(sock, fields)
            answer = receive(sock)
        except BaseException:
            sock.close()
            raise
        with self._lock:
            self._idle.append(sock)
        return answer

    def _connect(self, deadline: float) -> socket.socket:
        """The server may start later than its clients: tried again until the deadline."""
        while True:
            try:
                sock = socket.create_connection(self._address, timeout=max(0.1, deadline - time.monotonic()))
                try:
                    prove(sock, self._secret, is_server=False)
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    return sock
                except BaseException:
                    sock.close()
                    raise
            except RefusedError:
                raise
            except OSError:
                if time.monotonic() + _RETRY_S > deadline:
                    raise
                time.sleep(_RETRY_S)

    def beat(self, name: str) -> dict[str, float]:
        """Say that ``name`` lives; seconds since each was last heard of."""
        ages: dict[str, float] = json.loads(self.call(b"beat", name.encode())[0])
        return ages

    def close(self) -> None:
        """Close the connections that are not in use."""
        with self._lock:
            for sock in self._idle:
                sock.close()
            self._idle.clear()


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
        """Add to a counter; its new value."""
        return int(self._client.call(b"add", key.encode(), str(amount).encode())[0])

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Replace a value that is as expected; the value after that."""
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
        """Remove a key; whether it was there."""
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
