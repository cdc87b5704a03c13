"""Intervals, comparisons, break-downs: what is said of an evaluation, against other ways to it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.data.questions import Question
from tasks.errors import DataError, IntegrityError, RewardError
from tasks.evaluation.bootstrap import RESAMPLES, bootstrap_mean, paired_bootstrap
from tasks.evaluation.breakdown import breakdown
from tasks.evaluation.held_out import evaluate_version
from tasks.evaluation.intervals import t_interval, t_quantile, wilson, wilson_of_means
from tasks.evaluation.outcomes import Outcomes, compare, outcomes
from tasks.inputs import Inputs, load_inputs
from tasks.metrics import History, batch_stats
from tasks.presets import resolve
from tasks.rollout.agent import Unit
from tasks.rollout.engine import Sampling
from tasks.rollout.trajectory import GroupSummary
from tests.evaluation_helpers import evaluation, group, history, question, summary, trajectory

pytestmark = [pytest.mark.fast, pytest.mark.timeout(120)]

RNG = np.random.default_rng(7)


# Intervals


@given(st.lists(st.booleans(), min_size=1, max_size=60))
def test_one_sample_a_question_is_wilson_s_interval(hits: list[bool]) -> None:
    found = wilson_of_means([float(hit) for hit in hits], 1)
    assert found == pytest.approx(wilson(sum(hits), len(hits)), abs=1e-12)


def test_samples_that_agree_are_worth_one() -> None:
    """Eight copies of a sample say no more than it does."""
    means = [1.0] * 30 + [0.0] * 20
    assert wilson_of_means(means, 8) == pytest.approx(wilson(30, 50))
    assert wilson_of_means([1.0] * 50, 8) == pytest.approx(wilson(50, 50))


def test_samples_that_are_independent_are_worth_as_many() -> None:
    trials = RNG.random((400, 8)) < 0.6
    found = wilson_of_means(trials.mean(axis=1).tolist(), 8)
    wanted = wilson(int(trials.sum()), trials.size)
    assert found == pytest.approx(wanted, abs=0.004)
    wide = wilson(round(trials.mean() * 400), 400)
    assert found[1] - found[0] < 0.6 * (wide[1] - wide[0])


@given(st.integers(1, 9), st.lists(st.integers(0, 9), min_size=1, max_size=30))
def test_the_interval_lies_between_both(samples: int, counts: list[int]) -> None:
    means = [min(count, samples) / samples for count in counts]
    low, high = wilson_of_means(means, samples)
    assert 0 <= low <= fmean(means) + 1e-12
    assert fmean(means) - 1e-12 <= high <= 1
    widest = wilson_of_means([fmean(means)] * len(means), 1)
    assert high - low <= widest[1] - widest[0] + 1e-12


@pytest.mark.parametrize(("means", "samples"), [([], 1), ([0.5], 0), ([1.5], 2), ([-0.1], 2)])
def test_impossible_shares_are_refused(means: list[float], samples: int) -> None:
    with pytest.raises(ValueError, match="expected"):
        wilson_of_means(means, samples)


@pytest.mark.parametrize(
    ("degrees", "wanted"),
    # A table of Student's t, 97.5 %.
    [(1, 12.7062), (2, 4.3027), (3, 3.1824), (4, 2.7764), (9, 2.2622), (10, 2.2281), (30, 2.0423)],
)
def test_quantiles_of_student_s_t(degrees: int, wanted: float) -> None:
    assert t_quantile(0.975, degrees) == pytest.approx(wanted, abs=5e-5)
    assert t_quantile(0.025, degrees) == pytest.approx(-wanted, abs=5e-5)


def test_a_t_interval() -> None:
    assert t_interval([0.5]) is None
    assert t_interval([0.25, 0.25, 0.25]) == (0.25, 0.25)
    # mean 2, s 1, n 3: 2 -+ 4.3027 / sqrt(3)
    assert t_interval([1, 2, 3]) == pytest.approx((-0.4842, 4.4842), abs=1e-3)
    for bad in ((0.5, 0), (1.0, 3)):
        with pytest.raises(ValueError, match="expected"):
            t_quantile(*bad)


# Comparisons


def test_the_p_value_is_the_randomisation_test_s() -> None:
    """Against all sign patterns of nine differences."""
    first, second = RNG.random(9).round(1), RNG.random(9).round(1)
    difference = first - second
    signs = np.array(list(itertools.product((-1, 1), repeat=9)))
    exact = np.mean(np.abs(signs @ difference) >= abs(difference.sum()) - 1e-9)
    found = paired_bootstrap(first, second)
    assert found.p_value == pytest.approx(exact, abs=4 * np.sqrt(0.25 / RESAMPLES))


def test_the_interval_is_that_of_the_mean_where_there_are_many_questions() -> None:
    first, second = RNG.random(500) < 0.6, RNG.random(500) < 0.5
    difference = first.astype(float) - second
    half = 1.96 * pstdev(difference.tolist()) / np.sqrt(500)
    found = paired_bootstrap(first, second)
    assert found.mean == pytest.approx(difference.mean())
    wanted = (difference.mean() - half, difference.mean() + half)
    assert found.interval == pytest.approx(wanted, abs=0.1 * half)


def test_pairing_counts() -> None:
    """Always right where the other is, and on a few questions more: sure, though both vary."""
    second = np.arange(200) % 2
    first = np.maximum(second, np.arange(200) % 20 == 0)
    paired = paired_bootstrap(first, second)
    assert paired.interval[0] > 0
    assert paired.p_value < 0.01
    shuffled = paired_bootstrap(first, np.roll(second, 1))
    assert shuffled.interval[0] < 0 < shuffled.interval[1]


def test_two_questions_prove_nothing() -> None:
    assert paired_bootstrap([1, 1], [0, 0]).p_value == pytest.approx(0.5, abs=0.02)


def test_equal_evaluations_do_not_differ() -> None:
    found = paired_bootstrap([0, 1, 1], [0, 1, 1])
    assert (found.mean, found.interval, found.p_value) == (0.0, (0.0, 0.0), 1.0)


def test_a_comparison_repeats_and_turns_round() -> None:
    first, second = RNG.random(40), RNG.random(40)
    found = paired_bootstrap(first, second, seed=3)
    assert found == paired_bootstrap(first, second, seed=3)
    assert found != paired_bootstrap(first, second, seed=4)
    back = paired_bootstrap(second, first, seed=3)
    assert back.mean == -found.mean
    turned = (-found.interval[1], -found.interval[0])
    assert back.interval == pytest.approx(turned, abs=0.02)  # other draws


@pytest.mark.parametrize(
    ("first", "second"),
    [([1, 0], [1]), ([1], [0]), ([], []), ([[1, 0]], [[0, 1]]), ([1, float("nan")], [0, 1])],
)
def test_what_cannot_be_compared_is_refused(first: list, second: list) -> None:
    with pytest.raises(ValueError, match="expected"):
        paired_bootstrap(first, second)


def test_the_bootstrap_of_a_mean() -> None:
    values = RNG.random(7405).round(2)
    low, high = bootstrap_mean(values)
    half = 1.96 * values.std() / np.sqrt(len(values))
    assert (low, high) == pytest.approx((values.mean() - half, values.mean() + half), abs=half / 10)
    with pytest.raises(ValueError, match="expected"):
        bootstrap_mean([])


# Break-down

ASKED = [question(0), question(1, level="easy"), question(2, kind="comparison", level="odd")]


def test_a_break_down_counts_what_it_says() -> None:
    right, wrong = trajectory(ASKED[0], "1942"), trajectory(ASKED[1], "1911", found=())
    silent = trajectory(ASKED[2], None, found=ASKED[2].gold_titles)
    groups = [
        summary(group(ASKED[0], right, right)),
        summary(group(ASKED[1], wrong, replace(wrong, end="truncated", answer=None))),
        summary(group(ASKED[2], silent, silent)),
    ]
    rows = breakdown("sampled", groups, ASKED)
    assert [(row.by, row.label) for row in rows] == [
        ("all", "all"),
        ("kind", "bridge"),
        ("kind", "comparison"),
        ("level", "easy"),
        ("level", "hard"),
        ("level", "odd"),
    ]
    every, bridge, comparison = rows[:3]
    assert (every.questions, every.trajectories) == (3, 6)
    assert (every.answered, every.truncated, every.out_of_turns) == (3, 1, 2)
    assert (every.unanswered, every.invalid) == (3, 2)
    assert every.exact_match == pytest.approx(1 / 3)
    assert every.gold_recall == pytest.approx((0.5 * 2 + 0 + 1 * 2) / 6)
    assert (bridge.questions, bridge.exact_match, comparison.exact_match) == (2, 0.5, 0.0)
    # Samples that agree are no more evidence than one of them.
    assert every.exact_match_interval == pytest.approx(wilson(1, 3))
    assert sum(row.trajectories for row in rows if row.by == "level") == 6


def test_a_question_without_supporting_facts_has_no_recall() -> None:
    asked = replace(ASKED[0], gold_titles=())
    made = [summary(group(asked, trajectory_without_gold(asked)))]
    assert breakdown("greedy", made, [asked])[0].gold_recall is None
    assert batch_stats(made).gold_recall is None


def trajectory_without_gold(asked):  # type: ignore[no-untyped-def]
    made = trajectory(ASKED[0], "1942", found=())
    return replace(made, gold_titles=asked.gold_titles)


def test_no_groups_are_refused() -> None:
    with pytest.raises(ValueError, match="no groups"):
        breakdown("greedy", [], ASKED)


def test_outcomes_are_means_over_samples_and_survive_the_store() -> None:
    both = group(ASKED[0], trajectory(ASKED[0], "1942"), trajectory(ASKED[0], None))
    other = group(ASKED[1], trajectory(ASKED[1], "in 1942"), trajectory(ASKED[1], None))
    groups = {mode: [summary(both), summary(other)] for mode in ("greedy", "sampled")}
    found = outcomes(groups, [ASKED[0].id, ASKED[1].id])  # type: ignore[arg-type]
    assert found.values["sampled"]["exact_match"] == [0.5, 0.0]
    assert found.values["sampled"]["f1"] == pytest.approx([0.5, 1 / 3])
    again = Outcomes.from_json(found.to_json())
    assert [c.difference.mean for c in compare(found, again)] == [0, 0, 0, 0]
    damaged = json.loads(found.to_json())
    damaged["values"]["greedy"]["f1"].pop()
    for data in (b"{}", b"\xff", json.dumps(damaged).encode()):
        with pytest.raises(IntegrityError, match="not an evaluation"):
            Outcomes.from_json(data)


def test_evaluations_of_other_questions_are_not_compared() -> None:
    def of(*asked: int) -> Outcomes:
        made = [summary(group(ASKED[i], trajectory(ASKED[i], "1942"))) for i in asked]
        return outcomes({"greedy": made, "sampled": made}, [ASKED[i].id for i in asked])

    with pytest.raises(ValueError, match="not the same"):
        compare(of(0, 1), of(1, 0))


def test_questions_left_out_of_one_evaluation_are_left_out_of_the_comparison() -> None:
    """The reward may fail on a question in one mode of one evaluation; the rest still counts."""
    ids = [question.id for question in ASKED[:3]]

    def of(greedy: list[int], sampled: list[int], answer: str) -> Outcomes:
        made = [summary(group(q, trajectory(q, answer))) for q in ASKED[:3]]
        groups = {"greedy": [made[i] for i in greedy], "sampled": [made[i] for i in sampled]}
        return Outcomes.from_json(outcomes(groups, ids).to_json())  # type: ignore[arg-type]

    first, second = of([0, 1, 2], [0, 2], "1942"), of([1, 2], [2], "in 1942")
    assert first.values["sampled"]["exact_match"] == (1.0, None, 1.0)
    found = {(one.mode, one.metric): one for one in compare(first, second)}
    assert set(found) == {("greedy", "exact_match"), ("greedy", "f1")}, "one pair says nothing"
    row = found["greedy", "exact_match"]
    assert (row.questions, row.first, row.second) == (2, 1.0, 0.0)


# Records


def test_a_history_comes_back_with_its_evaluations() -> None:
    made = [group(q, trajectory(q, "1942")) for q in ASKED]
    last, _ = evaluation(ASKED, {"greedy": made, "sampled": made}, step=10)
    before = history(10, last)
    after = History.from_jsonl(before.to_jsonl())
    assert after.evaluations[-1] == last
    assert after.steps == before.steps
    assert after.evaluation_at(10) == last
    assert after.evaluation_at(9) is None


def test_a_step_that_is_repeated_is_recorded_once() -> None:
    made = [group(q, trajectory(q, "1942")) for q in ASKED]
    last, _ = evaluation(ASKED, {"greedy": made, "sampled": made}, step=10)
    found = history(10, last)
    first = list(found.steps)
    again = replace(first[4], seconds={"rollout": 0.0, "update": 0.0, "publish": 0.0})
    found.add_step(again)
    assert found.steps == first, "to the same version: as it was"
    other = replace(first[4], version=99)
    found.add_step(other)
    assert found.steps == [*first[:4], other], "to another: what came after is of a line left"
    assert [one.step for one in found.evaluations if one.step > 4] == []
    found.add_evaluation(replace(last, step=2))
    found.add_evaluation(replace(last, step=2, version=77))
    assert [(e.step, e.version) for e in found.evaluations if e.step == 2] == [(2, 77)]


def test_records_of_a_run_from_before_these_fields_can_be_read() -> None:
    made = [group(q, trajectory(q, "1942")) for q in ASKED]
    last, _ = evaluation(ASKED, {"greedy": made, "sampled": made}, step=0)
    row = json.loads(History(evaluations=[last]).to_jsonl().splitlines()[0])
    for new in ("rows", "seconds"):
        del row[new]
    del row["greedy"]["gold_recall"]
    (found,) = History.from_jsonl(json.dumps(row).encode()).evaluations
    assert found.rows == ()
    assert found.greedy.gold_recall is None


@settings(deadline=None)
@given(st.lists(st.sampled_from(["1942", "1911", None]), min_size=1, max_size=6))
def test_valid_actions_are_a_share(answers: list[str | None]) -> None:
    made = [summary(group(ASKED[0], *(trajectory(ASKED[0], answer) for answer in answers)))]
    # Each searches once and then answers, or acts invalidly.
    wanted = 1 - answers.count(None) / (2 * len(answers))
    assert batch_stats(made).valid_actions == pytest.approx(wanted)


class Answers:
    """A fleet whose answers are there: but for some questions, on which the reward has failed."""

    def __init__(self, lost: Sequence[tuple[str, str]] = ()) -> None:
        self.units: dict[str, Unit] = {}
        self._lost = lost

    def offer(self, units: Sequence[Unit]) -> None:
        self.units = {unit.unit_id: unit for unit in units}

    def collect(self, unit_ids: Sequence[str]) -> list[GroupSummary]:
        found = []
        for unit in map(self.units.__getitem__, unit_ids):
            mode = "greedy" if unit.size == 1 and unit.sampling.temperature == 0 else "sampled"
            if (mode, unit.question_id) not in self._lost:
                asked = next(one for one in ASKED if one.id == unit.question_id)
                found.append(summary(group(asked, *[trajectory(asked, "1942")] * unit.size)))
        return found


def asked_inputs(questions: Sequence[Question], samples: int = 1) -> Inputs:
    made = resolve("tiny", {"evaluation": {"samples": samples}})
    nothing: Any = ()
    return Inputs(made, nothing, tuple(questions), (), Path(), None, None)


def test_every_question_is_asked_once_greedily_and_k_times_sampled() -> None:
    fleet: Any = Answers()
    made = evaluate_version(fleet, asked_inputs(ASKED, samples=3), 7, 5)
    units = list(fleet.units.values())
    greedy, sampled = units[: len(ASKED)], units[len(ASKED) :]
    assert {(u.size, u.sampling) for u in greedy} == {(1, Sampling(0.0, 1.0))}
    assert {(u.size, u.sampling) for u in sampled} == {(3, Sampling(1.0, 1.0))}
    everyone = [one.id for one in ASKED]
    assert [u.question_id for u in greedy] == [u.question_id for u in sampled] == everyone
    assert (made.record.greedy.trajectories, made.record.sampled.trajectories) == (
        len(ASKED),
        3 * len(ASKED),
    )
    assert made.record.left_out == ""


def test_questions_on_which_the_reward_failed_are_said_to_be_missing() -> None:
    lost = [("greedy", ASKED[1].id), ("sampled", ASKED[0].id), ("sampled", ASKED[1].id)]
    fleet: Any = Answers(lost)
    made = evaluate_version(fleet, asked_inputs(ASKED), 7, 5).record
    said = f"{len(ASKED)} questions (less 1 greedy and 2 sampled on which the reward failed)"
    assert said in made.line()
    assert (made.greedy.groups, made.sampled.groups) == (len(ASKED) - 1, len(ASKED) - 2)


@pytest.mark.parametrize("mode", ["greedy", "sampled"])
def test_an_evaluation_without_a_reward_left_is_an_error(mode: str) -> None:
    fleet: Any = Answers([(mode, one.id) for one in ASKED])
    with pytest.raises(
        RewardError, match=rf"'exact_match' failed on all {len(ASKED)} {mode} groups of version 7"
    ):
        evaluate_version(fleet, asked_inputs(ASKED), 7, 5)


# Bad input


def test_an_evaluation_of_nothing_is_refused() -> None:
    fleet: Any = Answers()
    with pytest.raises(DataError, match="'miniature:held_out' has no questions to evaluate on"):
        evaluate_version(fleet, asked_inputs(()), 7, 5)
    assert not fleet.units


@pytest.mark.parametrize("field", ["train", "held_out"])
def test_an_empty_split_is_refused_before_anything_starts(tmp_path: Path, field: str) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    with pytest.raises(DataError, match=r"empty\.jsonl.*is empty; expected at least one question"):
        load_inputs(resolve("tiny", {"data": {field: str(empty)}}), tmp_path)
