"""The launchers of a run on several machines: how they meet, watch each other and end together.

Launcher 0 serves the ``KeyValueServer`` that all ranks and launchers meet through. Each launcher says every second that
it lives. One that is silent for too long is lost: the others stop their ranks and say which it was. One whose ranks
failed says why, and the others repeat it. Without this, a cut link shows as a collective that times out and blames
nobody.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from vissl_zero.errors import LaunchError
from vissl_zero.launch.failure import Failure
from vissl_zero.launch.interface import interface_towards
from vissl_zero.launch.key_value_server import KeyValueServer, RefusedError
from vissl_zero.launch.network_store import ADDRESS_VARIABLE, SECRET_VARIABLE, Client
from vissl_zero.reporting.atomic import replacing

FIRST_RANK_VARIABLE = "VISSL_ZERO_FIRST_RANK"
WORLD_SIZE_VARIABLE = "VISSL_ZERO_WORLD_SIZE"
FIRST_LOCAL_RANK_VARIABLE = "VISSL_ZERO_FIRST_LOCAL_RANK"
_BEAT_S = 1.0
_LONGEST_SILENCE_S = 60.0
_FAREWELL_S = 5.0
_SIGNS_OF_A_LOST_PEER = ("peer", "Timed out", "timed out", "Timeout", "Broken pipe", "a rank is missing", "unreachable")


@dataclass(frozen=True)
class Place:
    """Where one launcher stands among those of its run.

    Attributes:
        index, count: of launchers; 0 serves.
        procs: ranks that each launcher starts.
        first_local_rank: number on its machine of this launcher's first rank (one launcher per rank under SLURM).
        address: where launcher 0 listens (or shall listen; port 0: a free one).
        secret: of the run.
        timeout_s: of a collective.
        start_s: how long launchers wait for each other at the start.
    """

    index: int
    count: int
    procs: int
    address: tuple[str, int]
    secret: bytes
    timeout_s: float
    first_local_rank: int = 0
    start_s: float = 300.0

    @property
    def silence_s(self) -> float:
        """After how long without a sign of life a launcher counts as lost."""
        return min(_LONGEST_SILENCE_S, self.timeout_s / 2)


class Membership:
    """One launcher's membership; use ``join`` and, whatever happens, ``leave``."""

    def __init__(self, place: Place, announce: Path | None = None):
        """Serve, if this is launcher 0.

        Args:
            place: where this launcher stands.
            announce: file to write the address to, for launchers that read it from a shared folder.
        Raises:
            LaunchError: the address cannot be listened on.
        """
        self.place = place
        self.cause = ""
        self._is_someone_lost = False
        self._server: KeyValueServer | None = None
        self._stopping = threading.Event()
        self._names: list[str] = []
        self._watcher: threading.Thread | None = None
        address = place.address
        if place.index == 0:
            try:
                self._server = KeyValueServer(address, place.secret)
            except OSError as error:
                host, port = address
                raise LaunchError(
                    f"Cannot listen on {host}:{port} ({error.strerror or error}). Name an address of this machine "
                    "and a free port."
                ) from error
            address = self._server.address
            if announce is not None:
                with replacing(announce) as temporary:
                    temporary.write_text(json.dumps(address))
        self.address = address
        self._client = Client(address, place.secret, place.start_s)

    def join(self, configuration: str, run_dir: str) -> str:
        """Wait for all launchers; the run folder that launcher 0 decided on.

        Args:
            configuration: what must be equal on all machines.
            run_dir: this launcher's.
        Raises:
            LaunchError: a launcher does not come, holds another secret or another configuration.
        """
        place = self.place
        hello = {"host": socket.gethostname(), "configuration": configuration, "run_dir": run_dir}
        try:
            self._client.beat(str(place.index))  # known from here on, and missed if nothing more comes
            self._client.call(b"set", f"launcher/{place.index}".encode(), json.dumps(hello).encode())
            greetings = []
            deadline = time.monotonic() + place.start_s
            for index in range(place.count):
                key = f"launcher/{index}".encode()
                left = max(0.0, deadline - time.monotonic())
                if self._client.call(b"wait", str(left).encode(), key, answer_within_s=left + 5.0)[0] != b"1":
                    raise LaunchError(
                        f"Machine {index} of {place.count} did not come within {place.start_s:g} s. Start the same "
                        "command there, with its own node_id."
                    )
                greetings.append(json.loads(self._client.call(b"get", key)[0]))
        except RefusedError as error:
            host, port = self.address
            raise LaunchError(
                f"{host}:{port} refuses this machine: {error}. All machines of a run need the same secret; copy the "
                "file of config.DISTRIBUTED.SECRET_FILE (~/.vissl_zero/secret unless set) from machine 0."
            ) from error
        except OSError as error:
            host, port = self.address
            raise LaunchError(
                f"Machine 0 cannot be reached at {host}:{port} within {place.start_s:g} s ({error.strerror or error}). "
                "Start it, and check that this address and port can be reached from here."
            ) from error
        self._names = [f"machine {index} ({greeting['host']})" for index, greeting in enumerate(greetings)]
        for index, greeting in enumerate(greetings):
            if greeting["configuration"] != greetings[0]["configuration"]:
                raise LaunchError(
                    f"Machine {index} was started with another configuration than machine 0. Use the same recipe, "
                    "overrides and version of vissl_zero on all of them."
                )
        self._client = Client(self.address, place.secret, min(5.0, max(1.0, place.silence_s / 4)))
        self._watcher = threading.Thread(target=self._watch, daemon=True, name="peers")
        self._watcher.start()
        return str(greetings[0]["run_dir"])

    def variables(self) -> dict[str, str]:
        """Environment of this launcher's ranks."""
        place, (host, port) = self.place, self.address
        found = {
            ADDRESS_VARIABLE: f"{host}:{port}",
            SECRET_VARIABLE: place.secret.hex(),
            FIRST_RANK_VARIABLE: str(place.index * place.procs),
            FIRST_LOCAL_RANK_VARIABLE: str(place.first_local_rank),
            WORLD_SIZE_VARIABLE: str(place.count * place.procs),
        }
        interface = interface_towards(host, port)
        if interface and "GLOO_SOCKET_IFNAME" not in os.environ:
            found["GLOO_SOCKET_IFNAME"] = interface
        return found

    def first_rank(self) -> int:
        """Global rank of this launcher's rank 0."""
        return self.place.index * self.place.procs

    def _watch(self) -> None:
        """Runs in a thread: notice who is lost or has failed, and stop this launcher's ranks."""
        last_answer = time.monotonic()
        silence_s = self.place.silence_s
        while not self._stopping.wait(_BEAT_S) and not self.cause:
            try:
                ages = self._client.beat(str(self.place.index))
                last_answer = time.monotonic()
                departed = self._departed()
                self.cause = self._reported()
            except OSError:
                if (age_s := time.monotonic() - last_answer) > silence_s and not self._stopping.is_set():
                    self.cause = self._lost(0, age_s)
                continue
            for index in range(self.place.count):
                if index not in departed and ages.get(str(index), 0.0) > silence_s:
                    self.cause = self.cause or self._lost(index, ages[str(index)])
        if self.cause:
            end_children()  # they wait for a peer that will not answer, and would do so until the timeout

    def _departed(self) -> set[int]:
        """Launchers that have ended in good order."""
        keys = [f"left/{index}".encode() for index in range(self.place.count)]
        return {index for index, key in enumerate(keys) if self._client.call(b"check", key)[0] == b"1"}

    def _reported(self) -> str:
        """The first failure that another launcher has reported, as a sentence, or nothing."""
        reports = []
        for index in range(self.place.count):
            if index != self.place.index and (found := self._client.call(b"get", f"failed/{index}".encode())):
                reports.append((json.loads(found[0]), index))
        if not reports:
            return ""
        report, index = min(reports, key=lambda pair: pair[0]["time_ns"])
        return f"rank {report['rank']} on {self._names[index]} failed first:\n{report['text']}"

    def _lost(self, index: int, age_s: float) -> str:
        self._is_someone_lost = True
        where = f", {self.address[0]}:{self.address[1]}" if index == 0 else ""
        return (
            f"Lost {self._names[index]}{where}: nothing heard of it for {age_s:.0f} s. The link is down, or the "
            "machine or its launcher is gone. The ranks here were stopped."
        )

    def explain(self, failure: Failure) -> str:
        """Why the run ended if that was not this launcher's own doing, else nothing (and the others are told).

        A rank that lost its peer is no cause: this waits for the watcher to know more.

        Args:
            failure: how this launcher's first failed rank ended.
        """
        if not self.cause and any(sign in failure.text for sign in _SIGNS_OF_A_LOST_PEER):
            assert self._watcher is not None
            self._watcher.join(self.place.silence_s + 5.0)
        if not self.cause:
            report = {"rank": failure.rank, "time_ns": failure.time_ns or time.time_ns(), "text": failure.text}
            with contextlib.suppress(OSError):
                self._client.call(b"set", f"failed/{self.place.index}".encode(), json.dumps(report).encode())
        return self.cause

    def leave(self) -> None:
        """Stop watching. Launcher 0 serves for a moment longer, so that the others can leave in good order."""
        self._stopping.set()
        is_out_of_reach = self._is_someone_lost and self._server is None
        with contextlib.suppress(OSError):
            if not is_out_of_reach:
                self._client.call(b"set", f"left/{self.place.index}".encode(), b"1")
            if self._server is not None and self._watcher is not None and not self._is_someone_lost:
                keys = [f"left/{index}".encode() for index in range(self.place.count)]
                self._client.call(b"wait", str(_FAREWELL_S).encode(), *keys, answer_within_s=2 * _FAREWELL_S)
        self._client.close()
        if self._server is not None:
            self._server.close()


def end_children() -> None:
    """Kill this process's children (Linux)."""
    own = str(os.getpid())
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # "pid (name) state parent ...", and a name may hold anything
            if status.read_text().rpartition(")")[2].split()[1] == own:
                os.kill(int(status.parent.name), signal.SIGKILL)
