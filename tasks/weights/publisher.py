"""The trainer's side: each rank diffs and uploads its own shards, rank 0 commits.

Order, on every rank of the gang:

    part = publisher.prepare(shards, "delta")       uploads this rank's objects; changes nothing
    parts = gather of all parts on rank 0
    published = commit(store, run, version, parts)  rank 0 alone: manifest, then head
    publisher.confirm(published)                    every rank, with rank 0's answer

If anything raises on any rank, call `abandon` (or nothing) on all of them: the snapshots, the head
and the version are as before, objects uploaded meanwhile are reachable from no head, and publishing
again works, with the same version. A rank that fails alone must tell the others: gather
`part or error` rather than `part`, or they wait for it in the gather.

Anchors hold whole tensors, and a rank has only rows. So for an anchor rank 0 also passes `full`: an
iterator of (name, full tensor), usually over `DTensor.full_tensor()`, which is a collective: the
other ranks must run the same collectives meanwhile, in the same order, and pass nothing. `prepare`
consumes it after it has looked at the shards, one tensor at a time, holding about 1 GB. What it
yields is hashed and must equal the ranks' own shards. Where every rank holds whole tensors (one
rank, or tests), leave `full` out: the shards are used.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from blake3 import blake3

from tasks.errors import IntegrityError, NotFiniteError, StoreError
from tasks.store import Data, ObjectStore, object_key
from tasks.weights.bits import (
    Bits,
    DtypeName,
    dtype_name,
    from_bits,
    is_finite,
    numel,
    pattern_dtype,
    to_bits,
)
from tasks.weights.codec import DEFAULT_CODEC, changed, codec_named
from tasks.weights.commit import Published, commit, read_ref
from tasks.weights.digest import Piece, piece, tensor_digest
from tasks.weights.manifest import ManifestRef, Shard
from tasks.weights.shards import Record, anchor_files, pack_delta

__all__ = [
    "LocalShard",
    "PreparedPart",
    "Published",
    "RankPublisher",
    "TensorPart",
    "commit",
]

Kind = Literal["anchor", "delta"]


@dataclass(frozen=True)
class LocalShard:
    """A rank's contiguous flat range [start, start + len(values)) of one tensor; may be empty.

    Attributes:
        shape: of the full tensor.
        values: flat pattern, uint16 or uint32 as `dtype` asks.
        dtype: "bfloat16", "float16" or "float32".
    """

    name: str
    shape: tuple[int, ...]
    start: int
    values: Bits
    dtype: DtypeName = "bfloat16"

    @staticmethod
    def from_tensor(
        name: str, tensor: torch.Tensor, shape: Sequence[int] | None = None, start: int = 0
    ) -> LocalShard:
        """From this rank's rows (any shape; a CPU copy where it lies elsewhere).

        Args:
            shape: of the full tensor; None: `tensor` is the full tensor.
            start: flat index of its first value in the full tensor.
        """
        full = tuple(tensor.shape) if shape is None else tuple(shape)
        return LocalShard(name, full, start, to_bits(tensor), dtype_name(tensor.dtype))

    def __post_init__(self) -> None:
        expected = pattern_dtype(self.dtype)
        if self.values.ndim != 1 or self.values.dtype != expected:
            raise ValueError(
                f"{self.name}: values are {self.values.dtype} of {self.values.ndim} dimensions; "
                f"expected a flat {expected} pattern of {self.dtype}"
            )
        if not 0 <= self.start <= self.start + self.values.size <= numel(self.shape):
            raise ValueError(
                f"{self.name}: values {self.start}..{self.start + self.values.size} lie outside "
                f"the tensor of shape {self.shape}"
            )


@dataclass(frozen=True)
class TensorPart:
    """What one rank says about one tensor after the update."""

    name: str
    shape: tuple[int, ...]
    dtype: DtypeName
    changed: int
    piece: Piece


@dataclass(frozen=True)
class PreparedPart:
    """What one rank hands to rank 0: small and picklable.

    Attributes:
        base: the version this part builds on; None where the run has none.
        shards: objects this rank made sure are in the store.
        full_digests: an anchor's tensor digests as rank 0 wrote them.
        bytes_uploaded, objects_created: without what the store already had.
    """

    run: str
    rank: int
    kind: Kind
    codec: str
    writer: str
    base: ManifestRef | None
    tensors: tuple[TensorPart, ...]
    shards: tuple[Shard, ...]
    bytes_uploaded: int
    objects_created: int
    full_digests: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Change:
    """What `confirm` writes into the snapshot: changed values, or all of them where new."""

    indices: Bits | None
    values: Bits


class RankPublisher:
    """One rank's publisher. It keeps the snapshot: the last *committed* pattern of its shards.

    Not thread-safe.
    """

    def __init__(
        self,
        store: ObjectStore,
        run: str,
        rank: int,
        *,
        resume: bool = False,
        codec: str = DEFAULT_CODEC,
    ) -> None:
        """
        Args:
            resume: go on from the run's head, with the next version, which must be an anchor
                unless `restore` gives the snapshot. Without it the run must be new: else `commit`
                raises StoreConflict.

        Raises:
            StoreError: resuming a run that has published nothing.
        """
        self.store = store
        self.run = run
        self.rank = rank
        self._codec = codec_named(codec)
        self._writer = uuid.uuid4().hex
        self._snapshot: dict[str, tuple[int, Bits]] = {}
        self._pending: dict[str, _Change] | None = None
        self._starts: dict[str, int] = {}
        self._base: ManifestRef | None = None
        if resume:
            self._base = read_ref(store, run)
            if self._base is None:
                raise StoreError(f"run {run!r} has published nothing; start it without resume")

    @property
    def base(self) -> ManifestRef | None:
        """The last committed version; the next one is its number plus one, or 0."""
        return self._base

    @property
    def next_version(self) -> int:
        return 0 if self._base is None else self._base.version + 1

    @property
    def has_snapshot(self) -> bool:
        """Whether a delta can be prepared; else the next version must be an anchor."""
        return bool(self._snapshot)

    def restore(self, shards: Iterable[LocalShard], base: ManifestRef) -> None:
        """Take these patterns as the snapshot of version `base`, which must be the run's head.

        The patterns are copied. Wrong ones are found by the readers' digests, not here.
        """
        self._snapshot = {s.name: (s.start, s.values.copy()) for s in shards}
        self._pending = None
        self._base = base

    def prepare(
        self,
        shards: Sequence[LocalShard],
        kind: Kind,
        full: Iterable[tuple[str, torch.Tensor]] | None = None,
        *,
        whole: bool = False,
    ) -> PreparedPart:
        """Upload this rank's objects for the next version; commits nothing, changes no snapshot.

        Args:
            shards: this rank's range of every tensor (empty ranges may be left out).
            kind: "anchor" or "delta".
            full: rank 0 of an anchor: the full tensors, see the module's docstring. Consumed to
                its end even where this raises, so that the other ranks' collectives find a peer.
            whole: the shards are the full tensors: an anchor needs no `full`.

        Raises:
            NotFiniteError: a weight is NaN or infinite; names the tensor. Nothing was uploaded.
            IntegrityError: a delta without a snapshot, or other ranges than the snapshot's.
            StoreError: the store failed.
        """
        source = None if full is None else iter(full)
        try:
            return self._prepare(shards, kind, source, whole)
        finally:
            # The other ranks run through the same collectives, whatever happens on this one.
            for _ in source or ():
                pass

    def _prepare(
        self,
        shards: Sequence[LocalShard],
        kind: Kind,
        full: Iterator[tuple[str, torch.Tensor]] | None,
        whole: bool,
    ) -> PreparedPart:
        self._pending = None
        if len({shard.name for shard in shards}) != len(shards):
            raise ValueError("a tensor is named twice among the shards; one range each")
        for shard in shards:
            if not is_finite(shard.values, shard.dtype):
                raise NotFiniteError(
                    f"{shard.name} holds NaN or infinite weights; version {self.next_version} of "
                    f"run {self.run!r} was not published, nothing changed"
                )
        if kind == "delta":
            self._check_snapshot(shards)
        uploads = _Uploads(self.store)
        pending, tensors, records = self._diff(shards, encode=kind == "delta")
        objects: list[Shard] = []
        digests: dict[str, str] = {}
        if kind == "delta" and records:
            data = pack_delta(self._codec.name, records)
            objects.append(Shard(digest=uploads.add(data), bytes=len(data), rank=self.rank))
        if kind == "anchor" and self.rank == 0:
            source = full if full is not None else _as_tensors(shards) if whole else None
            if source is None:
                raise ValueError("rank 0 prepares an anchor: pass `full`, or whole=True")
            for names, data in anchor_files(_hashed(source, digests)):
                digest = uploads.add(data)
                objects.append(Shard(digest=digest, bytes=len(data), rank=0, tensors=names))
        self._pending = pending
        return PreparedPart(
            run=self.run,
            rank=self.rank,
            kind=kind,
            codec=self._codec.name,
            writer=self._writer,
            base=self._base,
            tensors=tuple(tensors),
            shards=tuple(objects),
            bytes_uploaded=uploads.bytes,
            objects_created=uploads.created,
            full_digests=digests,
        )

    def confirm(self, published: Published) -> None:
        """Advance the snapshot to the committed version: call on every rank, after `commit`.

        Raises:
            IntegrityError: nothing is prepared, or another version was.
        """
        if self._pending is None or published.version != self.next_version:
            raise IntegrityError(
                f"rank {self.rank} of run {self.run!r} has not prepared version "
                f"{published.version}; its next is {self.next_version}"
            )
        for name, change in self._pending.items():
            if change.indices is None:
                self._snapshot[name] = (self._starts[name], change.values)
            else:
                self._snapshot[name][1][change.indices] = change.values
        self._pending = None
        self._base = published.ref

    def abandon(self) -> None:
        """Forget what was prepared: its commit failed, or another rank did."""
        self._pending = None

    def _check_snapshot(self, shards: Sequence[LocalShard]) -> None:
        if not self._snapshot:
            raise IntegrityError(
                f"rank {self.rank} of run {self.run!r} holds no committed version to diff against; "
                "publish an anchor first"
            )
        ranges = {s.name: (s.start, s.values.size) for s in shards if s.values.size}
        held = {n: (start, bits.size) for n, (start, bits) in self._snapshot.items() if bits.size}
        if ranges != held:
            odd = sorted(n for n in ranges.keys() | held.keys() if ranges.get(n) != held.get(n))
            raise IntegrityError(
                f"rank {self.rank} holds other ranges than at the last version, of {odd[:3]}; "
                "publish an anchor"
            )

    def _diff(
        self, shards: Sequence[LocalShard], encode: bool
    ) -> tuple[dict[str, _Change], list[TensorPart], list[Record]]:
        pending: dict[str, _Change] = {}
        tensors: list[TensorPart] = []
        records: list[Record] = []
        self._starts = {shard.name: shard.start for shard in shards}
        for shard in shards:
            start, old = self._snapshot.get(shard.name, (-1, np.empty(0, shard.values.dtype)))
            count = shard.values.size
            if start == shard.start and old.size == count and old.dtype == shard.values.dtype:
                indices, values = changed(old, shard.values)
                pending[shard.name] = _Change(indices, values)
                count = indices.size
                if encode and count:
                    payload = self._codec.encode(old, indices, values)
                    records.append(Record(shard.name, shard.start, old.size, payload))
            else:  # copied: the caller may go on training in this memory
                pending[shard.name] = _Change(None, shard.values.copy())
            tensors.append(
                TensorPart(
                    shard.name, shard.shape, shard.dtype, count, piece(shard.values, shard.start)
                )
            )
        return pending, tensors, records


class _Uploads:
    """Creates content-addressed objects and counts those that were not there."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self.bytes = 0
        self.created = 0

    def add(self, data: Data) -> str:
        digest = blake3(data).hexdigest()
        key = object_key(digest)
        if not self._store.exists(key) and self._store.create_if_absent(key, data):
            self.bytes += len(data)
            self.created += 1
        return digest


def _as_tensors(shards: Sequence[LocalShard]) -> Iterator[tuple[str, torch.Tensor]]:
    for shard in shards:
        yield shard.name, from_bits(shard.values, shard.dtype, shard.shape)


def _hashed(
    tensors: Iterable[tuple[str, torch.Tensor]], digests: dict[str, str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Passes the tensors on and notes their digests."""
    for name, tensor in tensors:
        digests[name] = tensor_digest(to_bits(tensor))
        yield name, tensor
