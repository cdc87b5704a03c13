"""Batches: the units of a step, when they may be sampled, and the groups that come back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from tasks.config import TrainConfig
from tasks.data.order import batch, order
from tasks.data.questions import Question
from tasks.errors import ConfigError
from tasks.rollout.agent import Unit
from tasks.rollout.engine import Sampling
from tasks.rollout.streams import turns_at_most
from tasks.rollout.trajectory import GroupSummary, TrajectorySummary, plain

_EVALUATION = 2**31
_REFILL_EPOCHS = 2**32


def train_units(
    questions: Sequence[Question], config: TrainConfig, step: int, version: int
) -> list[Unit]:
    """The step's units: which questions, is a pure function of (seed, step)."""
    rollout = config.rollout
    chosen = batch(len(questions), config.seed, step, rollout.questions_per_step)
    sampling = Sampling(rollout.temperature, rollout.top_p)
    make = partial(_unit, config, version, rollout.group_size, sampling)
    first = step * _units_of_a_step(config)
    return [
        make(f"train-{step:06d}-{i:05d}", first + i, questions[q]) for i, q in enumerate(chosen)
    ]


def refill_units(
    questions: Sequence[Question], config: TrainConfig, step: int, version: int, span: range
) -> list[Unit]:
    """Further units of a step, numbers `span` of them: like `train_units` a pure function of (seed,
    step), of questions that the step does not have yet."""
    rollout = config.rollout
    regular = set(batch(len(questions), config.seed, step, rollout.questions_per_step))
    # An epoch that no step reaches, of its own for each step.
    further = order(len(questions), config.seed, _REFILL_EPOCHS + step)
    chosen = [q for q in further.tolist() if q not in regular][span.start : span.stop]
    sampling = Sampling(rollout.temperature, rollout.top_p)
    make = partial(_unit, config, version, rollout.group_size, sampling)
    first = step * _units_of_a_step(config) + rollout.questions_per_step
    return [
        make(f"train-{step:06d}-refill-{i:05d}", first + i, questions[q])
        for i, q in zip(span, chosen, strict=True)
    ]


def _units_of_a_step(config: TrainConfig) -> int:
    """How many a step has at most, with those of every refill."""
    return config.rollout.questions_per_step * (1 + config.training.refill_rounds)


def check_streams(config: TrainConfig, held_out: int) -> None:
    """Refuses a run that is so long that two of its turns would share a random stream.

    Args:
        held_out: how many held-out questions there are.

    Raises:
        ConfigError: it is.
    """
    rollout, turns = config.rollout, turns_at_most(config.rollout)
    of_a_step = {
        "trained on": _units_of_a_step(config) * rollout.group_size * turns,
        "evaluated": held_out * config.evaluation.samples * turns,
    }
    for kind, streams in of_a_step.items():
        most = _EVALUATION // max(1, streams) - 2
        if config.training.steps > most:
            raise ConfigError(
                f"training.steps is {config.training.steps:,}; at {streams:,} turns of a step that "
                f"are {kind} a run has random streams for {most:,} steps: lower it, or begin "
                "another run from this one's checkpoint"
            )


def refill_available(questions: Sequence[Question], config: TrainConfig, step: int) -> int:
    """How many units `refill_units` has for a step."""
    regular = batch(len(questions), config.seed, step, config.rollout.questions_per_step)
    return len(questions) - len(set(regular))


def evaluation_units(
    questions: Sequence[Question], config: TrainConfig, version: int, greedy: bool
) -> list[Unit]:
    """One unit a held-out question: a single greedy trajectory, or evaluation.samples sampled."""
    rollout = config.rollout
    name = "greedy" if greedy else "sampled"
    sampling = Sampling(0.0, 1.0) if greedy else Sampling(rollout.temperature, rollout.top_p)
    size = 1 if greedy else config.evaluation.samples
    make = partial(_unit, config, version, size, sampling)
    # Half of all streams are an evaluation's: never those of a unit that is trained on.
    first = _EVALUATION // (size * turns_at_most(rollout)) + 1 + version * len(questions)
    return [
        make(f"evaluation-{version:06d}-{name}-{i:05d}", first + i, q)
        for i, q in enumerate(questions)
    ]


def _unit(
    config: TrainConfig,
    version: int,
    size: int,
    sampling: Sampling,
    unit_id: str,
    number: int,
    question: Question,
) -> Unit:
    """A unit. `number` is one that no other unit of the run has which samples as much: so none has
    its random streams."""
    return Unit(
        unit_id=unit_id,
        question_id=question.id,
        question=question.question,
        answers=question.answers,
        version=version,
        seed=config.seed,
        size=size,
        sampling=sampling,
        gold_titles=question.gold_titles,
        stream=number * size * turns_at_most(config.rollout),
    )


def unit_from_wire(data: dict[str, Any]) -> Unit:
    tuples = {name: tuple(data[name]) for name in ("answers", "gold_titles")}
    return Unit(**{**data, **tuples, "sampling": Sampling(**data["sampling"])})


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
