"""A version as a Hugging Face checkpoint among a run's objects."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path

from tasks.store import ObjectStore
from tasks.weights.export import export


def store_checkpoint(store: ObjectStore, run: str, version: int, model_dir: Path) -> str:
    """Exports a version into the store under `runs/RUN/final/VERSION/`; returns that prefix.

    Raises:
        IntegrityError, StoreError: as `tasks.weights.subscriber.Subscriber.fetch`.
    """
    prefix = f"runs/{run}/final/{version:08d}/"
    with tempfile.TemporaryDirectory(prefix="kindling-final-") as scratch:
        folder = export(store, run, version, Path(scratch) / "checkpoint", model_dir)
        put_folder(store, folder, prefix)
    return prefix


def put_folder(store: ObjectStore, folder: Path, prefix: str) -> None:
    """Every file of a folder under a prefix."""
    for path in sorted(folder.iterdir()):
        store.put(prefix + path.name, path.read_bytes())


def fetch_checkpoint(store: ObjectStore, prefix: str, folder: Path) -> Path:
    """The files under such a prefix in a local folder below `folder`, fetched once."""
    target = folder / prefix.strip("/").replace("/", "-")
    if target.is_dir():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    keys = store.list(prefix)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as scratch:
        whole = Path(scratch) / "whole"
        whole.mkdir()
        for key, data in zip(keys, store.get_many(keys), strict=True):
            (whole / key.removeprefix(prefix)).write_bytes(data)
        with contextlib.suppress(OSError):
            whole.rename(target)  # another rank of this host may have been first
    return target
