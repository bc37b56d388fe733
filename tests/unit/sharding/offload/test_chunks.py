"""Every element in one chunk, cut where vector loops are."""

from __future__ import annotations

import torch

from vissl_zero.sharding.offload.layout import ALIGN, Layout, StoredParam, cut, kept_in_memory


def test_every_element_once_and_in_order():
    tensors = [torch.empty(size) for size in (5, 0, 3 * ALIGN + 7, 1, ALIGN, 2 * ALIGN)]
    chunks = cut(tensors, 2 * ALIGN)
    seen = [torch.zeros(tensor.numel()) for tensor in tensors]
    for chunk in chunks:
        filled = 0
        for segment in chunk.segments:
            assert segment.offset == filled
            filled += segment.stop - segment.start
            seen[segment.tensor][segment.start : segment.stop] += 1
            assert segment.start % ALIGN == 0
        assert chunk.num_elements == filled <= 2 * ALIGN
    assert all(bool((count == 1).all()) for count in seen)


def test_small_tensors_share_a_chunk_and_formats_do_not():
    floats = [torch.empty(3), torch.empty(4)]
    assert len(cut(floats, ALIGN)) == 1
    mixed = cut([*floats, torch.empty(2, dtype=torch.float64)], ALIGN)
    assert [(len(chunk.segments), chunk.itemsize) for chunk in mixed] == [(2, 4), (1, 8)]


def test_records_have_room_for_each_parameter_in_its_own_format():
    params = [StoredParam("a", 3, torch.float64, True), StoredParam("b", 5, torch.float32, True)]
    layout = Layout([params, [StoredParam("c", 7, torch.bfloat16, False)]])
    assert layout.sizes == [3 * 8, 5 * 4, 7 * 2]
    for record, (chunk, param) in enumerate(zip(layout.chunks, layout.params, strict=True)):
        values = layout.view(chunk.segments[0], torch.zeros(layout.sizes[record], dtype=torch.uint8))
        assert (values.dtype, len(values)) == (param.dtype, param.num_elements)


def test_the_first_shards_that_fit_stay_in_memory() -> None:
    """One that takes all the room left fits; one that does not leaves room for a later one."""
    assert list(kept_in_memory([4, 7, 6, 1], 10)) == [True, False, True, False]
