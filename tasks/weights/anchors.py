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

_PARALLEL = 2  # one is downloaded while another is hashed


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
        self._folder.mkdir(parents=True, exist_ok=True)
        # Written aside and renamed: a killed process leaves no half file under the digest.
        handle, name = tempfile.mkstemp(dir=self._folder, prefix=f".{digest[:16]}-")
        os.close(handle)
        try:
            size = self._store.download_object(digest, Path(name))
            os.replace(name, path)
        finally:
            Path(name).unlink(missing_ok=True)
        with self._counting:
            self.downloads += 1
            self.bytes_downloaded += size
        return path


def _digest(path: Path) -> str:
    return blake3(max_threads=blake3.AUTO).update_mmap(path).hexdigest()
