"""Any published version as a Hugging Face checkpoint that transformers and vLLM load unchanged."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tasks.errors import PolicyError
from tasks.store import ObjectStore
from tasks.weights.bits import from_bits
from tasks.weights.subscriber import Subscriber
from tasks.weights.update import Update

_FILE_BYTES = 5 * 10**9
# Everything beside the weights: configuration, tokenizer, chat template, licence.
_COPIED = ("*.json", "*.jinja", "*.txt", "*.model", "*.md", "LICENSE*")
_NOT_COPIED = ("model.safetensors.index.json", "pytorch_model.bin.index.json", "config.json")


def export(
    store: ObjectStore,
    run: str,
    version: int,
    directory: str | Path,
    model_dir: str | Path,
    cache_dir: str | Path | None = None,
) -> Path:
    """Write a version to a new folder: weights, config, tokenizer and generation config.

    Args:
        directory: must not exist, or be empty.
        model_dir: the base model's folder; everything but the weights is copied from it.
        cache_dir: where anchor files are kept; None: a temporary folder.

    Raises:
        PolicyError: the folder is not empty, or `model_dir` has no config.json.
        IntegrityError, StoreError: as `Subscriber.fetch`.
    """
    target, base = Path(directory), Path(model_dir)
    if target.exists() and any(target.iterdir()):
        raise PolicyError(f"{target} is not empty; export into a new folder")
    if not (base / "config.json").is_file():
        raise PolicyError(f"{base} has no config.json; expected the base model's folder")
    with tempfile.TemporaryDirectory(prefix="kindling-export-") as scratch:
        subscriber = Subscriber(store, cache_dir or scratch)
        update = subscriber.fetch(run, version)
        write_checkpoint(update, target, base)
    return target


def write_checkpoint(update: Update, target: Path, base: Path) -> None:
    """Write a full update's tensors and the base model's other files into `target`."""
    target.mkdir(parents=True, exist_ok=True)
    for pattern in _COPIED:
        for path in base.glob(pattern):
            if path.is_file() and path.name not in _NOT_COPIED:
                shutil.copyfile(path, target / path.name)
    config: dict[str, Any] = json.loads((base / "config.json").read_text())
    config.pop("torch_dtype", None)  # its older name
    config["dtype"] = _main_dtype(update)
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    batches = _batches(update)
    index: dict[str, str] = {}
    for at, names in enumerate(batches, 1):
        name = f"model-{at:05d}-of-{len(batches):05d}.safetensors"
        name = name if len(batches) > 1 else "model.safetensors"
        tensors: dict[str, torch.Tensor] = {}
        for key in names:
            tensor = update.tensors[key]
            tensors[key] = from_bits(tensor.values, tensor.dtype, tensor.shape)
            index[key] = name
        save_file(tensors, target / name, metadata={"format": "pt"})
    if len(batches) > 1:
        size = sum(tensor.values.nbytes for tensor in update.tensors.values())
        document = {"metadata": {"total_size": size}, "weight_map": index}
        (target / "model.safetensors.index.json").write_text(json.dumps(document, indent=2) + "\n")


def _main_dtype(update: Update) -> str:
    """The dtype of most values: what transformers is to load the model in."""
    counts: dict[str, int] = {}
    for tensor in update.tensors.values():
        counts[tensor.dtype] = counts.get(tensor.dtype, 0) + tensor.values.size
    return max(counts, key=lambda dtype: counts[dtype])


def _batches(update: Update) -> list[list[str]]:
    batches: list[list[str]] = [[]]
    size = 0
    for name, tensor in update.tensors.items():
        if batches[-1] and size + tensor.values.nbytes > _FILE_BYTES:
            batches.append([])
            size = 0
        batches[-1].append(name)
        size += tensor.values.nbytes
    return batches
