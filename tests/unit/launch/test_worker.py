"""What a rank says of an error that another rank has caused."""

from __future__ import annotations

import traceback
from contextlib import nullcontext
from typing import Any

import pytest

from tests.unit.config.example_config import CPU_HOST
from vissl_zero.config.compose import compose
from vissl_zero.launch import worker
from vissl_zero.resolve.resolve import resolve


@pytest.mark.parametrize(
    ("message", "is_explained"), [("Timed out waiting 20000ms for recv operation to complete", True), ("other", False)]
)
def test_a_rank_that_waited_in_vain_says_for_whom_and_how_long(
    message: str, is_explained: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train_rank(plan: Any) -> int:
        raise RuntimeError(message)

    plan = resolve(compose("digits/simclr", ["config.DISTRIBUTED.TIMEOUT_S=20"]).run, "/nowhere", host=CPU_HOST)
    monkeypatch.setattr(worker, "train_rank", train_rank)
    monkeypatch.setattr(worker, "process_group", lambda *_: nullcontext())
    with pytest.raises(RuntimeError) as caught:
        worker.work(plan)
    said = "".join(traceback.format_exception(caught.value))
    assert ("Another rank gave no answer for 20 s (config.DISTRIBUTED.TIMEOUT_S)" in said) == is_explained
