"""Held-out evaluation: every question once greedily and some times sampled, through the queue."""

from __future__ import annotations

from collections.abc import Sequence

from tasks.evaluation.intervals import wilson
from tasks.inputs import Inputs
from tasks.metrics import Evaluation, batch_stats
from tasks.rollout.batches import evaluation_units
from tasks.rollout.fleet import Fleet
from tasks.rollout.trajectory import GroupSummary


def evaluate_version(
    fleet: Fleet, inputs: Inputs, version: int, step: int
) -> tuple[Evaluation, list[GroupSummary]]:
    """Evaluates a published version; also returns the sampled groups, to be looked at.

    Args:
        step: steps trained at that version, for the record.
    """
    greedy = evaluation_units(inputs.held_out, inputs.config, version, greedy=True)
    sampled = evaluation_units(inputs.held_out, inputs.config, version, greedy=False)
    fleet.offer([*greedy, *sampled])
    of_greedy = fleet.collect([unit.unit_id for unit in greedy])
    of_sampled = fleet.collect([unit.unit_id for unit in sampled])
    made = Evaluation(
        version=version,
        step=step,
        questions=len(inputs.held_out),
        greedy=batch_stats(of_greedy),
        sampled=batch_stats(of_sampled),
        greedy_interval=_interval(of_greedy),
        sampled_interval=_interval(of_sampled),
    )
    return made, of_sampled


def _interval(groups: Sequence[GroupSummary]) -> tuple[float, float]:
    trajectories = [t for group in groups for t in group.trajectories]
    return wilson(sum(t.exact_match for t in trajectories), len(trajectories))
