"""Garbage collection: what no live head, pinned version, checkpoint or index can reach goes.

Roots, and what each of them needs:

    a head         that version and the `keep_versions` before it (for readers on their way): the
                   newest anchor not above the oldest of them, and all deltas and anchors since
    a pin          its version: the newest anchor not above it, and the deltas since
    a checkpoint   the parts its manifest names
    an index       the files its description names

Manifests that a head leads to are kept for ever: they are small, and readers follow their links
past collected versions. Other manifests, of commits that failed, go when they are older than the
grace period. Nothing else in the store is touched. If any record cannot be read, nothing is: see
`tasks.weights.inventory`.

Why an object is set aside before it is deleted. Objects are named by their content, so a publisher
may find an old, unreachable one already there, upload nothing, and commit a version that needs it,
while a collection that began before is about to delete it. No check before deleting closes that
gap, since S3 cannot make a deletion depend on what has been read; refreshing the object's age in
the publisher does not either, for a collection that has looked already. So a collection deletes
nothing that was in its place when it began:

1. An object that nothing reaches and that is older than the grace period is moved from `objects/`
   to `quarantine/`: copied, then deleted. Readers who miss it look there (`get_object`); writers do
   not, and upload it again.
2. A later collection moves it back where something reaches it again,
3. and deletes it where it has been there for the grace period and nothing does. Whoever relied on
   the object found it in its place before it was moved, that is about a grace period ago, and has
   committed since: the head is read after that and leads to it.

So what is asked of writers is only that a publish or a checkpoint, from its first upload to its
commit, takes less than half the grace period (the rest covers how long a collection takes). They
know nothing of collections, and neither need a new one. The price is that space is freed by the
second collection, not the first. What is set aside by mistake can be had back for that long.

3 supposes that nobody else moves an object away between a collection's look and its deletion: one
collection runs at a time, under a lock in the store, and stops itself before the lock runs out.
Ages are by the store's clock, never this host's.
"""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from time import monotonic
from typing import Final

from pydantic import BaseModel, ConfigDict, Field

from tasks.errors import IntegrityError, StoreConflict, StoreError
from tasks.store import ObjectStore, object_key
from tasks.store_location import Listed, quarantine_key
from tasks.weights.inventory import Inventory, RunHistory, take_inventory
from tasks.weights.pins import pin, unpin

__all__ = ["Collection", "Retention", "Row", "Tally", "collect", "pin", "plan_collection", "unpin"]

LOCK: Final = "quarantine/running.json"
NO_RUN: Final = "(no run)"  # uploads whose commit failed, and parts of removed checkpoints
_BATCH = 64  # objects copied between two looks at the clock
_PARALLEL = 8


class Retention(BaseModel):
    """What is kept beside what is pinned. The bounds: no publish takes an hour."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    grace_hours: float = Field(default=24.0, ge=1.0, le=24 * 365)
    keep_versions: int = Field(default=8, ge=0)

    @property
    def grace_s(self) -> float:
        return self.grace_hours * 3600


@dataclass(frozen=True)
class Tally:
    """Objects, and their bytes in all."""

    objects: int = 0
    bytes: int = 0

    @staticmethod
    def of(found: Sequence[Listed]) -> Tally:
        return Tally(len(found), sum(one.bytes for one in found))


@dataclass(frozen=True)
class Row:
    """What a collection does to one run; an object of several runs counts for the first by name.

    Attributes:
        head: its newest version; None where it has none.
        oldest_kept: versions from this on can be read, beside the pinned ones.
        manifests: of failed commits, deleted.
    """

    run: str
    head: int | None
    oldest_kept: int | None
    pinned: int
    set_aside: Tally
    deleted: Tally
    manifests: int


@dataclass(frozen=True)
class Collection:
    """What a collection does, or in a dry run would do.

    Attributes:
        set_aside, restored, deleted: digests moved out of place, back there, or deleted for good.
        manifests: keys deleted.
        kept: objects that stay in place, by reason: "versions", "pins", "checkpoints and indexes",
            or "young": reached by nothing, and not older than the grace period.
        totals: of the first three, by name.
        rows: by run.
    """

    set_aside: tuple[str, ...]
    restored: tuple[str, ...]
    deleted: tuple[str, ...]
    manifests: tuple[str, ...]
    kept: Mapping[str, Tally]
    totals: Mapping[str, Tally]
    rows: tuple[Row, ...] = field(repr=False)


def collect(store: ObjectStore, retention: Retention, *, dry_run: bool = True) -> Collection:
    """Looks at the whole store, and unless it is a dry run collects its garbage.

    A collection that fails half-way leaves a sound store; the next one goes on.

    Raises:
        IntegrityError: a record cannot be read; names its key. Nothing was changed.
        StoreConflict: another collection is running.
        StoreError: the store failed, or the collection takes longer than a third of the grace.
    """
    if dry_run:
        return plan_collection(take_inventory(store), retention)
    with _alone(store, retention.grace_s / 2) as still_allowed:
        found = plan_collection(take_inventory(store), retention)
        _execute(store, found, still_allowed)
    return found


def plan_collection(inventory: Inventory, retention: Retention) -> Collection:
    """What becomes of every object: no IO."""
    needed = _needed(inventory, retention.keep_versions)
    objects, aside = inventory.objects, inventory.aside

    def old(one: Listed) -> bool:
        return one.age_s > retention.grace_s

    out = [d for d, one in objects.items() if d not in needed and old(one)]
    back = [digest for digest in aside if digest in needed and digest not in objects]
    # Not what is moved there now: the copy that is to stay has the same key.
    moved = {*out, *back}
    gone = [digest for digest, one in aside.items() if old(one) and digest not in moved]
    strays = {h.run: [one.key for one in h.strays if old(one)] for h in inventory.runs}
    kept: dict[str, list[Listed]] = {}
    for digest, one in objects.items():
        if digest not in moved:
            kept.setdefault(needed.get(digest, "young"), []).append(one)
    return Collection(
        set_aside=tuple(out),
        restored=tuple(back),
        deleted=tuple(gone),
        manifests=tuple(key for keys in strays.values() for key in keys),
        kept={reason: Tally.of(found) for reason, found in kept.items()},
        totals={
            "set_aside": Tally.of([objects[digest] for digest in out]),
            "restored": Tally.of([aside[digest] for digest in back]),
            "deleted": Tally.of([aside[digest] for digest in gone]),
        },
        rows=_rows(inventory, retention.keep_versions, out, gone, strays),
    )


def _needed(inventory: Inventory, keep_versions: int) -> dict[str, str]:
    """digest -> the first reason to keep it."""
    needed: dict[str, str] = {}
    for history in inventory.runs:
        first = _oldest_kept(history, keep_versions)
        if first is not None:
            newest = len(history.versions) - 1
            for digest in _way(history, first, newest, anchors=True):
                needed.setdefault(digest, "versions")
    for history in inventory.runs:
        for version in history.pinned:
            for digest in _way(history, version, version, anchors=False):
                needed.setdefault(digest, "pins")
    for digests in inventory.records.values():
        for digest in digests:
            needed.setdefault(digest, "checkpoints and indexes")
    return needed


def _oldest_kept(history: RunHistory, keep_versions: int) -> int | None:
    return max(0, len(history.versions) - 1 - keep_versions) if history.versions else None


def _way(history: RunHistory, first: int, last: int, *, anchors: bool) -> Iterator[str]:
    """Objects by which a reader reaches version `first` from nothing, and goes on to `last`.

    Args:
        anchors: also those above `first`: where newcomers to later versions begin.
    """
    base = next(v for v in range(first, -1, -1) if history.versions[v].anchor)  # version 0 has one
    yield from history.versions[base].anchor
    for version in history.versions[base + 1 : last + 1]:
        yield from version.delta
        if anchors:
            yield from version.anchor


def _rows(
    inventory: Inventory,
    keep_versions: int,
    out: Sequence[str],
    gone: Sequence[str],
    strays: Mapping[str, Sequence[str]],
) -> tuple[Row, ...]:
    """A row a run, those without any change too, and one for what belongs to none."""
    owner: dict[str, str] = {}
    for history in inventory.runs:
        for version in history.versions:
            for digest in (*version.delta, *version.anchor):
                owner.setdefault(digest, history.run)

    def by_run(digests: Sequence[str], found: Mapping[str, Listed]) -> dict[str, Tally]:
        groups: dict[str, list[Listed]] = {}
        for digest in digests:
            groups.setdefault(owner.get(digest, NO_RUN), []).append(found[digest])
        return {run: Tally.of(group) for run, group in groups.items()}

    moved, deleted = by_run(out, inventory.objects), by_run(gone, inventory.aside)
    rows = [
        Row(
            run=history.run,
            head=len(history.versions) - 1 if history.versions else None,
            oldest_kept=_oldest_kept(history, keep_versions),
            pinned=len(history.pinned),
            set_aside=moved.get(history.run, Tally()),
            deleted=deleted.get(history.run, Tally()),
            manifests=len(strays[history.run]),
        )
        for history in inventory.runs
    ]
    unowned = moved.get(NO_RUN, Tally()), deleted.get(NO_RUN, Tally())
    if any(tally.objects for tally in unowned):
        rows.append(Row(NO_RUN, None, None, 0, *unowned, 0))
    return tuple(rows)


def _execute(store: ObjectStore, found: Collection, still_allowed: Callable[[], None]) -> None:
    """Objects come back before others go: a failure half-way leaves no less than before."""

    def copy(
        digests: Sequence[str], source: Callable[[str], str], to: Callable[[str], str]
    ) -> None:
        with ThreadPoolExecutor(_PARALLEL, thread_name_prefix="garbage") as pool:
            list(pool.map(lambda digest: store.copy(source(digest), to(digest)), digests))

    for batch in _batches(found.restored):
        still_allowed()
        # The copy set aside stays until the next time: readers may be on their way to it.
        copy(batch, quarantine_key, object_key)
    for batch in _batches(found.set_aside):
        still_allowed()
        copy(batch, object_key, quarantine_key)
        store.delete(map(object_key, batch))
    for batch in _batches(found.deleted):
        still_allowed()
        store.delete(map(quarantine_key, batch))
    for batch in _batches(found.manifests):
        still_allowed()
        store.delete(batch)


def _batches(items: Sequence[str]) -> Iterator[Sequence[str]]:
    return (items[start : start + _BATCH] for start in range(0, len(items), _BATCH))


@contextlib.contextmanager
def _alone(store: ObjectStore, lasts_s: float) -> Iterator[Callable[[], None]]:
    """The lock under which one collection at a time changes the store, for at most `lasts_s`.

    Yields what to call before every change: it raises StoreError while there is still time for the
    requests of one batch before another collection may take the lock.
    """
    began = monotonic()
    _lock(store, lasts_s)

    def still_allowed() -> None:
        if monotonic() > began + lasts_s * 2 / 3:
            raise StoreError(
                f"the collection took longer than {lasts_s * 2 / 3:.0f} s, a third of the grace "
                "period, and stopped: what it knows of the store is too old. Run it again; it goes "
                "on where this one stopped"
            )

    try:
        yield still_allowed
    finally:
        if monotonic() < began + lasts_s * 5 / 6:  # else it may be another's by now
            with contextlib.suppress(StoreError):  # it runs out by itself
                store.delete([LOCK])


def _lock(store: ObjectStore, lasts_s: float) -> None:
    ours = json.dumps({"lasts_s": lasts_s, "by": secrets.token_hex(8)}).encode()
    found = store.read_head(LOCK)
    if found is not None:
        try:
            limit = float(json.loads(found[0])["lasts_s"])
        except (ValueError, KeyError, TypeError) as error:
            raise IntegrityError(
                f"{LOCK} is not the lock of a collection ({error!r}); delete it once no collection "
                "runs"
            ) from error
        age = next((one.age_s for one in store.listing(LOCK)), limit)
        if age < limit:
            raise StoreConflict(
                f"a collection has been running for {age:.0f} s; wait for it. If its process is "
                f"dead, delete {LOCK} or wait {limit - age:.0f} s until it runs out"
            )
    store.swap(LOCK, ours, found[1] if found else None)
