"""Memory of optimizer state that a checkpoint fills."""

from __future__ import annotations

import torch

from vissl_zero.sharding.state.shard import empty_state


def test_state_lies_in_memory_as_its_parameter_does():
    """Fused kernels walk through both together, in the order of memory."""
    kernel = torch.zeros(4, 3, 2, 2).to(memory_format=torch.channels_last)
    same = empty_state(kernel, (4, 3, 2, 2), torch.float64)
    assert (same.stride(), same.dtype) == (kernel.stride(), torch.float64)
    for shape in ((), (4,), (4, 1, 1, 1)):  # a counter, a row of Adafactor's
        assert empty_state(kernel, shape, None).shape == shape


def test_state_of_a_shard_on_disk_is_in_host_memory():
    meta = torch.zeros(3, 2, device="meta")
    for shape in ((3, 2), (3,)):
        assert (state := empty_state(meta, shape, torch.float32)).device.type == "cpu" and state.shape == shape
