"""The rendezvous of launchers on several machines: they meet, send heartbeats, and end or restart together.

Launcher 0 serves the ``KeyValueServer`` that all ranks and launchers use. Each launcher sends a heartbeat every second.
A launcher that is silent for too long is lost: the others stop their ranks and name it. A launcher whose ranks failed
reports the error, and the others print it too. Without this, a cut link would show only as a collective that times out,
without naming a machine.

A rendezvous lasts for one ``Generation`` of the run: until the ranks end. If the run may restart
(``DISTRIBUTED.MAX_RESTARTS``), every launcher leaves it and joins the next one.

Each generation has its own random name, and all its keys on launcher 0's server start with that name. So a launcher
that is late, or that was lost and restarted, cannot join a generation that started without it.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vissl_zero.atomic import replacing
from vissl_zero.errors import LaunchError
from vissl_zero.launch.failure import Failure
from vissl_zero.launch.key_value_store import (
    ADDRESS_VARIABLE,
    GENERATION_VARIABLE,
    SECRET_VARIABLE,
    Client,
    KeyValueServer,
    RefusedError,
    interface_towards,
)

FIRST_RANK_VARIABLE = "VISSL_ZERO_FIRST_RANK"
WORLD_SIZE_VARIABLE = "VISSL_ZERO_WORLD_SIZE"
FIRST_LOCAL_RANK_VARIABLE = "VISSL_ZERO_FIRST_LOCAL_RANK"
CRASHED = 1  # the exit code after which a run may restart
_AGAIN = b"again"
_BEAT_S = 1.0
_FAREWELL_S = 5.0
_SETTLE_S = 5.0  # for another machine to report that it failed first; its launcher waits 3 s for its own ranks
_WELL_S = 3.5 * _BEAT_S  # a launcher with a younger heartbeat is not lost


class Rendezvous:
    """One launcher's rendezvous. Call ``join`` and, also after an error, ``leave``.

    Attributes:
        spec: specification of this launcher; on launcher 0, with the port on which it listens.
        num_restarts: number of restarts of the run so far; all launchers agree on it after ``join``.
        cause: why another launcher had the ranks here stopped; empty if none had.
        exit_code: exit code for ``cause``.
        is_someone_lost: whether ``cause`` is a launcher that was silent for too long.
        may_start_again: whether all launchers are present or may come back.
    """

    def __init__(self, spec: LauncherSpec, announce: Path | None = None, before: Rendezvous | None = None):
        """Start the server, if this is launcher 0.

        Args:
            spec: specification of this launcher.
            announce: file to which launcher 0 writes its address, for launchers that read it from a shared folder.
            before: this launcher's rendezvous in the previous generation, which it has left to restart.
        Raises:
            LaunchError: launcher 0 cannot listen on its address.
        """
        self.spec = spec
        self.num_restarts: int = before.num_restarts + 1 if before else 0
        self.cause = ""
        self.exit_code = CRASHED
        self.is_someone_lost = False
        self.may_start_again = True
        self._after = before.generation_name if before else ""
        self._server: KeyValueServer | None = None
        self._stopping = threading.Event()
        self._names: list[str] = []
        self._watcher: threading.Thread | None = None
        self._generation: Generation | None = None
        self._end_ranks: Callable[[], None] = lambda: None
        self.address = spec.address
        if spec.index == 0:
            try:
                self._server = KeyValueServer(spec.address, spec.secret)
            except OSError as error:
                host, port = spec.address
                raise LaunchError(
                    f"Cannot listen on {host}:{port} ({error.strerror or error}). Name an address of this machine "
                    "and a free port."
                ) from error
            self.address = self._server.address
        # A fraction of the silence that counts as a loss, so that one slow answer is not taken for it.
        self._client = Client(self.address, spec.secret, min(5.0, max(1.0, spec.silence_s / 4)))
        if self._server is not None:  # it listens: launchers may join
            self._client.call(b"set", _NAME, secrets.token_hex(8).encode())
        if announce is not None:
            with replacing(announce) as temporary:
                temporary.write_text(json.dumps(self.address))

    @property
    def generation_name(self) -> str:
        """The name of the generation that this launcher has joined; "" before ``join``."""
        return self._generation.name if self._generation else ""

    def join(self, configuration: str, run_dir: str) -> str:
        """Wait for all launchers and return the run folder that launcher 0 has chosen.

        Args:
            configuration: digest of the configuration, which must be equal on all machines.
            run_dir: run folder that this launcher proposes.
        Raises:
            LaunchError: a launcher does not join in time, or has another secret or configuration.
        """
        spec = self.spec
        hello = {
            "host": socket.gethostname(),
            "configuration": configuration,
            "run_dir": run_dir,
            "num_restarts": self.num_restarts,
            "launcher": secrets.token_hex(8),  # different for each launcher
        }
        try:
            self._generation = enter(self._client, spec, json.dumps(hello).encode(), self._after)
            greetings = []
            deadline = time.monotonic() + spec.start_s
            for index in range(spec.count):
                greeting = self._generation.wait("hello", index, max(0.0, deadline - time.monotonic()))
                if greeting is None:
                    raise LaunchError(
                        f"Machine {index} of {spec.count} did not join within {spec.start_s:g} s. Start the same "
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
                f"Machine 0 cannot be reached at {host}:{port} within {spec.start_s:g} s ({error.strerror or error}). "
                "Start it, and check that this address and port can be reached from here."
            ) from error
        self._names = [f"machine {index} ({greeting['host']})" for index, greeting in enumerate(greetings)]
        for index, greeting in enumerate(greetings):
            if greeting["configuration"] != greetings[0]["configuration"]:
                raise LaunchError(
                    f"Machine {index} was started with another configuration than machine 0. Use the same recipe, "
                    "overrides and version of vissl_zero on all of them."
                )
        # A restarted launcher counts from 0, but the limit is for the whole run, so the largest count is used.
        self.num_restarts = max(int(greeting["num_restarts"]) for greeting in greetings)
        self._watcher = threading.Thread(target=self._watch, args=(self._generation,), daemon=True, name="peers")
        self._watcher.start()
        return str(greetings[0]["run_dir"])

    def variables(self) -> dict[str, str]:
        """Return the environment of this launcher's ranks."""
        spec, (host, port) = self.spec, self.address
        variables = {
            ADDRESS_VARIABLE: f"{host}:{port}",
            SECRET_VARIABLE: spec.secret.hex(),
            GENERATION_VARIABLE: self.generation_name,
            FIRST_RANK_VARIABLE: str(spec.index * spec.procs),
            FIRST_LOCAL_RANK_VARIABLE: str(spec.first_local_rank),
            WORLD_SIZE_VARIABLE: str(spec.count * spec.procs),
        }
        interface = interface_towards(host, port)
        if interface and "GLOO_SOCKET_IFNAME" not in os.environ:
            variables["GLOO_SOCKET_IFNAME"] = interface
        return variables

    def watch_over(self, end_ranks: Callable[[], None]) -> None:
        """Watch the other launchers, and end this launcher's ranks if one is lost or has failed.

        Args:
            end_ranks: function that ends the ranks at once; called from a thread.
        """
        self._end_ranks = end_ranks
        if self.cause:  # set before the ranks were started
            end_ranks()

    def first_rank(self) -> int:
        """Return the global rank of this launcher's rank 0."""
        return self.spec.index * self.spec.procs

    def _watch(self, generation: Generation) -> None:
        """Wait, in a thread, until a launcher is lost or has failed; then stop this launcher's ranks."""
        began = last_answer = time.monotonic()
        silence_s = self.spec.silence_s
        while not self._stopping.wait(_BEAT_S) and not self.cause:
            try:
                ages = generation.beat()
                last_answer = time.monotonic()
                departed = generation.published("left")
                self._repeat(generation)
                if not self.cause and generation.is_over():  # launcher 0 was lost, and has been restarted
                    self.cause = self._lost(0, last_answer - began)
            except OSError:
                if (age_s := time.monotonic() - last_answer) > silence_s and not self._stopping.is_set():
                    self.cause = self._lost(0, age_s)
                continue
            for index in range(self.spec.count):
                # A launcher that waited for the others before this thread began sent no heartbeat meanwhile.
                age_s = min(ages.get(index, 0.0), last_answer - began)
                if index not in departed and age_s > silence_s:
                    self.cause = self.cause or self._lost(index, age_s)
        if self.cause:
            self._end_ranks()  # else they would wait until the timeout for a peer that does not answer

    def _repeat(self, generation: Generation) -> None:
        """Set ``cause`` to the first failure that another launcher has reported, if there is one."""
        reports = {
            index: json.loads(text)
            for index, text in generation.published("failed").items()
            if index != self.spec.index
        }
        if reports:
            self._take_over(*min(reports.items(), key=lambda pair: pair[1]["time_ns"]))

    def _lost(self, index: int, age_s: float) -> str:
        self.is_someone_lost = True
        self.may_start_again = self.spec.comes_back
        where = f", {self.address[0]}:{self.address[1]}" if index == 0 else ""
        return (
            f"Lost {self._names[index]}{where}: no heartbeat for {age_s:.0f} s. The link is down, or the "
            "machine or its launcher is gone. The ranks here were stopped."
        )

    def explain(self, failure: Failure) -> str:
        """Return why another launcher ended the run, or "" after publishing this launcher's failure as the cause.

        A rank that was killed, or reports a user's error, is a cause. A rank that raised another error may only have
        lost its peer. So this waits for reports of all other machines, and the earliest error is the cause.

        Args:
            failure: failure of this launcher's first failed rank.
        """
        assert self._watcher is not None and self._generation is not None
        if not self.cause and failure.time_ns and not failure.is_user_error:
            self._wait_for_others(self._generation, failure)
        if self.cause:
            self._watcher.join(_SETTLE_S)  # the watcher ends the ranks here
        with contextlib.suppress(OSError):
            if not self.cause:
                self._see_who_has_ended(self._generation)
            if not self.cause:
                report = failure.__dict__ | {"time_ns": failure.time_ns or time.time_ns()}
                self._generation.publish("failed", json.dumps(report).encode())
        return self.cause

    def _wait_for_others(self, generation: Generation, failure: Failure) -> None:
        """Wait until it is known whether another machine failed or was lost before ``failure``, and set ``cause``."""
        began, is_published, errors = time.monotonic(), False, dict[int, bytes]()
        while not self.cause and (waited_s := time.monotonic() - began) < self.spec.silence_s + _SETTLE_S:
            try:
                if not is_published:  # with a time of the server's clock, because the clocks of machines may differ
                    when = generation.server_time_ns() - (time.time_ns() - failure.time_ns)
                    generation.publish("raised", json.dumps(failure.__dict__ | {"time_ns": when}).encode())
                    is_published = True
                ages, errors = generation.beat(), generation.published("raised")
                alive = (
                    errors.keys()
                    | generation.published("left").keys()
                    | {i for i, age in ages.items() if age < _WELL_S}
                )
                if waited_s > _SETTLE_S and alive >= {*range(self.spec.count)}:
                    break
            except OSError:  # the server does not answer: the watcher finds out whether it is lost
                pass
            time.sleep(0.2)
        reports = {index: json.loads(text) for index, text in errors.items()}
        # By time and then by number, because all launchers must name the same one.
        first = min(reports, key=lambda index: (reports[index]["time_ns"], index), default=self.spec.index)
        if not self.cause and first != self.spec.index:
            self._take_over(first, reports[first])

    def _take_over(self, index: int, report: dict[str, Any]) -> None:
        self.exit_code = 2 if report["is_user_error"] else CRASHED
        self.cause = f"rank {report['rank']} on {self._names[index]} failed first:\n{report['text']}"

    def _see_who_has_ended(self, generation: Generation) -> None:
        """Note launchers that will not restart, because they are done or were stopped; crashes were reported before."""
        for index, code in generation.published("left").items():
            if code == _AGAIN:
                continue
            self.may_start_again = False
            if int(code) not in (0, CRASHED):
                self.exit_code = int(code)
                self.cause = f"{self._names[index]} has ended with exit code {self.exit_code}, before the ranks here."

    def leave(self, exit_code: int | None) -> None:
        """Stop watching. Launcher 0 serves for a moment longer, so that the others can leave in good order.

        Args:
            exit_code: exit code of this launcher; None: it will join the next generation.
        """
        self._stopping.set()
        # If machine 0 is lost, a farewell would only wait for its timeout.
        is_out_of_reach = self.is_someone_lost and self._server is None
        with contextlib.suppress(OSError):
            if self._generation is not None and not is_out_of_reach:
                self._generation.publish("left", _AGAIN if exit_code is None else str(exit_code).encode())
                if self._server is not None and self._watcher is not None and not self.is_someone_lost:
                    self._generation.wait_for_all("left", _FAREWELL_S)
        self._client.close()
        if self._server is not None:
            self._server.close()


_NAME = b"generation"
_RETRY_S = 0.2


class Generation:
    """One launcher's part in a generation; ``enter`` returns it.

    Attributes:
        name: name of the generation.
        client: client of the server.
    """

    def __init__(self, name: str, client: Client, spec: LauncherSpec):
        self.name, self.client = name, client
        self._spec = spec

    def publish(self, what: str, value: bytes) -> None:
        """Publish ``value`` under the key ``what`` for the other launchers."""
        self.client.call(b"set", self._key(what, self._spec.index), value)

    def claim(self, hello: bytes) -> bool:
        """Claim this launcher's index and return False if another launcher has it."""
        if self.client.call(b"swap", self._key("hello", self._spec.index), b"", hello)[0] != hello:
            return False
        self.beat()  # from now on, a missing heartbeat counts as a lost launcher
        return True

    def wait(self, what: str, index: int, within_s: float) -> bytes | None:
        """Return the value that launcher ``index`` published as ``what``; None after ``within_s`` seconds."""
        key = self._key(what, index)
        if self.client.call(b"wait", str(within_s).encode(), key, answer_within_s=within_s + 5.0)[0] != b"1":
            return None
        return self.client.call(b"get", key)[0]

    def published(self, what: str) -> dict[int, bytes]:
        """Return launcher -> value that it has published as ``what``."""
        answers = {index: self.client.call(b"get", self._key(what, index)) for index in range(self._spec.count)}
        return {index: answer[0] for index, answer in answers.items() if answer}

    def wait_for_all(self, what: str, within_s: float) -> None:
        """Wait until every launcher has published ``what``, at most ``within_s`` seconds."""
        keys = [self._key(what, index) for index in range(self._spec.count)]
        self.client.call(b"wait", str(within_s).encode(), *keys, answer_within_s=2 * within_s)

    def beat(self) -> dict[int, float]:
        """Send a heartbeat and return launcher -> seconds since its last heartbeat."""
        ages = self.client.beat(f"{self.name}/{self._spec.index}")
        split = {tuple(name.split("/")): age for name, age in ages.items()}
        return {int(index): age for (name, index), age in split.items() if name == self.name}

    def server_time_ns(self) -> int:
        """Return the time of launcher 0's clock; it is late by the time that the answer takes."""
        return int(self.client.call(b"time")[0])

    def is_over(self) -> bool:
        """Check whether the server now serves another generation."""
        return self.client.call(b"get", _NAME) != [self.name.encode()]

    def _key(self, what: str, index: int) -> bytes:
        return f"{self.name}/{what}/{index}".encode()


def enter(client: Client, spec: LauncherSpec, hello: bytes, after: str) -> Generation:
    """Join the generation that the server serves, as soon as it is not ``after``. Return this launcher's part in it.

    Args:
        client: client with a short timeout; this function retries for ``spec.start_s``.
        spec: specification of this launcher.
        hello: first message of this launcher; each launcher's is different.
        after: name of the generation that this launcher has left, or "".
    Raises:
        RefusedError: the server has another secret.
        OSError: the server cannot be reached.
        LaunchError: another launcher has this index, or no new generation is served in time.
    """
    deadline = time.monotonic() + spec.start_s
    while True:
        is_taken = False
        try:
            number = client.call(b"get", _NAME)
            if number and (name := number[0].decode()) != after:
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
        client.close()  # a server that is about to end may still answer on an old connection
        time.sleep(_RETRY_S)


_TAKEN = (
    "Machine {index} takes part in this run already. Give each machine its own node_id. If that machine is gone, the "
    "others have not noticed yet, or may not restart (config.DISTRIBUTED.MAX_RESTARTS)."
)


_LONGEST_SILENCE_S = 60.0


@dataclass(frozen=True)
class LauncherSpec:
    """The specification of one launcher of a run.

    Attributes:
        index, count: number of this launcher, and of all launchers; launcher 0 serves the others.
        procs: number of ranks that each launcher starts.
        first_local_rank: ``local_rank`` of this launcher's first rank (not 0 where SLURM starts one launcher per rank).
        address: host and port on which launcher 0 listens; port 0: any free port.
        secret: secret of the run.
        timeout_s: timeout of a collective, in seconds.
        start_s: seconds for which launchers wait for each other at the start, and for a lost launcher to return.
        comes_back: whether the user may restart a lost launcher. A batch system restarts the whole job instead.
    """

    index: int
    count: int
    procs: int
    address: tuple[str, int]
    secret: bytes
    timeout_s: float
    first_local_rank: int = 0
    start_s: float = 300.0
    comes_back: bool = True

    @property
    def silence_s(self) -> float:
        """Seconds without a heartbeat after which a launcher counts as lost."""
        # Well before a collective times out, because that error would name no machine.
        return min(_LONGEST_SILENCE_S, self.timeout_s / 2)
