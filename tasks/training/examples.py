"""What the objective is told of each trajectory, and its padded form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tasks.config import TrainingConfig
from tasks.errors import IntegrityError, NotFiniteError
from tasks.rollout.trajectory import Group, Trajectory
from tasks.training.grpo import group_advantages


@dataclass(frozen=True, slots=True)
class Example:
    """A trajectory as it is trained on. Arrays have its length T.

    ids: int32. trained: bool, the loss mask. sampled: bool, a subset of `trained`: where there is a
    sampler's log-probability. logprobs: float32, those, 0 elsewhere. advantage: of the trajectory.
    """

    ids: np.ndarray
    trained: np.ndarray
    sampled: np.ndarray
    logprobs: np.ndarray
    advantage: float

    @property
    def tokens(self) -> int:
        """Tokens in the loss mask."""
        return int(self.trained.sum())


class Padded(NamedTuple):
    """A micro-batch of examples, padded on the right: ids int64, trained and sampled bool,
    logprobs float32, all [B, T]; advantages float32 [B, 1]."""

    ids_BT: Tensor
    trained_BT: Tensor
    sampled_BT: Tensor
    logprobs_BT: Tensor
    advantages_B1: Tensor

    def to(self, device: torch.device) -> Padded:
        return Padded(*(tensor.to(device) for tensor in self))


def group_examples(
    group: Group, training: TrainingConfig, vocabulary: int, where: str
) -> list[Example]:
    """The group's trajectories with their advantages and loss masks.

    A trajectory that ran out of room and is to be masked (overlong filtering: Yu et al. 2025, DAPO,
    arXiv:2503.14476, section 3.4) has an empty loss mask, but its reward stays in the group's
    baseline: taking it out would make the others look average for having come to an end.

    Raises:
        IntegrityError, NotFiniteError: see `check_trajectory`, and a reward that is not finite.
    """
    rewards = [trajectory.reward for trajectory in group.trajectories]
    advantages = group_advantages(rewards, training.advantage).tolist()
    examples = []
    for number, (one, advantage) in enumerate(zip(group.trajectories, advantages, strict=True)):
        check_trajectory(one, vocabulary, f"{where}: trajectory {number} of {group.unit_id}")
        trained = one.loss_mask
        if training.train_on_observations:
            trained = np.arange(len(one.ids)) >= max(1, one.prompt_tokens)
        if training.truncated == "mask" and one.end == "truncated":
            trained = np.zeros_like(one.loss_mask)
        sampled = one.loss_mask & trained
        logprobs = np.where(sampled, one.logprobs, np.float32(0))
        examples.append(Example(one.ids, trained, sampled, logprobs, advantage))
    return examples


def collate(examples: Sequence[Example]) -> Padded:
    """Pad examples on the right to the longest of them.

    Returns:
        On the CPU; ids and log-probabilities 0 in the padding, masks False. No examples at all give
        B = 1, T = 2 and empty masks: something an idle rank can run a forward pass on.
    """
    rows = max(1, len(examples))
    width = max([2, *(len(one.ids) for one in examples)])
    ids_BT = np.zeros((rows, width), np.int64)
    trained_BT = np.zeros((rows, width), np.bool_)
    sampled_BT = np.zeros((rows, width), np.bool_)
    logprobs_BT = np.zeros((rows, width), np.float32)
    advantages_B1 = np.zeros((rows, 1), np.float32)
    for row, one in enumerate(examples):
        end = len(one.ids)
        ids_BT[row, :end] = one.ids
        trained_BT[row, :end] = one.trained
        sampled_BT[row, :end] = one.sampled
        logprobs_BT[row, :end] = one.logprobs
        advantages_B1[row] = one.advantage
    arrays = (ids_BT, trained_BT, sampled_BT, logprobs_BT, advantages_B1)
    return Padded(*(torch.from_numpy(array) for array in arrays))


def check_trajectory(trajectory: Trajectory, vocabulary: int, where: str) -> None:
    """Refuse what would index out of the embeddings or poison a gradient.

    Raises:
        IntegrityError: arrays of unequal lengths, a sampled prompt token, an unknown token id.
        NotFiniteError: a sampled token's log-probability is NaN or infinite.
    """
    ids, mask, logprobs = trajectory.ids, trajectory.loss_mask, trajectory.logprobs
    if not len(ids) == len(mask) == len(logprobs) or len(ids) == 0:
        raise IntegrityError(
            f"{where}: {len(ids)} ids, {len(mask)} mask entries and {len(logprobs)} "
            "log-probabilities; expected as many of each, at least one"
        )
    if mask[: max(1, trajectory.prompt_tokens)].any():
        raise IntegrityError(
            f"{where}: a token of its prompt ({trajectory.prompt_tokens} tokens, at least 1) is "
            "marked as sampled"
        )
    if ids.min() < 0 or ids.max() >= vocabulary:
        raise IntegrityError(
            f"{where}: token ids {ids.min()}..{ids.max()}, the policy has 0..{vocabulary - 1}"
        )
    if not np.isfinite(logprobs[mask]).all():
        raise NotFiniteError(f"{where}: the sampler's log-probabilities are not finite")
