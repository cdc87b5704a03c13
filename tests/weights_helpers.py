"""Small weights, publishers of several ranks in one process, and a store in a dictionary."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from blake3 import blake3

from tasks.errors import IntegrityError, StoreConflict, StoreError
from tasks.store import ObjectMissing, ObjectStore, object_key
from tasks.weights.bits import Bits, DtypeName, from_bits, numel, pattern_dtype
from tasks.weights.commit import Published, commit, since_anchor
from tasks.weights.manifest import ManifestRef
from tasks.weights.publisher import Kind, LocalShard, PreparedPart, RankPublisher

Weights = dict[str, tuple[tuple[int, ...], DtypeName, Bits]]

SHAPES: dict[str, tuple[tuple[int, ...], DtypeName]] = {
    "model.embed.weight": ((700, 48), "bfloat16"),
    "model.layer.weight": ((5, 3), "bfloat16"),
    "model.norm.weight": ((33,), "float32"),
    "model.half.weight": ((7, 9), "float16"),
    "model.scalar": ((), "bfloat16"),
    "model.empty": ((0, 4), "bfloat16"),
}


class MemoryStore:
    """The part of ObjectStore that weights use, for tests that need many stores at once."""

    def __init__(self) -> None:
        self.data: dict[str, bytes] = {}

    def get(self, key: str) -> bytes:
        if key not in self.data:
            raise ObjectMissing(f"no object {key}")
        return self.data[key]

    def get_object(self, digest: str) -> bytes:
        data = self.get(object_key(digest))
        if blake3(data).hexdigest() != digest:
            raise IntegrityError(f"object {digest} is damaged")
        return data

    def download_object(self, digest: str, path: Path) -> int:
        return path.write_bytes(self.get_object(digest))

    def exists(self, key: str) -> bool:
        return key in self.data

    def create_if_absent(self, key: str, data: bytes) -> bool:
        new = key not in self.data
        self.data.setdefault(key, bytes(data))
        return new

    def read_head(self, key: str) -> tuple[bytes, str] | None:
        data = self.data.get(key)
        return None if data is None else (data, blake3(data).hexdigest())

    def swap(self, key: str, data: bytes, etag: str | None) -> str:
        now = self.read_head(key)
        if (now[1] if now else None) != etag:
            raise StoreConflict(f"{key} changed")
        self.data[key] = bytes(data)
        return blake3(data).hexdigest()


def memory_store() -> ObjectStore:
    return cast(ObjectStore, MemoryStore())


class Failing:
    """A store whose operation number `at` (reads included) fails, after it was done if `late`."""

    def __init__(self, store: ObjectStore, at: int, late: bool) -> None:
        self._store, self._at, self._late, self.calls = store, at, late, 0

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)
        if not callable(method):
            return method

        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            fails = self.calls == self._at
            if fails and not self._late:
                raise StoreError(f"injected before {name}")
            result = method(*args, **kwargs)
            if fails:
                raise StoreError(f"injected after {name}")
            return result

        return call


def random_weights(seed: int, shapes: Any = None) -> Weights:
    """Finite random values in every dtype."""
    rng = np.random.default_rng(seed)
    made: Weights = {}
    for name, (shape, dtype) in (shapes or SHAPES).items():
        values = rng.normal(0, 0.05, numel(shape)).astype(np.float32)
        made[name] = (shape, dtype, _as_bits(values, dtype))
    return made


def _as_bits(values: Bits, dtype: DtypeName) -> Bits:
    if dtype == "bfloat16":
        return (values.view("<u4") >> 16).astype("<u2")
    kind = np.dtype("<f2") if dtype == "float16" else np.dtype("<f4")
    return values.astype(kind).view(pattern_dtype(dtype))


def perturbed(weights: Weights, seed: int, share: float = 0.02) -> Weights:
    """A copy with about `share` of the values moved by one unit in the last place."""
    rng = np.random.default_rng(seed)
    moved: Weights = {}
    for name, (shape, dtype, bits) in weights.items():
        step = (rng.random(bits.size) < share).astype(bits.dtype)
        moved[name] = (shape, dtype, bits ^ step)
    return moved


def shards_of(weights: Weights, rank: int, ranks: int) -> list[LocalShard]:
    """Rank's rows as FSDP2 cuts dimension 0: ceil(rows / ranks) a rank, the last ones short."""
    shards: list[LocalShard] = []
    for name, (shape, dtype, bits) in weights.items():
        rows = shape[0] if shape else 1
        width = numel(shape[1:]) if shape else 1
        chunk = -(-rows // ranks)
        low, high = min(rank * chunk, rows) * width, min((rank + 1) * chunk, rows) * width
        shards.append(LocalShard(name, shape, low, bits[low:high].copy(), dtype))
    return shards


class Gang:
    """All ranks of one publisher in one process."""

    def __init__(self, store: ObjectStore, run: str, ranks: int = 2, resume: bool = False) -> None:
        self.store, self.run = store, run
        self.ranks = [RankPublisher(store, run, rank, resume=resume) for rank in range(ranks)]

    def prepare(self, weights: Weights, kind: Kind) -> list[PreparedPart]:
        full = None
        if kind == "anchor":
            full = (
                (n, from_bits(bits, dtype, shape)) for n, (shape, dtype, bits) in weights.items()
            )
        count = len(self.ranks)
        return [
            publisher.prepare(
                shards_of(weights, rank, count), kind, full=full if rank == 0 else None
            )
            for rank, publisher in enumerate(self.ranks)
        ]

    def publish(self, weights: Weights, kind: Kind) -> Published:
        parts = self.prepare(weights, kind)
        published = commit(self.store, self.run, self.ranks[0].next_version, parts)
        for publisher in self.ranks:
            publisher.confirm(published)
        return published

    def adopt(self, weights: Weights) -> None:
        """Goes on from the head, which holds these."""
        count, base = len(self.ranks), self.base
        assert base is not None
        chain = since_anchor(self.store, self.run, base)
        for rank, publisher in enumerate(self.ranks):
            publisher.adopt(shards_of(weights, rank, count), base, *chain)

    @property
    def base(self) -> ManifestRef | None:
        return self.ranks[0].base


def publish_chain(gang: Gang, versions: int, anchors: Sequence[int] = (0,)) -> list[Weights]:
    """Versions 0.. of a chain; what each of them holds."""
    history = [random_weights(11)]
    for version in range(versions):
        if version:
            history.append(perturbed(history[-1], version))
        gang.publish(history[version], "anchor" if version in anchors else "delta")
    return history


def same(shadow: dict[str, Bits], weights: Weights) -> bool:
    return shadow.keys() == weights.keys() and all(
        np.array_equal(shadow[name], bits) for name, (_, _, bits) in weights.items()
    )


def keys_with(keys: Iterable[str], prefix: str) -> list[str]:
    return [key for key in keys if key.startswith(prefix)]
