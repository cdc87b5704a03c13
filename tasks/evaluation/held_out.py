"""Held-out evaluation: every question once greedily and some times sampled, through the queue."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from tasks.errors import DataError, RewardError
from tasks.evaluation.breakdown import Mode, breakdown
from tasks.evaluation.outcomes import Outcomes, outcomes
from tasks.inputs import Inputs
from tasks.metrics import Evaluation, batch_stats
from tasks.rollout.batches import evaluation_units
from tasks.rollout.fleet import Fleet
from tasks.rollout.trajectory import GroupSummary


@dataclass(frozen=True, slots=True)
class Evaluated:
    """An evaluation's record, and its groups by reference, in the order of the questions: one a
    question, but for those whose reward failed."""

    record: Evaluation
    groups: dict[Mode, Sequence[GroupSummary]]
    question_ids: tuple[str, ...]

    @property
    def outcomes(self) -> Outcomes:
        return outcomes(self.groups, self.question_ids)


def evaluate_version(fleet: Fleet, inputs: Inputs, version: int, step: int) -> Evaluated:
    """Evaluates a published version on every held-out question.

    Args:
        step: steps trained at that version, for the record.

    Raises:
        DataError: there are no held-out questions.
        RewardError: the reward failed on all that was sampled, or on all that was greedy.
    """
    if not inputs.held_out:
        raise DataError(
            f"data.held_out {inputs.config.data.held_out!r} has no questions to evaluate on; "
            "expected at least one"
        )
    began = time.perf_counter()
    units = {
        mode: evaluation_units(inputs.held_out, inputs.config, version, greedy=mode == "greedy")
        for mode in ("greedy", "sampled")
    }
    fleet.offer([*units["greedy"], *units["sampled"]])
    groups: dict[Mode, Sequence[GroupSummary]] = {
        "greedy": fleet.collect([unit.unit_id for unit in units["greedy"]]),
        "sampled": fleet.collect([unit.unit_id for unit in units["sampled"]]),
    }
    for mode, found in groups.items():
        if not found:
            raise RewardError(
                f"reward {inputs.config.rollout.reward!r} failed on all {len(units[mode])} {mode} "
                f"groups of version {version}'s evaluation, see the warnings before this; mend it "
                "and evaluate again"
            )
    stats = {
        mode: batch_stats(found, dropped=len(units[mode]) - len(found))
        for mode, found in groups.items()
    }
    rows = {mode: breakdown(mode, found, inputs.held_out) for mode, found in groups.items()}
    record = Evaluation(
        version=version,
        step=step,
        questions=len(inputs.held_out),
        greedy=stats["greedy"],
        sampled=stats["sampled"],
        greedy_interval=rows["greedy"][0].exact_match_interval,
        sampled_interval=rows["sampled"][0].exact_match_interval,
        rows=(*rows["greedy"], *rows["sampled"]),
        seconds=time.perf_counter() - began,
    )
    return Evaluated(record, groups, tuple(one.id for one in inputs.held_out))
