"""What all tests share: the pool of ranks ends with the session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ranks import close_pool


@pytest.fixture(scope="session", autouse=True)
def _ranks() -> Iterator[None]:
    """End the pool of gloo processes after the last test; they must exit cleanly."""
    yield
    assert set(close_pool()) <= {0}
