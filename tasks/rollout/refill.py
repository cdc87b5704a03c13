"""Filling a step up with groups that can teach something (DAPO's dynamic sampling).

Yu et al. 2025, DAPO, arXiv:2503.14476, section 3.2: a group whose rewards are all equal has
advantage 0 throughout, so a batch full of them is a small batch with a noisy gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from tasks.rollout.reward import ROUNDING
from tasks.rollout.trajectory import GroupSummary


def is_uniform(group: GroupSummary) -> bool:
    """Whether all the group's rewards are equal: no advantage, no policy gradient."""
    rewards = [trajectory.reward for trajectory in group.trajectories]
    return max(rewards) - min(rewards) <= ROUNDING


@dataclass(slots=True)
class Refill:
    """A step's groups while further questions are sampled in place of those that are of no use:
    the ones that failed, and the uniform ones unless these are kept.

    A pure state machine: `ask` says how many questions to sample next, `take` is given their groups
    in the order of their units, until `ask` says 0. Which groups are trained on follows from that
    order alone, never from which came back first: the quick ones are the short ones.

    wanted: groups to train on. rounds: how often more are asked for at most. available: further
    questions there are. keep_uniform: uniform groups are trained on, too.
    """

    wanted: int
    rounds: int
    available: int
    keep_uniform: bool = False
    sampled: list[GroupSummary] = field(default_factory=list)
    refilled: int = 0
    round: int = 0

    def take(self, groups: Sequence[GroupSummary]) -> None:
        """Groups that were sampled: the step's own first, then each round's."""
        self.sampled.extend(groups)

    def ask(self) -> int:
        """How many further questions to sample now; 0: no more.

        As many as ought to close the gap at the share of groups that had a spread so far, but no
        more than a step's worth at once.
        """
        useful = len(self._useful())
        missing = self.wanted - useful
        if missing <= 0 or self.round == self.rounds:
            return 0
        likely = math.ceil(missing * len(self.sampled) / useful) if useful else self.wanted
        count = min(max(missing, likely), self.wanted, self.available - self.refilled)
        if count > 0:
            self.round += 1
            self.refilled += count
        return count

    def trained(self) -> list[GroupSummary]:
        """The groups to train on: the first `wanted` that are of use.

        Where none has a spread, the step's own: their KL and entropy terms still count.
        """
        return self._useful()[: self.wanted] or self.sampled[: self.wanted]

    def _useful(self) -> list[GroupSummary]:
        return [group for group in self.sampled if self.keep_uniform or not is_uniform(group)]
