"""The index in the object store and on disk: built once, fetched by every worker.

`indexes/<key>.json` names the index's files as content-addressed objects. It is written last, so
whoever sees it can have all of them.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from tasks.data.questions import Passage
from tasks.errors import IntegrityError
from tasks.retrieval.bm25 import Index, build, index_key

FORMAT = 1


class Store(Protocol):
    """What is needed of `tasks.store.ObjectStore`."""

    def exists(self, key: str, /) -> bool: ...
    def get(self, key: str, /) -> bytes: ...
    def create_if_absent(self, key: str, data: bytes, /) -> bool: ...
    def create_object(self, data: bytes, /) -> str: ...
    def get_object(self, digest: str, /) -> bytes: ...


def name_of(key: str) -> str:
    """The store key under which an index with this content key is described."""
    return f"indexes/{key}.json"


def is_stored(store: Store, key: str) -> bool:
    """Whether the index with this key (see `bm25.index_key`) can be fetched."""
    return store.exists(name_of(key))


def objects_of(store: Store, key: str) -> list[str]:
    """Digests of the objects that hold the index with this key.

    Raises:
        StoreError: the store failed or has no such index.
        IntegrityError: the stored description is damaged.
    """
    return list(_files(store.get(name_of(key)), key).values())


def store_index(store: Store, index: Index) -> str:
    """Stores the index unless it is there; returns its key.

    Raises:
        StoreError: the store failed.
    """
    if is_stored(store, index.key):
        return index.key
    files: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="kindling-index-") as folder:
        index.save(folder)
        for path in sorted(Path(folder).iterdir()):
            data = path.read_bytes()
            files[path.name] = {"digest": store.create_object(data), "bytes": len(data)}
    description = {"format": FORMAT, "key": index.key, "files": files}
    text = json.dumps(description, indent=1, sort_keys=True)
    store.create_if_absent(name_of(index.key), text.encode())
    return index.key


def fetch_index(store: Store, key: str, cache_dir: str | Path) -> Index:
    """Opens the index, memory-mapped, downloading it into `cache_dir/<key>` if it is not there.

    Workers of one machine may share the folder and fetch at the same time: files appear in it all
    at once, by a rename.

    Raises:
        StoreError: the store failed or has no such index.
        IntegrityError: the stored description or a file is damaged.
    """

    def download(folder: Path) -> None:
        for name, digest in _files(store.get(name_of(key)), key).items():
            (folder / name).write_bytes(store.get_object(digest))

    return _cached(Path(cache_dir) / key, download)


def local_index(passages: Sequence[Passage], k1: float, b: float, cache_dir: str | Path) -> Index:
    """The index over the passages from `cache_dir`, where `fetch_index` keeps it too, or built and
    kept there: for what needs no store.

    Raises:
        DataError, ValueError: as `bm25.build`.
        IntegrityError: the files in the cache are damaged.
    """
    key = index_key(passages, k1, b)
    return _cached(Path(cache_dir) / key, lambda folder: build(passages, k1, b).save(folder))


def _cached(target: Path, fill: Callable[[Path], None]) -> Index:
    if not target.is_dir():
        _appear(target, fill)
    index = Index.load(target)
    if index.key != target.name:
        raise IntegrityError(
            f"index {target} says that its key is {index.key}; remove the folder to have it made "
            "again"
        )
    return index


def _appear(target: Path, fill: Callable[[Path], None]) -> None:
    """Makes a folder with what `fill` writes, all at once."""
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name[:16]}-", dir=target.parent))
    try:
        fill(scratch)
        try:
            os.rename(scratch, target)
        except OSError:
            # A folder that is not empty cannot be renamed over: another worker was first.
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _files(description: bytes, key: str) -> dict[str, str]:
    """File name -> digest; names must be plain, since they become paths."""
    name = name_of(key)
    try:
        found = json.loads(description)
        if found["format"] != FORMAT or found["key"] != key:
            raise IntegrityError(
                f"{name} has format {found['format']!r} and key {found['key']!r}, "
                f"expected {FORMAT} and {key!r}"
            )
        files = {str(file): str(entry["digest"]) for file, entry in found["files"].items()}
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise IntegrityError(f"{name} is not the description of an index: {error!r}") from error
    for file in files:
        if file != Path(file).name or file in ("", ".", ".."):
            raise IntegrityError(f"{name} names the file {file!r}, expected a plain name")
    return files
