"""The reader's side: a host's verified shadow copy, and what each of its engines needs.

`Subscriber.fetch` brings the shadow (`tasks.weights.shadow`, shared by the host's processes) to a
version: it follows manifests from the run's head, downloads and verifies every object, decodes,
applies to the shadow, and compares every tensor that any step touched with the target's digest.
Only then does it return an `Update` of absolute values, so an engine is never given a bit that was
not verified, and giving it twice is harmless. What another process of the host has done is not done
again.

Nothing in the store is trusted further than a head's links reach. A shadow that turns out unusable
is rebuilt from the newest anchor within the same call; where the store itself is at fault, the call
raises and the shadow holds nothing, or what it held.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from tasks.errors import IntegrityError, StoreError
from tasks.store import ObjectMissing, ObjectStore, object_key
from tasks.weights.anchors import AnchorCache
from tasks.weights.bits import Bits, DtypeName, numel
from tasks.weights.codec import Change, Range, decode, threads
from tasks.weights.commit import load_manifest, read_ref
from tasks.weights.digest import tensor_digest
from tasks.weights.history import advance, no_history
from tasks.weights.manifest import Manifest, ManifestRef, Shard, TensorState
from tasks.weights.shadow import Shadow, remove_unused
from tasks.weights.shards import DeltaShard, Place, read_anchor, unpack_delta
from tasks.weights.update import TensorUpdate, Update
from tasks.weights.versions import Holds, Nothing, Plan, Refusal, State, plan

_MANIFESTS_KEPT = 64


class Subscriber:
    """One engine's way to its host's shadow. Not thread-safe: hold a lock around it."""

    def __init__(self, store: ObjectStore, cache_dir: str | Path) -> None:
        """
        Args:
            cache_dir: folder of this host for anchor files and shadows, shared by processes, runs
                and engines.
        """
        self.store = store
        self._shadows = Path(cache_dir) / "shadows"
        self._shadow: Shadow | None = None
        self._cache = AnchorCache(store, Path(cache_dir))
        self._manifests: dict[ManifestRef, Manifest] = {}
        self._delta_bytes = 0

    @property
    def anchor_loads(self) -> int:
        """Anchor objects downloaded from the store; one found in the cache does not count."""
        return self._cache.downloads

    @property
    def bytes_downloaded(self) -> int:
        """Bytes of anchors and deltas downloaded here; manifests do not count."""
        return self._cache.bytes_downloaded + self._delta_bytes

    @property
    def state(self) -> State:
        """What the shadow held when it was last looked at."""
        return self._shadow.state if self._shadow else Nothing()

    @property
    def shadow(self) -> dict[str, Bits]:
        """name -> flat pattern of the full tensor; see `reading`."""
        return dict(self._shadow.weights) if self._shadow else {}

    def close(self) -> None:
        """Gives the shadow up; the next process that looks for unused ones removes it."""
        if self._shadow is not None:
            self._shadow.close()
            self._shadow = None

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
                A delta is returned only where every step from there is known; else a full update.

        Raises:
            IntegrityError: a manifest, link, object or digest is wrong. The shadow is whole (where
                nothing had been applied) or holds nothing; the engine is untouched.
            StoreError: no such version, its objects were collected, or the store failed.
        """
        shadow = self._shadow_of(run)
        with shadow.locked(to_write=True):
            return self._fetch(shadow, version, shadow.state if engine is None else engine)

    @contextlib.contextmanager
    def reading(self, update: Update) -> Iterator[Update]:
        """The update, for as long as its values are used: what a full one shows must not move.

        Where another engine of the host has taken the shadow elsewhere meanwhile, it is brought
        back first, and the update is a new one.

        Raises:
            IntegrityError, StoreError: as `fetch`.
        """
        if update.kind == "delta":
            yield update
            return
        shadow = self._shadow_of(update.run)
        with shadow.locked(to_write=False):  # engines may read it side by side
            if shadow.state == update.target:
                yield update
                return
        with shadow.locked(to_write=True):
            yield self._fetch(shadow, update.version, Nothing())

    def _fetch(self, shadow: Shadow, version: int, engine: State) -> Update:
        road = self._plan(shadow, version, shadow.state)
        if road.steps:
            try:
                self._travel(shadow, road)
            except ObjectMissing as missing:
                raise _collected(road.target, missing) from missing
        target = road.target
        if engine == Holds(shadow.run, target.ref()):
            return Update(target, "delta", engine, {})
        if isinstance(engine, Holds) and engine.run == shadow.run:
            moved = shadow.moved_since(engine.ref)
            if moved is not None:
                return Update(target, "delta", engine, _merged(shadow, target, moved))
        return _full(shadow, target)

    def _shadow_of(self, run: str) -> Shadow:
        if self._shadow is None or self._shadow.run != run:
            self.close()
            self._shadow = Shadow(self._shadows, run)
            remove_unused(self._shadows)
        return self._shadow

    def _plan(self, shadow: Shadow, version: int, state: State) -> Plan:
        run = shadow.run
        head = read_ref(self.store, run)
        found = plan(run, state, head, version, lambda ref: self._load(run, ref))
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

    def _travel(self, shadow: Shadow, road: Plan) -> None:
        try:
            self._take(shadow, road)
        except (IntegrityError, ObjectMissing) as error:
            # Where the deltas from what is held were collected, those since an anchor may be there.
            # A shadow whose memory went bad looks like a bad delta: an anchor tells them apart. A
            # shadow that is still whole was not touched: then the store is at fault.
            store_at_fault = isinstance(error, IntegrityError) and isinstance(shadow.state, Holds)
            if road.kind == "full" or store_at_fault:
                raise
            self._take(shadow, self._plan(shadow, road.target.version, Nothing()))

    def _take(self, shadow: Shadow, road: Plan) -> None:
        """Takes the steps; all downloads come before the first write."""
        target = road.target
        sizes = {tensor.name: numel(tensor.shape) for tensor in target.tensors}
        deltas = road.steps[1:] if road.kind == "full" else road.steps
        files = (
            self._cache.files([file.digest for file in road.steps[0].anchor])
            if road.kind == "full"
            else []
        )
        shards = [self._download(manifest, sizes) for manifest in deltas]
        first: list[Change] | None = None
        if road.kind == "delta":  # a delta that does not decode leaves the shadow whole
            first = decoded(shadow, deltas[0], shards[0])
        with shadow.changing(Holds(shadow.run, target.ref())):
            touched = set(sizes) if road.kind == "full" else set[str]()
            if road.kind == "full":
                _load_anchor(shadow, road.steps[0], files)
            for manifest, parts in zip(deltas, shards, strict=True):
                changes = first or decoded(shadow, manifest, parts)
                first = None
                moved = whole_changes(parts, changes)
                apply_changes(shadow, manifest, moved)
                touched |= set(moved)
            _check_digests(shadow, target, touched)

    def _download(self, manifest: Manifest, sizes: Mapping[str, int]) -> list[DeltaShard]:
        """The shards of a delta, each verified against its digest."""
        if not manifest.shards:
            return []
        with ThreadPoolExecutor(min(16, len(manifest.shards))) as pool:
            data = list(pool.map(self._object, manifest.shards))
        return [unpack_delta(content, sizes) for content in data]

    def _object(self, shard: Shard) -> bytes:
        content = self.store.get_object(shard.digest)
        self._delta_bytes += len(content)
        if len(content) != shard.bytes:
            raise IntegrityError(
                f"object {object_key(shard.digest)} has {len(content)} bytes, its manifest says "
                f"{shard.bytes}"
            )
        return content


def _collected(target: Manifest, missing: ObjectMissing) -> ObjectMissing:
    return ObjectMissing(
        f"run {target.run!r} version {target.version} is in the store no longer ({missing}); "
        "garbage collection keeps pinned versions and those near the head: ask for one of them, "
        "and pin a version that is to stay"
    )


def _load_anchor(shadow: Shadow, manifest: Manifest, paths: Sequence[Path]) -> None:
    """Replaces the shadow's content by an anchor's tensors."""
    where = f"the anchor of run {manifest.run!r} version {manifest.version}"
    shadow.lay_out(manifest)
    missing = {tensor.name: tensor for tensor in manifest.tensors}
    for path in paths:
        for name, dtype, shape, bits in read_anchor(path):
            expected = missing.pop(name, None)
            if expected is None or (expected.dtype, expected.shape) != (dtype, shape):
                raise IntegrityError(
                    f"{where} holds {name} as {dtype}{list(shape)}, which is not what its manifest "
                    "says"
                )
            shadow.weights[name][:] = bits
    if missing:
        raise IntegrityError(f"{where} lacks {sorted(missing)[:5]}")


def _ranges(
    shadow: Shadow, manifest: Manifest, shard: DeltaShard, dtypes: Mapping[str, DtypeName]
) -> list[Range]:
    def history(place: Place) -> Bits:
        if manifest.history == "new":
            return no_history(place.count)
        return shadow.history[place.tensor][place.start : place.start + place.count]

    return [
        Range(
            place.tensor,
            place.start,
            dtypes[place.tensor],
            shadow.weights[place.tensor][place.start : place.start + place.count],
            history(place),
        )
        for place in shard.places
    ]


def decoded(shadow: Shadow, manifest: Manifest, shards: Sequence[DeltaShard]) -> list[Change]:
    """The changes of all places of all shards, in their order, against what the shadow holds.

    Raises:
        IntegrityError: they do not decode, or change another number of values than the manifest
            says. The shadow is untouched.
    """
    dtypes: dict[str, DtypeName] = {tensor.name: tensor.dtype for tensor in manifest.tensors}
    counts = dict.fromkeys(dtypes, 0)
    changes: list[Change] = []
    for shard in shards:
        found = decode(shard.tables, shard.blocks, _ranges(shadow, manifest, shard, dtypes))
        for place, change in zip(shard.places, found, strict=True):
            counts[place.tensor] += change.indices.size
        changes += found
    wrong = [t.name for t in manifest.tensors if counts[t.name] != t.changed]
    if wrong:
        raise IntegrityError(
            f"the shards of run {manifest.run!r} version {manifest.version} change another "
            f"number of values than its manifest says, in {wrong[:5]}"
        )
    return changes


def whole_changes(shards: Sequence[DeltaShard], changes: Sequence[Change]) -> dict[str, Change]:
    """What changed in each tensor (int64 positions), from the changes of the shards' places."""
    pieces: dict[str, list[tuple[int, Change]]] = {}
    places = [place for shard in shards for place in shard.places]
    for place, change in zip(places, changes, strict=True):
        pieces.setdefault(place.tensor, []).append((place.start, change))
    return {name: _whole(found) for name, found in pieces.items()}


def apply_changes(shadow: Shadow, manifest: Manifest, moved: Mapping[str, Change]) -> None:
    """Writes one version's changes by tensor and brings the history past them."""

    def write(name: str) -> None:
        weights, history = shadow.weights[name], shadow.history[name]
        change = moved.get(name) or Change(np.empty(0, np.int64), np.empty(0, weights.dtype))
        if manifest.kind == "anchor" or manifest.history == "new":
            history.fill(0)
        if manifest.kind != "anchor":
            advance(history, weights, change.indices, change.values)
        weights[change.indices] = change.values

    with ThreadPoolExecutor(threads()) as pool:
        list(pool.map(write, shadow.weights))
    shadow.note_moved(manifest, {name: change.indices for name, change in moved.items()})


def _whole(pieces: list[tuple[int, Change]]) -> Change:
    """The changes of a tensor, int64 positions, from those of its ranges."""
    pieces.sort(key=lambda piece: piece[0])
    return Change(
        np.concatenate([change.indices.astype(np.int64) + start for start, change in pieces]),
        np.concatenate([change.values for _, change in pieces]),
    )


def wrong_digests(shadow: Shadow, states: Sequence[TensorState]) -> list[str]:
    """Names of those tensors whose bits in the shadow do not have the digest of their state."""
    with ThreadPoolExecutor(threads()) as pool:
        digests = list(pool.map(lambda t: tensor_digest(shadow.weights[t.name]), states))
    return [t.name for t, digest in zip(states, digests, strict=True) if t.digest != digest]


def _check_digests(shadow: Shadow, target: Manifest, touched: set[str]) -> None:
    """That every touched tensor is what the target's manifest says."""
    wrong = wrong_digests(shadow, [t for t in target.tensors if t.name in touched])
    if wrong:
        raise IntegrityError(
            f"run {target.run!r} version {target.version}: {wrong[0]} ({len(wrong)} tensors in "
            "all) does not have the digest its manifest names; the version was not applied to any "
            "engine"
        )


def _merged(
    shadow: Shadow, target: Manifest, moved: Mapping[str, Sequence[Bits]]
) -> dict[str, TensorUpdate]:
    """The values now at all positions that some step moved."""
    found: dict[str, TensorUpdate] = {}
    for tensor in target.tensors:
        if steps := moved.get(tensor.name):
            # Several steps may touch a value; each step's positions are sorted and distinct.
            indices = steps[0] if len(steps) == 1 else np.unique(np.concatenate(steps))
            values = shadow.weights[tensor.name][indices]
            found[tensor.name] = TensorUpdate(tensor.shape, tensor.dtype, indices, values)
    return found


def _full(shadow: Shadow, manifest: Manifest) -> Update:
    def whole(tensor: TensorState) -> TensorUpdate:
        return TensorUpdate(tensor.shape, tensor.dtype, None, shadow.weights[tensor.name])

    return Update(manifest, "full", Nothing(), {t.name: whole(t) for t in manifest.tensors})
