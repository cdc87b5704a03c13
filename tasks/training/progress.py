"""How far a supervised fine-tuning has come, in the store: an interrupted one goes on from there.

The state is a checkpoint of a gang of one (`tasks.training.checkpoint`): float32 parameters and
both AdamW moments as safetensors, a JSON manifest written last.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

from tasks.store import ObjectStore
from tasks.training import checkpoint
from tasks.training.checkpoint import Range, RankState

SAVE_EVERY_S = 120.0
"""Work an interruption costs at most, on top of a step; a state of a large model takes a while."""
_MOMENTS = ("exp_avg", "exp_avg_sq")


class StoredProgress:
    """Progress under `runs/NAME/checkpoints/`; the newest alone is kept.

    Args:
        save_every_s: between two states.
        clock: seconds, for tests.
    """

    def __init__(
        self,
        store: ObjectStore,
        name: str,
        save_every_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._name = name
        self._save_every_s = save_every_s
        self._clock = clock
        self._last = clock()

    def restore(
        self, model: PreTrainedModel, optimizer: torch.optim.Optimizer
    ) -> list[dict[str, float]]:
        """Puts both where they were; returns the metrics of the steps behind them, none at first.

        Raises:
            IntegrityError: the state is damaged or another model's.
            StoreError: the store failed.
        """
        made = checkpoint.latest(self._store, self._name)
        if made is None:
            return []
        state = checkpoint.load_part(self._store, made, _ranges(model), 0, 1)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(state.values["parameter"][name].view_as(parameter))
                entry: dict[str, Any] = {"step": torch.tensor(float(state.optimizer_steps))}
                for kind in _MOMENTS:
                    values = state.values[kind][name].view_as(parameter)
                    entry[kind] = values.to(parameter.device, copy=True)
                optimizer.state[parameter] = entry
        return made.extra["history"]

    def save_if_due(
        self,
        model: PreTrainedModel,
        optimizer: torch.optim.Optimizer,
        history: list[dict[str, float]],
    ) -> None:
        """Saves the state after the steps of `history`, where the last one is old enough."""
        if self._clock() - self._last < self._save_every_s:
            return
        values: dict[str, dict[str, torch.Tensor]] = {kind: {} for kind in checkpoint.KINDS}
        for name, parameter in model.named_parameters():
            values["parameter"][name] = _flat(parameter)
            for kind in _MOMENTS:
                values[kind][name] = _flat(optimizer.state[parameter][kind])
        state = RankState(0, 1, len(history), _ranges(model), values)
        before = self._manifests()
        part = checkpoint.save_part(self._store, state)
        checkpoint.commit(self._store, self._name, len(history), [part], {"history": history})
        self._store.delete(set(before) - {checkpoint.manifest_key(self._name, len(history))})
        self._last = self._clock()

    def forget(self) -> None:
        """What was saved is no longer needed; the next garbage collection frees it."""
        self._store.delete(self._manifests())

    def _manifests(self) -> list[str]:
        found = self._store.list(f"runs/{self._name}/checkpoints/")
        return [key for key in found if checkpoint.run_and_step(key)]


def _ranges(model: PreTrainedModel) -> dict[str, Range]:
    return {
        name: Range(tuple(parameter.shape), 0, parameter.numel())
        for name, parameter in model.named_parameters()
    }


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", torch.float32).reshape(-1)
