"""GRPO in pure functions of tensors: advantages, the clipped objective, KL, aggregation.

Sources, cited below by these letters:
[A] Shao et al. 2024, DeepSeekMath, arXiv:2402.03300 (GRPO: section 4.1, equations 3, 4 and 21).
[B] Schulman et al. 2017, PPO, arXiv:1707.06347 (clipped surrogate: equation 7).
[C] Schulman 2020, "Approximating KL Divergence" (k1, k2, k3).
[D] Yu et al. 2025, DAPO, arXiv:2503.14476 (separate clips and token mean: equation 8).

Dimensions: G trajectories of a group, B rows, T token positions. All floats are float32, natural
logarithms. Whatever lies outside a loss mask may hold anything, NaN included: the functions that
take a mask never let it reach a sum or a gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tasks.errors import NotFiniteError

# Rewards of one group whose spread is below this are equal up to rounding. Without the floor a
# group of rewards such as 0.1 + 0.2 and 0.3 in float32 would be blown up to advantages near one.
STD_FLOOR = 1e-4
# |log ratio| above this is a broken pair of log-probabilities; exp of it would be inf, and inf
# times a zero gradient NaN. Far outside any clip range, so that no legal token is touched.
LOG_RATIO_BOUND = 20.0


class ClippedObjective(NamedTuple):
    """Per-token results of `clipped_objective`, all of the shape of its inputs.

    loss: float32, to be minimised; ratio: float32, policy over sampler, detached;
    clipped_low, clipped_high: bool, True where that clip is what cut the gradient off.
    """

    loss: Tensor
    ratio: Tensor
    clipped_low: Tensor
    clipped_high: Tensor


def group_advantages(rewards_G: Tensor | Sequence[float], eps: float = 1e-6) -> Tensor:
    """Group-relative advantages: (r - mean) / (std + eps), std with ddof 1 ([A] section 4.1.2).

    Args:
        rewards_G: rewards of one group's trajectories, [G].
        eps: added to the standard deviation.

    Returns:
        Advantages [G], float32. Exactly 0 for a singleton and for a group of equal rewards: there
        is nothing to compare with, so there is nothing to learn.

    Raises:
        NotFiniteError: a reward is NaN or infinite.
    """
    rewards = torch.as_tensor(rewards_G, dtype=torch.float64)
    if not torch.isfinite(rewards).all():
        raise NotFiniteError(f"rewards {rewards.tolist()} of a group must all be finite")
    if rewards.numel() < 2 or rewards.min() == rewards.max():
        return torch.zeros(rewards.shape, dtype=torch.float32)
    std = rewards.std(correction=1).clamp(min=STD_FLOOR)
    return ((rewards - rewards.mean()) / (std + eps)).float()


def clipped_objective(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> ClippedObjective:
    """Clipped surrogate, negated ([B] equation 7; [A] equation 3; two clips: [D] equation 8).

    loss = -min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A)

    Args:
        logprobs: the policy's log-probabilities, [BT] or any shape; gradients flow through these.
        old_logprobs: the sampler's, same shape; the ratio's denominator.
        advantages: same shape or broadcastable, constant along a trajectory.
        clip_low: how far below 1 the ratio counts, in (0, 1).
        clip_high: how far above 1 the ratio counts, > 0.
    """
    log_ratio = (logprobs - old_logprobs.detach()).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    ratio = log_ratio.exp()
    free = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    cut = clipped > free
    return ClippedObjective(
        loss=torch.maximum(free, clipped),
        ratio=ratio.detach(),
        clipped_low=cut & (advantages < 0),
        clipped_high=cut & (advantages > 0),
    )


def kl_k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """k1 estimate of KL(policy || reference) per token: log p - log q ([C]). Any shape."""
    return logprobs - ref_logprobs


def kl_k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """k3 estimate of KL(policy || reference) per token: q/p - 1 - log(q/p) ([C]; [A] equation 4).

    Args:
        logprobs: the policy's, any shape; gradients flow through these.
        ref_logprobs: the reference's, same shape; treated as constant.

    Returns:
        Same shape, never negative.
    """
    log_ratio = (ref_logprobs.detach() - logprobs).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return torch.expm1(log_ratio) - log_ratio


def masked_sum(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Sum over the mask, scalar; values outside it cannot reach the result, NaN included."""
    return torch.where(mask_BT, values_BT, 0).sum()


def token_mean(values_BT: Tensor, mask_BT: Tensor, global_count: int | float) -> Tensor:
    """Token-mean aggregation ([D] equation 8), scalar: this part's share of the global mean.

    Args:
        values_BT: per-token values of this micro-batch, [B, T].
        mask_BT: bool, True where the policy sampled the token, [B, T].
        global_count: masked-in tokens of the *whole* mini-batch, over all micro-batches and ranks.
            Dividing each part by its own count instead would weigh tokens by how the mini-batch
            happened to be cut; so the sum of the parts' results is the mean, whatever the cut.
    """
    if global_count <= 0:
        raise ValueError(f"global_count is {global_count}, the mini-batch has no sampled token")
    return masked_sum(values_BT, mask_BT) / global_count
