"""From the two offload blocks of a recipe to the plan, and what is said about them."""

from __future__ import annotations

import pytest

from vissl_zero.config.blocks.sharding import OffloadOptimizer, OffloadParam
from vissl_zero.resolve.offload import max_in_cpu, offload_notes, offload_plans, offload_problems


def test_the_blocks_arrive_in_the_plan():
    optimizer = OffloadOptimizer(device="nvme", nvme_path="/disk", fast_init=True, keep_files=True)
    params = OffloadParam(device="cpu", pin_memory=False)
    of_optimizer, of_params = offload_plans(optimizer, params)
    assert (of_optimizer.device, of_optimizer.nvme_path) == ("nvme", "/disk")
    assert of_optimizer.fast_init and of_optimizer.keep_files
    assert (of_params.device, of_params.pin_memory, of_params.max_in_cpu) == ("cpu", False, None)
    assert of_optimizer.pin_memory, "not given"
    assert offload_problems(optimizer, params, 3, "config.ZERO") == []


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        (OffloadParam(max_in_cpu=1e9), 10**9),
        (OffloadParam(max_in_cpu=0.0), 0),
        (OffloadParam(fast_init=5e8), 5 * 10**8),
        (OffloadParam(fast_init=7), 7),
        (OffloadParam(fast_init=True), None),
    ],
)
def test_max_in_cpu(block, expected):
    assert max_in_cpu(block) == expected


@pytest.mark.parametrize(
    ("optimizer", "params", "level", "sentence"),
    [
        ({"device": "cpu"}, {}, 0, "z.offload_optimizer_config.device: needs ZeRO level 1, 2 or 3"),
        ({"device": "nvme"}, {}, 1, "z.offload_optimizer_config.nvme_path: must be given with nvme"),
        ({"device": "gpu"}, {}, 1, "z.offload_optimizer_config.device: must be none, cpu or nvme (got 'gpu')"),
        ({}, {"device": "cpu"}, 2, "z.offload_param_config.device: needs ZeRO level 3: at level 2"),
        ({}, {"device": "nvme"}, 3, "z.offload_param_config.nvme_path: must be given with nvme"),
        ({}, {"max_in_cpu": -1.0}, 3, "z.offload_param_config.max_in_cpu: must be at least 0 (got -1)"),
        (
            {},
            {"max_in_cpu": float("inf")},
            3,
            "z.offload_param_config.max_in_cpu: must be a number of elements (got inf)",
        ),
        (
            {},
            {"fast_init": float("nan")},
            3,
            "z.offload_param_config.max_in_cpu: must be a number of elements (got nan)",
        ),
        ({}, {"fast_init": 1.5, "max_in_cpu": 2.0}, 3, "z.offload_param_config.fast_init: is a number"),
    ],
)
def test_what_cannot_be_done_is_refused_with_the_reason(optimizer, params, level, sentence):
    problems = offload_problems(OffloadOptimizer(**optimizer), OffloadParam(**params), level, "z")
    assert [str(problem).startswith(sentence) for problem in problems] == [True]


@pytest.mark.parametrize(
    ("optimizer", "params", "has_gpu", "expected"),
    [
        ({}, {}, False, ()),
        ({"nvme_path": "/x"}, {}, False, ("z.offload_optimizer_config has no effect: its device is none.",)),
        (
            {"device": "nvme", "nvme_path": "/x", "pin_memory": True},
            {},
            False,
            ("z.offload_optimizer_config.pin_memory has no effect without an accelerator.",),
        ),
        ({"device": "nvme", "nvme_path": "/x"}, {}, False, ()),  # nobody asked for pin_memory
        ({"device": "nvme", "nvme_path": "/x", "pin_memory": True}, {}, True, ()),
        (
            {"device": "cpu", "pin_memory": True},
            {"device": "nvme", "nvme_path": "/x", "pin_memory": True},
            True,
            (
                "z.offload_optimizer_config.pin_memory has no effect: "
                "what the update needs is stored with the parameters already.",
                "z.offload_param_config.pin_memory has no effect with device: nvme.",
            ),
        ),
        (
            {},
            {"device": "cpu", "max_in_cpu": 5.0},
            True,
            ("z.offload_param_config.max_in_cpu has no effect with device: cpu.",),
        ),
        (
            {},
            {"device": "cpu", "fast_init": 5.0},
            True,
            (
                "z.offload_param_config.fast_init=5 is a number and is read as max_in_cpu.",
                "z.offload_param_config.max_in_cpu has no effect with device: cpu.",
            ),
        ),
        (
            {"device": "cpu", "pin_memory": False, "fast_init": True},
            {},
            False,
            (
                "z.offload_optimizer_config.device=cpu: training runs on the CPU, where this state is in any case.",
                "z.offload_optimizer_config.fast_init has no effect with device: cpu.",
            ),
        ),
    ],
)
def test_what_has_no_effect_is_said_once(optimizer, params, has_gpu, expected):
    assert offload_notes(OffloadOptimizer(**optimizer), OffloadParam(**params), has_gpu, "z") == expected
