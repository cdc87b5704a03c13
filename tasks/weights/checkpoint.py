"""A Hugging Face checkpoint as a run's version 0: how a model from outside reaches an engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from tasks.store import ObjectStore
from tasks.weights.commit import commit
from tasks.weights.publisher import LocalShard, RankPublisher

_HEADS = ("model_type", "num_attention_heads", "num_key_value_heads")


def shapes_in(folder: Path) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor of a checkpoint, from its files' headers."""
    found: dict[str, tuple[int, ...]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            found |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    return found


def heads_in(folder: Path) -> dict[str, Any]:
    """What of a checkpoint's architecture no shape shows."""
    config = json.loads((folder / "config.json").read_text())
    return {name: config.get(name) for name in _HEADS}


def publish_checkpoint(store: ObjectStore, run: str, folder: Path) -> int:
    """Publishes a checkpoint's tensors, in bf16, as the anchor of a new run; returns its version.

    Raises:
        NotFiniteError: a weight is NaN or infinite.
        StoreConflict: the run exists.
    """
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)
    shards = [LocalShard.from_tensor(n, t.to(torch.bfloat16)) for n, t in tensors.items()]
    publisher = RankPublisher(store, run, rank=0)
    part = publisher.prepare(shards, "anchor", whole=True)
    return commit(store, run, publisher.next_version, [part]).version
