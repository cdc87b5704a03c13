"""Filling a step up with groups that have a spread of rewards: the machine, and its units."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.config import TrainConfig
from tasks.data.questions import Question
from tasks.metrics import batch_stats
from tasks.presets import resolve
from tasks.rollout.batches import refill_available, refill_units, train_units
from tasks.rollout.refill import Refill, is_uniform
from tasks.rollout.trajectory import GroupSummary, TrajectorySummary

pytestmark = pytest.mark.fast


def _group(name: str, *rewards: float) -> GroupSummary:
    trajectories = tuple(TrajectorySummary(9, 4, r, r == 1, r, "answered", 1, 0) for r in rewards)
    return GroupSummary(name, "q", f"groups/{name}", "w", 0, 1.0, trajectories)


def _groups(varied: list[bool], first: int = 0) -> list[GroupSummary]:
    return [_group(f"u{first + i}", 1.0, float(not v)) for i, v in enumerate(varied)]


def test_uniform_means_equal_up_to_rounding() -> None:
    assert is_uniform(_group("a", 0.5, 0.5))
    assert is_uniform(_group("a", 0.1 + 0.2, 0.3))
    assert not is_uniform(_group("a", 0.3, 0.31))


@given(
    st.integers(1, 8),
    st.integers(1, 4),
    st.integers(0, 30),
    st.lists(st.booleans(), min_size=64, max_size=64),
)
def test_a_step_is_filled_up_or_says_that_it_could_not(
    wanted: int, rounds: int, available: int, luck: list[bool]
) -> None:
    refill = Refill(wanted, rounds, available)
    refill.take(_groups(luck[:wanted]))
    while count := refill.ask():
        assert 0 < count <= wanted
        first = len(refill.sampled)
        refill.take(_groups(luck[first : first + count], first))
    assert refill.round <= rounds
    assert refill.refilled <= available
    assert len(refill.sampled) == wanted + refill.refilled
    names = [group.unit_id for group in refill.sampled]
    varied = [group.unit_id for group in refill.sampled if not is_uniform(group)]
    trained = [group.unit_id for group in refill.trained()]
    if varied:
        assert trained == varied[:wanted], "the first with a spread, in the order of their units"
    else:
        assert trained == names[:wanted], "the step's own, since there is nothing better"
    if len(varied) < wanted:
        assert refill.round == rounds or refill.refilled == available, "it tried all it may"
    if all(luck[:wanted]):
        assert refill.refilled == 0


@given(st.integers(1, 8), st.integers(1, 4), st.lists(st.booleans(), min_size=64, max_size=64))
def test_where_uniform_groups_are_kept_only_lost_ones_are_made_up_for(
    wanted: int, rounds: int, lost: list[bool]
) -> None:
    """`lost`: whether each unit, in order, fails on every try."""
    refill = Refill(wanted, rounds, 64, keep_uniform=True)
    made = [g for g, gone in zip(_groups([False] * 64), lost, strict=True) if not gone]
    refill.take([g for g in made if int(g.unit_id[1:]) < wanted])
    while count := refill.ask():
        first = wanted + refill.refilled - count
        refill.take([g for g in made if first <= int(g.unit_id[1:]) < first + count])
    if not any(lost[:wanted]):
        assert refill.refilled == 0
    assert refill.trained() == made[: len(refill.trained())]
    assert len(refill.trained()) == wanted or refill.round == rounds


def test_it_asks_for_as_many_as_the_share_so_far_makes_likely() -> None:
    refill = Refill(8, 2, 100)
    refill.take(_groups([True, True, True, True, True, True, False, False]))
    assert refill.ask() == 3  # 2 missing, 6 of 8 had a spread
    refill.take(_groups([False] * 3, 8))
    assert refill.ask() == 4  # 2 missing, 6 of 11
    refill.take(_groups([True] * 4, 11))
    assert refill.ask() == 0
    assert [g.unit_id for g in refill.trained()][-2:] == ["u11", "u12"]


QUESTIONS = [
    Question(f"q{i}", f"who {i}?", ("a",), "bridge", "hard", (), (), "") for i in range(30)
]


def _config(seed: int = 0) -> TrainConfig:
    return resolve("tiny", {"seed": seed, "rollout": {"questions_per_step": 8, "group_size": 12}})


def test_further_units_are_of_other_questions_and_never_the_same_twice() -> None:
    seen: set[str] = set()
    for step in range(6):
        regular = train_units(QUESTIONS, _config(), step, version=step)
        assert refill_available(QUESTIONS, _config(), step) == 22
        spans = (range(5), range(5, 9), range(9, 22))
        rounds = [refill_units(QUESTIONS, _config(), step, step, span) for span in spans]
        further = [unit for units in rounds for unit in units]
        questions = [unit.question_id for unit in (*regular, *further)]
        assert len(set(questions)) == 30, "each question once a step"
        ids = {unit.unit_id for unit in (*regular, *further)}
        assert len(ids) == 30
        assert not ids & seen
        seen |= ids
        assert {unit.version for unit in further} == {step}
        again = refill_units(QUESTIONS, _config(), step, step, range(22))
        assert again == further, "whatever the rounds"
    one, other = (refill_units(QUESTIONS, _config(seed), 0, 0, range(9)) for seed in (0, 1))
    assert [u.question_id for u in one] != [u.question_id for u in other]


def test_numbers_are_of_all_groups_sampled() -> None:
    groups = _groups([True, False, True, False])
    stats = batch_stats(groups, refilled=2, trained=2)
    assert (stats.groups, stats.refilled_groups, stats.trained_groups) == (4, 2, 2)
    assert (stats.reward, stats.uniform_groups) == (0.75, 0.5)
    assert batch_stats(groups).trained_groups == 4
