"""What all tests share: the pool of ranks ends with the session, and only the outside world gets a second try."""

from __future__ import annotations

import gc
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# Before torch is imported. Tests use tiny tensors: threads only wait for each other, 50 times longer on a busy machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import vissl_zero  # noqa: F401  (lets torchvision, which timm needs, be imported beside a CPU torch)
from tests.ranks import close_pool

MAX_RERUNS = 3  # in one session: more is no accident


@pytest.fixture(scope="session", autouse=True)
def _ranks() -> Iterator[None]:
    """End the pool of gloo processes after the last test; they must exit cleanly."""
    yield
    assert set(close_pool()) <= {0}


@pytest.fixture(scope="session", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep what plans measure of this machine out of the user's cache, in this process and those that it starts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder with a short name, for what keeps sockets in its TMPDIR: their names may have 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="test_") as name:
        yield Path(name)


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Seed torch for each test, so that what a test draws does not depend on the order of tests."""
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_process_group() -> Iterator[None]:
    """Leave the group of one that ``initialize`` joins to no later test."""
    yield
    distributed = getattr(sys.modules.get("torch"), "distributed", None)
    if distributed is not None and distributed.is_initialized():
        distributed.destroy_process_group()


@pytest.fixture(scope="session", autouse=True)
def _problems_are_sentences() -> Iterator[None]:
    """Check each problem that a test meets: *key: must be (got it). Do this.* In another order it is nonsense."""
    from vissl_zero.errors import Problem

    initialize = Problem.__init__

    def check(problem: Problem, *args: Any, **kwargs: Any) -> None:
        initialize(problem, *args, **kwargs)
        parts = (problem.key, problem.got, problem.must, problem.fix)
        assert not re.match(r"[\[{(\d'\"]|(True|False|None)$", problem.key), f"no key: {parts}"
        assert not problem.must.endswith((".", "?")), f"two sentences: {parts}"
        assert not problem.fix or problem.fix[-1] in ".?'", f"no sentence: {parts}"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Problem, "__init__", check)
        yield


@pytest.fixture(autouse=True)
def _no_secrets() -> Iterator[None]:
    """Forget values of the environment that a recipe of the test has read: later tests would mask them."""
    yield
    if errors := sys.modules.get("vissl_zero.errors"):
        errors._secrets.clear()


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Say which tests run in one process, which may run twice, and which begin first.

    A file's tests share what they cache, so they stay together; the parity matrix, the longest file, is split by
    feature. Tests marked ``outside`` get one more try. All others fail at once: a retry would hide a race. Tests of
    ``tests/launch`` count as such: they start complete runs and wait for them by the clock, so that other work on the
    machine can make them late. These take the longest, so they begin first, and then what has the most tests: a long
    file that begins last leaves a core idle.
    """
    groups = [_group(item) for item in items]
    sizes = Counter(groups)
    for item, group in zip(items, groups, strict=True):
        item.add_marker(pytest.mark.xdist_group(group))
        if _starts_complete_runs(item):
            item.add_marker(pytest.mark.flaky(reruns=1))
    items.sort(key=lambda item: (not _starts_complete_runs(item), -sizes[_group(item)]))


def _group(item: pytest.Item) -> str:
    cell = getattr(item, "callspec", None) and item.callspec.params.get("cell")  # type: ignore[attr-defined]
    return f"{item.path.stem}-{cell.feature}" if cell else str(item.path)


def _starts_complete_runs(item: pytest.Item) -> bool:
    return item.get_closest_marker("outside") is not None or item.path.parent.name == "launch"


def pytest_collection_finish() -> None:
    """Leave what is imported and collected out of garbage collections: it stays until the session ends."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _freeze_imports() -> Iterator[None]:
    """Leave out what a module's tests have imported too: collections that look at it double the time of plans."""
    num_modules = len(sys.modules)
    yield
    if len(sys.modules) > num_modules:
        gc.collect()
        gc.freeze()


def _reruns(config: pytest.Config) -> list[Any]:
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    return reporter.stats.get("rerun", []) if reporter else []


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a session in which the outside world needed more than a few second tries."""
    if len(_reruns(session.config)) > MAX_RERUNS and session.exitstatus == 0:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl
def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Count and name the tests that ran twice."""
    if reruns := _reruns(terminalreporter.config):
        terminalreporter.section("second tries")
        terminalreporter.write_line(f"{len(reruns)} of at most {MAX_RERUNS} second tries:")
        for report in reruns:
            terminalreporter.write_line(f"  {report.nodeid}")
