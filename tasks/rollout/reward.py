"""The reward: exact match or F1 of the answer the policy itself wrote, plus a format bonus.

Only the answer extracted from sampled text comes in here; prompt and observations never do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tasks.config import RolloutConfig
from tasks.evaluation.scoring import exact_match, f1


@dataclass(frozen=True, slots=True)
class Score:
    exact_match: bool
    f1: float
    reward: float


def score(answer: str | None, golds: Sequence[str], rollout: RolloutConfig) -> Score:
    """Scores an answer; None (the trajectory never answered) earns nothing."""
    if answer is None:
        return Score(False, 0.0, 0.0)
    em, overlap = exact_match(answer, golds), f1(answer, golds)
    base = float(em) if rollout.reward == "exact_match" else overlap
    return Score(em, overlap, base + rollout.format_bonus)
