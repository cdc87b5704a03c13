"""All that a garbage collection knows of the store: objects, and everything that names them.

Only these write content-addressed objects, and their records are what is read here:

    the publisher          runs/<run>/head.json and the manifests it leads to
    trainer checkpoints    runs/<run>/checkpoints/<step>.json
    the BM25 index         indexes/<key>.json

Whoever else begins to must be added, or its objects are garbage (a test looks for new writers).
The objects are listed before the records are read: whatever is committed in between is seen.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tasks.errors import IntegrityError
from tasks.retrieval.stored import objects_of
from tasks.store import ObjectMissing, ObjectStore
from tasks.store_location import Listed
from tasks.training import checkpoint
from tasks.weights.commit import load_manifest, read_ref
from tasks.weights.manifest import Manifest, ManifestRef, head_key, manifest_key
from tasks.weights.pins import read_pin

_OBJECT = re.compile(r"(?:objects|quarantine)/([0-9a-f]{2})/(\1[0-9a-f]{62})")
_OF_RUN = re.compile(r"runs/([^/]+)/(head\.json|manifests/.*|pins/.*)")
_MANIFEST = re.compile(r"runs/[^/]+/manifests/(\d{8,})-([0-9a-f]{64})\.json\.zst")
_INDEX = re.compile(r"indexes/(.+)\.json")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_AT_ONCE = 64  # manifests in memory: one of a large model is a megabyte


@dataclass(frozen=True)
class Version:
    """What a version is made of: digests of its objects. `anchor` is empty for a mere delta."""

    ref: ManifestRef
    parent: ManifestRef | None
    delta: tuple[str, ...]
    anchor: tuple[str, ...]

    @staticmethod
    def of(manifest: Manifest) -> Version:
        delta = tuple(shard.digest for shard in manifest.shards)
        anchor = tuple(file.digest for file in manifest.anchor)
        return Version(manifest.ref(), manifest.parent, delta, anchor)


@dataclass(frozen=True)
class RunHistory:
    """A run's versions.

    Attributes:
        versions: those reachable from the head, by number; () where the run has no head (yet).
        pinned: numbers of the pinned ones.
        strays: manifests reachable from no head.
    """

    run: str
    versions: tuple[Version, ...]
    pinned: frozenset[int] = frozenset()
    strays: tuple[Listed, ...] = ()


@dataclass(frozen=True)
class Inventory:
    """The store's content-addressed objects and what names them.

    Attributes:
        objects, aside: digest -> the object in its place, and the one set aside.
        records: key of a checkpoint's manifest or an index's description -> digests it names.
    """

    objects: Mapping[str, Listed]
    aside: Mapping[str, Listed]
    runs: tuple[RunHistory, ...]
    records: Mapping[str, frozenset[str]]


def take_inventory(store: ObjectStore) -> Inventory:
    """Reads every head, manifest, pin, checkpoint manifest and index description.

    Raises:
        IntegrityError: one cannot be read or understood; names its key.
        StoreError: the store failed.
    """
    objects = _by_digest(store.listing("objects/"))
    aside = _by_digest(store.listing("quarantine/"))
    of_runs: dict[str, list[Listed]] = {}
    records: dict[str, frozenset[str]] = {}
    for one in store.listing("runs/"):
        if match := _OF_RUN.fullmatch(one.key):
            of_runs.setdefault(match[1], []).append(one)
        elif found := checkpoint.run_and_step(one.key):
            with _naming(one.key):
                made = checkpoint.read(store, *found)
                records[one.key] = _digests([record.digest for record in made.records])
    for key in store.list("indexes/"):
        with _naming(key):
            match = _INDEX.fullmatch(key)
            records[key] = _digests(objects_of(store, match[1] if match else key))
    runs = tuple(_history(store, run, files) for run, files in sorted(of_runs.items()))
    return Inventory(objects, aside, runs, records)


def _by_digest(found: Sequence[Listed]) -> dict[str, Listed]:
    """Those with the key of an object; what else lies there is not ours to touch."""
    matches = ((_OBJECT.fullmatch(one.key), one) for one in found)
    return {match[2]: one for match, one in matches if match}


def _digests(found: Sequence[str]) -> frozenset[str]:
    """A digest with a typing error would not keep its object."""
    for digest in found:
        if not _DIGEST.fullmatch(digest):
            raise IntegrityError(f"it names {digest!r} as an object; expected a BLAKE3 digest")
    return frozenset(found)


def _history(store: ObjectStore, run: str, files: Sequence[Listed]) -> RunHistory:
    listed: dict[ManifestRef, Listed] = {}
    pins: list[str] = []
    for one in files:
        if match := _MANIFEST.fullmatch(one.key):
            listed[ManifestRef(version=int(match[1]), manifest=match[2])] = one
        elif "/pins/" in one.key:
            pins.append(one.key)
        elif one.key != head_key(run):
            with _naming(one.key):
                raise IntegrityError("not the key of a manifest")
    with _naming(head_key(run)):
        head = read_ref(store, run)
        if head is None and (pins or any(ref.version for ref in listed)):
            raise IntegrityError(f"run {run!r} has pins or later manifests, and no head")
    known = _load(store, run, listed)
    versions: list[Version] = []
    link = head
    while link is not None:
        with _naming(manifest_key(run, link)):
            # One that was committed after the listing is read by itself.
            version = known.pop(link, None) or Version.of(load_manifest(store, run, link))
        versions.append(version)
        link = version.parent
    versions.reverse()
    pinned = frozenset(_pinned(store, key, versions) for key in pins)
    return RunHistory(run, tuple(versions), pinned, tuple(listed[ref] for ref in known))


def _load(
    store: ObjectStore, run: str, listed: Mapping[ManifestRef, Listed]
) -> dict[ManifestRef, Version]:
    """All listed manifests, strays too: one that is damaged might be what a head leads to."""
    known: dict[ManifestRef, Version] = {}
    refs = list(listed)
    for start in range(0, len(refs), _AT_ONCE):
        batch = refs[start : start + _AT_ONCE]
        contents = store.get_many([listed[ref].key for ref in batch])
        for ref, content in zip(batch, contents, strict=True):
            with _naming(listed[ref].key):
                manifest = Manifest.from_bytes(content)
                if (manifest.run, manifest.ref()) != (run, ref):
                    raise IntegrityError("it is not the manifest its key says")
            known[ref] = Version.of(manifest)
    return known


def _pinned(store: ObjectStore, key: str, versions: Sequence[Version]) -> int:
    with _naming(key):
        ref = read_pin(store, key).ref
        if ref.version >= len(versions) or versions[ref.version].ref != ref:
            raise IntegrityError(f"it pins a version {ref.version} that the head does not lead to")
    return ref.version


@contextlib.contextmanager
def _naming(key: str) -> Iterator[None]:
    """Says which key, what follows and what to do, for whatever is wrong with what it holds."""
    try:
        yield
    except (IntegrityError, ObjectMissing) as error:
        raise IntegrityError(
            f"{key}: {error}. Nothing was collected: expected every record readable, since what a "
            "damaged one names cannot be known. Restore it, or remove it with what depends on it"
        ) from error
