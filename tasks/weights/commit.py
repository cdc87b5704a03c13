"""The commit of a version by rank 0: pure over the ranks' parts, then manifest and head."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from tasks.errors import ConfigError, IntegrityError, StoreConflict, StoreError
from tasks.store import ObjectStore
from tasks.weights.bits import DtypeName, numel
from tasks.weights.digest import Piece, combine
from tasks.weights.manifest import (
    Head,
    Manifest,
    ManifestRef,
    TensorState,
    check_child,
    head_key,
    manifest_key,
)
from tasks.weights.parts import PreparedPart, TensorPart

_FENCE_TRIES = 20
TRAINED = "trained_steps"
"""In a manifest's creation data: how many steps of the run lie behind the version."""


@dataclass(frozen=True)
class Published:
    """A committed version.

    Attributes:
        codec: of the delta from the parent; None where there is no such delta.
        delta_bytes, anchor_bytes: sizes of the version's objects, whether or not the store had
            them.
        bytes_uploaded, objects_created: what really went up: 0 for a base anchor that another run
            has published already.
        full_bytes: the bytes of all weights.
        changed, total: values changed against the parent, of how many.
        created: as in the manifest.
    """

    run: str
    version: int
    kind: str
    codec: str | None
    ref: ManifestRef
    delta_bytes: int
    anchor_bytes: int
    manifest_bytes: int
    bytes_uploaded: int
    objects_created: int
    full_bytes: int
    changed: int
    total: int
    created: str


def read_head(store: ObjectStore, run: str) -> tuple[Head, str] | None:
    """The run's head and its ETag; None where the run has none.

    Raises:
        IntegrityError: the head is not parseable or belongs to another run.
    """
    found = store.read_head(head_key(run))
    return None if found is None else (Head.from_bytes(found[0], run), found[1])


def read_ref(store: ObjectStore, run: str) -> ManifestRef | None:
    """The link to the run's newest version; None where it has none."""
    found = read_head(store, run)
    return None if found is None else found[0].ref


def existing_ref(store: ObjectStore, run: str) -> ManifestRef:
    """The link to the newest version of a run that somebody named.

    Raises:
        ConfigError: it has published nothing here; names runs of this store.
    """
    ref = read_ref(store, run)
    if ref is None:
        raise ConfigError(
            f"run {run!r} has published nothing in this store; known: {known_runs(store)}"
        )
    return ref


def known_runs(store: ObjectStore) -> str:
    """The last runs of the store by name, for a message."""
    runs = sorted({key.split("/")[1] for key in store.list("runs/")})
    return ", ".join(runs[-10:]) or "none"


def load_manifest(store: ObjectStore, run: str, ref: ManifestRef) -> Manifest:
    """The manifest of a link.

    Raises:
        IntegrityError: its bytes do not match the link, or it is not valid.
        StoreError: it is not there.
    """
    manifest = Manifest.from_bytes(store.get(manifest_key(run, ref)))
    if manifest.ref() != ref or manifest.run != run:
        raise IntegrityError(
            f"the manifest of run {run!r} version {ref.version} does not match the link to it"
        )
    return manifest


def commit(
    store: ObjectStore,
    run: str,
    version: int,
    parts: Sequence[PreparedPart],
    creation: Mapping[str, str | int | float] | None = None,
    fence: str = "",
) -> Published:
    """Make the parts of all ranks the run's next version: manifest first, then the head.

    Calling it again with the same parts after an error that left the outcome open is safe.

    Args:
        version: the number expected, one above the head's; 0 for a new run.
        parts: one of each rank.
        creation: free data for the manifest (step, host, ...).
        fence: of the publisher, see `fence_off`.

    Raises:
        IntegrityError: the parts contradict each other or do not cover every tensor exactly.
        StoreConflict: another publisher moved the head or fenced this one off, or the run exists
            already.
        StoreError: the store failed; the head may or may not have moved.
    """
    found = read_head(store, run)
    head, etag = (found[0].ref, found[1]) if found else (None, None)
    if found and found[0].fence not in ("", fence):
        raise StoreConflict(
            f"run {run!r} belongs to the publishers of {found[0].fence!r} by now, and version "
            f"{version} comes from {fence!r}: not published"
        )
    manifest = _assemble(run, version, parts, dict(creation or {}))
    if head is not None and head != manifest.parent:
        if head.version == version and _same(load_manifest(store, run, head), manifest):
            return _published(load_manifest(store, run, head), parts)  # an earlier try got through
        raise StoreConflict(_conflict(run, manifest, head))
    if head is None and manifest.parent is not None:
        raise StoreConflict(f"the head of run {run!r} has vanished; expected {manifest.parent}")
    if manifest.parent is not None:
        check_child(load_manifest(store, run, manifest.parent), manifest)
    ref = manifest.ref()
    store.create_if_absent(manifest_key(run, ref), manifest.to_bytes())
    new_head = Head(run=run, version=version, manifest=ref.manifest, fence=fence)
    try:
        store.swap(head_key(run), new_head.to_bytes(), etag)
    except StoreError as error:
        # The answer may be lost after the head moved, and a retry inside the store then "loses"
        # against ourselves: what the head names now decides.
        now = read_ref(store, run)
        if now != ref:
            if isinstance(error, StoreConflict):
                raise StoreConflict(_conflict(run, manifest, now)) from error
            raise
    return _published(manifest, parts)


def fence_off(store: ObjectStore, run: str, fence: str) -> Head | None:
    """From now on only commits with this fence move the run's head; the head as it is then.

    A publisher of before that is thought dead, and is only slow, loses: its commit either moved
    the head already, and what is returned says so, or finds another fence. A run without a head
    has nothing to fence; None.

    Args:
        fence: "life.epoch", or what else has numbers and dots: a higher one is younger.

    Raises:
        StoreConflict: a younger fence is there; or others move the head again and again.
    """
    for _ in range(_FENCE_TRIES):
        found = read_head(store, run)
        if found is None:
            return None
        head, etag = found
        if head.fence == fence:
            return head
        if _age(head.fence) > _age(fence):
            raise StoreConflict(
                f"run {run!r} belongs to a younger flow (epoch {head.fence}, this is {fence}): it "
                "was resumed elsewhere; stop this one"
            )
        fenced = head.model_copy(update={"fence": fence})
        try:
            store.swap(head_key(run), fenced.to_bytes(), etag)
            return fenced
        except StoreConflict:
            continue  # the head has just moved once more, or our own write's answer was lost
    raise StoreConflict(f"the head of run {run!r} keeps moving: another flow trains it; stop one")


def _age(fence: str) -> tuple[int, ...]:
    return tuple(int(number) for number in fence.split(".")) if fence else ()


def require_fence(store: ObjectStore, run: str, fence: str) -> None:
    """
    Raises:
        StoreConflict: the run's head belongs to another fence by now.
    """
    found = read_head(store, run)
    if found is not None and found[0].fence not in ("", fence):
        raise StoreConflict(
            f"run {run!r} belongs to epoch {found[0].fence} by now, and this is {fence}: another "
            "flow trains it; stop one"
        )


def published_before(store: ObjectStore, run: str, ref: ManifestRef) -> Published:
    """A version as `commit` reported it, with nothing uploaded: for one that exists already."""
    return _published(load_manifest(store, run, ref), ())


def differing(manifest: Manifest, parts: Sequence[Sequence[TensorPart]]) -> list[str]:
    """Tensors whose weights, as the ranks have surveyed them, are not the version's; sorted."""
    held = {state.name: state.digest for state in _tensor_states(parts)}
    there = {state.name: state.digest for state in manifest.tensors}
    return sorted(n for n in held.keys() | there.keys() if held.get(n) != there.get(n))


def lineage(store: ObjectStore, run: str, since: int) -> dict[int, ManifestRef]:
    """Trained steps -> version, for those versions of the run's present line that lie at or after
    step `since`. A run that was resumed and could not repeat its steps to the bit has left
    versions of another line behind, which are not here."""
    found: dict[int, ManifestRef] = {}
    ref = read_ref(store, run)
    last: float = math.inf
    while ref is not None:
        manifest = load_manifest(store, run, ref)
        trained = manifest.creation.get(TRAINED)
        if isinstance(trained, int) and trained < last:
            last = trained
            if trained < since:
                break
            found[trained] = ref
        ref = manifest.parent
    return found


def since_anchor(store: ObjectStore, run: str, ref: ManifestRef) -> tuple[int, int]:
    """Bytes of the newest anchor at or before a version, and of the deltas from there to it."""
    deltas = 0
    while (manifest := load_manifest(store, run, ref)).kind != "anchor":
        deltas += manifest.delta_bytes
        assert manifest.parent is not None, "version 0 is an anchor"
        ref = manifest.parent
    return manifest.anchor_bytes, deltas


def _conflict(run: str, manifest: Manifest, head: ManifestRef | None) -> str:
    base = "nothing" if manifest.parent is None else f"version {manifest.parent.version}"
    now = "is gone" if head is None else f"is at version {head.version}"
    return (
        f"run {run!r} {now}, this publisher builds on {base}: another publisher writes this run; "
        f"version {manifest.version} was not published. Stop one of them, or resume from the head"
    )


def _same(committed: Manifest, ours: Manifest) -> bool:
    def content(one: Manifest) -> tuple[object, ...]:
        return (one.writer, one.parent, one.codec, one.history, one.shards, one.anchor, one.tensors)

    return content(committed) == content(ours)


def _assemble(
    run: str,
    version: int,
    parts: Sequence[PreparedPart],
    creation: dict[str, str | int | float],
) -> Manifest:
    """The manifest of the parts, every tensor covered exactly."""
    ordered = sorted(parts, key=lambda part: part.rank)
    if [part.rank for part in ordered] != list(range(len(parts))) or not parts:
        raise IntegrityError(
            f"parts of ranks {[part.rank for part in ordered]}; expected one of each rank from 0"
        )
    first = ordered[0]
    for part in ordered:
        if (part.run, part.kind, part.codec, part.history, part.base) != (
            run,
            first.kind,
            first.codec,
            first.history,
            first.base,
        ):
            ours, theirs = (
                f"{one.kind} of run {one.run!r} on {one.base} ({one.codec}, {one.history} history)"
                for one in (part, first)
            )
            raise IntegrityError(f"rank {part.rank} prepared {ours}; rank 0, for {run!r}, {theirs}")
    expected = 0 if first.base is None else first.base.version + 1
    if version != expected:
        raise IntegrityError(f"the parts make version {expected} of run {run!r}, not {version}")
    tensors = _tensor_states([part.tensors for part in ordered])
    if first.kind == "anchor":
        written = {tensor.name: tensor.digest for tensor in tensors}
        if first.full_digests != written:
            odd = sorted(dict(first.full_digests.items() ^ written.items()))
            raise IntegrityError(
                f"the anchor's full tensors are not what the ranks hold: {odd[:5]}"
            )
    return Manifest(
        run=run,
        version=version,
        parent=first.base,
        kind=first.kind,
        codec=first.codec,
        history=first.history,
        shards=tuple(shard for part in ordered for shard in part.shards),
        anchor=tuple(file for part in ordered for file in part.anchor),
        tensors=tensors,
        writer=first.writer,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        creation=creation,
    )


def _tensor_states(parts: Sequence[Sequence[TensorPart]]) -> tuple[TensorState, ...]:
    known: dict[str, tuple[tuple[int, ...], DtypeName]] = {}
    counts: dict[str, int] = {}
    pieces: dict[str, list[Piece]] = {}
    for part in parts:
        for tensor in part:
            if known.setdefault(tensor.name, (tensor.shape, tensor.dtype)) != (
                tensor.shape,
                tensor.dtype,
            ):
                raise IntegrityError(f"the ranks disagree about the shape of {tensor.name}")
            counts[tensor.name] = counts.get(tensor.name, 0) + tensor.changed
            pieces.setdefault(tensor.name, []).append(tensor.piece)
    states: list[TensorState] = []
    for name, (shape, dtype) in known.items():
        try:
            digest = combine(pieces[name], numel(shape))
        except IntegrityError as error:
            raise IntegrityError(f"{name}: {error}") from error
        states.append(
            TensorState(name=name, shape=shape, dtype=dtype, digest=digest, changed=counts[name])
        )
    return tuple(states)


def _published(manifest: Manifest, parts: Sequence[PreparedPart]) -> Published:
    return Published(
        run=manifest.run,
        version=manifest.version,
        kind=manifest.kind,
        codec=manifest.codec,
        ref=manifest.ref(),
        delta_bytes=manifest.delta_bytes,
        anchor_bytes=manifest.anchor_bytes,
        manifest_bytes=len(manifest.to_bytes()),
        bytes_uploaded=sum(part.bytes_uploaded for part in parts),
        objects_created=sum(part.objects_created for part in parts),
        full_bytes=manifest.full_bytes,
        changed=manifest.changed,
        total=manifest.values,
        created=manifest.created,
    )
