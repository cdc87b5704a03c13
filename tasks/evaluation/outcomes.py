"""An evaluation question by question, kept so that two of them can be compared."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal, get_args

from tasks.errors import IntegrityError
from tasks.evaluation.bootstrap import Difference, paired_bootstrap
from tasks.evaluation.breakdown import MODES, Mode
from tasks.rollout.trajectory import GroupSummary

Metric = Literal["exact_match", "f1"]
METRICS: tuple[Metric, ...] = get_args(Metric)
METRIC_NAMES: dict[Metric, str] = {"exact_match": "EM", "f1": "F1"}


@dataclass(frozen=True, slots=True)
class Outcomes:
    """values[mode][metric] is a value a question, a mean over its samples, in the order of
    question_ids; None where the question's group was left out, since its reward failed."""

    question_ids: tuple[str, ...]
    values: Mapping[str, Mapping[str, Sequence[float | None]]]

    def to_json(self) -> bytes:
        return json.dumps({"question_ids": self.question_ids, "values": self.values}).encode()

    @staticmethod
    def from_json(data: bytes) -> Outcomes:
        """Inverse of `to_json`.

        Raises:
            IntegrityError: the bytes are not an evaluation's outcomes.
        """
        try:
            found = json.loads(data)
            ids = tuple(found["question_ids"])
            values = {
                mode: {metric: tuple(found["values"][mode][metric]) for metric in METRICS}
                for mode in MODES
            }
            if any(len(column) != len(ids) for mode in values.values() for column in mode.values()):
                raise ValueError(f"{len(ids)} questions, and columns of other lengths")
        except (ValueError, KeyError, TypeError) as error:
            raise IntegrityError(f"not an evaluation's outcomes: {error!r}") from None
        return Outcomes(ids, values)


@dataclass(frozen=True, slots=True)
class Comparison:
    """One metric of two evaluations of the same questions, over those that both have a value
    for, and how sure the difference is."""

    mode: Mode
    metric: Metric
    questions: int
    first: float
    second: float
    difference: Difference


def outcomes(
    groups: Mapping[Mode, Sequence[GroupSummary]], question_ids: Sequence[str]
) -> Outcomes:
    """Of the groups of both modes, at most one a question.

    Args:
        question_ids: all that were asked, in their order.
    """
    values: dict[str, dict[str, list[float | None]]] = {}
    for mode in MODES:
        of = {group.question_id: group.trajectories for group in groups[mode]}
        values[mode] = {
            metric: [
                fmean(getattr(t, metric) for t in of[one]) if one in of else None
                for one in question_ids
            ]
            for metric in METRICS
        }
    return Outcomes(tuple(question_ids), values)


def compare(first: Outcomes, second: Outcomes, seed: int = 0) -> list[Comparison]:
    """Each mode and metric of the first evaluation against the second, by a paired bootstrap over
    the questions that both have a value for; without those that fewer than two have.

    Raises:
        ValueError: they are not of the same questions in the same order.
    """
    if first.question_ids != second.question_ids:
        raise ValueError(
            f"evaluations of {len(first.question_ids)} and {len(second.question_ids)} questions "
            "that are not the same; compare evaluations of the same held-out questions"
        )
    made = []
    for mode in MODES:
        for metric in METRICS:
            both = [
                (mine, other)
                for mine, other in zip(
                    first.values[mode][metric], second.values[mode][metric], strict=True
                )
                if mine is not None and other is not None
            ]
            if len(both) < 2:
                continue
            mine, others = zip(*both, strict=True)
            difference = paired_bootstrap(mine, others, seed)
            made.append(Comparison(mode, metric, len(both), fmean(mine), fmean(others), difference))
    return made
