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
    question_ids."""

    question_ids: tuple[str, ...]
    values: Mapping[str, Mapping[str, Sequence[float]]]

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
    """One metric of two evaluations of the same questions, and how sure the difference is."""

    mode: Mode
    metric: Metric
    first: float
    second: float
    difference: Difference


def outcomes(groups: Mapping[Mode, Sequence[GroupSummary]]) -> Outcomes:
    """Of the groups of both modes, one a question and in the same order."""
    ids = tuple(group.question_id for group in groups["greedy"])
    if ids != tuple(group.question_id for group in groups["sampled"]):
        raise ValueError("greedy and sampled groups are not of the same questions in one order")
    return Outcomes(
        ids,
        {
            mode: {
                metric: [fmean(getattr(t, metric) for t in g.trajectories) for g in groups[mode]]
                for metric in METRICS
            }
            for mode in MODES
        },
    )


def compare(first: Outcomes, second: Outcomes, seed: int = 0) -> list[Comparison]:
    """Each mode and metric of the first evaluation against the second, by a paired bootstrap.

    Raises:
        ValueError: they are not of the same questions in the same order, or of fewer than two.
    """
    if first.question_ids != second.question_ids:
        raise ValueError(
            f"evaluations of {len(first.question_ids)} and {len(second.question_ids)} questions "
            "that are not the same; compare evaluations of the same held-out questions"
        )
    return [
        Comparison(
            mode,
            metric,
            fmean(first.values[mode][metric]),
            fmean(second.values[mode][metric]),
            paired_bootstrap(first.values[mode][metric], second.values[mode][metric], seed),
        )
        for mode in MODES
        for metric in METRICS
    ]
