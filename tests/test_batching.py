"""The plan of an update: each trajectory once, budgets kept, ranks level, the same everywhere."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.errors import ConfigError
from tasks.rollout.trajectory import GroupSummary, TrajectorySummary
from tasks.training.batching import (
    Item,
    UpdatePlan,
    mini_batches,
    plan_update,
)

pytestmark = pytest.mark.fast


def _groups(lengths: list[list[int]]) -> list[GroupSummary]:
    return [
        GroupSummary(
            unit_id=f"u{g}",
            question_id=f"q{g}",
            key=f"k{g}",
            worker="w",
            version=0,
            seconds=0.0,
            trajectories=tuple(
                TrajectorySummary(n, n // 2, 0.0, False, 0.0, "answered", 0, 0) for n in group
            ),
        )
        for g, group in enumerate(lengths)
    ]


batches = st.lists(st.lists(st.integers(2, 64), min_size=1, max_size=9), min_size=1, max_size=12)


def _all_items(groups: list[GroupSummary]) -> list[Item]:
    return [Item(g, t) for g, group in enumerate(groups) for t in range(len(group.trajectories))]


def _plan(groups: list[GroupSummary], **changes: int) -> UpdatePlan:
    arguments = {
        "mini_batch_size": 8,
        "ranks": 2,
        "tokens_per_micro_batch": 128,
        "seed": 0,
        "step": 1,
    }
    return plan_update(groups, **{**arguments, **changes})


@settings(max_examples=150, deadline=None)
@given(batches, st.integers(1, 20), st.integers(1, 5), st.integers(64, 300), st.integers(0, 99))
def test_each_trajectory_once_within_budget_and_ranks_level(
    lengths: list[list[int]], size: int, ranks: int, budget: int, step: int
) -> None:
    groups = _groups(lengths)
    plan = _plan(
        groups, mini_batch_size=size, ranks=ranks, tokens_per_micro_batch=budget, step=step
    )
    seen = []
    for mini in plan.micro_batches:
        assert len({len(micros) for micros in mini}) == 1, "ranks differ in micro-batches"
        for micros in mini:
            for micro in micros:
                tokens = [lengths[i.group][i.trajectory] for i in micro]
                assert max(tokens, default=0) * len(tokens) <= budget
                seen.extend(micro)
    assert sorted(seen) == _all_items(groups)
    for rank in range(ranks):
        assert set(plan.groups_of(rank)) == {
            i.group for mini in plan.micro_batches for micro in mini[rank] for i in micro
        }


@settings(max_examples=150, deadline=None)
@given(batches, st.integers(1, 20), st.integers(0, 99))
def test_mini_batches_keep_groups_whole(lengths: list[list[int]], size: int, seed: int) -> None:
    groups = _groups(lengths)
    batches = mini_batches(groups, size, seed, 3)
    assert sorted(item for batch in batches for item in batch) == _all_items(groups)
    assert all(batches)
    largest = max(len(group) for group in lengths)
    for batch in batches:
        assert len(batch) < size + min(size, largest)
    for g, group in enumerate(lengths):
        if len(group) <= size:
            assert sum(any(item.group == g for item in batch) for batch in batches) == 1
    assert batches == mini_batches(groups, size, seed, 3)


def test_the_reference_recipe_takes_ten_even_optimizer_steps() -> None:
    groups = _groups([[64] * 5] * 512)
    sizes = [len(batch) for batch in mini_batches(groups, 256, 0, 1)]
    assert len(sizes) == 10
    assert set(sizes) <= {255, 260}


def test_shuffle_changes_with_step_and_seed() -> None:
    groups = _groups([[10] * 4] * 12)
    assert mini_batches(groups, 8, 0, 1) != mini_batches(groups, 8, 0, 2)
    assert mini_batches(groups, 8, 0, 1) != mini_batches(groups, 8, 1, 1)


def test_ranks_are_balanced_by_tokens_and_groups_stay_together_when_that_is_level() -> None:
    level = _plan(_groups([[32] * 4] * 8), mini_batch_size=32)
    assert not set(level.groups_of(0)) & set(level.groups_of(1))
    uneven = [[60, 2, 2, 2], [60, 60, 60, 60]]
    plan = _plan(_groups(uneven), mini_batch_size=8)
    loads = [
        sum(uneven[i.group][i.trajectory] for micro in plan.micro_batches[0][rank] for i in micro)
        for rank in range(2)
    ]
    assert max(loads) <= 1.1 * sum(loads) / 2 + 60


def test_a_rank_without_work_gets_empty_micro_batches() -> None:
    plan = _plan(_groups([[10]]), ranks=3)
    assert [[len(micro) for micro in micros] for micros in plan.micro_batches[0]] == [[1], [0], [0]]


def test_too_long_a_trajectory_and_an_empty_batch_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"unit u0 has 200 tokens.*tokens_per_micro_batch 128"):
        _plan(_groups([[200]]))
    with pytest.raises(ConfigError, match="nothing to train"):
        _plan([])
