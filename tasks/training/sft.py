"""Supervised fine-tuning on demonstrations: the core of the warm start, in one process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tasks.errors import NotFiniteError
from tasks.training.grpo import token_mean
from tasks.training.policy import token_logprobs


class Progress(Protocol):
    """Where a training's state is kept; `tasks.training.progress.StoredProgress` is one."""

    def restore(
        self, model: PreTrainedModel, optimizer: torch.optim.Optimizer
    ) -> list[dict[str, float]]: ...

    def save_if_due(
        self,
        model: PreTrainedModel,
        optimizer: torch.optim.Optimizer,
        history: list[dict[str, float]],
    ) -> None: ...


def learning_rate_at(step: int, peak: float, warmup: int) -> float:
    """Learning rate of optimizer step `step` (0-based): linear warm-up, then constant."""
    return peak * min(1.0, (step + 1) / warmup) if warmup > 0 else peak


def sft_step(
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    ids_BT: Tensor,
    loss_mask_BT: Tensor,
    max_grad_norm: float = 1.0,
) -> dict[str, float]:
    """One optimizer step on the mean negative log-likelihood of the policy's tokens.

    Args:
        model: the policy, float32.
        optimizer: over the model's parameters.
        ids_BT: int64 [B, T], padded on the right with any id.
        loss_mask_BT: bool [B, T], True where the policy is to say the token; prompts,
            observations and padding are False and take no part.
        max_grad_norm: global gradient-norm clip.

    Returns:
        loss and entropy in nats a token, grad_norm before the clip, tokens in the mask.

    Raises:
        NotFiniteError: loss or gradient is NaN or infinite; parameters and optimizer unchanged.
    """
    mask_BT = loss_mask_BT.clone()
    mask_BT[:, 0] = False  # nothing stands before the first token to predict it from
    count = int(mask_BT.sum())
    logprobs_BT, entropy_BT = token_logprobs(model, ids_BT, mask_BT)
    loss = token_mean(-logprobs_BT, mask_BT, count)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
    if not (torch.isfinite(loss) and torch.isfinite(norm)):
        optimizer.zero_grad(set_to_none=True)
        raise NotFiniteError(
            f"supervised step: loss {loss.item()}, gradient norm {norm.item()}; nothing was "
            "changed; lower the learning rate"
        )
    optimizer.step()
    return {
        "loss": loss.item(),
        "entropy": token_mean(entropy_BT, mask_BT, count).item(),
        "grad_norm": norm.item(),
        "tokens": count,
    }


def train_sft(
    model: PreTrainedModel,
    batches: Iterable[tuple[Tensor, Tensor]],
    learning_rate: float,
    warmup: int = 0,
    *,
    betas: tuple[float, float] = (0.9, 0.999),
    weight_decay: float = 0.0,
    max_grad_norm: float = 1.0,
    schedule: Callable[[int], float] | None = None,
    on_step: Callable[[int, dict[str, float]], Any] | None = None,
    progress: Progress | None = None,
) -> list[dict[str, float]]:
    """Train a model in place over batches, each taken once, one optimizer step a batch.

    Args:
        model: the policy, float32.
        batches: (ids_BT int64, loss_mask_BT bool), as `sft_step` takes them; always the same ones
            where there is progress to go on from.
        learning_rate: AdamW peak; warmed up linearly over `warmup` steps, constant after.
        schedule: step (0-based) to learning rate, in place of that.
        on_step: called after each step with (step, metrics); what it raises ends the training.
        progress: keeps the state after a step, and has that of an earlier, interrupted call.

    Returns:
        Metrics of every step: those of `sft_step`, learning_rate and seconds. The same bits with
        and without an interruption, on one machine with one number of threads.

    Raises:
        NotFiniteError: names the step; the model is as it was before that step.
    """
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=learning_rate, betas=betas, weight_decay=weight_decay
    )
    history = progress.restore(model, optimizer) if progress is not None else []
    for step, (ids_BT, loss_mask_BT) in enumerate(batches):
        if step < len(history):
            continue
        began = time.perf_counter()
        rate = schedule(step) if schedule else learning_rate_at(step, learning_rate, warmup)
        for group in optimizer.param_groups:
            group["lr"] = rate
        try:
            ids_BT, loss_mask_BT = ids_BT.to(model.device), loss_mask_BT.to(model.device)
            metrics = sft_step(model, optimizer, ids_BT, loss_mask_BT, max_grad_norm)
        except NotFiniteError as error:
            raise NotFiniteError(f"step {step}: {error}") from None
        metrics |= {"learning_rate": rate, "seconds": time.perf_counter() - began}
        history.append(metrics)
        if progress is not None:
            progress.save_if_due(model, optimizer, history)
        if on_step is not None:
            on_step(step, metrics)
    return history
