"""Which number formats are chosen, from the model's own and from what ``zero`` says."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from vissl_zero.errors import ConfigError
from vissl_zero.integration.initialize import choose_precision
from vissl_zero.integration.settings import read_settings
from vissl_zero.resolve.resolved import Precision

TYPED = {"type": "ZeroRedundancyOptimizer_Level_3"}
SCALED = Precision("float32", None, "float16", "float32", True)


@pytest.mark.parametrize(
    ("dtype", "zero", "expected"),
    [
        (torch.float32, TYPED | {"fp16": True}, SCALED),
        (torch.float32, {"level": 2, "fp16": True}, SCALED),
        (torch.float16, {"level": 3}, SCALED),
        (torch.float16, TYPED | {"dynamic_loss_scale": False}, Precision("float32", None, "float16", "float32", False)),
        (torch.bfloat16, {"level": 1}, Precision("float32", None, "bfloat16", "float32", False)),
        (torch.float32, {"level": 0, "fp16": True}, Precision("float32", "float16", "float32", "float32", True)),
        (
            torch.bfloat16,
            {"level": 0, "rounding": "kahan"},
            Precision("bfloat16", None, "bfloat16", "float32", rounding="kahan"),
        ),
        (torch.float64, TYPED, Precision("float64", None, "float64", "float64", False)),
        (torch.float32, {"level": 3}, Precision()),
    ],
)
def test_formats(dtype, zero, expected):
    assert choose_precision(nn.Linear(2, 2, dtype=dtype), read_settings(zero)) == (expected, ())


@pytest.mark.parametrize("value", [True, False])
def test_loss_scaling_without_float16_is_said_to_have_no_effect(value):
    _, notes = choose_precision(nn.Linear(2, 2), read_settings({"level": 3, "dynamic_loss_scale": value}))
    assert notes == ("zero.dynamic_loss_scale has no effect: nothing is computed in float16.",)


def test_the_type_that_turns_float16_on_says_so():
    found, (note,) = choose_precision(nn.Linear(2, 2), read_settings(TYPED))
    assert found == SCALED and note.startswith("zero.type computes in float16, scaling the loss")


@pytest.mark.parametrize(("dtype", "key"), [(torch.float16, "fp16"), (torch.bfloat16, "bf16")])
def test_a_half_precision_model_without_half_precision_is_refused(dtype, key):
    with pytest.raises(ConfigError, match=rf"zero\.{key}: contradicts the model, which is in b?float16"):
        choose_precision(nn.Linear(2, 2, dtype=dtype), read_settings({"level": 3, key: False}))


@pytest.mark.parametrize(
    ("dtype", "zero", "told"),
    [
        (torch.float32, {}, "must have all its parameters in bfloat16 where zero.rounding is given"),
        (torch.bfloat16, {"rounding": "nearest"}, "zero.rounding: must be stochastic or kahan"),
        (torch.bfloat16, {"fp16": True}, "zero.rounding: cannot go with zero.fp16=True"),
        (torch.bfloat16, {"engine": "fairscale"}, "zero.rounding: cannot go with the fairscale engine"),
        (torch.bfloat16, {"offload_param_config": {"device": "nvme", "nvme_path": "/tmp"}}, "state on NVMe"),
    ],
)
def test_what_cannot_go_with_parameters_in_bfloat16_is_refused(dtype, zero, told):
    with pytest.raises(ConfigError) as caught:
        choose_precision(nn.Linear(2, 2, dtype=dtype), read_settings({"level": 3, "rounding": "kahan"} | zero))
    assert told in str(caught.value)


def test_float64_is_never_touched():
    with pytest.raises(ConfigError, match="cannot go with a float64 model"):
        choose_precision(nn.Linear(2, 2).double(), read_settings({"level": 3, "bf16": True}))


def _mixed(trained: torch.dtype, frozen: torch.dtype = torch.bfloat16) -> nn.Module:
    """Adapters over a frozen base."""
    return nn.Sequential(nn.Linear(2, 2, dtype=trained), nn.Linear(2, 2, dtype=frozen).requires_grad_(False))


@pytest.mark.parametrize("zero", [{"level": 3}, TYPED])
@pytest.mark.parametrize("name", ["float32", "float64"])
def test_a_model_of_several_formats_keeps_them(name, zero):
    found = choose_precision(_mixed(getattr(torch, name)), read_settings(zero))
    assert found == (Precision(name, None, name, name, False), ())
    trained = choose_precision(_mixed(getattr(torch, name)).requires_grad_(True), read_settings(zero))
    assert trained == found


@pytest.mark.parametrize(
    ("model", "zero", "message"),
    [
        (
            _mixed(torch.float16),
            {"level": 3, "dynamic_loss_scale": True},
            r"zero\.dynamic_loss_scale: cannot go with a model of several formats",
        ),
        (_mixed(torch.float32, torch.complex64), {"level": 0}, "must have floating-point parameters .got complex64 of"),
        (_mixed(torch.float32), {"level": 3, "bf16": True}, r"zero\.bf16: cannot go with a model of several formats"),
        (_mixed(torch.float32), {"level": 1, "engine": "fairscale"}, r"zero\.engine: needs a model of one floating-"),
        (_mixed(torch.float32), {"level": "fit"}, r"zero\.level: cannot forecast a model of several formats"),
        (nn.Linear(2, 2, dtype=torch.complex64), {"level": 0}, "must have floating-point parameters"),
    ],
)
def test_what_several_formats_cannot_do_is_refused(model, zero, message):
    with pytest.raises(ConfigError, match=message):
        choose_precision(model, read_settings(zero))
