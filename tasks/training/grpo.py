"""The objective's parts in pure functions of tensors: advantages, ratio and clips, KL, aggregation.

Sources, cited below by these letters:
[A] Shao et al. 2024, DeepSeekMath, arXiv:2402.03300 (GRPO: section 4.1, equations 3, 4 and 21).
[B] Schulman et al. 2017, PPO, arXiv:1707.06347 (clipped surrogate: equation 7).
[C] Schulman 2020, "Approximating KL Divergence" (k1, k2, k3).
[D] Yu et al. 2025, DAPO, arXiv:2503.14476 (separate clips and token mean: equation 8).
[E] Liu et al. 2025, "Understanding R1-Zero-Like Training", arXiv:2503.20783 (Dr. GRPO: section 3).
[F] Ahmadian et al. 2024, "Back to Basics", arXiv:2402.14740 (RLOO: section 4.2.1).
[G] Ye et al. 2020, "Mastering Complex Control in MOBA Games", arXiv:1912.09729 (dual clip:
    equation 5).
[H] Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training"
    (truncated importance sampling between sampler and trainer).

Dimensions: G trajectories of a group, B rows, T token positions. Natural logarithms. Functions keep
the float dtype they are given, advantages apart. Whatever lies outside a loss mask may hold
anything, NaN included: the functions that take a mask never let it reach a sum or a gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tasks.config import Advantage, Aggregation
from tasks.errors import NotFiniteError
from tasks.rollout.reward import ROUNDING

# |log ratio| above this is a broken pair of log-probabilities; exp of it would be inf, and inf
# times a zero gradient NaN. Far outside any clip range, so that no legal token is touched.
LOG_RATIO_BOUND = 20.0


# ---------------------------------------------------------------- advantages


def group_advantages(
    rewards_G: Tensor | Sequence[float], kind: Advantage = "grpo", eps: float = 1e-6
) -> Tensor:
    """How much better each trajectory of a group did than its group.

    grpo: (r - mean) / (max(std, floor) + eps), std with ddof 1 ([A] section 4.1.2).
    dr_grpo: r - mean ([E]): no division, which weighs questions by how alike their rewards are.
    rloo: r - mean of the *others* ([F]); dr_grpo times G / (G - 1), an unbiased baseline.

    Args:
        rewards_G: rewards of one group's trajectories, [G], those that are not trained on included.
        kind: which of the three.
        eps: added to grpo's standard deviation.

    Returns:
        Advantages [G], float32. Exactly 0 for a singleton and for a group of equal rewards: there
        is nothing to compare with, so there is nothing to learn.

    Raises:
        NotFiniteError: a reward is NaN or infinite.
    """
    rewards = torch.as_tensor(rewards_G, dtype=torch.float64)
    if not torch.isfinite(rewards).all():
        raise NotFiniteError(f"rewards {rewards.tolist()} of a group must all be finite")
    count = rewards.numel()
    if count < 2 or rewards.min() == rewards.max():
        return torch.zeros(rewards.shape, dtype=torch.float32)
    centred = rewards - rewards.mean()
    if kind == "dr_grpo":
        return centred.float()
    if kind == "rloo":
        return (centred * count / (count - 1)).float()
    return (centred / (rewards.std(correction=1).clamp(min=ROUNDING) + eps)).float()


# ---------------------------------------------------------------- ratio and clips


class ClippedObjective(NamedTuple):
    """Per-token results of `clipped_objective`, all of the shape of its inputs.

    loss: to be minimised; ratio: policy over behaviour policy, detached; clipped_low,
    clipped_high, clipped_dual: bool, True where that clip is what cut the gradient off.
    """

    loss: Tensor
    ratio: Tensor
    clipped_low: Tensor
    clipped_high: Tensor
    clipped_dual: Tensor


def clipped_objective(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> ClippedObjective:
    """Clipped surrogate, negated ([B] equation 7; [A] equation 3; two clips: [D] equation 8).

    loss = -min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A), and where A < 0 no more
    than -dual_clip * A ([G] equation 5): without it the loss of a bad token whose probability has
    risen far is unbounded.

    Args:
        logprobs: the policy's log-probabilities, [BT] or any shape; gradients flow through these.
        old_logprobs: the behaviour policy's, same shape; the ratio's denominator, constant.
        advantages: same shape or broadcastable, constant along a trajectory.
        clip_low: how far below 1 the ratio counts, in (0, 1).
        clip_high: how far above 1 the ratio counts, > 0.
        dual_clip: largest ratio that counts where the advantage is negative, > 1; None: no bound.
    """
    ratio = _bounded(logprobs - old_logprobs.detach()).exp()
    free = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = torch.maximum(free, clipped)
    cut = clipped > free
    dual = torch.zeros_like(cut)
    if dual_clip is not None:
        bound = -advantages * dual_clip
        dual = (advantages < 0) & (loss > bound)
        loss = torch.where(dual, bound, loss)
    return ClippedObjective(
        loss=loss,
        ratio=ratio.detach(),
        clipped_low=cut & (advantages < 0),
        clipped_high=cut & (advantages > 0),
        clipped_dual=dual,
    )


def truncated_importance(trainer: Tensor, sampler: Tensor, bound: float) -> Tensor:
    """min(p_trainer / p_sampler, bound) per token ([H]): what a token's loss is to be weighed by.

    Args:
        trainer: log-probabilities of the policy that sampled, as the *trainer* computes them
            before the batch's first optimizer step; any shape.
        sampler: the engine's own for the same tokens, same shape.
        bound: largest weight; without it one token the sampler found unlikely rules the batch.

    Returns:
        Weights of the same shape, without gradient.
    """
    return _bounded(trainer - sampler).exp().clamp(max=bound).detach()


# ---------------------------------------------------------------- KL


def kl_k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """k1 estimate of KL(policy || reference) per token: log p - log q ([C]). Any shape.

    Unbiased, of high variance. As a loss term it pulls nowhere: its gradient is that of log p,
    zero in expectation over the policy's own samples.
    """
    return logprobs - ref_logprobs.detach()


def kl_k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """k2 estimate of KL(policy || reference) per token: (log p - log q)^2 / 2 ([C]). Any shape.

    Biased in value; on the policy's own samples its gradient is that of the KL.
    """
    return (logprobs - ref_logprobs.detach()).square() / 2


def kl_k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """k3 estimate of KL(policy || reference) per token: q/p - 1 - log(q/p) ([C]; [A] equation 4).

    Args:
        logprobs: the policy's, any shape; gradients flow through these.
        ref_logprobs: the reference's, same shape; treated as constant.

    Returns:
        Same shape, never negative.
    """
    log_ratio = _bounded(ref_logprobs.detach() - logprobs)
    return torch.expm1(log_ratio) - log_ratio


KL_ESTIMATORS = {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3}


# ---------------------------------------------------------------- aggregation


class Totals(NamedTuple):
    """Of a whole mini-batch, over all its micro-batches and ranks; only what is trained on.

    Dividing each part by its own totals instead would weigh tokens by how the mini-batch happened
    to be cut; with these the sum of the parts' results is the mean, whatever the cut.

    tokens: in the loss mask. sequences: trajectories with at least one such token.
    """

    tokens: int
    sequences: int


def masked_sum(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Sum over the mask, scalar; values outside it cannot reach the result, NaN included."""
    return torch.where(mask_BT, values_BT, 0).sum()


def token_mean(values_BT: Tensor, mask_BT: Tensor, tokens: int) -> Tensor:
    """Mean over tokens ([D] equation 8), scalar: this part's share of the mini-batch's.

    Args:
        values_BT: per-token values of this micro-batch, [B, T].
        mask_BT: bool, True where the token is trained on, [B, T].
        tokens: see `Totals`.

    Raises:
        ValueError: the mini-batch has no such token.
    """
    return masked_sum(values_BT, mask_BT) / _some(tokens, "token")


def sequence_mean_token_mean(values_BT: Tensor, mask_BT: Tensor, sequences: int) -> Tensor:
    """Mean over trajectories of each one's token mean ([A] equation 3), scalar: this part's share.

    A trajectory without a token in the mask counts neither above nor below the line.

    Raises:
        ValueError: no trajectory of the mini-batch has such a token.
    """
    lengths_B = mask_BT.sum(-1).clamp(min=1)
    means_B = torch.where(mask_BT, values_BT, 0).sum(-1) / lengths_B
    return means_B.sum() / _some(sequences, "trajectory with a token")


def sequence_mean_token_sum(
    values_BT: Tensor, mask_BT: Tensor, sequences: int, constant: float
) -> Tensor:
    """Mean over trajectories of each one's token sum over a constant ([E]), scalar: this part's
    share. Unlike a mean over its own length, it does not make long failures cheap.

    Args:
        constant: tokens; the same for every trajectory and step (never the padded width, which
            depends on what else is in the batch).

    Raises:
        ValueError: no trajectory of the mini-batch has such a token.
    """
    total = masked_sum(values_BT, mask_BT)
    return total / (_some(sequences, "trajectory with a token") * constant)


def aggregate(
    values_BT: Tensor, mask_BT: Tensor, totals: Totals, how: Aggregation, constant: float
) -> Tensor:
    """One of the three above by its name; `constant` is of the last alone."""
    if how == "token_mean":
        return token_mean(values_BT, mask_BT, totals.tokens)
    if how == "sequence_mean_token_mean":
        return sequence_mean_token_mean(values_BT, mask_BT, totals.sequences)
    return sequence_mean_token_sum(values_BT, mask_BT, totals.sequences, constant)


def _some(count: int, what: str) -> int:
    if count <= 0:
        raise ValueError(f"the mini-batch has no sampled {what} (count {count}): nothing to mean")
    return count


def _bounded(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
