"""A Hugging Face checkpoint as a run's version 0: how a model from outside reaches an engine."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from tasks.store import ObjectStore
from tasks.weights.commit import commit
from tasks.weights.publisher import LocalShard, RankPublisher


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
