"""What changes from step to step."""

from __future__ import annotations

import pytest

from vissl_zero.engine.loop import Frozen
from vissl_zero.errors import ConfigError

NAME = "heads.0.prototypes0.weight"


@pytest.mark.parametrize(
    "written",
    [
        f"module.{NAME}",
        "_fsdp_wrapped_module.heads.0._fsdp_wrapped_module._fpw_module.prototypes0._fsdp_wrapped_module.weight",
    ],
)
def test_frozen_parameters_may_have_the_names_that_vissl_s_wrappers_give(written: str) -> None:
    frozen = Frozen([[written, 2]], [NAME, "trunk.weight"])
    assert [frozen.at(step) for step in range(3)] == [{NAME}, {NAME}, set()]


def test_a_name_that_no_parameter_has_is_refused() -> None:
    with pytest.raises(ConfigError, match="must name parameters of the model"):
        Frozen([["heads.0.prototypes1.weight", 2]], [NAME])
