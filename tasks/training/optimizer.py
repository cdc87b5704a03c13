"""AdamW over a rank's shard: clip by the global norm, warm-up, and its state for checkpoints."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tasks.config import TrainingConfig
from tasks.training.sft import learning_rate_at
from tasks.training.sharding import ShardedPolicy, local_rows

MOMENTS = ("exp_avg", "exp_avg_sq")


class PolicyOptimizer:
    """AdamW on a sharded policy.

    Attributes:
        steps: taken since the base (they drive the learning-rate warm-up).
    """

    def __init__(self, policy: ShardedPolicy, training: TrainingConfig) -> None:
        self._training = training
        self._named = dict(policy.parameters())
        self._adamw = torch.optim.AdamW(
            list(self._named.values()),
            lr=training.learning_rate,
            betas=(training.beta1, training.beta2),
            weight_decay=training.weight_decay,
        )
        self.steps = 0

    def zero_grad(self) -> None:
        self._adamw.zero_grad(set_to_none=True)

    def gradients(self) -> list[Tensor]:
        """This rank's rows of every gradient there is."""
        return [local_rows(p.grad) for p in self._named.values() if p.grad is not None]

    def step(self, norm: float) -> float:
        """Clip gradients whose global norm is `norm`, and step; returns the learning rate used."""
        training = self._training
        rate = learning_rate_at(self.steps, training.learning_rate, training.warmup_steps)
        scale = min(1.0, training.max_grad_norm / (norm + 1e-6))
        if scale < 1:
            for rows in self.gradients():
                rows.mul_(scale)
        for group in self._adamw.param_groups:
            group["lr"] = rate
        self._adamw.step()
        self.steps += 1
        return rate

    def moments(self) -> dict[str, dict[str, Tensor]]:
        """This rank's rows of both moments, by moment and parameter; empty before the first step.
        They share the optimizer's memory."""
        if not self.steps:
            return {}
        state = self._adamw.state
        return {
            moment: {name: local_rows(state[p][moment]) for name, p in self._named.items()}
            for moment in MOMENTS
        }

    def load(self, steps: int, moments: dict[str, dict[str, Tensor]]) -> None:
        """Take up where another optimizer stood, with what its `moments` gave (any shape of as many
        elements). `self` must be fresh."""
        for name, parameter in self._named.items() if steps else ():
            entry: dict[str, Any] = {"step": torch.tensor(float(steps))}
            for moment in MOMENTS:
                entry[moment] = torch.zeros_like(parameter, requires_grad=False)
                rows = local_rows(entry[moment])
                rows.copy_(moments[moment][name].view_as(rows))
            self._adamw.state[parameter] = entry
        self.steps = steps
