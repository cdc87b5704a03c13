"""The warm start: a policy that knows the search protocol, by supervised fine-tuning.

Pure over its inputs; `tasks.training.stored_policy` runs it on a trainer worker. Loss on the
policy's own tokens alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from transformers import PreTrainedModel

from tasks.config import TrainConfig, WarmStartConfig
from tasks.errors import ConfigError
from tasks.rollout.protocol import SearchProtocol
from tasks.training.demonstrations import (
    Corpus,
    Demonstration,
    demonstrations,
    readings,
    settings_of,
    with_readings,
)
from tasks.training.sft import Progress, train_sft
from tasks.training.tiny_policy import induction_batch
from tasks.training.trajectory_file import parse_trajectories

_WARMUP_STEPS = 20
_COOLDOWN = 0.3
_FINAL_RATE = 0.05
_INDUCTION_ROWS, _INDUCTION_LENGTH = 64, 72
_LAST = 10
# To be raised when the same settings come to make another policy: one that a store holds is then
# not taken for it.
_RECIPE = 5
PROVENANCE = "provenance.json"


def policy_key(config: TrainConfig, base: str, searched: str, shown: bytes) -> str:
    """Names a warm-started policy by everything that makes it what it is: by contents, since a
    file of the same name may hold something else today.

    Args:
        base: the model's name and its digest. searched: key of the index, or address of
            the retriever. shown: the questions demonstrated, or the file of demonstrations.
    """
    rollout = config.rollout
    settings = settings_of(config).model_dump(exclude={"trajectories"})
    made_of = {
        "recipe": _RECIPE,
        "base": base,
        "warm_start": settings,
        "model": [config.model.instruction, config.model.chat, config.model.context],
        "shown": blake3(shown).hexdigest(),
        "index": [searched, config.retrieval.top_k],
        "rollout": [
            rollout.max_observation_tokens,
            rollout.max_search_turns,
            rollout.max_new_tokens,
        ],
        "seed": config.seed,
    }
    return blake3(json.dumps(made_of, sort_keys=True).encode()).hexdigest(length=16)


def demonstrations_of(
    config: TrainConfig, tokenizer: Any, source: Corpus | bytes
) -> list[Demonstration]:
    """The demonstrations a configuration asks for, in the order of use.

    Args:
        source: what to build them from, or the file they stand in.

    Raises:
        ConfigError: a run would allow none of them.
        DataError: as `parse_trajectories`.
        RetrieverError: the retriever fails.
    """
    settings = settings_of(config)
    protocol = SearchProtocol(tokenizer, config.model, config.rollout)
    if isinstance(source, bytes):
        read = parse_trajectories(source, settings.trajectories or "", protocol, config)
        return [read[i % len(read)] for i in range(settings.demonstrations)]
    made = demonstrations(protocol, config, settings, source)
    if not made:
        raise ConfigError(
            f"none of {settings.demonstrations} demonstrations fits model.context = "
            f"{config.model.context}, rollout.max_search_turns = "
            f"{config.rollout.max_search_turns} and rollout.max_new_tokens = "
            f"{config.rollout.max_new_tokens}; raise them, or lower rollout.max_observation_tokens"
        )
    return with_readings(made, readings(protocol, config, settings, source), settings)


def warm_start(
    config: TrainConfig,
    model: PreTrainedModel,
    made: Sequence[Demonstration],
    vocabulary: int,
    on_step: Callable[[int, int, float], None],
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Fine-tunes `model` (float32) in place; returns what came of it as plain values.

    Args:
        made: the demonstrations, see `demonstrations_of`.
        vocabulary: ids that steps on random tokens draw from.
        on_step: called with (step, steps, loss).
        progress: see `train_sft`.

    Raises:
        NotFiniteError: the loss or a gradient is not finite.
    """
    settings = settings_of(config)
    fine_tuning = -(-len(made) // settings.batch_size)
    steps = settings.induction_steps + fine_tuning

    def rate(step: int) -> float:
        """Constant, then linearly down: what comes first is learned at the full rate, too, however
        much follows (Hägele et al. 2024, arXiv:2405.18392, section 3)."""
        warm = min(1.0, (step + 1) / _WARMUP_STEPS)
        left = (steps - step) / (_COOLDOWN * fine_tuning)
        return settings.learning_rate * warm * min(1.0, max(_FINAL_RATE, left))

    history = train_sft(
        model,
        _batches(settings, made, vocabulary, config.seed),
        settings.learning_rate,
        weight_decay=0.01,
        schedule=rate,
        on_step=lambda step, metrics: on_step(step, steps, metrics["loss"]),
        progress=progress,
    )
    losses = [metrics["loss"] for metrics in history]
    played = sum(not one.is_reading for one in made)
    return {
        "demonstrations": played,
        "readings": len(made) - played,
        "left_out": settings.demonstrations - played,
        "steps": steps,
        "tokens": sum(int(metrics["tokens"]) for metrics in history),
        "first_loss": losses[0],
        "final_loss": losses[-1],
        "mean_loss_of_last_steps": sum(losses[-_LAST:]) / len(losses[-_LAST:]),
    }


def save_policy(
    model: PreTrainedModel, tokenizer: Any, provenance: dict[str, Any], folder: Path
) -> None:
    """Writes a Hugging Face checkpoint in bf16, its tokenizer, and where it comes from."""
    model.to(torch.bfloat16).save_pretrained(folder)  # type: ignore[arg-type]
    tokenizer.save_pretrained(folder)
    (folder / PROVENANCE).write_text(json.dumps(provenance, indent=1) + "\n")


def _batches(
    settings: WarmStartConfig, made: Sequence[Demonstration], vocabulary: int, seed: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(settings.induction_steps):
        yield induction_batch(vocabulary, _INDUCTION_ROWS, _INDUCTION_LENGTH, generator)
    for start in range(0, len(made), settings.batch_size):
        yield _padded(made[start : start + settings.batch_size])


def _padded(batch: Sequence[Demonstration]) -> tuple[torch.Tensor, torch.Tensor]:
    """ids_BT int64 and loss_mask_BT bool, padded on the right."""
    length = max(len(item.ids) for item in batch)
    ids_BT = torch.zeros((len(batch), length), dtype=torch.long)
    mask_BT = torch.zeros((len(batch), length), dtype=torch.bool)
    for row, item in enumerate(batch):
        ids_BT[row, : len(item.ids)] = torch.from_numpy(item.ids)
        mask_BT[row, : len(item.ids)] = torch.from_numpy(item.loss_mask)
    return ids_BT, mask_BT
