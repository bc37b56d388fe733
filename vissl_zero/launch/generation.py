"""One generation of a run on several machines: the messages between launchers from one start of the ranks to the next.

Each generation has its own random name, and all its keys on launcher 0's server start with that name. So a launcher
that is late, or that was lost and restarted, cannot join a generation that started without it.
"""

from __future__ import annotations

import time

from vissl_zero.errors import LaunchError
from vissl_zero.launch.key_value_client import Client
from vissl_zero.launch.key_value_server import RefusedError
from vissl_zero.launch.launcher_spec import LauncherSpec

_NAME = b"generation"
_RETRY_S = 0.2


class Generation:
    """One launcher's part in a generation; ``enter`` returns it.

    Attributes:
        name: of the generation.
        client: of the server.
    """

    def __init__(self, name: str, client: Client, spec: LauncherSpec):
        self.name, self.client = name, client
        self._spec = spec

    def say(self, what: str, value: bytes) -> None:
        """Note ``what`` for the others."""
        self.client.call(b"set", self._key(what, self._spec.index), value)

    def claim(self, hello: bytes) -> bool:
        """Claim this launcher's index. Returns False if another launcher holds it."""
        if self.client.call(b"swap", self._key("hello", self._spec.index), b"", hello)[0] != hello:
            return False
        self.beat()  # from now on, a missing heartbeat counts as a lost launcher
        return True

    def wait(self, what: str, index: int, within_s: float) -> bytes | None:
        """The value that launcher ``index`` set for ``what``, or None if it does not come in time."""
        key = self._key(what, index)
        if self.client.call(b"wait", str(within_s).encode(), key, answer_within_s=within_s + 5.0)[0] != b"1":
            return None
        return self.client.call(b"get", key)[0]

    def said(self, what: str) -> dict[int, bytes]:
        """The values that launchers have set for ``what``, by launcher."""
        answers = {index: self.client.call(b"get", self._key(what, index)) for index in range(self._spec.count)}
        return {index: answer[0] for index, answer in answers.items() if answer}

    def wait_for_all(self, what: str, within_s: float) -> None:
        """Wait until every launcher has set ``what``, at most ``within_s`` seconds."""
        keys = [self._key(what, index) for index in range(self._spec.count)]
        self.client.call(b"wait", str(within_s).encode(), *keys, answer_within_s=2 * within_s)

    def beat(self) -> dict[int, float]:
        """Send a heartbeat; returns the seconds since each launcher's last one, by launcher."""
        ages = self.client.beat(f"{self.name}/{self._spec.index}")
        split = {tuple(name.split("/")): age for name, age in ages.items()}
        return {int(index): age for (name, index), age in split.items() if name == self.name}

    def server_time_ns(self) -> int:
        """The clock of launcher 0's machine, behind by the time that the answer takes."""
        return int(self.client.call(b"time")[0])

    def is_over(self) -> bool:
        """Whether the server at this address serves another generation by now."""
        return self.client.call(b"get", _NAME) != [self.name.encode()]

    def _key(self, what: str, index: int) -> bytes:
        return f"{self.name}/{what}/{index}".encode()


def open_generation(name: str, client: Client) -> None:
    """Let launchers join. Launcher 0 calls it once its server listens."""
    client.call(b"set", _NAME, name.encode())


def enter(client: Client, spec: LauncherSpec, hello: bytes, after: str) -> Generation:
    """Join the generation that is served, as soon as it is not ``after``.

    Args:
        client: with a short timeout; this function retries for ``spec.start_s``.
        spec: of this launcher.
        hello: its first message, different from any other launcher's.
        after: name of the generation that it has left, or "".
    Raises:
        RefusedError: the server has another secret.
        OSError: there is no server.
        LaunchError: another launcher has this index, or no new generation is served in time.
    """
    deadline = time.monotonic() + spec.start_s
    while True:
        is_taken = False
        try:
            found = client.call(b"get", _NAME)
            if found and (name := found[0].decode()) != after:
                entered = Generation(name, client, spec)
                if entered.claim(hello):
                    return entered
                is_taken = True
        except RefusedError:
            if not after:
                raise
        except OSError:
            if time.monotonic() > deadline:
                raise
        if time.monotonic() > deadline:
            raise LaunchError(_TAKEN.format(index=spec.index) if is_taken else "Machine 0 did not restart in time.")
        client.close()  # a server that is about to end may still answer on a connection made before
        time.sleep(_RETRY_S)


_TAKEN = (
    "Machine {index} takes part in this run already. Give each machine its own node_id. If that machine is gone, the "
    "others have not noticed yet, or may not restart (config.DISTRIBUTED.MAX_RESTARTS)."
)
