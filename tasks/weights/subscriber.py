"""The reader's side: a verified shadow copy of a version in host memory.

`Subscriber.fetch` brings the shadow to a version: it follows manifests from the run's head,
downloads and verifies every object, decodes, applies to the shadow, and compares every tensor that
any step touched with the target's digest. Only then does it return an `Update` of absolute values,
so an engine is never given a bit that was not verified, and giving it twice is harmless.

Nothing in the store is trusted further than a head's links reach. A shadow that turns out unusable
is rebuilt from the newest anchor within the same call; where the store itself is at fault, the call
raises and the shadow holds nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from tasks.errors import IntegrityError, StoreError
from tasks.store import ObjectStore, object_key
from tasks.weights.anchors import AnchorCache
from tasks.weights.bits import Bits, DtypeName, numel
from tasks.weights.codec import codec_named
from tasks.weights.commit import load_manifest, read_ref
from tasks.weights.digest import tensor_digest
from tasks.weights.manifest import Manifest, ManifestRef
from tasks.weights.shards import read_anchor, unpack_delta
from tasks.weights.versions import HalfApplied, Holds, Nothing, Plan, Refusal, State, plan

_MANIFESTS_KEPT = 64


@dataclass(frozen=True)
class TensorUpdate:
    """Absolute values for one tensor.

    Attributes:
        shape, dtype: of the full checkpoint tensor.
        indices: flat positions, int64, strictly ascending, shape (k,); None: all of them.
        values: patterns, uint16 or uint32, shape (k,) or (numel,). A full tensor's are the
            shadow's own memory: not to be written, and valid until the next `fetch`.
    """

    shape: tuple[int, ...]
    dtype: DtypeName
    indices: Bits | None
    values: Bits


@dataclass(frozen=True)
class Update:
    """What brings an engine that is in state `base` (any state where full) to `manifest`."""

    manifest: Manifest
    kind: Literal["full", "delta"]
    base: State
    tensors: Mapping[str, TensorUpdate]

    @property
    def run(self) -> str:
        return self.manifest.run

    @property
    def version(self) -> int:
        return self.manifest.version

    @property
    def target(self) -> Holds:
        """The engine's state once this is applied."""
        return Holds(self.manifest.run, self.manifest.ref())

    @property
    def changed(self) -> int:
        """Values written."""
        return sum(tensor.values.size for tensor in self.tensors.values())


class Subscriber:
    """One host's (for now: one engine's) shadow copy. Not thread-safe: hold a lock around it.

    Attributes:
        shadow: name -> flat pattern of the full tensor; meaningful where `state` is `Holds`.
    """

    def __init__(self, store: ObjectStore, cache_dir: str | Path) -> None:
        """
        Args:
            cache_dir: folder for anchor files; may be shared with other processes and runs.
        """
        self.store = store
        self.shadow: dict[str, Bits] = {}
        self.state: State = Nothing()
        self._cache = AnchorCache(store, Path(cache_dir))
        self._manifests: dict[ManifestRef, Manifest] = {}
        self._delta_bytes = 0
        self._last: Update | None = None

    @property
    def anchor_loads(self) -> int:
        """Anchor objects downloaded from the store; one found in the cache does not count."""
        return self._cache.downloads

    @property
    def bytes_downloaded(self) -> int:
        """Bytes of anchors and deltas downloaded; manifests do not count."""
        return self._cache.bytes_downloaded + self._delta_bytes

    def newest(self, run: str) -> int | None:
        """The run's newest version, None where it has none: one small read.

        Raises:
            IntegrityError: the head is not valid.
        """
        ref = read_ref(self.store, run)
        return None if ref is None else ref.version

    def fetch(self, run: str, version: int, engine: State | None = None) -> Update:
        """Bring the shadow to a version, verified, and say what an engine needs.

        Args:
            engine: what the engine to be updated holds. None: it holds what the shadow holds now.
                A delta is returned only where it fits that; else a full update.

        Raises:
            IntegrityError: a manifest, link, object or digest is wrong. The shadow is whole (where
                nothing had been applied) or holds nothing; the engine is untouched.
            StoreError: no such version, or the store failed.
        """
        base = self.state
        before = base if engine is None else engine
        road = self._plan(run, version, base)
        if road.steps:
            self._last = None
            self._last = self._travel(road, base)
        target = Holds(run, road.target.ref())
        if before == target:
            return Update(road.target, "delta", before, {})
        last = self._last
        if last is not None and last.target == target and last.base in (before, Nothing()):
            return last
        return self._full(road.target)

    def _plan(self, run: str, version: int, state: State) -> Plan:
        found = plan(
            run, state, read_ref(self.store, run), version, lambda ref: self._load(run, ref)
        )
        if isinstance(found, Refusal):
            raise IntegrityError(found.reason) if found.broken else StoreError(found.reason)
        return found

    def _load(self, run: str, ref: ManifestRef) -> Manifest:
        manifest = self._manifests.get(ref)
        if manifest is None:
            manifest = load_manifest(self.store, run, ref)
            while len(self._manifests) >= _MANIFESTS_KEPT:
                self._manifests.pop(next(iter(self._manifests)))
            self._manifests[ref] = manifest
        return manifest

    def _travel(self, road: Plan, base: State) -> Update:
        try:
            return self._take(road)
        except IntegrityError:
            # A shadow whose memory went bad looks like a bad delta: an anchor tells them apart. A
            # shadow that is still whole was not touched: then the store is at fault.
            if road.kind == "full" or self.state == base:
                raise
            return self._take(self._plan(road.target.run, road.target.version, Nothing()))

    def _take(self, road: Plan) -> Update:
        """Downloads and decodes everything that can be before the shadow is written."""
        target, base = road.target, self.state
        sizes = {tensor.name: numel(tensor.shape) for tensor in target.tensors}
        deltas = [m for m in road.steps if m.kind == "delta"]
        payloads = [self._download(m) for m in deltas]
        if road.kind == "full":
            self._load_anchor(road.steps[0])
        written: dict[str, list[Bits]] = {name: [] for name in sizes}
        for manifest, shards in zip(deltas, payloads, strict=True):
            for name, indices in self._apply(manifest, shards, sizes):
                written[name].append(indices)
        full = road.kind == "full"
        for tensor in target.tensors:
            if (full or written[tensor.name]) and (
                tensor_digest(self.shadow[tensor.name]) != tensor.digest
            ):
                self.state = Nothing()
                raise IntegrityError(
                    f"run {target.run!r} version {target.version}: {tensor.name} does not have the "
                    "digest its manifest names; the version was not applied to any engine"
                )
        self.state = Holds(target.run, target.ref())
        if full:
            return self._full(target)
        tensors = {
            tensor.name: self._merged(tensor.name, tensor.shape, tensor.dtype, written[tensor.name])
            for tensor in target.tensors
            if written[tensor.name]
        }
        return Update(target, "delta", base, tensors)

    def _download(self, manifest: Manifest) -> list[bytes]:
        """The shards of a delta, each verified against its digest."""
        data = [self.store.get_object(shard.digest) for shard in manifest.shards]
        for shard, content in zip(manifest.shards, data, strict=True):
            self._delta_bytes += len(content)
            if len(content) != shard.bytes:
                raise IntegrityError(
                    f"object {object_key(shard.digest)} has {len(content)} bytes, the manifest of "
                    f"run {manifest.run!r} version {manifest.version} says {shard.bytes}"
                )
        return data

    def _load_anchor(self, manifest: Manifest) -> None:
        """Replaces the shadow by an anchor's tensors, in place where they fit."""
        paths = [self._cache.file(shard.digest) for shard in manifest.shards]
        states = {tensor.name: tensor for tensor in manifest.tensors}
        self.state = HalfApplied(manifest.run, manifest.version)
        fresh: dict[str, Bits] = {}
        for shard, path in zip(manifest.shards, paths, strict=True):
            for name, dtype, shape, bits in read_anchor(path):
                expected = states.get(name)
                if expected is None or (expected.dtype, expected.shape) != (dtype, shape):
                    raise IntegrityError(
                        f"anchor {shard.digest[:16]} holds {name} as {dtype}{list(shape)}, which "
                        f"is not what version {manifest.version} of run {manifest.run!r} says"
                    )
                old = self.shadow.pop(name, None)  # so that two copies of one tensor is the most
                if old is not None and old.size == bits.size and old.dtype == bits.dtype:
                    old[:] = bits
                    bits = old
                fresh[name] = bits
        if fresh.keys() != states.keys():
            raise IntegrityError(
                f"the anchor of run {manifest.run!r} version {manifest.version} lacks "
                f"{sorted(states.keys() - fresh.keys())[:5]}"
            )
        self.shadow = fresh

    def _apply(
        self, manifest: Manifest, shards: list[bytes], sizes: Mapping[str, int]
    ) -> list[tuple[str, Bits]]:
        """Writes one delta into the shadow; (tensor, flat positions int64) of each record.

        Everything is decoded before anything is written: a payload that does not decode leaves
        the shadow whole.
        """
        codec = codec_named(manifest.codec)
        decoded: list[tuple[str, Bits, Bits]] = []
        counts = dict.fromkeys(sizes, 0)
        for data in shards:
            for record in unpack_delta(data, manifest.codec, sizes):
                old = self.shadow[record.tensor][record.start : record.start + record.count]
                indices, values = codec.decode(record.payload, old)
                decoded.append((record.tensor, indices.astype(np.int64) + record.start, values))
                counts[record.tensor] += indices.size
        wrong = [t.name for t in manifest.tensors if counts[t.name] != t.changed]
        if wrong:
            raise IntegrityError(
                f"the shards of run {manifest.run!r} version {manifest.version} change another "
                f"number of values than its manifest says, in {wrong[:5]}"
            )
        self.state = HalfApplied(manifest.run, manifest.version)
        for name, indices, values in decoded:
            self.shadow[name][indices] = values
        return [(name, indices) for name, indices, _ in decoded]

    def _merged(
        self, name: str, shape: tuple[int, ...], dtype: DtypeName, written: list[Bits]
    ) -> TensorUpdate:
        indices = np.unique(np.concatenate(written))  # sorted; steps may touch a value twice
        return TensorUpdate(shape, dtype, indices, self.shadow[name][indices])

    def _full(self, manifest: Manifest) -> Update:
        tensors = {
            tensor.name: TensorUpdate(tensor.shape, tensor.dtype, None, self.shadow[tensor.name])
            for tensor in manifest.tensors
        }
        return Update(manifest, "full", Nothing(), tensors)
