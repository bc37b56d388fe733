"""What the launchers of a run tell each other from one start of the ranks to the next.

Each start is a round with a name of its own, under which everything is noted on launcher 0's server. A launcher that
was lost and is started again, or is late, therefore never takes part in a round that has begun without it.
"""

from __future__ import annotations

import time

from vissl_zero.errors import LaunchError
from vissl_zero.launch.key_value_client import Client
from vissl_zero.launch.key_value_server import RefusedError
from vissl_zero.launch.place import Place

_NAME = b"round"
_RETRY_S = 0.2


class Round:
    """One launcher's part in a round; ``enter`` gives it.

    Attributes:
        name: of the round.
        client: of the server.
    """

    def __init__(self, name: str, client: Client, place: Place):
        self.name, self.client = name, client
        self._place = place

    def say(self, what: str, value: bytes) -> None:
        """Note ``what`` for the others."""
        self.client.call(b"set", self._key(what, self._place.index), value)

    def claim(self, hello: bytes) -> bool:
        """Say hello, unless a launcher has done so that holds the same place; whether it is this one's now."""
        if self.client.call(b"swap", self._key("hello", self._place.index), b"", hello)[0] != hello:
            return False
        self.beat()  # known from here on, and missed if nothing more comes
        return True

    def wait(self, what: str, index: int, within_s: float) -> bytes | None:
        """What launcher ``index`` says, or None if it does not in time."""
        key = self._key(what, index)
        if self.client.call(b"wait", str(within_s).encode(), key, answer_within_s=within_s + 5.0)[0] != b"1":
            return None
        return self.client.call(b"get", key)[0]

    def said(self, what: str) -> dict[int, bytes]:
        """What each launcher has said so far."""
        answers = {index: self.client.call(b"get", self._key(what, index)) for index in range(self._place.count)}
        return {index: answer[0] for index, answer in answers.items() if answer}

    def wait_for_all(self, what: str, within_s: float) -> None:
        """Until every launcher has said it, or the time is over."""
        keys = [self._key(what, index) for index in range(self._place.count)]
        self.client.call(b"wait", str(within_s).encode(), *keys, answer_within_s=2 * within_s)

    def beat(self) -> dict[int, float]:
        """Say that this launcher lives; seconds since each was last heard of, by launcher."""
        ages = self.client.beat(f"{self.name}/{self._place.index}")
        split = {tuple(name.split("/")): age for name, age in ages.items()}
        return {int(index): age for (name, index), age in split.items() if name == self.name}

    def server_time_ns(self) -> int:
        """The clock of launcher 0's machine, late by the time that the answer takes."""
        return int(self.client.call(b"time")[0])

    def is_over(self) -> bool:
        """Whether another round is served at this address."""
        return self.client.call(b"get", _NAME) != [self.name.encode()]

    def _key(self, what: str, index: int) -> bytes:
        return f"{self.name}/{what}/{index}".encode()


def open_round(name: str, client: Client) -> None:
    """Launcher 0, once its server listens: let launchers in."""
    client.call(b"set", _NAME, name.encode())


def enter(client: Client, place: Place, hello: bytes, after: str) -> Round:
    """Take this launcher's place in the round that is served, once that is another than ``after``.

    Args:
        client: with a short timeout; this tries again for ``place.start_s``.
        place: of this launcher.
        hello: what it says first, unlike any other launcher's.
        after: name of the round that it has left, or nothing.
    Raises:
        RefusedError: the server has another secret.
        OSError: there is no server.
        LaunchError: the place is taken.
    """
    deadline = time.monotonic() + place.start_s
    while True:
        is_taken = False
        try:
            found = client.call(b"get", _NAME)
            if found and (name := found[0].decode()) != after:
                entered = Round(name, client, place)
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
            raise LaunchError(_TAKEN.format(index=place.index) if is_taken else "Machine 0 does not begin again.")
        client.close()  # a server that is about to end may still answer on a connection made before
        time.sleep(_RETRY_S)


_TAKEN = (
    "Machine {index} takes part in this run already. Each machine needs a node_id of its own; if that one is gone, the "
    "others have not missed it yet, or do not start again (config.DISTRIBUTED.MAX_RESTARTS)."
)
