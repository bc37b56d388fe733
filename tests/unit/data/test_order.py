from __future__ import annotations

import pytest

from vissl_zero.data.loader import EpochOrder, rank_slice, sequential


def orders(world_size: int, **keys: int | bool) -> list[EpochOrder]:
    defaults: dict[str, int | bool] = {"num_samples": 50, "micro_batch": 8, "accumulation_steps": 1, "seed": 3}
    defaults |= {"drop_last": False, "is_exact": False}
    return [EpochOrder(**{**defaults, **keys}, rank=rank, world_size=world_size) for rank in range(world_size)]  # type: ignore[arg-type]


def flat(steps: list[list[list[int]]]) -> list[int]:
    return [sample_id for step in steps for part in step for sample_id in part]


def ids(order: EpochOrder, epoch: int = 0, start_sample: int = 0) -> list[list[list[int]]]:
    return [[list(part.sample_ids) for part in step] for step in order.steps(epoch, start_sample)]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("num_samples", [7, 8, 10, 64])
def test_sample_i_goes_to_rank_i_times_ranks_over_samples(num_samples: int, world_size: int) -> None:
    parts = [list(range(num_samples))[rank_slice(num_samples, rank, world_size)] for rank in range(world_size)]
    for rank, part in enumerate(parts):
        assert part == [i for i in range(num_samples) if i * world_size // num_samples == rank]
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ranks_together_hold_the_same_global_batches_at_any_world_size(world_size: int) -> None:
    alone = ids(orders(1)[0], epoch=2)
    together = [ids(order, epoch=2) for order in orders(world_size)]
    # The last 2 of the 50 samples are left out where they are fewer than the ranks.
    assert len(together[0]) == (7 if world_size <= 2 else 6)
    for step, of_ranks in enumerate(zip(*together, strict=True)):
        assert flat(list(of_ranks)) == alone[step][0]


def test_an_epoch_has_every_sample_once_and_epochs_differ() -> None:
    first, second = (flat(ids(orders(1)[0], epoch)) for epoch in (0, 1))
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second
    assert first == flat(ids(orders(1)[0], 0))


def test_accumulated_steps_hold_the_samples_of_one_large_batch() -> None:
    accumulated, whole = orders(1, accumulation_steps=3)[0], orders(1, micro_batch=24)[0]
    assert accumulated.steps_per_epoch == whole.steps_per_epoch == 3
    assert [flat([step]) for step in ids(accumulated)] == [step[0] for step in ids(whole)]


def test_accumulation_deals_micro_batch_by_micro_batch_unless_it_is_exact() -> None:
    """With exact accumulation, what a rank has of a step lies together."""
    for rank in (0, 1):
        each = [step[0] for step in ids(orders(2)[rank])]
        assert [part for step in ids(orders(2, accumulation_steps=3)[rank]) for part in step] == each
        together = ids(orders(2, accumulation_steps=3, is_exact=True)[rank])
        assert [flat([step]) for step in together] == [step[0] for step in ids(orders(2, micro_batch=24)[rank])]
        assert together[0] != [each[0], each[1], each[2]]
        # The last 2 samples are one micro-batch: a rank has one of them, and no micro-batch is empty.
        assert [[len(part) for part in step] for step in together] == [[4, 4, 4], [4, 4, 4], [1]]


def test_the_global_count_is_right_for_the_partial_batch() -> None:
    for order in orders(2):
        steps = list(order.steps(0))
        assert [part.num_global for step in steps for part in step] == [8] * 6 + [2]
        assert len(steps) == order.steps_per_epoch == 7
        assert len(steps[-1][0].sample_ids) == 1


@pytest.mark.parametrize("changes", [{}, {"drop_last": True}, {"accumulation_steps": 3}, {"micro_batch": 60}])
@pytest.mark.parametrize("is_exact", [True, False])
def test_the_fewest_samples_of_a_rank_are_known_without_an_epoch(changes: dict[str, int], is_exact: bool) -> None:
    for world_size in (1, 2, 3):
        ranks = orders(world_size, is_exact=is_exact, **changes)
        counts = [len(part.sample_ids) for rank in ranks for step in rank.steps(0) for part in step]
        assert [rank.fewest for rank in ranks] == [min(counts, default=0)] * world_size


def test_a_tail_smaller_than_the_world_is_left_out_and_no_other() -> None:
    assert orders(2)[0].num_kept == 50
    assert orders(4)[0].num_kept == 48
    assert len(list(orders(4)[0].steps(0))) == orders(4)[0].steps_per_epoch == 6


@pytest.mark.parametrize(("accumulation_steps", "kept"), [(1, 48), (2, 48), (4, 32)])
def test_drop_last_keeps_whole_steps_only(accumulation_steps: int, kept: int) -> None:
    order = orders(1, drop_last=True, accumulation_steps=accumulation_steps)[0]
    assert order.num_kept == kept
    assert len(flat(ids(order))) == kept
    assert len(ids(order)) == order.steps_per_epoch


def test_resuming_goes_on_where_the_epoch_stopped_even_with_another_batch_size() -> None:
    whole = flat(ids(orders(1)[0], 5))
    resumed = [ids(order, 5, start_sample=24) for order in orders(2, micro_batch=6)]
    assert [i for of_ranks in zip(*resumed, strict=True) for i in flat(list(of_ranks))] == whole[24:]


@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_evaluation_gives_every_rank_the_same_number_of_batches_and_every_sample(world_size: int) -> None:
    plans = [list(sequential(18, 8, rank, world_size)) for rank in range(world_size)]
    assert {len(rank) for rank in plans} == {3}
    assert all(part.sample_ids for rank in plans for part in rank)
    assert {i for rank in plans for part in rank for i in part.sample_ids} == set(range(18))
