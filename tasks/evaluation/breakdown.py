"""What an evaluation found: over all questions, and by their kind and level."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal, get_args

from tasks.data.questions import KINDS, Question
from tasks.evaluation.bootstrap import bootstrap_mean
from tasks.evaluation.intervals import Interval, wilson_of_means
from tasks.rollout.trajectory import GroupSummary

Mode = Literal["greedy", "sampled"]
MODES: tuple[Mode, ...] = get_args(Mode)
By = Literal["all", "kind", "level"]
_LEVELS = ("easy", "medium", "hard")


@dataclass(frozen=True, slots=True)
class Row:
    """Scores of some of the held-out questions, greedy or sampled.

    by, name: which questions: `all`; or the ones of a kind (bridge, comparison) or level (easy,
        medium, hard; other names where a data set has others).
    exact_match, f1: means over the trajectories. Their 95 % intervals treat the question, not the
        trajectory, as what was drawn: Wilson's, and the bootstrap's.
    answered, truncated, out_of_turns: trajectories that ended so. Those are all ends, so what is
        not `answered` is unanswered.
    invalid: trajectories with at least one invalid action.
    gold_recall: mean share of a question's gold titles that an observation showed; None where no
        question names any.
    """

    mode: Mode
    by: By
    name: str
    questions: int
    trajectories: int
    exact_match: float
    exact_match_interval: Interval
    f1: float
    f1_interval: Interval
    answered: int
    truncated: int
    out_of_turns: int
    invalid: int
    searches: float
    gold_recall: float | None

    @property
    def unanswered(self) -> int:
        return self.trajectories - self.answered

    @property
    def label(self) -> str:
        return "all" if self.by == "all" else self.name

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Row:
        """Inverse of `asdict`, after JSON."""
        intervals = {name: tuple(data[name]) for name in ("exact_match_interval", "f1_interval")}
        return Row(**{**data, **intervals})


def breakdown(mode: Mode, groups: Sequence[GroupSummary], asked: Sequence[Question]) -> list[Row]:
    """The row of all questions, then one a kind, then one a level.

    Args:
        groups: one a question.
        asked: the questions, in any order.

    Raises:
        ValueError: no groups.
    """
    if not groups:
        raise ValueError(f"no groups of a {mode} evaluation, expected one a question")
    known = {question.id: question for question in asked}
    rows = [_row(mode, "all", "", groups)]
    for by, attribute, order in (("kind", "kind", KINDS), ("level", "level", _LEVELS)):
        of: dict[str, list[GroupSummary]] = {}
        for group in groups:
            of.setdefault(getattr(known[group.question_id], attribute), []).append(group)
        rows += [_row(mode, by, name, of[name]) for name in _in_order(of, order)]
    return rows


def _in_order(found: dict[str, Any], order: Sequence[str]) -> Iterator[str]:
    yield from (name for name in order if name in found)
    yield from sorted(set(found) - set(order))


def _row(mode: Mode, by: Any, name: str, groups: Sequence[GroupSummary]) -> Row:
    every = [t for group in groups for t in group.trajectories]
    ends = [t.end for t in every]
    recalls = [t.gold_recall for t in every if t.gold_recall is not None]
    matches = [fmean(t.exact_match for t in group.trajectories) for group in groups]
    overlaps = [fmean(t.f1 for t in group.trajectories) for group in groups]
    return Row(
        mode=mode,
        by=by,
        name=name,
        questions=len(groups),
        trajectories=len(every),
        exact_match=fmean(t.exact_match for t in every),
        exact_match_interval=wilson_of_means(matches, len(every) // len(groups)),
        f1=fmean(t.f1 for t in every),
        f1_interval=bootstrap_mean(overlaps),
        answered=ends.count("answered"),
        truncated=ends.count("truncated"),
        out_of_turns=ends.count("out_of_turns"),
        invalid=sum(t.invalid_actions > 0 for t in every),
        searches=fmean(t.searches for t in every),
        gold_recall=fmean(recalls) if recalls else None,
    )
