"""The key-value store through which launchers on several machines meet: server, client, secret, network interface.

torch's TCPStore listens on every interface and accepts anyone. This server listens on one address, and both sides
prove with HMAC-SHA256 over fresh random numbers that they know the run's secret, before any other message. The store
has the addresses of peers, which process groups need to start, the time of each launcher's last heartbeat, and why the
run ended.

A frame is a 4-byte length, then fields that each begin with a 4-byte length; nothing is ever unpickled.

The secret is 32 random bytes in a file of the user's. Environment variables give ranks the server's address and the
interface through which machine 0 is reached: gloo takes the address that this machine's own name resolves to, which on
many systems is a loopback address.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import hashlib
import hmac
import json
import os
import secrets
import socket
import stat
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from vissl_zero.errors import LaunchError

_MAX_FRAME = 1 << 26
_LENGTH = struct.Struct("!I")
_NONCE_BYTES = 32
_HANDSHAKE_S = 10.0
# Most connections that have not authenticated yet; beyond that, the oldest is closed. A client with the secret needs
# milliseconds to authenticate. A stranger cannot use more threads and descriptors than these connections have.
_MOST_GREETING = 64


class RefusedError(ConnectionError):
    """The other side does not hold the run's secret."""


def send(sock: socket.socket, fields: Sequence[bytes]) -> None:
    """Write one frame."""
    body = b"".join(_LENGTH.pack(len(field)) + field for field in fields)
    sock.sendall(_LENGTH.pack(len(body)) + body)


def receive(sock: socket.socket, max_bytes: int = _MAX_FRAME, deadline: float | None = None) -> list[bytes]:
    """Read one frame.

    Args:
        sock: socket to read from.
        max_bytes: most bytes of a frame.
        deadline: time on the monotonic clock by which the whole frame must have arrived; None: only the socket's
            timeout limits each read.
    Raises:
        ConnectionError: the other side is gone, or sends no valid frame.
    """
    (size,) = _LENGTH.unpack(_exactly(sock, _LENGTH.size, deadline))
    if size > max_bytes:
        raise ConnectionError("a frame is too large")
    body, fields = _exactly(sock, size, deadline), []
    while body:
        if len(body) < _LENGTH.size:
            raise ConnectionError("a frame is torn")
        (length,) = _LENGTH.unpack(body[: _LENGTH.size])
        fields.append(body[_LENGTH.size : _LENGTH.size + length])
        body = body[_LENGTH.size + length :]
    return fields


def _exactly(sock: socket.socket, size: int, deadline: float | None) -> bytes:
    parts = []
    while size:
        if deadline is not None:
            if (left := deadline - time.monotonic()) <= 0:
                raise TimeoutError("the other side is too slow")
            sock.settimeout(left)
        part = sock.recv(min(size, 1 << 20))
        if not part:
            raise ConnectionError("the other side closed the connection")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def prove(sock: socket.socket, secret: bytes, is_server: bool) -> None:
    """Prove to the other side, and make it prove, knowledge of ``secret`` without sending it.

    Raises:
        RefusedError: the other side does not know the secret.
        ConnectionError, TimeoutError: the other side is gone, or does not answer.
    """
    # The whole greeting has one deadline: a peer that sends a byte at a time could hold the connection open forever.
    deadline = time.monotonic() + _HANDSHAKE_S
    sock.settimeout(_HANDSHAKE_S)
    ours = secrets.token_bytes(_NONCE_BYTES)
    send(sock, [ours])
    # Enough for a greeting: before the proof, a stranger must not make this process take more memory.
    theirs = b"".join(receive(sock, 256, deadline))
    own_role, other = (b"server", b"client") if is_server else (b"client", b"server")
    # An echo of our own number would let a stranger reflect our proof back to us.
    if len(theirs) != _NONCE_BYTES or theirs == ours:
        raise RefusedError("no proper greeting")
    send(sock, [_proof(secret, own_role, ours, theirs)])
    try:
        proof = b"".join(receive(sock, 256, deadline))
    except ConnectionError as error:
        raise RefusedError("the other side ended the greeting") from error
    # Compared in constant time, so that the time of a refusal reveals nothing about the proof.
    if not hmac.compare_digest(proof, _proof(secret, other, theirs, ours)):
        raise RefusedError("the secrets differ")
    # From here on, a wait may take as long as the launcher asks for.
    sock.settimeout(None)


def _proof(secret: bytes, role: bytes, first: bytes, second: bytes) -> bytes:
    # With the role: otherwise a stranger could get a client's proof from the server itself, on a second connection.
    return hmac.new(secret, role + first + second, hashlib.sha256).digest()


class KeyValueServer:
    """The server of the key-value store, in threads of this process, until ``close``.

    Args:
        address: host and port to listen on; port 0 takes a free one.
        secret: secret of the run.
    Attributes:
        address: host and port on which the server listens.
    """

    def __init__(self, address: tuple[str, int], secret: bytes):
        self._secret = secret
        self._values: dict[bytes, bytes] = {}
        self._changed = threading.Condition()
        self._heard: dict[str, float] = {}
        self._open: set[socket.socket] = set()
        self._greeting: dict[socket.socket, None] = {}  # oldest connection first
        self._is_closed = False
        family = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0][0]
        self._listener = socket.create_server(address, family=family, backlog=256)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        threading.Thread(target=self._accept, daemon=True, name="key-value server").start()

    def close(self) -> None:
        """Stop listening and cut all connections."""
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread in accept, which would accept another client
        self._listener.close()
        for sock in list(self._open):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                if self._is_closed:
                    return
                time.sleep(0.1)  # no descriptor is free at the moment
                continue
            self._greeting[sock] = None
            if len(self._greeting) > _MOST_GREETING:
                with contextlib.suppress(OSError, StopIteration, RuntimeError):  # the greeting may have ended meanwhile
                    oldest = next(iter(self._greeting))
                    self._greeting.pop(oldest, None)
                    oldest.shutdown(socket.SHUT_RDWR)  # wakes its thread, which ends
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        with sock, contextlib.suppress(OSError):
            try:
                prove(sock, self._secret, is_server=True)
            finally:
                self._greeting.pop(sock, None)
            self._open.add(sock)
            try:
                while True:
                    send(sock, self._answer(receive(sock)))
            finally:
                self._open.discard(sock)

    def _answer(self, fields: list[bytes]) -> list[bytes]:
        operation, rest = fields[0] if fields else b"", fields[1:]
        with self._changed:
            if operation == b"wait":
                timeout_s, keys = float(rest[0]), rest[1:]
                are_set = self._changed.wait_for(lambda: all(key in self._values for key in keys), timeout_s)
                return [b"1" if are_set else b"0"]
            if operation == b"beat":  # the answer has the seconds since each launcher's last heartbeat
                now = time.monotonic()
                self._heard[rest[0].decode()] = now
                return [json.dumps({name: now - when for name, when in self._heard.items()}).encode()]
            answer = self._change(operation, rest)
            self._changed.notify_all()
            return answer

    def _change(self, operation: bytes, rest: list[bytes]) -> list[bytes]:
        values = self._values
        if operation == b"set":
            values[rest[0]] = rest[1]
            return [b""]
        if operation == b"get":
            return [values[key] for key in rest] if all(key in values for key in rest) else []
        if operation == b"add":
            values[rest[0]] = str(int(values.get(rest[0], b"0")) + int(rest[1])).encode()
            return [values[rest[0]]]
        if operation == b"swap":
            key, expected, desired = rest
            if values.get(key, b"") == expected:
                values[key] = desired
            return [values.get(key, expected)]
        if operation == b"check":
            return [b"1" if all(key in values for key in rest) else b"0"]
        if operation == b"delete":
            return [b"1" if values.pop(rest[0], None) is not None else b"0"]
        if operation == b"time":
            return [str(time.time_ns()).encode()]
        if operation == b"count":
            return [str(len(values)).encode()]
        return []


# The launcher sets these for its ranks. On one machine, it names a file in a folder that only this user can enter; ...
STORE_PATH_VARIABLE = "VISSL_ZERO_STORE"
# ... on several machines, it names a server.
ADDRESS_VARIABLE = "VISSL_ZERO_STORE_ADDRESS"
SECRET_VARIABLE = "VISSL_ZERO_STORE_SECRET"  # noqa: S105 - its name alone
GENERATION_VARIABLE = "VISSL_ZERO_GENERATION"
_RETRY_S = 0.2


class Client:
    """Client of the key-value store. Threads may share it: each call uses a connection of its own.

    Args:
        address: address of the server.
        secret: secret of the run.
        timeout_s: timeout to connect and to wait for an answer, in seconds.
    """

    def __init__(self, address: tuple[str, int], secret: bytes, timeout_s: float):
        self._address = address
        self._secret = secret
        self._timeout_s = timeout_s
        self._idle: list[socket.socket] = []
        self._lock = threading.Lock()

    def call(self, *fields: bytes, answer_within_s: float | None = None) -> list[bytes]:
        """Send one request and return the fields of the answer.

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
                    # Requests are small, and the caller waits for each: the kernel must not hold them back.
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
        """Send a heartbeat of ``name`` and return the seconds since each name's last one."""
        ages: dict[str, float] = json.loads(self.call(b"beat", name.encode())[0])
        return ages

    def close(self) -> None:
        """Close the connections that are not in use."""
        with self._lock:
            for sock in self._idle:
                sock.close()
            self._idle.clear()


DEFAULT = "~/.vissl_zero/secret"
_NUM_BYTES = 32


def load_secret(path_name: str | None) -> bytes:
    """Read the secret from a file; create the default file first if it is missing.

    Raises:
        LaunchError: the file is missing, too short, or others can read it.
    """
    path = Path(path_name or DEFAULT).expanduser()
    if path_name is None and not path.exists():
        return _made(path)
    try:
        with path.open("rb") as file:
            # The status is that of the open file: the path may name another file meanwhile.
            status = os.fstat(file.fileno())
            content = file.read(4096)
    except OSError as error:
        raise LaunchError(f"config.DISTRIBUTED.SECRET_FILE: cannot read {path} ({error.strerror}).") from error
    if status.st_uid != os.getuid() or status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise LaunchError(
            f"config.DISTRIBUTED.SECRET_FILE: {path} must belong to you and be private. Run chmod 600 on it."
        )
    if len(content) < 16:
        raise LaunchError(f"config.DISTRIBUTED.SECRET_FILE: {path} must hold at least 16 bytes. Delete it to make one.")
    return content


def _made(path: Path) -> bytes:
    content = secrets.token_bytes(_NUM_BYTES)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:  # another launcher on this machine was faster
        return load_secret(str(path))
    except OSError as error:
        raise LaunchError(f"config.DISTRIBUTED.SECRET_FILE: cannot make {path} ({error.strerror}).") from error
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
    return content


def interface_towards(host: str, port: int) -> str | None:
    """Return the name of the network interface that leads to ``host``; None if it is unknown."""
    try:
        family, kind, _, _, target = socket.getaddrinfo(host, port or 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)  # a datagram socket: nothing is sent
            local_address = probe.getsockname()[0]
    except OSError:
        return None
    return next((name for name, address in interfaces().items() if address == local_address), None)


def interfaces() -> Mapping[str, str]:
    """Return interface -> IPv4 address; interfaces without an address are left out."""
    addresses = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            # Linux limits the name of an interface to 15 bytes.
            request = array.array("B", struct.pack("256s", name.encode()[:15]))
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(probe.fileno(), 0x8915, bytes(request))  # SIOCGIFADDR
                addresses[name] = socket.inet_ntoa(answer[20:24])
    return addresses
