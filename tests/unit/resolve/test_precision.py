"""Number formats, from AMP, FSDP_CONFIG and TRAINER.DTYPE."""

from __future__ import annotations

import pytest

from tests.unit.config.example_config import config
from vissl_zero.resolve.resolved import Precision
from vissl_zero.resolve.sharding_plan import precision

AMP = {"MODEL__AMP_PARAMS__USE_AMP": True}
FP16 = {"MODEL__AMP_PARAMS__DTYPE": "float16"}
AUTO = {"MODEL__FSDP_CONFIG__AUTO_SETUP_FSDP": True}


def o2(text="O2"):
    return {"MODEL__FSDP_CONFIG__AMP_TYPE": text}


FULL = Precision()
AUTOCAST = Precision(autocast="bfloat16")
HALF = Precision(compute="bfloat16", reduce="bfloat16")
CASES = {
    "AMP off": ({}, 3, FULL),
    "AMP off, AUTO_SETUP_FSDP": (AUTO, 3, FULL),
    "AMP off, O2": ({**AUTO, **o2()}, 3, FULL),
    "AMP on, level 0": (AMP, 0, AUTOCAST),
    "O1": ({**AMP, **AUTO}, 3, AUTOCAST),
    "01 with a zero, as printed": ({**AMP, **AUTO, **o2("01")}, 3, AUTOCAST),
    "O2": ({**AMP, **AUTO, **o2()}, 3, HALF),
    "02 with a zero": ({**AMP, **AUTO, **o2("02")}, 3, HALF),
    "O2 by ZERO.LEVEL alone": ({**AMP, **o2()}, 3, HALF),
    "O2 below level 3": ({**AMP, **o2()}, 2, AUTOCAST),
    "O2, reduced in float32": (
        {**AMP, **AUTO, **o2(), "MODEL__FSDP_CONFIG__fp32_reduce_scatter": True},
        3,
        Precision(compute="bfloat16", reduce="float32"),
    ),
    "float16 scales the loss": ({**AMP, **FP16}, 1, Precision(autocast="float16", use_loss_scale=True)),
    "float16 O2 scales the loss": (
        {**AMP, **FP16, **AUTO, **o2()},
        3,
        Precision(compute="float16", reduce="float16", use_loss_scale=True),
    ),
    "float16 without loss scaling": (
        {**AMP, **FP16, "ZERO__dynamic_loss_scale": False},
        1,
        Precision(autocast="float16"),
    ),
    "compute_dtype by hand": ({"MODEL__FSDP_CONFIG__compute_dtype": "bfloat16"}, 3, HALF),
    "compute_dtype by hand, below level 3": ({"MODEL__FSDP_CONFIG__compute_dtype": "bfloat16"}, 1, FULL),
    "compute_dtype by hand, mixed precision off": (
        {"MODEL__FSDP_CONFIG__compute_dtype": "bfloat16", "MODEL__FSDP_CONFIG__mixed_precision": False},
        3,
        FULL,
    ),
    "compute_dtype, derived": ({**AUTO, "MODEL__FSDP_CONFIG__compute_dtype": "bfloat16"}, 3, FULL),
    "bfloat16": (
        {"TRAINER__DTYPE": "bfloat16"},
        0,
        Precision("bfloat16", None, "bfloat16", "float32", rounding="stochastic"),
    ),
    "bfloat16 with Kahan sums": (
        {"TRAINER__DTYPE": "bfloat16", "TRAINER__ROUNDING": "kahan"},
        3,
        Precision("bfloat16", None, "bfloat16", "float32", rounding="kahan"),
    ),
    "float64": ({"TRAINER__DTYPE": "float64"}, 3, Precision("float64", None, "float64", "float64")),
}


@pytest.mark.parametrize("name", CASES)
def test_formats(name):
    values, level, expected = CASES[name]
    assert precision(config(**values), level)[0] == expected


@pytest.mark.parametrize(
    ("values", "level", "note"),
    [
        ({}, 1, "compute_dtype=float16 has no effect below level 3"),
        (AUTO, 3, "compute_dtype=float16 has no effect: AUTO_SETUP_FSDP derives it from AMP"),
        ({"MODEL__FSDP_CONFIG__mixed_precision": False}, 3, "has no effect: mixed_precision is off"),
        ({**AMP, **AUTO, **o2()}, 3, "compute_dtype=float16 gives way to AMP_PARAMS.DTYPE=bfloat16"),
    ],
)
def test_an_overridden_compute_dtype_is_said(values, level, note):
    _, notes = precision(config(**values, MODEL__FSDP_CONFIG__compute_dtype="float16"), level)
    assert len(notes) == 1
    assert note in notes[0]


def test_documented_fsdp_block_says_nothing():
    assert precision(config(**AMP, **AUTO, **o2("01")), 3)[1] == ()
