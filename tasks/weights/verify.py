"""Everything a run has in the store, read again, hashed again and replayed.

From the head down every manifest is checked against its link and its parent. Then, oldest version
first, every object is read and hashed, every delta is decoded against the version before it and
applied to a shadow of our own (in a temporary folder, mapped), every tensor's digest is compared
with the manifest's, and so is every tensor of every anchor file: an anchor with a delta is checked
both ways. Faults are collected; what hangs on one is said to be "not reached". In passing the
replay knows what the manifests cannot say: the limit of every delta (`tasks.weights.entropy`).

What garbage collection may take away is no fault where it is gone: the objects of versions older
than the newest anchor, which no newcomer needs, and their manifests. What is there must be right.

Memory: one shard or anchor file (about 1 GB) at a time beside the shadow's pages.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from tasks.errors import IntegrityError, PolicyError
from tasks.store import ObjectStore, object_key
from tasks.store_errors import ObjectMissing
from tasks.weights import look
from tasks.weights.anchors import AnchorCache
from tasks.weights.bits import Bits, DtypeName, numel
from tasks.weights.codec import Change
from tasks.weights.commit import existing_ref, load_manifest
from tasks.weights.digest import tensor_digest
from tasks.weights.entropy import exponent_limit
from tasks.weights.look import Fault, Row, Walk
from tasks.weights.manifest import Manifest, Shard
from tasks.weights.shadow import Shadow
from tasks.weights.shards import DeltaShard, read_anchor, unpack_delta
from tasks.weights.subscriber import apply_changes, decoded, whole_changes, wrong_digests

Check = Literal["ok", "fault", "not-kept", "not-reached"]


@dataclass(frozen=True)
class Report:
    """What `verify` found.

    Attributes:
        head: the newest version; None where the head itself is at fault.
        rows: oldest first, with their limits where a delta was replayed.
        checks: by version, also of those whose manifest is not kept. "not-reached": what leads
            there is at fault, so its objects alone were checked.
        objects, bytes: how many were read and had the digest they are named by; their size.
    """

    run: str
    head: int | None
    rows: tuple[Row, ...]
    checks: Mapping[int, Check]
    faults: tuple[Fault, ...]
    objects: int
    bytes: int


def verify(store: ObjectStore, run: str) -> Report:
    """Checks all of a run's versions; see the module.

    Raises:
        ConfigError: the run has published nothing here, or its name cannot be a run's.
        StoreError: the store failed, other than by lacking an object.
    """
    try:
        head = existing_ref(store, run)
    except IntegrityError as error:
        return Report(run, None, (), {}, (Fault(None, str(error)),), 0, 0)
    walk = look.walk(head, lambda ref: load_manifest(store, run, ref))
    with tempfile.TemporaryDirectory(prefix="kindling-verify-") as scratch:
        replay = _Replay(store, run, Path(scratch), walk)
        with replay.shadow.locked(to_write=True):
            for link in walk.links:
                replay.visit(load_manifest(store, run, link))
        replay.shadow.close()
    lost = {} if walk.lost is None else _gone(walk)
    rows = [replace(row, limit=replay.limits.get(row.version)) for row in walk.rows]
    return Report(
        run,
        head.version,
        tuple(rows),
        lost | replay.checks,
        tuple(sorted([*walk.faults, *replay.faults], key=lambda fault: fault.version or 0)),
        replay.objects,
        replay.bytes,
    )


def _gone(walk: Walk) -> dict[int, Check]:
    assert walk.lost is not None
    check: Check = "not-kept" if walk.newest_anchor is not None else "not-reached"
    return dict.fromkeys(range(walk.lost + 1), check)


class _Replay:
    """The versions of a run, one after the other, in one shadow.

    Attributes:
        held: the version the shadow was brought to; None where it holds nothing to go on from.
    """

    def __init__(self, store: ObjectStore, run: str, scratch: Path, walk: Walk) -> None:
        self.shadow = Shadow(scratch / "shadows", run)
        self.held: Manifest | None = None
        self.faults: list[Fault] = []
        self.checks: dict[int, Check] = {}
        self.limits: dict[int, float] = {}
        self.objects = self.bytes = 0
        self._store = store
        self._cache = AnchorCache(store, scratch)
        self._needed_from = walk.newest_anchor or 0
        # What to think of the version below the oldest that was found.
        self._below: Check = "not-reached" if walk.lost is None else "not-kept"
        self._bad = {fault.version for fault in walk.faults}
        self._absent: set[int] = set()  # versions that lack an object, where they may

    def visit(self, manifest: Manifest) -> None:
        """Checks the version after the one visited last."""
        version, before = manifest.version, len(self.faults)
        shards = self._shards(manifest)
        by_delta = shards is not None and self._follow(manifest, shards)
        by_anchor = manifest.kind == "anchor" and self._begin(manifest, by_delta)
        self.held = manifest if by_delta or by_anchor else None
        if len(self.faults) > before or version in self._bad:
            self.checks[version] = "fault"
        elif version in self._absent:
            self.checks[version] = "not-kept"
        elif self.held is not None:
            self.checks[version] = "ok"
        else:  # nothing wrong with it: what it builds on is gone, or at fault
            gone = self.checks.get(version - 1, self._below) == "not-kept"
            old = version < self._needed_from
            self.checks[version] = "not-kept" if gone and old else "not-reached"

    # Objects

    def _shards(self, manifest: Manifest) -> list[DeltaShard] | None:
        """The delta's shards; None where one is missing or no shard."""
        sizes = {tensor.name: numel(tensor.shape) for tensor in manifest.tensors}
        found: list[DeltaShard] = []
        for shard in manifest.shards:
            try:
                data = self._store.get_object(shard.digest)
                self._count(manifest, shard, len(data))
                found.append(unpack_delta(data, sizes))
            except ObjectMissing:
                self._missing(manifest, shard)
            except IntegrityError as error:
                self._fault(manifest, f"shard of rank {shard.rank}: {error}")
        return found if len(found) == len(manifest.shards) else None

    def _anchor_file(self, manifest: Manifest, file: Shard) -> Path | None:
        try:
            path = self._cache.file(file.digest)
        except ObjectMissing:
            self._missing(manifest, file)
        except IntegrityError as error:
            self._fault(manifest, f"anchor file: {error}")
        else:
            self._count(manifest, file, path.stat().st_size)
            return path
        return None

    def _count(self, manifest: Manifest, shard: Shard, size: int) -> None:
        self.objects += 1
        self.bytes += size
        if size != shard.bytes:
            self._fault(
                manifest,
                f"object {object_key(shard.digest)} has {size} bytes, its manifest says "
                f"{shard.bytes}",
            )

    def _missing(self, manifest: Manifest, shard: Shard) -> None:
        if manifest.version < self._needed_from:
            self._absent.add(manifest.version)
        else:
            self._fault(manifest, f"object {object_key(shard.digest)} is missing")

    def _fault(self, manifest: Manifest, what: str) -> None:
        self.faults.append(Fault(manifest.version, what))

    # Ways

    def _follow(self, manifest: Manifest, shards: Sequence[DeltaShard]) -> bool:
        """Takes the version's delta; whether the shadow holds the version now, right or wrong."""
        if manifest.codec is None or self.held is None or self.held.ref() != manifest.parent:
            return False
        if _layout(manifest) != _layout(self.held):
            return False  # a fault between the two manifests, found already
        try:
            moved = whole_changes(shards, decoded(self.shadow, manifest, shards))
        except IntegrityError as error:
            self._fault(
                manifest, f"its delta does not apply to version {self.held.version}: {error}"
            )
            return False
        self.limits[manifest.version] = self._limit(manifest, moved)
        apply_changes(self.shadow, manifest, moved)
        wrong = wrong_digests(self.shadow, manifest.tensors)
        if wrong:
            self._wrong(manifest, "by its delta", wrong)
        return True

    def _begin(self, manifest: Manifest, reached: bool) -> bool:
        """Reads the version's anchor; whether the shadow holds the version by it.

        Args:
            reached: the shadow holds the version by its delta: only what is right may replace that.
        """
        if not reached:
            self.shadow.lay_out(manifest)
        missing = {tensor.name for tensor in manifest.tensors}
        wrong: list[str] = []
        for file in manifest.anchor:
            path = self._anchor_file(manifest, file)
            if path is not None:
                held = self._read(manifest, file, path, reached, wrong)
                missing -= held
                path.unlink()
        if wrong:
            self._wrong(manifest, "by its anchor", wrong)
        return not missing

    def _read(
        self, manifest: Manifest, file: Shard, path: Path, reached: bool, wrong: list[str]
    ) -> set[str]:
        """Loads an anchor file; the names of the tensors it holds as the manifest describes them.

        Args:
            wrong: takes the names of those whose bits have another digest.
        """
        states = {tensor.name: tensor for tensor in manifest.tensors}
        names: list[str] = []
        held: set[str] = set()
        try:
            for name, dtype, shape, bits in read_anchor(path):
                names.append(name)
                state = states.get(name)
                if state is None or (state.dtype, state.shape) != (dtype, shape):
                    said = f"{state.dtype}{list(state.shape)}" if state else "no such tensor"
                    self._fault(
                        manifest,
                        f"its anchor holds {name} as {dtype}{list(shape)}; its manifest says "
                        f"{said}",
                    )
                    continue
                held.add(name)
                right = tensor_digest(bits) == state.digest
                if not right:
                    wrong.append(name)
                if right or not reached:
                    self.shadow.weights[name][:] = bits
        except (IntegrityError, PolicyError) as error:
            self._fault(manifest, f"anchor file {file.digest}: {error}")
        if sorted(names) != sorted(file.tensors):
            odd = sorted(set(names) ^ set(file.tensors))
            self._fault(
                manifest, f"anchor file {file.digest} holds other tensors than named: {odd[:5]}"
            )
        return held

    def _wrong(self, manifest: Manifest, way: str, names: Sequence[str]) -> None:
        self._fault(
            manifest,
            f"{len(names)} of {len(manifest.tensors)} tensors, reached {way}, do not have the "
            f"digest the manifest names: {', '.join(names[:5])}",
        )

    def _limit(self, manifest: Manifest, moved: Mapping[str, Change]) -> float:
        """Bits that this delta takes at least, given the exponents of what the shadow holds."""

        def change(name: str, old: Bits) -> Change:
            nothing = Change(np.empty(0, np.int64), np.empty(0, old.dtype))
            return moved.get(name, nothing)

        total = 0.0
        for dtype in get_args(DtypeName):
            names = [tensor.name for tensor in manifest.tensors if tensor.dtype == dtype]
            weights = self.shadow.weights
            total += exponent_limit(
                ((weights[name], change(name, weights[name])) for name in names), dtype
            )
        return total


def _layout(manifest: Manifest) -> dict[str, tuple[str, int]]:
    return {tensor.name: (tensor.dtype, numel(tensor.shape)) for tensor in manifest.tensors}
