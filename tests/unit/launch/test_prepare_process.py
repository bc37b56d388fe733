"""What a rank sets up before anything is built."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from vissl_zero.config.compose import compose
from vissl_zero.launch.worker import prepare_process
from vissl_zero.resolve.resolve import resolve


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32, torch.get_num_threads()
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before[:2]
    torch.set_num_threads(before[2])


@pytest.mark.parametrize(
    ("value", "products", "convolutions"), [("null", False, True), ("true", True, True), ("false", False, False)]
)
def test_tf32_rounds_where_the_key_says(value: str, products: bool, convolutions: bool) -> None:
    recipe = "quickstart/swav_digits"
    prepare_process(resolve(compose(recipe, [f"config.MACHINE.TF32={value}"]).run, "/runs/mine", recipe=recipe))
    assert torch.backends.cuda.matmul.allow_tf32 == products
    assert torch.backends.cudnn.allow_tf32 == convolutions
