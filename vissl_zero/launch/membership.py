"""The launchers of a run on several machines: how they meet, watch each other, and end or start again together.

Launcher 0 serves the ``KeyValueServer`` that all ranks and launchers meet through. Each launcher says every second that
it lives. One that is silent for too long is lost: the others stop their ranks and say which it was. One whose ranks
failed says why, and the others repeat it. Without this, a cut link shows as a collective that times out and blames
nobody.

A membership lasts for one round (``round.py``). Where the run may start again (``DISTRIBUTED.MAX_RESTARTS``), every
launcher leaves it and takes part in another.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vissl_zero.atomic import replacing
from vissl_zero.errors import LaunchError
from vissl_zero.launch.failure import Failure
from vissl_zero.launch.interface import interface_towards
from vissl_zero.launch.key_value_client import ADDRESS_VARIABLE, ROUND_VARIABLE, SECRET_VARIABLE, Client
from vissl_zero.launch.key_value_server import KeyValueServer, RefusedError
from vissl_zero.launch.place import Place
from vissl_zero.launch.round import Round, enter, open_round

FIRST_RANK_VARIABLE = "VISSL_ZERO_FIRST_RANK"
WORLD_SIZE_VARIABLE = "VISSL_ZERO_WORLD_SIZE"
FIRST_LOCAL_RANK_VARIABLE = "VISSL_ZERO_FIRST_LOCAL_RANK"
CRASHED = 1  # the exit code after which a run may start again
_AGAIN = b"again"
_BEAT_S = 1.0
_FAREWELL_S = 5.0
_SETTLE_S = 5.0  # for another machine to say that it failed first; its launcher gives its own ranks 3 s
_WELL_S = 3.5 * _BEAT_S  # who was heard of since then is no machine that was lost


class Membership:
    """One launcher's membership; use ``join`` and, whatever happens, ``leave``.

    Attributes:
        place: where this launcher stands; of launcher 0 with the port that it listens on.
        num_restarts: of the run so far, as all launchers agree after ``join``.
        cause: why the ranks here were stopped, if not by themselves.
        exit_code: that goes with it.
        is_someone_lost: it is that a launcher was silent for too long.
        may_start_again: all launchers are there, or may come back.
    """

    def __init__(self, place: Place, announce: Path | None = None, before: Membership | None = None):
        """Serve, if this is launcher 0.

        Args:
            place: where this launcher stands.
            announce: file to write the address to, for launchers that read it from a shared folder.
            before: this launcher's membership in the round before, which it has left to start again.
        Raises:
            LaunchError: the address cannot be listened on.
        """
        self.place = place
        self.num_restarts: int = before.num_restarts + 1 if before else 0
        self.cause = ""
        self.exit_code = CRASHED
        self.is_someone_lost = False
        self.may_start_again = True
        self._after = before.round_name if before else ""
        self._server: KeyValueServer | None = None
        self._stopping = threading.Event()
        self._names: list[str] = []
        self._watcher: threading.Thread | None = None
        self._round: Round | None = None
        self._end_ranks: Callable[[], None] = lambda: None
        self.address = place.address
        if place.index == 0:
            try:
                self._server = KeyValueServer(place.address, place.secret)
            except OSError as error:
                host, port = place.address
                raise LaunchError(
                    f"Cannot listen on {host}:{port} ({error.strerror or error}). Name an address of this machine "
                    "and a free port."
                ) from error
            self.address = self._server.address
        self._client = Client(self.address, place.secret, min(5.0, max(1.0, place.silence_s / 4)))
        if self._server is not None:
            open_round(secrets.token_hex(8), self._client)
        if announce is not None:
            with replacing(announce) as temporary:
                temporary.write_text(json.dumps(self.address))

    @property
    def round_name(self) -> str:
        """Of the round that this launcher takes part in; nothing before ``join``."""
        return self._round.name if self._round else ""

    def join(self, configuration: str, run_dir: str) -> str:
        """Wait for all launchers; the run folder that launcher 0 decided on.

        Args:
            configuration: what must be equal on all machines.
            run_dir: this launcher's.
        Raises:
            LaunchError: a launcher does not come, holds another secret or another configuration.
        """
        place = self.place
        hello = {
            "host": socket.gethostname(),
            "configuration": configuration,
            "run_dir": run_dir,
            "num_restarts": self.num_restarts,
            "launcher": secrets.token_hex(8),  # no two say the same
        }
        try:
            self._round = enter(self._client, place, json.dumps(hello).encode(), self._after)
            greetings = []
            deadline = time.monotonic() + place.start_s
            for index in range(place.count):
                greeting = self._round.wait("hello", index, max(0.0, deadline - time.monotonic()))
                if greeting is None:
                    raise LaunchError(
                        f"Machine {index} of {place.count} did not come within {place.start_s:g} s. Start the same "
                        "command there, with its own node_id."
                    )
                greetings.append(json.loads(greeting))
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
        self.num_restarts = max(int(greeting["num_restarts"]) for greeting in greetings)
        self._watcher = threading.Thread(target=self._watch, args=(self._round,), daemon=True, name="peers")
        self._watcher.start()
        return str(greetings[0]["run_dir"])

    def variables(self) -> dict[str, str]:
        """Environment of this launcher's ranks."""
        place, (host, port) = self.place, self.address
        found = {
            ADDRESS_VARIABLE: f"{host}:{port}",
            SECRET_VARIABLE: place.secret.hex(),
            ROUND_VARIABLE: self.round_name,
            FIRST_RANK_VARIABLE: str(place.index * place.procs),
            FIRST_LOCAL_RANK_VARIABLE: str(place.first_local_rank),
            WORLD_SIZE_VARIABLE: str(place.count * place.procs),
        }
        interface = interface_towards(host, port)
        if interface and "GLOO_SOCKET_IFNAME" not in os.environ:
            found["GLOO_SOCKET_IFNAME"] = interface
        return found

    def watch_over(self, end_ranks: Callable[[], None]) -> None:
        """Have this launcher's ranks ended once another launcher is lost or has failed.

        Args:
            end_ranks: ends them at once; called from a thread.
        """
        self._end_ranks = end_ranks
        if self.cause:  # before they were started
            end_ranks()

    def first_rank(self) -> int:
        """Global rank of this launcher's rank 0."""
        return self.place.index * self.place.procs

    def _watch(self, own: Round) -> None:
        """Runs in a thread: notice who is lost or has failed, and stop this launcher's ranks."""
        began = last_answer = time.monotonic()
        silence_s = self.place.silence_s
        while not self._stopping.wait(_BEAT_S) and not self.cause:
            try:
                ages = own.beat()
                last_answer = time.monotonic()
                departed = own.said("left")
                self._repeat(own)
                if not self.cause and own.is_over():  # launcher 0 was gone, and has been started again
                    self.cause = self._lost(0, last_answer - began)
            except OSError:
                if (age_s := time.monotonic() - last_answer) > silence_s and not self._stopping.is_set():
                    self.cause = self._lost(0, age_s)
                continue
            for index in range(self.place.count):
                # Who had to wait for the others before this began was silent meanwhile.
                age_s = min(ages.get(index, 0.0), last_answer - began)
                if index not in departed and age_s > silence_s:
                    self.cause = self.cause or self._lost(index, age_s)
        if self.cause:
            self._end_ranks()  # they wait for a peer that will not answer, and would do so until the timeout

    def _repeat(self, own: Round) -> None:
        """Take over the first failure that another launcher has reported, if there is one."""
        reports = {index: json.loads(text) for index, text in own.said("failed").items() if index != self.place.index}
        if reports:
            self._take_over(*min(reports.items(), key=lambda pair: pair[1]["time_ns"]))

    def _lost(self, index: int, age_s: float) -> str:
        self.is_someone_lost = True
        self.may_start_again = self.place.comes_back
        where = f", {self.address[0]}:{self.address[1]}" if index == 0 else ""
        return (
            f"Lost {self._names[index]}{where}: nothing heard of it for {age_s:.0f} s. The link is down, or the "
            "machine or its launcher is gone. The ranks here were stopped."
        )

    def explain(self, failure: Failure) -> str:
        """Why the run ended if that was not this launcher's own doing, else nothing (and the others are told).

        A rank that was killed, or has found the user's input wrong, is a cause. One that raised may only have lost its
        peer: this waits until all other machines have been heard of, and the earliest of those that raised counts.

        Args:
            failure: how this launcher's first failed rank ended.
        """
        assert self._watcher is not None and self._round is not None
        if not self.cause and failure.time_ns and not failure.is_user_error:
            self._wait_for_others(self._round, failure)
        if self.cause:
            self._watcher.join(_SETTLE_S)  # it ends the ranks here
        with contextlib.suppress(OSError):
            if not self.cause:
                self._see_who_has_ended(self._round)
            if not self.cause:
                report = failure.__dict__ | {"time_ns": failure.time_ns or time.time_ns()}
                self._round.say("failed", json.dumps(report).encode())
        return self.cause

    def _wait_for_others(self, own: Round, failure: Failure) -> None:
        """Until it is known whether another machine was lost or failed before ``failure``; ``cause`` says so then."""
        began, is_told, stumbled = time.monotonic(), False, dict[int, bytes]()
        while not self.cause and (waited_s := time.monotonic() - began) < self.place.silence_s + _SETTLE_S:
            try:
                if not is_told:  # at the time of the server's clock, since those of the machines may differ
                    when = own.server_time_ns() - (time.time_ns() - failure.time_ns)
                    own.say("raised", json.dumps(failure.__dict__ | {"time_ns": when}).encode())
                    is_told = True
                ages, stumbled = own.beat(), own.said("raised")
                heard = stumbled.keys() | own.said("left").keys() | {i for i, age in ages.items() if age < _WELL_S}
                if waited_s > _SETTLE_S and heard >= {*range(self.place.count)}:
                    break
            except OSError:  # the server cannot be reached: the watcher will know whether it is lost
                pass
            time.sleep(0.2)
        reports = {index: json.loads(text) for index, text in stumbled.items()}
        first = min(reports, key=lambda index: (reports[index]["time_ns"], index), default=self.place.index)
        if not self.cause and first != self.place.index:
            self._take_over(first, reports[first])

    def _take_over(self, index: int, report: dict[str, Any]) -> None:
        self.exit_code = 2 if report["is_user_error"] else CRASHED
        self.cause = f"rank {report['rank']} on {self._names[index]} failed first:\n{report['text']}"

    def _see_who_has_ended(self, own: Round) -> None:
        """Launchers that will not start again: done, or stopped by somebody; those that crashed have said why."""
        for index, code in own.said("left").items():
            if code == _AGAIN:
                continue
            self.may_start_again = False
            if int(code) not in (0, CRASHED):
                self.exit_code = int(code)
                self.cause = f"{self._names[index]} has ended with exit code {self.exit_code}, before the ranks here."

    def leave(self, exit_code: int | None) -> None:
        """Stop watching. Launcher 0 serves for a moment longer, so that the others can leave in good order.

        Args:
            exit_code: of this launcher; None: it will take part in the next round.
        """
        self._stopping.set()
        is_out_of_reach = self.is_someone_lost and self._server is None
        with contextlib.suppress(OSError):
            if self._round is not None and not is_out_of_reach:
                self._round.say("left", _AGAIN if exit_code is None else str(exit_code).encode())
                if self._server is not None and self._watcher is not None and not self.is_someone_lost:
                    self._round.wait_for_all("left", _FAREWELL_S)
        self._client.close()
        if self._server is not None:
            self._server.close()
