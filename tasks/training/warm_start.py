"""The warm start: a policy that knows the search protocol, by supervised fine-tuning.

Pure over its inputs; `flows/warm_start.py` runs it by hand and a run whose configuration asks for
it runs it on a trainer worker. Loss on the policy's own tokens alone.
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
from tasks.training.demonstrations import Corpus, Demonstration, demonstrations
from tasks.training.sft import train_sft
from tasks.training.tiny_policy import induction_batch

_WARMUP_STEPS = 20
_FINAL_RATE = 0.05
_INDUCTION_ROWS, _INDUCTION_LENGTH = 64, 72
PROVENANCE = "provenance.json"


def settings_of(config: TrainConfig) -> WarmStartConfig:
    """The warm start a configuration asks for.

    Raises:
        ConfigError: it asks for none.
    """
    if config.model.warm_start is None:
        raise ConfigError(
            "model.warm_start is not set; give at least model.warm_start.demonstrations"
        )
    return config.model.warm_start


def policy_key(config: TrainConfig, base: str, index_key: str) -> str:
    """Names a warm-started policy by everything that makes it what it is."""
    rollout = config.rollout
    made_of = {
        "base": base,
        "warm_start": settings_of(config).model_dump(),
        "model": [config.model.instruction, config.model.chat, config.model.context],
        "data": config.data.model_dump(),
        "index": [index_key, config.retrieval.top_k],
        "rollout": [rollout.max_observation_tokens, rollout.max_search_turns],
        "seed": config.seed,
    }
    return blake3(json.dumps(made_of, sort_keys=True).encode()).hexdigest(length=16)


def warm_start(
    config: TrainConfig,
    model: PreTrainedModel,
    tokenizer: Any,
    corpus: Corpus,
    on_step: Callable[[int, int, float], None],
) -> dict[str, Any]:
    """Fine-tunes `model` (float32) in place; returns its provenance as plain values.

    Args:
        on_step: called with (step, steps, loss).

    Raises:
        ConfigError: no demonstration fits the context.
        NotFiniteError: the loss or a gradient is not finite.
    """
    settings = settings_of(config)
    protocol = SearchProtocol(tokenizer, config.model, config.rollout)
    made = demonstrations(protocol, config, settings, corpus)
    if not made:
        raise ConfigError(
            f"none of {settings.demonstrations} demonstrations fits model.context = "
            f"{config.model.context}; raise it, or lower rollout.max_observation_tokens"
        )
    fine_tuning = -(-len(made) // settings.batch_size)
    steps = settings.induction_steps + fine_tuning

    def rate(step: int) -> float:
        warm = min(1.0, (step + 1) / _WARMUP_STEPS)
        left = 1.0 - max(0, step - settings.induction_steps) / fine_tuning
        return settings.learning_rate * warm * max(_FINAL_RATE, left)

    history = train_sft(
        model,
        _batches(settings, made, len(tokenizer), config.seed),
        settings.learning_rate,
        weight_decay=0.01,
        schedule=rate,
        on_step=lambda step, metrics: on_step(step, steps, metrics["loss"]),
    )
    return {
        "base": config.model.path,
        "data": config.data.train,
        "seed": config.seed,
        "settings": settings.model_dump(),
        "demonstrations": len(made),
        "steps": steps,
        "final_loss": history[-1]["loss"],
        "torch": torch.__version__,
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
