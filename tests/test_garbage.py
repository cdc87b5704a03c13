"""Garbage collection: what anyone can still ask for stays, in every order of events."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from prefect.client.orchestration import get_client
from prefect.exceptions import ParameterTypeError

from flows.collect_garbage import Collected, collect_garbage
from infra.local import prefect_api
from infra.processes import environment
from tasks.artifacts import garbage_rows
from tasks.errors import ConfigError, IntegrityError, StoreConflict, StoreError
from tasks.presets import Overrides
from tasks.store import ObjectMissing, ObjectStore, StoreLocation, object_key
from tasks.store_location import Listed, quarantine_key
from tasks.training import checkpoint
from tasks.weights import garbage
from tasks.weights.commit import commit, load_manifest, read_ref
from tasks.weights.garbage import LOCK, Retention, Tally, collect, pin, plan_collection, unpin
from tasks.weights.inventory import Inventory, take_inventory
from tasks.weights.manifest import Head, head_key, manifest_key
from tasks.weights.pins import pin_key
from tasks.weights.publisher import Kind, PreparedPart
from tasks.weights.subscriber import Subscriber
from tasks.weights.versions import Nothing, Plan, plan
from tests.aging_store import AgingStore
from tests.weights_helpers import Gang, Weights, perturbed, random_weights, same

pytestmark = pytest.mark.timeout(120)
ROOT = Path(__file__).resolve().parent.parent
SHAPES = {"a.weight": ((40, 3), "bfloat16"), "b.weight": ((9,), "float32")}
NONE = Retention(grace_hours=24, keep_versions=0)


def weights_of(seed: int) -> Weights:
    return random_weights(seed, SHAPES)


def publish(gang: Gang, versions: int, anchors: tuple[int, ...]) -> list[Weights]:
    """Versions 0.. of a new run from the base that all runs share; what each of them holds."""
    history = [weights_of(0)]
    for version in range(versions):
        if version:
            history.append(perturbed(history[-1], version, 0.2))
        gang.publish(history[version], "anchor" if version in anchors else "delta")
    return history


def fetched(store: ObjectStore, run: str, version: int) -> dict[str, Any]:
    """What a newcomer without any cache gets."""
    with tempfile.TemporaryDirectory() as cache:
        reader = Subscriber(store, cache)
        try:
            reader.fetch(run, version)
            return {name: bits.copy() for name, bits in reader.shadow.items()}
        finally:
            reader.close()


def readable(store: ObjectStore, run: str, version: int) -> bool:
    """Whether a newcomer gets every object of its way, each verified by its digest: quicker."""
    head = read_ref(store, run)
    road = plan(run, Nothing(), head, version, lambda ref: load_manifest(store, run, ref))
    assert isinstance(road, Plan)
    objects = [file.digest for file in road.steps[0].anchor]
    objects += [shard.digest for step in road.steps[1:] for shard in step.shards]
    return all(store.get_object(digest) for digest in objects)


def collect_for_good(store: AgingStore, retention: Retention) -> None:
    """Two collections, the grace period apart."""
    collect(store, retention, dry_run=False)
    store.hours(retention.grace_hours + 1)
    collect(store, retention, dry_run=False)


def save_checkpoint(store: ObjectStore, run: str, step: int, seed: int) -> list[str]:
    """A checkpoint of one tensor; the keys of its objects."""
    values = torch.randn(12, generator=torch.Generator().manual_seed(seed))
    ranges = {"w": checkpoint.Range((12,), 0, 12)}
    state = checkpoint.RankState(0, 1, 0, ranges, {"parameter": {"w": values}})
    made = checkpoint.commit(store, run, step, [checkpoint.save_part(store, state)], {})
    return [object_key(record.digest) for record in made.records]


def save_index(store: ObjectStore, key: str, content: bytes) -> str:
    digest = store.create_object(content)
    files = {"data.bin": {"digest": digest, "bytes": len(content)}}
    description = {"format": 1, "key": key, "files": files}
    store.put(f"indexes/{key}.json", json.dumps(description).encode())
    return object_key(digest)


@pytest.fixture
def store() -> AgingStore:
    return AgingStore()


@pytest.fixture
def one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies in order, for tests that count operations."""
    monkeypatch.setattr(garbage, "_PARALLEL", 1)
    monkeypatch.setattr(garbage, "_BATCH", 2)


# ---------------------------------------------------------------- any history


class World:
    """Several runs, what each of their versions holds, and which are promised to stay."""

    def __init__(self, data: st.DataObject) -> None:
        self.store = AgingStore()
        self.gangs: dict[str, Gang] = {}
        self.history: dict[str, list[Weights]] = {}
        self.pins: dict[str, set[int]] = {}
        for _ in range(data.draw(st.integers(1, 8), "events")):
            run = data.draw(st.sampled_from("abc"), "run")
            self.publish(run, data)
            if data.draw(st.booleans(), "pin"):
                version = data.draw(st.integers(0, len(self.history[run]) - 1), "pinned")
                pin(self.store, run, version, "kept")
                self.pins[run].add(version)
            self.store.hours(data.draw(st.sampled_from([0, 0, 5, 30]), "hours"))

    def publish(self, run: str, data: st.DataObject) -> None:
        if run not in self.gangs:
            self.gangs[run] = Gang(self.store, run, ranks=data.draw(st.integers(1, 2)))
            self.history[run], self.pins[run] = [weights_of(0)], set()
            kind: Kind = "anchor"
        else:
            share = data.draw(st.sampled_from([0.0, 0.1]), "share")
            seed = len(self.history[run]) + 100 * ord(run)
            self.history[run].append(perturbed(self.history[run][-1], seed, share))
            kind = data.draw(st.sampled_from(["anchor", "delta", "delta"]), "kind")
        if data.draw(st.integers(0, 3), "failed") == 0:  # what an aborted publish leaves behind
            self.gangs[run].prepare(perturbed(self.history[run][-1], 7, 0.3), kind)
        self.gangs[run].publish(self.history[run][-1], kind)

    def promised(self, keep: int) -> list[tuple[str, int]]:
        found = set()
        for run, versions in self.history.items():
            found |= {(run, v) for v in range(max(0, len(versions) - 1 - keep), len(versions))}
            found |= {(run, v) for v in self.pins[run]}
        return sorted(found)

    def objects_read(self, keep: int) -> set[str]:
        """Objects that newcomers to promised versions, and those who follow, really read."""
        self.store.read.clear()
        for run, version in self.promised(keep):
            assert same(fetched(self.store, run, version), self.history[run][version])
        for run, versions in self.history.items():
            with tempfile.TemporaryDirectory() as cache:
                follower = Subscriber(self.store, cache)
                for version in range(max(0, len(versions) - 1 - keep), len(versions)):
                    follower.fetch(run, version)
                    assert same(follower.shadow, versions[version])
                follower.close()
        return {key for key in self.store.read if key.startswith("objects/")}


@pytest.mark.fast
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_any_history_keeps_what_is_promised_and_nothing_else(data: st.DataObject) -> None:
    world = World(data)
    store = world.store
    retention = Retention(grace_hours=24, keep_versions=data.draw(st.integers(0, 3), "keep"))
    needed = world.objects_read(retention.keep_versions)
    before, at = dict(store.data), store.now
    planned = collect(store, retention)
    assert store.data == before, "a dry run changes nothing"

    assert collect(store, retention, dry_run=False) == planned
    young = {key for key, (_, written) in before.items() if at - written <= 24 * 3600}
    old_objects = {key for key in before if key.startswith("objects/")}
    assert store.keys("objects/") == (old_objects & (needed | young))
    assert store.keys("runs/") == {key for key in before if key.startswith("runs/")}
    assert sum(row.set_aside.objects for row in planned.rows) == len(planned.set_aside)
    promised = world.promised(retention.keep_versions)
    assert all(readable(store, run, version) for run, version in promised)

    for _ in range(2):  # what was young then is set aside, and what is aside deleted
        store.hours(25)
        collect(store, retention, dry_run=False)
    assert store.keys("objects/") == needed
    assert not store.keys("quarantine/")
    assert world.objects_read(retention.keep_versions) == needed
    for run, versions in world.history.items():
        for version, held in enumerate(versions):
            if (run, version) in promised:
                assert same(fetched(store, run, version), held)
            else:  # not promised: then right, or refused
                with contextlib.suppress(ObjectMissing):
                    assert same(fetched(store, run, version), held)
    for gang in world.gangs.values():  # and every run goes on
        gang.publish(perturbed(world.history[gang.run][-1], 9), "delta")


# ---------------------------------------------------------------- while others write and read


def numbered(store: AgingStore, events: dict[int, Callable[[], object]]) -> Callable[[], int]:
    """Runs an event just before the request of its number; returns how many there were."""
    count = 0

    def before(operation: str, key: str) -> None:
        nonlocal count
        if operation == "read" and not key.endswith("head.json"):
            return  # manifests are read in parallel
        count += 1
        if event := events.get(count):
            event()

    store.before = before
    return lambda: count


class Late:
    """A publish of the base as a new run, in two moments."""

    def __init__(self, store: AgingStore, gang: Gang) -> None:
        self.store, self.gang = store, gang
        self.parts: list[PreparedPart] = []

    def prepare(self) -> None:
        self.parts = self.gang.prepare(weights_of(0), "anchor")

    def commit(self) -> None:
        commit(self.store, "new", 0, self.parts)
        assert readable(self.store, "new", 0)

    def both(self) -> None:
        self.prepare()
        self.commit()


@pytest.mark.fast
@pytest.mark.usefixtures("one_at_a_time")
@pytest.mark.parametrize("round_", [1, 2])
def test_a_publish_may_find_an_object_that_is_being_collected(round_: int) -> None:
    """The base of a new run is garbage of an old one: found there at any moment of a collection,
    committed at any later one."""

    def world() -> tuple[AgingStore, Gang]:
        store = AgingStore()
        publish(Gang(store, "old", 1), 3, anchors=(0, 2))
        store.hours(48)
        if round_ == 2:  # then what the collection at hand deletes for good
            collect(store, NONE, dry_run=False)
            store.hours(25)
        return store, Gang(store, "new", 1)

    store, _ = world()
    requests = numbered(store, {})
    collect(store, NONE, dry_run=False)
    total = requests()
    assert total > 8
    found_there = 0
    for prepared in range(1, total + 2):
        for committed in range(prepared, total + 2):
            store, gang = world()
            late = Late(store, gang)
            if prepared == committed:
                numbered(store, {prepared: late.both})
            else:
                numbered(store, {prepared: late.prepare, committed: late.commit})
            collect(store, NONE, dry_run=False)
            store.before = None
            if not late.parts:
                late.prepare()
            if read_ref(store, "new") is None:
                store.hours(11)  # as long as a publish may take
                late.commit()
            found_there += late.parts[0].objects_created == 0
            for hours in (0, 1, 25, 25):
                store.hours(hours)
                collect(store, NONE, dry_run=False)
                assert readable(store, "new", 0)
            assert not store.keys("quarantine/")
    assert (found_there > 50) == (round_ == 1)


@pytest.mark.fast
@pytest.mark.usefixtures("one_at_a_time")
def test_a_checkpoint_may_find_a_part_that_is_being_collected(store: AgingStore) -> None:
    """At any moment; the parts come back to their place, and restore reads them meanwhile."""

    def world() -> tuple[AgingStore, str]:
        store = AgingStore()
        (part,) = save_checkpoint(store, "run", 1, seed=5)
        store.delete([checkpoint.manifest_key("run", 1)])  # by hand
        store.hours(48)
        return store, part

    store, _ = world()
    requests = numbered(store, {})
    assert len(collect(store, NONE, dry_run=False).set_aside) == 1
    for moment in range(1, requests() + 1):
        store, part = world()
        numbered(store, {moment: lambda store=store: save_checkpoint(store, "run", 2, seed=5)})
        collect(store, NONE, dry_run=False)
        for _ in range(3):
            found = checkpoint.latest(store, "run")
            assert found is not None
            wanted = {"w": checkpoint.Range((12,), 0, 12)}
            checkpoint.load_part(store, found, wanted, 0, 1)
            store.hours(25)
            collect(store, NONE, dry_run=False)
        assert store.keys("objects/") == {part}


@pytest.mark.fast
def test_a_joiner_reads_on_while_its_version_is_collected(tmp_path: Path) -> None:
    """Whichever object it is about to read: what it planned with stays readable."""

    def world() -> tuple[AgingStore, Gang, list[Weights]]:
        store = AgingStore()
        gang = Gang(store, "run", 1)
        history = publish(gang, 5, anchors=(0, 2))
        store.hours(48)
        return store, gang, history

    moments = 3  # the anchor 2, the deltas 3 and 4
    for moment in range(moments):
        store, gang, history = world()
        reads = 0

        def before(
            operation: str,
            key: str,
            store: AgingStore = store,
            gang: Gang = gang,
            last: Weights = history[-1],
            moment: int = moment,
        ) -> None:
            nonlocal reads
            if operation == "read" and key.startswith("objects/"):
                if reads == moment:
                    gang.publish(perturbed(last, 5), "anchor")
                    assert len(collect(store, NONE, dry_run=False).set_aside) == 6
                reads += 1

        store.before = before
        assert same(fetched(store, "run", 4), history[4])
        assert reads == moments


@pytest.mark.fast
@pytest.mark.usefixtures("one_at_a_time")
def test_a_collection_that_fails_anywhere_leaves_a_sound_store() -> None:
    def world() -> tuple[AgingStore, list[Weights]]:
        store = AgingStore()
        gang = Gang(store, "run", 1)
        history = publish(gang, 6, anchors=(0, 3))
        store.hours(48)
        collect(store, Retention(keep_versions=2), dry_run=False)
        store.hours(25)
        pin(store, "run", 4, "x")
        return store, history

    def fail() -> None:
        raise StoreError("injected")

    store, history = world()
    requests = numbered(store, {})
    collect_for_good(store, NONE)
    store.before = None
    objects, others = store.keys("objects/"), len(store.data)
    for moment in range(1, requests() + 1):
        store, history = world()
        numbered(store, {moment: fail})
        try:
            collect_for_good(store, NONE)
        except StoreError as error:
            assert "injected" in str(error)  # noqa: PT017
        store.before = None
        store.hours(25)  # a lock whose removal failed runs out
        for version in (4, 5):
            assert same(fetched(store, "run", version), history[version])
        collect_for_good(store, NONE)
        assert store.keys("objects/") == objects
        assert len(store.data) == others
        assert same(fetched(store, "run", 4), history[4])


@pytest.mark.fast
@pytest.mark.parametrize("needed", [False, True])
@pytest.mark.parametrize("in_place", [None, "young", "old"])
@pytest.mark.parametrize("aside", ["young", "old"])
def test_what_becomes_of_an_object_that_is_aside(
    needed: bool, in_place: str | None, aside: str
) -> None:
    """It may be in its place as well: brought back, or uploaded again."""
    digest, ages = "a" * 64, {"young": 23 * 3600.0, "old": 25 * 3600.0}
    objects = {digest: Listed("x", 5, ages[in_place])} if in_place else {}
    found = plan_collection(
        Inventory(
            objects=objects,
            aside={digest: Listed("y", 5, ages[aside])},
            runs=(),
            records={"indexes/k.json": frozenset([digest] if needed else [])},
        ),
        NONE,
    )
    moved = in_place == "old" and not needed
    back = needed and in_place is None
    assert found.set_aside == ((digest,) if moved else ())
    assert found.restored == ((digest,) if back else ())
    # Moving it writes the copy anew, so that it must not be deleted in the same go.
    assert found.deleted == ((digest,) if aside == "old" and not moved and not back else ())


# ---------------------------------------------------------------- one collection at a time


@pytest.mark.fast
@pytest.mark.usefixtures("one_at_a_time")
def test_collections_exclude_each_other(store: AgingStore) -> None:
    publish(Gang(store, "run", 1), 4, anchors=(0, 3))
    store.hours(48)
    refused = 0

    def rival() -> None:
        nonlocal refused
        with pytest.raises(StoreConflict, match=r"has been running for .*quarantine/running\.json"):
            collect(store, NONE, dry_run=False)
        collect(store, NONE)  # a dry run needs no lock
        refused += 1

    numbered(store, {8: rival})
    collect(store, NONE, dry_run=False)
    assert refused == 1
    store.before = None
    assert LOCK not in store.data

    store.put(LOCK, json.dumps({"lasts_s": 3600, "by": "a dead process"}).encode())
    with pytest.raises(StoreConflict):
        collect(store, NONE, dry_run=False)
    store.hours(1)
    collect(store, NONE, dry_run=False)
    assert LOCK not in store.data
    store.put(LOCK, b"?")
    with pytest.raises(IntegrityError, match="is not the lock"):
        collect(store, NONE, dry_run=False)


@pytest.mark.fast
@pytest.mark.usefixtures("one_at_a_time")
def test_a_slow_collection_stops_itself(store: AgingStore, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(Gang(store, "run", 1), 8, anchors=(0, 7))
    store.hours(48)
    ticks = iter([0.0, 1.0, 8 * 3600 - 1.0, 8 * 3600 + 1.0, 8 * 3600 + 2.0])
    monkeypatch.setattr(garbage, "monotonic", lambda: next(ticks))
    with pytest.raises(StoreError, match="longer than 28800 s"):
        collect(store, NONE, dry_run=False)
    assert len(store.keys("quarantine/")) == 4  # two batches
    assert LOCK not in store.data
    monkeypatch.undo()
    collect_for_good(store, NONE)
    assert len(store.keys("objects/")) == 1


# ---------------------------------------------------------------- records that cannot be read


def _put(key: str, content: bytes) -> Callable[[AgingStore], str]:
    def damage(store: AgingStore) -> str:
        store.put(key, content)
        return key

    return damage


def _manifest(store: AgingStore, version: int) -> str:
    (key,) = store.keys(f"runs/run/manifests/{version:08d}-")
    return key


def cut_manifest(store: AgingStore) -> str:
    key = _manifest(store, 1)
    store.put(key, store.data[key][0][:-9])
    return key


def other_manifest(store: AgingStore) -> str:
    key = _manifest(store, 1)
    store.put(key, store.data[_manifest(store, 2)][0])
    return key


def lost_manifest(store: AgingStore) -> str:
    key = _manifest(store, 1)
    store.delete([key])
    return key


def damaged_stray(store: AgingStore) -> str:
    key = f"runs/run/manifests/00000007-{'a' * 64}.json.zst"
    store.put(key, b"\x00")
    return key


def lost_head(store: AgingStore) -> str:
    store.delete([head_key("run")])
    return head_key("run")


def head_to_nowhere(store: AgingStore) -> str:
    store.put(head_key("run"), Head(run="run", version=3, manifest="9" * 64).to_bytes())
    return f"runs/run/manifests/00000003-{'9' * 64}.json.zst"


def pin_to_nowhere(store: AgingStore) -> str:
    key = pin(store, "run", 1, "x")
    text = store.data[key][0].decode()
    store.put(key, re.sub(r'"manifest":"\w{64}"', f'"manifest":"{"8" * 64}"', text).encode())
    return key


def displaced_pin(store: AgingStore) -> str:
    key = pin_key("run", 2, "y")
    store.put(key, store.data[pin(store, "run", 1, "x")][0])
    return key


def checkpoint_with_a_bad_digest(store: AgingStore) -> str:
    key = checkpoint.manifest_key("run", 3)
    content = json.loads(store.data[key][0])
    content["records"][0]["digest"] = "no digest"
    store.put(key, json.dumps(content).encode())
    return key


DAMAGES: dict[str, Callable[[AgingStore], str]] = {
    "head": _put(head_key("run"), b"\xff"),
    "lost head": lost_head,
    "head to nowhere": head_to_nowhere,
    "cut manifest": cut_manifest,
    "other manifest": other_manifest,
    "lost manifest": lost_manifest,
    "damaged stray": damaged_stray,
    "unknown manifest": _put("runs/run/manifests/00000001.json", b"{}"),
    "pin": _put(pin_key("run", 1, "x"), b"{}"),
    "pin by another name": _put("runs/run/pins/readme.txt", b"hello"),
    "pin to nowhere": pin_to_nowhere,
    "displaced pin": displaced_pin,
    "pin without a run": _put(pin_key("other", 1, "x"), b"{}"),
    "checkpoint": _put(checkpoint.manifest_key("run", 3), b"{"),
    "checkpoint with a bad digest": checkpoint_with_a_bad_digest,
    "index": _put("indexes/k.json", b"[]"),
    "unknown index": _put("indexes/k.txt", b"{}"),
}


@pytest.mark.fast
@pytest.mark.parametrize("name", DAMAGES)
def test_one_damaged_record_stops_everything(store: AgingStore, name: str) -> None:
    publish(Gang(store, "run", 1), 4, anchors=(0, 3))
    publish(Gang(store, "sound", 1), 4, anchors=(0, 3))
    save_checkpoint(store, "run", 3, seed=1)
    save_index(store, "k", b"postings")
    store.hours(48)
    assert collect(store, NONE).set_aside
    key = DAMAGES[name](store)
    if key.startswith("runs/other/"):
        key = head_key("other")  # what is missing
    before = dict(store.data)
    for dry_run in (True, False):
        with pytest.raises(IntegrityError, match=re.escape(key)) as caught:
            collect(store, NONE, dry_run=dry_run)
        assert "Nothing was collected" in str(caught.value)
        assert store.data == before


@pytest.mark.fast
def test_checkpoints_and_indexes_are_kept_and_nothing_else_is_touched(store: AgingStore) -> None:
    publish(Gang(store, "run", 1), 3, anchors=(0, 2))
    owned = {*save_checkpoint(store, "run", 3, seed=1), *save_checkpoint(store, "run", 6, seed=2)}
    # A run that has not published yet, and one with a name as an older tool might have made it.
    owned |= {*save_checkpoint(store, "unborn", 1, 3), *save_checkpoint(store, "deep/er", 1, 4)}
    owned.add(save_index(store, "k", b"postings"))
    others = (
        "runs/run/groups/0.safetensors",
        "runs/run/final/00000002/model.safetensors",
        "runs/run/checkpoints/00000009.json.tmp",
        "policies/p/model.safetensors",
        "objects/README",
        "quarantine/aa/short",
        "unknown",
    )
    for key in others:
        store.put(key, b"x")
    stray = failed_commit(store)
    store.hours(48)
    collect(store, NONE, dry_run=False)
    assert stray not in store.data
    assert owned <= store.keys("objects/")
    assert set(others) <= store.data.keys()
    found = collect(store, NONE)
    assert found.kept["checkpoints and indexes"].objects == len(owned)
    store.hours(48)
    collect(store, NONE, dry_run=False)
    assert len(store.keys("objects/")) == len(owned) + 1 + 1  # the newest anchor, README
    assert len(store.keys("runs/run/manifests/")) == 3


def failed_commit(store: AgingStore) -> str:
    """Leaves a manifest of version 3 that no head leads to; its key."""
    rival = AgingStore()
    rival.data = dict(store.data)
    published = Gang(rival, "run", 1, resume=True).publish(weights_of(4), "anchor")
    key = manifest_key("run", published.ref)
    store.put(key, rival.data[key][0])
    return key


@pytest.mark.fast
def test_every_writer_of_objects_is_a_root() -> None:
    """Who begins to write content-addressed objects must be added to `tasks.weights.inventory`."""
    writers = {
        str(path.relative_to(ROOT))
        for folder in ("tasks", "flows", "infra")
        for path in (ROOT / folder).rglob("*.py")
        if re.search(r"\bobject_key\(|\.create_object\(|[\"']objects/", path.read_text())
    }
    assert writers == {
        "tasks/store.py",
        "tasks/store_location.py",
        "tasks/retrieval/stored.py",
        "tasks/training/checkpoint.py",
        "tasks/weights/verify.py",  # reads them
        "tasks/weights/inventory.py",
        "tasks/weights/pins.py",
        "tasks/weights/publisher.py",
        "tasks/weights/subscriber.py",
    }


# ---------------------------------------------------------------- readers and pins afterwards


@pytest.mark.fast
def test_a_reader_that_fell_behind_goes_on_from_an_anchor(
    store: AgingStore, tmp_path: Path
) -> None:
    gang = Gang(store, "run", 2)
    history = publish(gang, 9, anchors=(0, 6))
    behind = Subscriber(store, tmp_path)
    behind.fetch("run", 1)
    store.hours(48)
    collect_for_good(store, Retention(keep_versions=1))
    behind.fetch("run", 8)
    assert same(behind.shadow, history[8])
    for version in (6, 7):
        assert same(fetched(store, "run", version), history[version])
    for version in (0, 3, 5):
        with pytest.raises(StoreError, match=f"version {version} is in the store no longer"):
            fetched(store, "run", version)
    with pytest.raises(StoreError, match="version 3 is in the store no longer"):
        behind.fetch("run", 3)
    assert same(behind.shadow, history[8])
    behind.close()


@pytest.mark.fast
def test_pins(store: AgingStore) -> None:
    history = publish(Gang(store, "run", 2), 9, anchors=(0, 4, 8))
    key = pin(store, "run", 6, "paper")
    assert pin(store, "run", 6, "paper") == key == "runs/run/pins/00000006-paper.json"
    pin(store, "run", 6, "demo")
    for version in (-1, 9):
        with pytest.raises(StoreError, match=f"no version {version}"):
            pin(store, "run", version, "x")
    with pytest.raises(StoreError, match="has published nothing"):
        pin(store, "nobody", 0, "x")
    with pytest.raises(ConfigError, match="pin name 'a/b'"):
        pin(store, "run", 1, "a/b")
    store.hours(48)
    collect(store, NONE, dry_run=False)

    # Set aside is not too late for a pin: it brings the version back by itself.
    pin(store, "run", 2, "late")
    store.hours(25)
    found = collect(store, NONE, dry_run=False)
    assert found.kept["pins"].objects == 2 * 5  # an anchor and two deltas of two ranks, twice
    for version in (2, 6, 8):
        assert same(fetched(store, "run", version), history[version])
    with pytest.raises(StoreError, match="cannot be pinned: it was collected"):
        pin(store, "run", 7, "x")
    assert len(store.keys("runs/run/pins/")) == 3

    unpin(store, "run", 6, "paper")
    with pytest.raises(StoreError, match=r"no pin .*00000002-late\.json, 00000006-demo\.json"):
        unpin(store, "run", 6, "paper")
    assert not collect(store, NONE).set_aside
    unpin(store, "run", 6, "demo")
    collect_for_good(store, NONE)
    with pytest.raises(StoreError, match="no longer"):
        fetched(store, "run", 6)
    assert same(fetched(store, "run", 2), history[2])


@pytest.mark.fast
def test_what_a_collection_says(store: AgingStore) -> None:
    publish(Gang(store, "b", 1), 4, anchors=(0, 3))
    Gang(store, "c", 1).prepare(weights_of(77), "anchor")
    store.hours(48)
    publish(Gang(store, "a", 1), 2, anchors=(0,))
    found = collect(store, Retention(keep_versions=1), dry_run=False)
    rows = {row.run: row for row in found.rows}
    # The base belongs to both runs; `a` needs it, so only deltas and a stranger's upload go.
    assert (rows["a"].set_aside, rows["a"].oldest_kept, rows["a"].head) == (Tally(), 0, 1)
    assert rows["b"].set_aside.objects == 0
    assert (rows["b"].oldest_kept, rows["b"].head) == (2, 3)
    assert rows[garbage.NO_RUN].set_aside.objects == 1
    shown = garbage_rows(found)
    assert [row["run"] for row in shown] == [garbage.NO_RUN, "all 3"]
    assert shown[-1]["bytes set aside"] == rows[garbage.NO_RUN].set_aside.bytes > 0
    assert garbage_rows(collect(store, Retention())) == [{"run": "all 2"}]
    with pytest.raises(ValueError, match="greater than or equal to 1"):
        Retention(grace_hours=0.5)


# ---------------------------------------------------------------- the real parts


@pytest.fixture(scope="module")
def bucket(store_location: StoreLocation) -> Iterator[ObjectStore]:
    """A bucket of its own on the real server: collections look at all of one."""
    store = ObjectStore(StoreLocation(store_location.endpoint, "kindling-garbage"))
    store.check()
    yield store
    store.delete(store.list())


def test_collecting_from_a_real_server(bucket: ObjectStore) -> None:
    gang = Gang(bucket, "run", 2)
    history = publish(gang, 6, anchors=(0, 4))
    (part,) = save_checkpoint(bucket, "run", 5, seed=1)
    before = bucket.list()
    assert not collect(bucket, NONE, dry_run=False).set_aside, "all is young"
    assert bucket.list() == before
    assert all(0 <= one.age_s < 60 and one.bytes for one in bucket.listing("objects/"))

    pause = threading.Event()
    while min(one.age_s for one in bucket.listing("objects/")) < 2:
        pause.wait(0.2)
    # Ages on a real server are seconds: a grace that no one may ask for.
    seconds = Retention.model_construct(grace_hours=1 / 3600, keep_versions=0)
    found = plan_collection(take_inventory(bucket), seconds)
    assert len(found.set_aside) == 1 + 3 * 2 + 2
    garbage._execute(bucket, found, lambda: None)
    assert len(bucket.list("objects/")) == 1 + 2 + 1
    aside = bucket.listing("quarantine/")
    assert [one.key for one in aside] == sorted(map(quarantine_key, found.set_aside))
    assert all(one.age_s < 2 for one in aside), "a copy's age begins anew"
    assert same(fetched(bucket, "run", 2), history[2])  # from where it is

    pin(bucket, "run", 1, "kept")
    while min(one.age_s for one in aside) < 2:
        pause.wait(0.2)
        aside = bucket.listing("quarantine/")
    again = plan_collection(take_inventory(bucket), seconds)
    assert not again.set_aside
    garbage._execute(bucket, again, lambda: None)
    assert not bucket.list("quarantine/")
    for version in (1, 4, 5):
        assert same(fetched(bucket, "run", version), history[version])
    with pytest.raises(StoreError, match="version 2 is in the store no longer"):
        fetched(bucket, "run", 2)
    assert part in bucket.list("objects/")
    gang.publish(perturbed(history[-1], 6), "delta")


def test_large_objects_are_copied_in_parts(
    bucket: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.store._COPY", 5 * 2**20)
    content = bytes(range(256)) * (11 * 2**12)
    bucket.put("large/source", content)
    bucket.copy("large/source", "large/target")
    assert bucket.get("large/target") == content
    with pytest.raises(StoreError, match="does not exist"):
        bucket.copy("large/nothing", "large/target")


def test_the_flow(bucket: ObjectStore, tmp_path: Path) -> None:
    publish(Gang(bucket, "flow", 1), 3, anchors=(0, 2))
    where = {"store_endpoint": bucket.location.endpoint, "store_bucket": bucket.location.bucket}
    chosen: Any = Overrides.model_validate({"cluster": where})
    with environment({"KINDLING_HOME": str(tmp_path)}), prefect_api(tmp_path):
        before = bucket.list()
        shown: Collected = collect_garbage(overrides=chosen)
        done: Collected = collect_garbage(dry_run=False, keep_versions=0, overrides=chosen)
        with pytest.raises(ParameterTypeError, match="grace_hours"):
            collect_garbage(grace_hours=0.1, overrides=chosen)
        assert asyncio.run(_artifacts()).count("garbage") == 2
    assert bucket.list() == before  # all of it is young
    assert shown.dry_run
    assert (done.objects_set_aside, done.objects_deleted) == (0, 0)
    assert done.objects_kept == shown.objects_kept == len(bucket.list("objects/"))
    line = shown.line("collect-garbage", 1.2)
    assert "0 objects (0 bytes) and 0 manifests would be deleted" in line
    assert "\n" not in line


async def _artifacts() -> list[str | None]:
    async with get_client() as api:
        return [artifact.key for artifact in await api.read_artifacts()]
