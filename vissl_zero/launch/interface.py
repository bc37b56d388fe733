"""The network interface through which another machine is reached.

gloo takes the address that this machine's own name resolves to, which on many systems is a loopback address.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import socket
import struct
from collections.abc import Mapping


def interface_towards(host: str, port: int) -> str | None:
    """Name of the network interface through which ``host`` is reached, or None if it is unknown."""
    try:
        family, kind, _, _, target = socket.getaddrinfo(host, port or 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)  # a datagram socket: nothing is sent
            own = probe.getsockname()[0]
    except OSError:
        return None
    return next((name for name, address in interfaces().items() if address == own), None)


def interfaces() -> Mapping[str, str]:
    """IPv4 address of each network interface that has one."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = array.array("B", struct.pack("256s", name.encode()[:15]))
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(probe.fileno(), 0x8915, bytes(request))  # SIOCGIFADDR
                found[name] = socket.inet_ntoa(answer[20:24])
    return found
