"""Anchor files kept on this host by digest: a base anchor is downloaded once for all runs."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from blake3 import blake3

from tasks.store import ObjectStore

_BLOCK = 1 << 24
_PARALLEL = 4  # an anchor file is about a gigabyte, in memory while it comes


class AnchorCache:
    """Files `<cache_dir>/anchors/<digest>.safetensors`; several processes may share the folder.

    Attributes:
        downloads: objects that came from the store.
        bytes_downloaded: their bytes.
    """

    def __init__(self, store: ObjectStore, cache_dir: Path) -> None:
        self._store = store
        self._folder = cache_dir / "anchors"
        self.downloads = 0
        self.bytes_downloaded = 0
        self._counting = threading.Lock()

    def files(self, digests: Sequence[str]) -> list[Path]:
        """The verified files of anchor objects, downloaded where not here or damaged, in parallel.

        Raises:
            As `file`.
        """
        with ThreadPoolExecutor(_PARALLEL) as pool:
            return list(pool.map(self.file, digests))

    def file(self, digest: str) -> Path:
        """The verified file of an anchor object, downloaded where it is not here or damaged.

        Raises:
            IntegrityError: the store's object does not have this digest.
            StoreError: the store failed, or lacks the object.
        """
        path = self._folder / f"{digest}.safetensors"
        if path.exists():
            if _digest(path) == digest:
                return path
            path.unlink(missing_ok=True)  # damaged on this disk: the store's copy decides
        data = self._store.get_object(digest)
        with self._counting:
            self.downloads += 1
            self.bytes_downloaded += len(data)
        self._folder.mkdir(parents=True, exist_ok=True)
        # Written aside and renamed: a killed process leaves no half file under the digest.
        handle, name = tempfile.mkstemp(dir=self._folder, prefix=f".{digest[:16]}-")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, path)
        finally:
            Path(name).unlink(missing_ok=True)
        return path


def _digest(path: Path) -> str:
    hasher = blake3()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            hasher.update(block)
    return hasher.hexdigest()
