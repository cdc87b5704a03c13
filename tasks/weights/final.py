"""A version as a Hugging Face checkpoint among a run's objects."""

from __future__ import annotations

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
        for path in sorted(folder.iterdir()):
            store.put(prefix + path.name, path.read_bytes())
    return prefix


def fetch_checkpoint(store: ObjectStore, prefix: str, folder: Path) -> Path:
    """The inverse: the files of such a prefix in a new local folder."""
    folder.mkdir(parents=True)
    keys = store.list(prefix)
    for key, data in zip(keys, store.get_many(keys), strict=True):
        (folder / key.removeprefix(prefix)).write_bytes(data)
    return folder
