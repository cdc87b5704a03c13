"""Batches: the units of a step, when they may be sampled, and the groups that come back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from tasks.config import TrainConfig
from tasks.data.order import batch
from tasks.data.questions import Question
from tasks.rollout.agent import Unit
from tasks.rollout.engine import Sampling
from tasks.rollout.trajectory import GroupSummary, TrajectorySummary, plain


def train_units(
    questions: Sequence[Question], config: TrainConfig, step: int, version: int
) -> list[Unit]:
    """The step's units: which questions, is a pure function of (seed, step)."""
    rollout = config.rollout
    chosen = batch(len(questions), config.seed, step, rollout.questions_per_step)
    sampling = Sampling(rollout.temperature, rollout.top_p)
    make = partial(_unit, version, config.seed, rollout.group_size, sampling)
    return [make(f"train-{step:06d}-{i:05d}", questions[q]) for i, q in enumerate(chosen)]


def evaluation_units(
    questions: Sequence[Question], config: TrainConfig, version: int, greedy: bool
) -> list[Unit]:
    """One unit a held-out question: a single greedy trajectory, or evaluation.samples sampled."""
    rollout = config.rollout
    name = "greedy" if greedy else "sampled"
    sampling = Sampling(0.0, 1.0) if greedy else Sampling(rollout.temperature, rollout.top_p)
    size = 1 if greedy else config.evaluation.samples
    make = partial(_unit, version, config.seed, size, sampling)
    return [make(f"evaluation-{version:06d}-{name}-{i:05d}", q) for i, q in enumerate(questions)]


def _unit(
    version: int, seed: int, size: int, sampling: Sampling, unit_id: str, question: Question
) -> Unit:
    text, answers = question.question, question.answers
    return Unit(unit_id, question.id, text, answers, version, seed, size, sampling)


def unit_from_wire(data: dict[str, Any]) -> Unit:
    return Unit(
        **{**data, "answers": tuple(data["answers"]), "sampling": Sampling(**data["sampling"])}
    )


def summary_to_wire(summary: GroupSummary) -> dict[str, Any]:
    return {**plain(summary), "trajectories": [plain(t) for t in summary.trajectories]}


def summary_from_wire(data: dict[str, Any]) -> GroupSummary:
    trajectories = tuple(TrajectorySummary(**t) for t in data["trajectories"])
    return GroupSummary(**{**data, "trajectories": trajectories})


@dataclass(slots=True)
class Producer:
    """The admission rule that joins sampling and training.

    A group for step s may be started at version v only if, when step s trains, at most `bound`
    versions lie between them. Training at step t turns version v into v+1, so step s is admissible
    while the trainer stands before step t <= s iff s - t <= bound. The synchronous run is bound 0.
    """

    steps: int
    bound: int
    offered: int

    def admissible(self, next_step: int) -> list[int]:
        """Steps to start now, in order, each handed out once. `next_step` is the next to train."""
        last = min(next_step + self.bound, self.steps - 1)
        steps = list(range(max(self.offered, next_step), last + 1))
        self.offered = max(self.offered, last + 1)
        return steps
