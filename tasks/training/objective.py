"""The loss of a micro-batch, put together from `grpo`'s pieces by the configuration."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tasks.config import TrainingConfig
from tasks.training.grpo import clipped_objective, kl_k3, masked_sum

# What is summed over the tokens of a micro-batch, in the order of `Terms.sums`.
SUMS = ("loss", "policy_loss", "entropy", "kl", "clip_low", "clip_high", "mismatch_kl")


class Terms(NamedTuple):
    """loss_BT: float32 [B, T], what to minimise per token; sums: float64 [len(SUMS)], over the
    mask; worst: scalar, the largest |sampler - trainer| log-probability in the mask."""

    loss_BT: Tensor
    sums: Tensor
    worst: Tensor


def terms(
    logprobs_BT: Tensor,
    entropy_BT: Tensor,
    sampler_BT: Tensor,
    reference_BT: Tensor | None,
    advantages_B1: Tensor,
    mask_BT: Tensor,
    training: TrainingConfig,
) -> Terms:
    """loss = clipped surrogate - entropy_coefficient * entropy + kl_coefficient * k3.

    Args:
        logprobs_BT: the policy's log-probabilities, float32 [B, T], with gradients.
        entropy_BT: its entropies, with gradients if their coefficient is not 0.
        sampler_BT: log-probabilities the tokens were sampled with; the ratio's denominator.
        reference_BT: the base policy's, or None where there is no KL term.
        advantages_B1: one a trajectory, [B, 1].
        mask_BT: bool, True where the policy sampled the token.
    """
    objective = clipped_objective(
        logprobs_BT, sampler_BT, advantages_B1, training.clip_low, training.clip_high
    )
    loss_BT = objective.loss - training.entropy_coefficient * entropy_BT
    kl_BT = torch.zeros_like(sampler_BT)
    if reference_BT is not None:
        kl_BT = kl_k3(logprobs_BT, reference_BT)
        loss_BT = loss_BT + training.kl_coefficient * kl_BT
    with torch.no_grad():
        difference_BT = torch.where(mask_BT, sampler_BT - logprobs_BT, 0)
        per_token = (
            loss_BT,
            objective.loss,
            entropy_BT,
            kl_BT,
            objective.clipped_low,
            objective.clipped_high,
            difference_BT,
        )
        sums = torch.stack([masked_sum(values.double(), mask_BT) for values in per_token])
    return Terms(loss_BT, sums, difference_BT.abs().max())
