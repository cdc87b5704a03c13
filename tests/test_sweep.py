"""Sweeps: what is planned, what seeds have in common; the flow itself is in test_flow."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from flows.sweep import planned, variant_from
from tasks.artifacts import sweep_markdown
from tasks.console import as_text, sweep_tables
from tasks.errors import ConfigError
from tasks.evaluation.seeds import SeedRun, spread, step_rows, to_json, variant_rows
from tasks.metrics import Evaluation
from tasks.presets import resolve
from tests.evaluation_helpers import evaluation, group, question, trajectory

pytestmark = [pytest.mark.fast, pytest.mark.timeout(120)]

ASKED = [question(0), question(1), question(2, kind="comparison"), question(3)]


def at(step: int, right: int) -> Evaluation:
    """An evaluation in which the first `right` of four questions were answered rightly."""
    made = [group(q, trajectory(q, "1942" if i < right else "1")) for i, q in enumerate(ASKED)]
    return evaluation(ASKED, {"greedy": made, "sampled": made}, step, step)[0]


RUNS = [
    SeedRun("default", 0, 100.0, "run-0", (at(0, 0), at(10, 2))),
    SeedRun("rloo", 0, 50.0, "run-1", (at(0, 1), at(10, 3))),
    SeedRun("default", 1, 200.0, "run-2", (at(0, 1), at(10, 3))),
    SeedRun("rloo", 1, 9.0, error="UnitFailed: [/bad] | unit 7"),
    SeedRun("default", 2, 300.0, "run-3", (at(0, 1), at(10, 4))),
]


def test_rows_by_step_are_over_the_seeds_that_got_there() -> None:
    rows = step_rows(RUNS)
    assert [(row.variant, row.step, row.seeds) for row in rows] == [
        ("default", 0, 3),
        ("default", 10, 3),
        ("rloo", 0, 1),
        ("rloo", 10, 1),
    ]
    last = rows[1].exact_match
    assert last["sampled", "all"].values == (0.5, 0.75, 1.0)
    assert last["sampled", "all"].mean == 0.75
    # 0.75 -+ 4.3027 * 0.25 / sqrt(3) = 0.75 -+ 0.621, cut to a share's range
    assert last["sampled", "all"].interval == pytest.approx((0.129, 1.0), abs=1e-3)
    assert last["greedy", "comparison"].values == (0.0, 1.0, 1.0)
    assert last["greedy", "bridge"].values == pytest.approx((2 / 3, 2 / 3, 1.0))


def test_variants_are_compared_seed_by_seed() -> None:
    default, rloo = variant_rows(RUNS)
    assert (default.variant, default.versus, default.seconds) == ("default", None, 200.0)
    assert rloo.versus is not None
    assert rloo.versus["sampled"].values == (0.25,)
    assert rloo.versus["sampled"].interval is None, "one seed has no spread"
    two = [*RUNS[:3], replace(RUNS[1], seed=1, evaluations=(at(10, 4),))]
    versus = variant_rows(two)[1].versus
    assert versus is not None
    assert versus["greedy"].values == (0.25, 0.25)


def test_an_interval_of_differences_may_leave_the_range_of_shares() -> None:
    assert spread([-0.1, 0.1], share=False).interval == pytest.approx((-1.27, 1.27), abs=0.01)


def test_tables_show_failures_beside_the_rest() -> None:
    steps, variants, each = (as_text(table) for table in sweep_tables(RUNS))
    assert "0.750 [0.129, 1.000]" in steps
    assert "+0.250" in variants
    assert "[/bad] | unit 7" in each, "taken as text, not as markup"
    assert "run-3" in each
    text = sweep_markdown("s", RUNS, sweep_tables(RUNS))
    rows = [line for line in text.splitlines() if line.startswith("| rloo | 1 |")]
    assert rows == ["| rloo | 1 | 9 | failed |  | UnitFailed: [/bad] \\| unit 7 |"]
    assert len(sweep_tables([RUNS[0], RUNS[2]])) == 2, "no variants, no table of them"


def test_a_sweep_without_any_success_can_be_shown() -> None:
    failed = [replace(RUNS[3], variant="default")]
    assert "failed" in as_text(sweep_tables(failed)[-1])
    assert json.loads(to_json(failed))[0]["error"].startswith("UnitFailed")


def test_a_plan_lays_variants_over_the_overrides() -> None:
    variants = [variant_from("hot:rollout.temperature=1.5,training.steps=4")]
    plan = planned("tiny", variants, {"training": {"steps": 9, "learning_rate": 1e-3}})
    assert list(plan) == ["default", "hot"]
    default, hot = (resolve("tiny", tree) for tree in plan.values())
    assert (default.training.steps, default.rollout.temperature) == (9, 1.0)
    assert (hot.training.steps, hot.rollout.temperature) == (4, 1.5)
    assert hot.training.learning_rate == 1e-3


@pytest.mark.parametrize(
    ("texts", "problem"),
    [
        (["hot"], "expected NAME"),
        (["hot:"], "expected NAME"),
        (["hot:rollout.temperature"], "expected section.field=value"),
        (["a b:rollout.temperature=0.7"], "variant 'a b:rollout.temperature=0.7'"),
        (["hot:rollout.heat=1"], "heat"),
        (["hot:rollout.temperature=-1"], "temperature"),
        (["hot:rollout.temperature=0.7", "hot:rollout.top_p=0.8"], "two variants are named 'hot'"),
        (["default:rollout.temperature=0.7"], "other than 'default'"),
        (["hot:seed=1"], "sets seed = 1, and a sweep counts the seeds"),
        (["hot:rollout.max_prompt_tokens=512"], "no room for an answer"),
    ],
)
def test_a_plan_that_cannot_work_is_refused(texts: list[str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        planned("tiny", [variant_from(text) for text in texts], None)
