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

An anchor of a run that goes on carries the delta from its parent as well, so that readers who
follow need not read it. After it, history (`tasks.weights.history`) starts again at zero.

A publisher that takes a run over (its gang formed anew, or the run was resumed) holds nothing to
diff against, and its next version is an anchor. Unless it holds, bit for bit, what the head is:
`survey` the shards on every rank, compare (`commit.differing`), and `adopt` on all of them. The
next version is then a delta as usual, whose manifest tells readers to forget the history, which
this publisher lacks.

Memory: the snapshot, a byte of history a value, six bytes a changed value until the commit, and of
the caller's shards one, or as many as hold 32 million values. Shards on an accelerator
(`DeviceShard`) are compared there, with a second snapshot in its memory, and only their changed
values are copied here.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from blake3 import blake3

from tasks.errors import IntegrityError, NotFiniteError, StoreError
from tasks.store import Data, ObjectStore, object_key
from tasks.weights.bits import from_bits, to_bits
from tasks.weights.codec import CODEC, Change, Range
from tasks.weights.commit import Published, commit, read_ref
from tasks.weights.digest import tensor_digest
from tasks.weights.history import advance
from tasks.weights.manifest import History, ManifestRef, Shard
from tasks.weights.parts import DeviceShard, Kind, LocalShard, PreparedPart, TensorPart
from tasks.weights.shards import anchor_files, pack_delta
from tasks.weights.snapshot import Held, as_integers, look

__all__ = [
    "DeviceShard",
    "Kind",
    "LocalShard",
    "PreparedPart",
    "Published",
    "RankPublisher",
    "TensorPart",
    "commit",
]


@dataclass(frozen=True)
class _Pending:
    """What `confirm` makes of the snapshot: changes to it, or other ranges than before."""

    kind: Kind
    changes: dict[str, Change]
    fresh: dict[str, Held]


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
    ) -> None:
        """
        Args:
            resume: go on from the run's head, with the next version, which must be an anchor
                unless this publisher adopts the head. Without it the run must be new: else
                `commit` raises StoreConflict.

        Raises:
            StoreError: resuming a run that has published nothing.
        """
        self.store = store
        self.run = run
        self.rank = rank
        self._writer = uuid.uuid4().hex
        self._snapshot: dict[str, Held] = {}
        self._pending: _Pending | None = None
        self._history: History = "kept"
        self._anchor_bytes = 0
        self._chain_bytes = 0
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

    def anchor_due(self, every: int) -> bool:
        """Whether the next version is to be an anchor: the same on every rank.

        Every `every` versions, and as soon as the deltas since the last anchor cost a late joiner
        more than an anchor would.
        """
        return (
            not self._snapshot
            or self.next_version % every == 0
            or self._chain_bytes > self._anchor_bytes
        )

    def prepare(
        self,
        shards: Iterable[LocalShard | DeviceShard],
        kind: Kind,
        full: Iterable[tuple[str, torch.Tensor]] | None = None,
        *,
        whole: bool = False,
    ) -> PreparedPart:
        """Upload this rank's objects for the next version; commits nothing, changes no snapshot.

        Args:
            shards: this rank's range of every tensor (empty ranges may be left out); taken a few
                ahead, and not to change until this returns.
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
        shards: Iterable[LocalShard | DeviceShard],
        kind: Kind,
        full: Iterator[tuple[str, torch.Tensor]] | None,
        whole: bool,
    ) -> PreparedPart:
        self._pending = None
        if whole:
            shards = list(shards)
            full = full or _as_tensors(shards)
        if kind == "delta" and not self._snapshot:
            raise IntegrityError(
                f"rank {self.rank} of run {self.run!r} holds no committed version to diff against; "
                "publish an anchor first"
            )
        pending, tensors, odd = self._diff(shards, kind)
        if odd and kind == "delta":
            raise IntegrityError(
                f"rank {self.rank} holds other ranges than at the last version, of {odd[:3]}; "
                "publish an anchor"
            )
        delta = bool(self._snapshot) and not odd
        uploads = _Uploads(self.store)
        objects: list[Shard] = []
        files: list[Shard] = []
        digests: dict[str, str] = {}
        if delta and any(change.indices.size for change in pending.changes.values()):
            data = self._encode(pending.changes)
            objects.append(Shard(digest=uploads.add(data), bytes=len(data), rank=self.rank))
        if kind == "anchor" and self.rank == 0:
            if full is None:
                raise ValueError("rank 0 prepares an anchor: pass `full`, or whole=True")
            for names, data in anchor_files(_hashed(full, digests)):
                digest = uploads.add(data)
                files.append(Shard(digest=digest, bytes=len(data), rank=0, tensors=names))
        self._pending = pending
        return PreparedPart(
            run=self.run,
            rank=self.rank,
            kind=kind,
            codec=CODEC if delta else None,
            history=self._history if delta else "kept",
            writer=self._writer,
            base=self._base,
            tensors=tuple(tensors),
            shards=tuple(objects),
            anchor=tuple(files),
            bytes_uploaded=uploads.bytes,
            objects_created=uploads.created,
            full_digests=digests,
        )

    def confirm(self, published: Published) -> None:
        """Advance the snapshot to the committed version: call on every rank, after `commit`.

        Raises:
            IntegrityError: nothing is prepared, or another version was.
        """
        pending = self._pending
        if pending is None or published.version != self.next_version:
            raise IntegrityError(
                f"rank {self.rank} of run {self.run!r} has not prepared version "
                f"{published.version}; its next is {self.next_version}"
            )
        for name, change in pending.changes.items():
            held = self._snapshot[name]
            if pending.kind == "anchor":
                held.history.fill(0)
            else:
                advance(held.history, held.bits, change.indices, change.values)
            held.bits[change.indices] = change.values
            if held.mirror is not None:
                where = torch.from_numpy(change.indices).to(held.mirror.device)
                held.mirror[where] = as_integers(change.values).to(held.mirror.device)
        if pending.kind == "anchor":  # it names all ranges there are
            kept = {n: held for n, held in self._snapshot.items() if n in pending.changes}
            self._snapshot = kept
        self._snapshot |= pending.fresh
        self._pending = None
        self._history = "kept"
        self._base = published.ref
        self._chain_bytes += published.delta_bytes
        if published.kind == "anchor":
            self._anchor_bytes, self._chain_bytes = published.anchor_bytes, 0

    def adopt(
        self,
        shards: Iterable[LocalShard | DeviceShard],
        ref: ManifestRef,
        anchor_bytes: int,
        chain_bytes: int,
    ) -> None:
        """Takes what this rank holds for the snapshot. Call on every rank, or on none.

        Args:
            shards: as in `prepare`; on all ranks together, bit for bit, what `survey` and
                `differing` have shown to be the head.
            ref: the head.
            anchor_bytes, chain_bytes: of the newest anchor, and of the deltas after it, see
                `commit.since_anchor`.
        """
        assert ref == self._base, (ref, self._base)
        snapshot: dict[str, Held] = {}
        for shard, looked in look({}, shards):
            assert isinstance(looked.found, Held), f"{shard.name} is not what it was"
            snapshot[shard.name] = looked.found
        self._snapshot, self._history, self._pending = snapshot, "new", None
        self._anchor_bytes, self._chain_bytes = anchor_bytes, chain_bytes

    def abandon(self) -> None:
        """Forget what was prepared: its commit failed, or another rank did."""
        self._pending = None

    def _diff(
        self, shards: Iterable[LocalShard | DeviceShard], kind: Kind
    ) -> tuple[_Pending, list[TensorPart], list[str]]:
        """What changed, what this rank says of its tensors, and ranges unlike the snapshot's."""
        pending = _Pending(kind, {}, {})
        tensors: list[TensorPart] = []
        for shard, looked in look(self._snapshot, shards):
            if shard.name in pending.changes or shard.name in pending.fresh:
                raise ValueError(f"{shard.name} is named twice among the shards; one range each")
            if looked.found is None:
                raise NotFiniteError(
                    f"{shard.name} holds NaN or infinite weights; version {self.next_version} of "
                    f"run {self.run!r} was not published, nothing changed"
                )
            if isinstance(looked.found, Change):
                pending.changes[shard.name] = looked.found
                count = looked.found.indices.size
            else:
                pending.fresh[shard.name] = looked.found
                count = looked.found.bits.size
            tensors.append(TensorPart(shard.name, shard.shape, shard.dtype, count, looked.piece))
        odd = [name for name, held in pending.fresh.items() if held.bits.size]
        odd += [
            name
            for name, held in self._snapshot.items()
            if held.bits.size and name not in pending.changes and name not in pending.fresh
        ]
        return pending, tensors, sorted(odd)

    def _encode(self, changes: Mapping[str, Change]) -> bytes:
        moved = {name: change for name, change in changes.items() if change.indices.size}
        held = self._snapshot
        ranges = [
            Range(name, held[name].start, held[name].dtype, held[name].bits, held[name].history)
            for name in moved
        ]
        return pack_delta(ranges, list(moved.values()))


def survey(shards: Iterable[LocalShard | DeviceShard]) -> tuple[TensorPart, ...]:
    """A rank's tensors with the digests of its ranges; nothing is uploaded or kept.

    Raises:
        NotFiniteError: a weight is NaN or infinite; names the tensor.
    """
    tensors: list[TensorPart] = []
    for shard, looked in look({}, shards):
        if not isinstance(looked.found, Held):
            raise NotFiniteError(f"{shard.name} holds NaN or infinite weights")
        tensors.append(TensorPart(shard.name, shard.shape, shard.dtype, 0, looked.piece))
    return tuple(tensors)


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


def _as_tensors(
    shards: Sequence[LocalShard | DeviceShard],
) -> Iterator[tuple[str, torch.Tensor]]:
    for shard in shards:
        if isinstance(shard, DeviceShard):
            yield shard.name, shard.tensor.reshape(shard.shape)
        else:
            yield shard.name, from_bits(shard.values, shard.dtype, shard.shape)


def _hashed(
    tensors: Iterable[tuple[str, torch.Tensor]], digests: dict[str, str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Passes the tensors on and notes their digests."""
    for name, tensor in tensors:
        digests[name] = tensor_digest(to_bits(tensor))
        yield name, tensor
