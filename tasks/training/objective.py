"""The loss of a micro-batch, put together from `grpo`'s pieces by the configuration.

Sources are cited by the letters of `tasks.training.grpo`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tasks.config import TrainingConfig
from tasks.training.examples import Padded
from tasks.training.grpo import (
    KL_ESTIMATORS,
    Totals,
    aggregate,
    clipped_objective,
    kl_k3,
    masked_sum,
    truncated_importance,
)

# Summed over a micro-batch's tokens, in the order of `Terms.sums`. A metric is such a sum over the
# tokens trained on; the last two are over the tokens that the sampler sampled.
SUMS = (
    "policy_loss",
    "entropy",
    "kl",
    "clip_low",
    "clip_high",
    "clip_dual",
    "importance_cut",
    "mismatch_kl",
    "sampled",
)


class Terms(NamedTuple):
    """loss: scalar, this micro-batch's share of the mini-batch's loss; sums: float64 [len(SUMS)];
    worst: scalar, the largest |sampler - trainer| log-probability of a sampled token."""

    loss: Tensor
    sums: Tensor
    worst: Tensor


def terms(
    logprobs_BT: Tensor,
    entropy_BT: Tensor,
    batch: Padded,
    old_BT: Tensor | None,
    reference_BT: Tensor | None,
    totals: Totals,
    training: TrainingConfig,
    context: int,
) -> Terms:
    """aggregate(weight * clipped surrogate + kl_coefficient * KL - entropy_coefficient * entropy).

    The ratio's denominator and the weight are those of `TrainingConfig.importance`: the sampler's
    probabilities, as importance sampling has it ([B], section 2), the trainer's own weighed by
    truncated ratios ([H]), or the trainer's own. The bonus is PPO's ([B], equation 9). Where a
    token is trained on that nobody sampled (an observation, by `train_on_observations`) there is no
    sampler's log-probability: it counts as sampled by the policy as it is (ratio 1, weight 1).

    Args:
        logprobs_BT: the policy's log-probabilities at the sampling temperature, with gradients.
        entropy_BT: its entropies, with gradients if their coefficient is not 0.
        batch: masks, the sampler's log-probabilities and the advantages.
        old_BT: log-probabilities by the trainer before the batch's first optimizer step; None: the
            policy has not moved since then. Not used with importance = sampler.
        reference_BT: the base policy's, or None where there is no KL term.
        totals: of the whole mini-batch.
        context: what aggregation_constant is by default, in tokens.
    """
    mask_BT, sampled_BT, sampler_BT = batch.trained_BT, batch.sampled_BT, batch.logprobs_BT
    now_BT = logprobs_BT.detach()
    trainer_BT = now_BT if old_BT is None else old_BT
    if training.importance == "sampler":
        behaviour_BT = torch.where(sampled_BT, sampler_BT, now_BT)
    else:
        behaviour_BT = trainer_BT
    objective = clipped_objective(
        logprobs_BT,
        behaviour_BT,
        batch.advantages_B1,
        training.clip_low,
        training.clip_high,
        training.dual_clip,
    )
    policy_BT, cut_BT = objective.loss, torch.zeros_like(mask_BT)
    if training.importance == "truncated":
        weight_BT = truncated_importance(trainer_BT, sampler_BT, training.importance_bound)
        cut_BT = sampled_BT & (weight_BT >= training.importance_bound)
        policy_BT = policy_BT * torch.where(sampled_BT, weight_BT, 1)
    loss_BT, kl_BT = policy_BT, torch.zeros_like(now_BT)
    if training.entropy_coefficient > 0:
        loss_BT = loss_BT - training.entropy_coefficient * entropy_BT
    if reference_BT is not None:
        kl_BT = KL_ESTIMATORS[training.kl_estimator](logprobs_BT, reference_BT)
        loss_BT = loss_BT + training.kl_coefficient * kl_BT
    constant = training.aggregation_constant or context
    loss = aggregate(loss_BT, mask_BT, totals, training.aggregation, constant)
    with torch.no_grad():
        per_token = (
            policy_BT,
            entropy_BT,
            kl_BT,
            objective.clipped_low,
            objective.clipped_high,
            objective.clipped_dual,
            cut_BT,
        )
        sums = [masked_sum(values.double(), mask_BT) for values in per_token]
        mismatch = mismatch_of(now_BT, batch)
    return Terms(loss, torch.cat([torch.stack(sums), mismatch.sums]), mismatch.worst)


class Mismatch(NamedTuple):
    """sums: float64 [2], the last two of `SUMS`; worst: see `Terms`."""

    sums: Tensor
    worst: Tensor


@torch.no_grad()
def mismatch_of(trainer_BT: Tensor, batch: Padded) -> Mismatch:
    """How far sampler and trainer are apart on the tokens that were sampled, as k3 of
    KL(sampler || trainer): of low variance, so that a batch's mean says something, and no
    difference is made up for by an opposite one."""
    sampled_BT, sampler_BT = batch.sampled_BT, batch.logprobs_BT
    kl = masked_sum(kl_k3(sampler_BT, trainer_BT).double(), sampled_BT)
    worst = torch.where(sampled_BT, sampler_BT - trainer_BT, 0).abs().max()
    return Mismatch(torch.stack([kl, sampled_BT.sum().double()]), worst)
