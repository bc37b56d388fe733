"""Client of ``KeyValueServer`` for launchers and ranks, and the variables that give ranks its address.

Imports no torch.
"""

from __future__ import annotations

import json
import socket
import threading
import time

from vissl_zero.launch.key_value_server import RefusedError, prove, receive, send

# Set for the ranks of a run by their launcher: on one machine a file, in a folder that only this user can enter; ...
STORE_PATH_VARIABLE = "VISSL_ZERO_STORE"
# ... on several machines a server.
ADDRESS_VARIABLE = "VISSL_ZERO_STORE_ADDRESS"
SECRET_VARIABLE = "VISSL_ZERO_STORE_SECRET"
GENERATION_VARIABLE = "VISSL_ZERO_GENERATION"
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
        """Send one request; returns its answer.

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
        """Retry until the deadline, because the server may start later than its clients."""
        while True:
            try:
                sock = socket.create_connection(self._address, timeout=max(0.1, deadline - time.monotonic()))
                try:
                    prove(sock, self._secret, is_server=False)
                    # Requests are small and each is waited for: they must not be held back to be sent together.
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
        """Send a heartbeat of ``name``; returns the seconds since each name's last one."""
        ages: dict[str, float] = json.loads(self.call(b"beat", name.encode())[0])
        return ages

    def close(self) -> None:
        """Close the connections that are not in use."""
        with self._lock:
            for sock in self._idle:
                sock.close()
            self._idle.clear()
