"""The end of a wait for ranks that do not come, in words of the loop; two ranks."""

from __future__ import annotations

import pytest

from tests.ranks import run_on_ranks
from vissl_zero.errors import VisslZeroError
from vissl_zero.sharding.checks import waiting


def _error_in_a_call(error: Exception, is_nested: bool) -> tuple[str, str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(waiting, "_watch", waiting._Watch())
        waiting.watch_calls()
        try:
            with waiting.waiting("optimizer.step()"):
                if not is_nested:
                    raise error
                with waiting.waiting("optimizer.full_state()"):
                    raise error
        except (RuntimeError, OSError, VisslZeroError) as caught:
            return type(caught).__name__, str(caught)
        finally:
            assert not waiting._watch.call
    raise AssertionError("no error")


@pytest.mark.parametrize("is_nested", [False, True])
@pytest.mark.parametrize(
    "error",
    [RuntimeError("Timed out waiting 1000ms"), OSError("[Errno 32] Broken pipe"), RuntimeError("rank has ended")],
)
def test_a_lost_connection_names_the_outermost_call(error: Exception, is_nested: bool) -> None:
    for rank, (kind, words) in enumerate(run_on_ranks(2, _error_in_a_call, error, is_nested)):
        assert kind == "VisslZeroError"
        assert words.startswith(f"Rank {rank} waits in optimizer.step(): another rank has not called it.")


@pytest.mark.parametrize("error", [RuntimeError("shape [3] is invalid"), VisslZeroError("Timed out")])
def test_an_error_of_another_kind_goes_on_as_it_is(error: Exception) -> None:
    expected = type(error).__name__, str(error)
    assert run_on_ranks(2, _error_in_a_call, error, False) == [expected] * 2


def test_a_rank_alone_waits_for_nobody() -> None:
    assert run_on_ranks(1, _error_in_a_call, RuntimeError("Timed out"), False) == [("RuntimeError", "Timed out")]
