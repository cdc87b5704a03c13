"""The object store in a dictionary, on a clock that tests set: what depends on age and order."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from blake3 import blake3

from tasks.errors import StoreConflict
from tasks.store import ObjectMissing, ObjectStore, StoreLocation
from tasks.store_location import Listed

Hook = Callable[[str, str], None]


class AgingStore(ObjectStore):
    """An ObjectStore whose requests end in `data`.

    Attributes:
        data: key -> content and when it was written.
        now: the store's clock in seconds.
        before: called with operation and key before every request, unless it is being called.
        read: keys read since it was last cleared.
    """

    def __init__(self) -> None:
        super().__init__(StoreLocation("http://127.0.0.1:1", "memory"))
        self.data: dict[str, tuple[bytes, float]] = {}
        self.now = 0.0
        self.before: Hook | None = None
        self.read: set[str] = set()
        self._guard = threading.RLock()

    def hours(self, hours: float) -> None:
        """Lets time pass."""
        self.now += hours * 3600

    def keys(self, prefix: str) -> set[str]:
        return {key for key in self.data if key.startswith(prefix)}

    def _request(self, operation: str, key: str) -> None:
        # Not under the guard: what a hook does may read in threads of its own.
        hook, self.before = self.before, None
        if hook is not None:
            try:
                hook(operation, key)
            finally:
                self.before = self.before or hook

    def _found(self, key: str) -> bytes:
        if key not in self.data:
            raise ObjectMissing(f"no object {key}")
        return self.data[key][0]

    def _read(self, key: str) -> tuple[bytes, str]:
        self._request("read", key)
        with self._guard:
            self.read.add(key)
            data = self._found(key)
            return data, blake3(data).hexdigest()

    def _download(self, key: str, path: Path) -> int:
        return path.write_bytes(self._read(key)[0])

    def _head(self, key: str) -> dict[str, Any]:
        self._request("head", key)
        with self._guard:
            return {"ContentLength": len(self._found(key))}

    def listing(self, prefix: str = "") -> list[Listed]:
        self._request("list", prefix)
        with self._guard:
            return [
                Listed(key, len(self.data[key][0]), self.now - self.data[key][1])
                for key in sorted(self.keys(prefix))
            ]

    def list(self, prefix: str = "") -> list[str]:
        return [one.key for one in self.listing(prefix)]

    def put(self, key: str, data: Any) -> None:
        self._request("write", key)
        with self._guard:
            self.data[key] = (bytes(data), self.now)

    def create(self, key: str, data: Any) -> None:
        self._request("write", key)
        with self._guard:
            if key in self.data:
                raise StoreConflict(f"{key} exists")
            self.data[key] = (bytes(data), self.now)

    def swap(self, key: str, data: Any, etag: str | None) -> str:
        self._request("write", key)
        with self._guard:
            held = self.data.get(key)
            if (blake3(held[0]).hexdigest() if held else None) != etag:
                raise StoreConflict(f"{key} changed")
            self.data[key] = (bytes(data), self.now)
            return blake3(data).hexdigest()

    def copy(self, source: str, target: str) -> None:
        self._request("copy", source)
        with self._guard:
            self.data[target] = (self._found(source), self.now)

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._request("delete", key)
            with self._guard:
                self.data.pop(key, None)
