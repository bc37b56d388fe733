"""How a run is asked to save and stop."""

from __future__ import annotations

import os
import signal
import time

import pytest

from vissl_zero.engine import stopping


@pytest.fixture(autouse=True)
def _put_back(monkeypatch):
    before = {number: signal.getsignal(number) for number in (*stopping.SIGNALS, signal.SIGINT)}
    monkeypatch.delenv(stopping.END_AT_VARIABLE, raising=False)
    stopping.forget()
    yield
    stopping.forget()
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2])
def test_signals_ask_with_their_name(number):
    signal.signal(number, signal.SIG_DFL)  # who runs the tests under nohup has SIGHUP ignored
    stopping.listen()
    assert stopping.requested_stop() is None
    os.kill(os.getpid(), number)
    assert stopping.requested_stop() == stopping.Stop(number.name, 75)
    stopping.request_stop("later")
    assert stopping.requested_stop() == stopping.Stop(number.name, 75)


def test_nohup_keeps_ignoring_the_end_of_the_terminal():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    stopping.listen()
    os.kill(os.getpid(), signal.SIGHUP)
    assert stopping.requested_stop() is None and signal.SIGHUP not in stopping.handled_signals()


def test_ctrl_c_saves_and_a_second_one_ends_at_once():
    stopping.listen()
    os.kill(os.getpid(), signal.SIGINT)
    assert stopping.requested_stop() == stopping.Stop("Ctrl-C", 130)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


def test_the_earlier_time_limit_counts(monkeypatch):
    stopping.end_at(time.time() + 100)
    assert stopping.requested_stop() is None
    monkeypatch.setenv(stopping.END_AT_VARIABLE, str(time.time() - 1))
    stopping.end_at(time.time() + 100)
    assert stopping.requested_stop() == stopping.Stop("the time limit")
    stopping.forget()
    assert stopping.requested_stop() == stopping.Stop("the time limit"), "the environment alone is enough"
