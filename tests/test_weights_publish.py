"""Publishing and subscribing: every fault leaves readers with right bits or none at all."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from tasks.errors import IntegrityError, NotFiniteError, StoreConflict, StoreError
from tasks.store import ObjectStore, object_key
from tasks.weights.bits import from_bits
from tasks.weights.codec import CODEC
from tasks.weights.commit import commit, load_manifest, read_ref, since_anchor
from tasks.weights.digest import tensor_digest
from tasks.weights.manifest import Head, Manifest, head_key, manifest_key
from tasks.weights.publisher import DeviceShard, Kind, LocalShard, RankPublisher
from tasks.weights.subscriber import Subscriber
from tasks.weights.update import Update
from tasks.weights.verify import verify
from tasks.weights.versions import HalfApplied, Holds, Nothing
from tests.weights_helpers import (
    Failing,
    Gang,
    MemoryStore,
    Weights,
    keys_with,
    memory_store,
    perturbed,
    publish_chain,
    random_weights,
    same,
    shards_of,
)


@pytest.fixture
def store() -> ObjectStore:
    return memory_store()


def data_of(store: ObjectStore) -> dict[str, bytes]:
    return cast(MemoryStore, store).data


def replay(engine: dict[str, Any], update: Update) -> None:
    """Applies an update to a copy, as an engine does."""
    for name, tensor in update.tensors.items():
        if tensor.indices is None:
            engine[name] = tensor.values.copy()
        else:
            engine[name][tensor.indices] = tensor.values


@pytest.mark.fast
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_readers_follow_any_history(data: st.DataObject, tmp_path_factory: Any) -> None:
    """Random publishes and fetches in any order; the engine holds what was published."""
    store = memory_store()
    gang = Gang(store, "run", ranks=data.draw(st.integers(1, 4)))
    subscriber = Subscriber(store, tmp_path_factory.mktemp("cache"))
    history: list[Weights] = []
    engine: dict[str, Any] = {}
    state: Any = Nothing()
    for step in range(data.draw(st.integers(1, 6))):
        share = data.draw(st.sampled_from([0.0, 0.01, 1.0]))
        weights = perturbed(history[-1], step, share) if history else random_weights(step)
        kind = data.draw(st.sampled_from(["anchor", "delta"])) if history else "anchor"
        if history and data.draw(st.booleans()):  # another gang takes over
            gang = Gang(store, "run", ranks=data.draw(st.integers(1, 4)), resume=True)
            gang.adopt(history[-1])
        gang.publish(weights, kind)  # type: ignore[arg-type]
        history.append(weights)
        for version in data.draw(st.lists(st.integers(0, step), max_size=3)):
            update = subscriber.fetch("run", version, state)
            if data.draw(st.booleans()):  # the engine may skip what was prefetched
                replay(engine, update)
                state = update.target
                assert same(engine, history[version])
            assert same(subscriber.shadow, history[version])


@pytest.mark.fast
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_digests_do_not_depend_on_the_ranks(store: ObjectStore, ranks: int) -> None:
    weights = random_weights(0)
    gang = Gang(store, "run", ranks)
    first = gang.publish(weights, "anchor")
    second = gang.publish(perturbed(weights, 1), "delta")
    for published, held in ((first, weights), (second, perturbed(weights, 1))):
        manifest = load_manifest(store, "run", published.ref)
        assert {t.name: t.digest for t in manifest.tensors} == {
            name: tensor_digest(bits) for name, (_, _, bits) in held.items()
        }
    assert first.total == second.total == sum(bits.size for _, _, bits in weights.values())
    assert (first.kind, first.version, second.kind, second.version) == ("anchor", 0, "delta", 1)
    moved = sum(int((weights[n][2] != perturbed(weights, 1)[n][2]).sum()) for n in weights)
    assert second.changed == moved > 0
    assert 0 < second.delta_bytes < first.anchor_bytes
    assert (first.delta_bytes, second.anchor_bytes) == (0, 0)


@pytest.mark.fast
def test_anchor_is_plain_safetensors(store: ObjectStore, tmp_path: Path) -> None:
    weights = random_weights(0)
    published = Gang(store, "run").publish(weights, "anchor")
    shard = load_manifest(store, "run", published.ref).anchor[0]
    (tmp_path / "model.safetensors").write_bytes(store.get_object(shard.digest))
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert {name: tuple(file.get_tensor(name).shape) for name in file.keys()} == {  # noqa: SIM118
            name: shape for name, (shape, _, _) in weights.items()
        }


@pytest.mark.fast
def test_not_finite_is_refused_and_nothing_changes(store: ObjectStore) -> None:
    gang = Gang(store, "run")
    history = publish_chain(gang, 2)
    before = dict(data_of(store))
    bad = perturbed(history[-1], 5)
    bad["model.layer.weight"][2][14] = 0x7FC0
    with pytest.raises(NotFiniteError, match=r"model\.layer\.weight"):
        gang.ranks[1].prepare(shards_of(bad, 1, 2), "delta")
    assert data_of(store) == before
    with pytest.raises(NotFiniteError, match=r"model\.layer\.weight"):
        gang.publish(bad, "delta")  # the other rank has uploaded its shard: nothing names it
    assert read_ref(store, "run") == gang.base
    whole = iter([("w", torch.zeros(2)), ("v", torch.zeros(2))])
    with pytest.raises(NotFiniteError):
        gang.ranks[1].prepare(shards_of(bad, 1, 2), "anchor", full=whole)
    assert next(whole, None) is None  # or the other ranks would wait in its collectives for ever
    assert gang.publish(perturbed(history[-1], 6), "delta").version == 2


@pytest.mark.fast
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("kind", ["anchor", "delta"])
def test_a_publish_that_fails_anywhere_can_be_repeated(
    tmp_path: Path, late: bool, kind: Any
) -> None:
    """Every store operation of a publish fails once, before or after it took effect."""
    at = 0
    while True:
        at += 1
        store = memory_store()
        gang = Gang(store, "run")
        history = publish_chain(gang, 2)
        new = perturbed(history[-1], 9)
        faulty = Failing(store, at, late)
        for part in (gang, *gang.ranks):
            part.store = cast(ObjectStore, faulty)
        reader = Subscriber(store, tmp_path / f"{at}")
        try:
            gang.publish(new, kind)
        except StoreError:
            newest = reader.newest("run")
            assert newest is not None
            assert newest in (1, 2)  # whole versions only
            reader.fetch("run", newest)
            assert same(reader.shadow, [*history, new][newest])
            base = gang.base
            assert base is not None
            assert base.version == 1
            assert gang.publish(new, kind).version == 2
        reached = faulty.calls >= at
        for part in (gang, *gang.ranks):
            part.store = store
        assert read_ref(store, "run") == gang.base
        reader.fetch("run", 2)
        assert same(reader.shadow, new)
        after = perturbed(new, 10)
        assert gang.publish(after, "delta").version == 3
        reader.fetch("run", 3)
        assert same(reader.shadow, after)
        if not reached:
            break
    assert at > 4


@pytest.mark.fast
def test_the_second_of_two_publishers_loses(store: ObjectStore, tmp_path: Path) -> None:
    gang = Gang(store, "run")
    history = publish_chain(gang, 2)
    rival = Gang(store, "run", resume=True)
    with pytest.raises(IntegrityError, match="anchor"):
        rival.prepare(history[-1], "delta")
    ours, theirs = perturbed(history[-1], 7), perturbed(history[-1], 8)
    parts = rival.prepare(theirs, "anchor")
    assert gang.publish(ours, "delta").version == 2
    with pytest.raises(StoreConflict, match="another publisher"):
        commit(store, "run", 2, parts)
    with pytest.raises(StoreConflict, match="is at version 2"):
        Gang(store, "run").publish(theirs, "anchor")  # a new run of the same name
    reader = Subscriber(store, tmp_path)
    reader.fetch("run", 2)
    assert same(reader.shadow, ours)
    late = Gang(store, "run", resume=True)
    assert late.publish(theirs, "anchor").version == 3
    with pytest.raises(StoreConflict, match="is at version 3"):
        gang.publish(ours, "delta")
    with pytest.raises(StoreError, match="published nothing"):
        RankPublisher(store, "nobody", 0, resume=True)


@pytest.mark.fast
def test_two_commits_at_once_have_one_winner(store: ObjectStore) -> None:
    gang = Gang(store, "run")
    history = publish_chain(gang, 2)
    rival = Gang(store, "run", resume=True)
    theirs = rival.prepare(perturbed(history[-1], 8), "anchor")

    class Interleaved(Failing):
        """Lets the rival commit just before our head moves."""

        def __getattr__(self, name: str) -> Any:
            if name == "swap" and self.calls >= 0:
                self.calls = -1
                commit(self._store, "run", 2, theirs)
            return getattr(self._store, name)

    gang.store = cast(ObjectStore, Interleaved(store, 0, False))
    with pytest.raises(StoreConflict, match="another publisher"):
        gang.publish(perturbed(history[-1], 7), "delta")
    head = read_ref(store, "run")
    assert head is not None
    assert load_manifest(store, "run", head).writer == theirs[0].writer


@pytest.mark.fast
def test_resume_goes_on_with_the_next_number(store: ObjectStore, tmp_path: Path) -> None:
    history = publish_chain(Gang(store, "run"), 3)
    reader = Subscriber(store, tmp_path)
    reader.fetch("run", 2)
    gang = Gang(store, "run", ranks=3, resume=True)
    assert all(publisher.anchor_due(1000) for publisher in gang.ranks)
    new = perturbed(history[1], 4)  # the trainer went back to an older checkpoint
    published = gang.publish(new, "anchor")
    assert (published.version, published.kind, published.delta_bytes) == (3, "anchor", 0)
    assert reader.fetch("run", 3).kind == "full"
    assert same(reader.shadow, new)
    after = perturbed(new, 5)
    assert gang.publish(after, "delta").version == 4
    assert reader.fetch("run", 4).kind == "delta"
    assert same(reader.shadow, after)


@pytest.mark.fast
def test_who_holds_the_head_goes_on_with_deltas(store: ObjectStore, tmp_path: Path) -> None:
    """A gang that formed anew after a death; its readers need no anchor."""
    history = publish_chain(Gang(store, "run"), 4)
    follower = Subscriber(store, tmp_path / "follower")
    follower.fetch("run", 3)
    gang = Gang(store, "run", ranks=3, resume=True)
    gang.adopt(history[-1])
    assert not any(publisher.anchor_due(1000) for publisher in gang.ranks)
    assert all(publisher.anchor_due(4) for publisher in gang.ranks), "the fourth is one anyway"
    kinds: list[Kind] = ["delta", "delta", "anchor", "delta"]
    for version, kind in enumerate(kinds, 4):
        history.append(perturbed(history[-1], version))
        published = gang.publish(history[-1], kind)
        assert published.codec is not None
        manifest = load_manifest(store, "run", published.ref)
        assert manifest.history == ("new" if version == 4 else "kept")
        assert follower.fetch("run", version).kind == "delta"
        assert same(follower.shadow, history[version])
        joiner = Subscriber(store, tmp_path / f"joiner-{version}")
        assert joiner.fetch("run", version).kind == "full"
        assert same(joiner.shadow, history[version])
    assert follower.anchor_loads == 1
    assert set(verify(store, "run").checks.values()) == {"ok"}


@pytest.mark.fast
def test_an_anchor_by_who_holds_the_head_costs_a_follower_nothing(
    store: ObjectStore, tmp_path: Path
) -> None:
    history = publish_chain(Gang(store, "run"), 3)
    follower = Subscriber(store, tmp_path)
    follower.fetch("run", 2)
    gang = Gang(store, "run", resume=True)
    gang.adopt(history[-1])
    kinds: list[Kind] = ["anchor", "delta"]
    for version, kind in enumerate(kinds, 3):
        history.append(perturbed(history[-1], version))
        gang.publish(history[-1], kind)
        assert follower.fetch("run", version).kind == "delta"
        assert same(follower.shadow, history[version])
    assert set(verify(store, "run").checks.values()) == {"ok"}


@pytest.mark.fast
def test_a_publish_that_failed_after_an_adoption_is_repeated(store: ObjectStore) -> None:
    history = publish_chain(Gang(store, "run"), 2)
    gang = Gang(store, "run", resume=True)
    gang.adopt(history[-1])
    tried = gang.prepare(perturbed(history[-1], 3), "delta")
    for publisher in gang.ranks:
        publisher.abandon()
    again = gang.prepare(perturbed(history[-1], 3), "delta")
    assert [part.history for part in again] == ["new", "new"]
    assert [part.shards for part in again] == [part.shards for part in tried]


@pytest.mark.fast
def test_ranks_that_disagree_about_the_history_are_refused(store: ObjectStore) -> None:
    history = publish_chain(Gang(store, "run"), 2)
    gang = Gang(store, "run", resume=True)
    gang.adopt(history[-1])
    parts = gang.prepare(perturbed(history[-1], 3), "delta")
    odd = dataclasses.replace(parts[1], history="kept")
    with pytest.raises(IntegrityError, match=r"rank 1 prepared.*kept history.*new history"):
        commit(store, "run", 2, [parts[0], odd])


@pytest.mark.fast
def test_parts_must_cover_every_tensor_once(store: ObjectStore) -> None:
    gang = Gang(store, "run", ranks=3)
    weights = random_weights(0)
    parts = gang.prepare(weights, "anchor")
    wrong_base = dataclasses.replace(
        parts[1], base=Head(run="run", version=0, manifest="a" * 64).ref
    )
    digests = parts[0].full_digests
    name = next(iter(digests))
    other_full = dataclasses.replace(parts[0], full_digests={**digests, name: "0" * 32})
    fewer = dataclasses.replace(parts[2], tensors=parts[2].tensors[:0])
    for odd in (
        parts[:2],
        [parts[0], parts[0], parts[2]],
        [*parts[:2], fewer],
        [parts[0], wrong_base, parts[2]],
        [other_full, *parts[1:]],
        [],
    ):
        with pytest.raises(IntegrityError):
            commit(store, "run", 0, odd)
    with pytest.raises(IntegrityError):
        commit(store, "run", 1, parts)
    assert read_ref(store, "run") is None
    assert commit(store, "run", 0, parts, {"step": 0}).version == 0
    with pytest.raises(ValueError, match="outside"):
        LocalShard("w", (3,), 2, np.zeros(2, "<u2"))


Damage = Callable[[dict[str, bytes], Manifest], None]


def _shard(manifest: Manifest, at: int = 0) -> str:
    return object_key(manifest.shards[at].digest)


def flip(data: dict[str, bytes], manifest: Manifest) -> None:
    content = bytearray(data[_shard(manifest)])
    content[-1] ^= 1
    data[_shard(manifest)] = bytes(content)


def truncate(data: dict[str, bytes], manifest: Manifest) -> None:
    data[_shard(manifest)] = data[_shard(manifest)][:-1]


def remove(data: dict[str, bytes], manifest: Manifest) -> None:
    del data[_shard(manifest)]


def swap_shards(data: dict[str, bytes], manifest: Manifest) -> None:
    first, second = _shard(manifest, 0), _shard(manifest, 1)
    data[first], data[second] = data[second], data[first]


def rewrite(data: dict[str, bytes], manifest: Manifest, **changes: Any) -> None:
    """Another manifest with a valid link from the head, as a faulty publisher would write it."""
    forged = Manifest.model_validate({**_fields(manifest), **changes})
    data[manifest_key(manifest.run, forged.ref())] = forged.to_bytes()
    head = Head(run=manifest.run, version=forged.version, manifest=forged.ref().manifest)
    data[head_key(manifest.run)] = head.to_bytes()


def _fields(manifest: Manifest) -> dict[str, Any]:
    return {name: getattr(manifest, name) for name in Manifest.model_fields}


def wrong_parent(data: dict[str, bytes], manifest: Manifest) -> None:
    assert manifest.parent
    parent = manifest.parent.model_copy(update={"manifest": "0" * 64})
    rewrite(data, manifest, parent=parent)


def tensor_too_few(data: dict[str, bytes], manifest: Manifest) -> None:
    rewrite(data, manifest, tensors=manifest.tensors[:-1])


def tensor_too_many(data: dict[str, bytes], manifest: Manifest) -> None:
    extra = manifest.tensors[0].model_copy(update={"name": "extra"})
    rewrite(data, manifest, tensors=(*manifest.tensors, extra))


def wrong_shape(data: dict[str, bytes], manifest: Manifest) -> None:
    first = manifest.tensors[0].model_copy(update={"shape": (48, 700)})
    rewrite(data, manifest, tensors=(first, *manifest.tensors[1:]))


def wrong_digest(data: dict[str, bytes], manifest: Manifest) -> None:
    first = manifest.tensors[0].model_copy(update={"digest": "0" * 32})
    rewrite(data, manifest, tensors=(first, *manifest.tensors[1:]))


def wrong_count(data: dict[str, bytes], manifest: Manifest) -> None:
    first = manifest.tensors[0].model_copy(update={"changed": manifest.tensors[0].changed + 1})
    rewrite(data, manifest, tensors=(first, *manifest.tensors[1:]))


def one_shard_less(data: dict[str, bytes], manifest: Manifest) -> None:
    rewrite(data, manifest, shards=manifest.shards[:1])


def unknown_codec(data: dict[str, bytes], manifest: Manifest) -> None:
    key = manifest_key(manifest.run, manifest.ref())
    text = zstandard.decompress(data[key])
    assert CODEC.encode() in text
    data[key] = zstandard.compress(text.replace(CODEC.encode(), b"zip-pairs"))


def cut_manifest(data: dict[str, bytes], manifest: Manifest) -> None:
    key = manifest_key(manifest.run, manifest.ref())
    data[key] = data[key][:-20]


def lost_manifest(data: dict[str, bytes], manifest: Manifest) -> None:
    del data[manifest_key(manifest.run, manifest.ref())]


def unparseable_head(data: dict[str, bytes], manifest: Manifest) -> None:
    data[head_key(manifest.run)] = b"\xff"


def head_to_nowhere(data: dict[str, bytes], manifest: Manifest) -> None:
    head = Head(run=manifest.run, version=manifest.version, manifest="9" * 64)
    data[head_key(manifest.run)] = head.to_bytes()


DAMAGES: list[Damage] = [
    flip,
    truncate,
    remove,
    swap_shards,
    wrong_parent,
    tensor_too_few,
    tensor_too_many,
    wrong_shape,
    wrong_digest,
    wrong_count,
    one_shard_less,
    unknown_codec,
    cut_manifest,
    lost_manifest,
    unparseable_head,
    head_to_nowhere,
]


@pytest.mark.fast
@pytest.mark.parametrize("joined", [False, True], ids=["joiner", "follower"])
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda d: d.__name__)
def test_no_damage_gets_past_a_reader(
    store: ObjectStore, tmp_path: Path, damage: Damage, joined: bool
) -> None:
    gang = Gang(store, "run")
    history = publish_chain(gang, 2)
    reader = Subscriber(store, tmp_path)
    if joined:
        reader.fetch("run", 1)
    history.append(perturbed(history[1], 2))
    gang.publish(history[2], "delta")
    whole = dict(data_of(store))
    head = read_ref(store, "run")
    assert head is not None
    damage(data_of(store), load_manifest(store, "run", head))
    with pytest.raises((IntegrityError, StoreError)):
        reader.fetch("run", 2)
    assert reader.state != Holds("run", head)
    if isinstance(reader.state, Holds):
        assert same(reader.shadow, history[1])
    data_of(store).clear()
    data_of(store).update(whole)  # repaired: the next read works, on the same reader
    reader.fetch("run", 2)
    assert same(reader.shadow, history[2])


@pytest.mark.fast
def test_a_spoilt_shadow_is_rebuilt_from_the_anchor(store: ObjectStore, tmp_path: Path) -> None:
    history = publish_chain(Gang(store, "run"), 4)
    reader = Subscriber(store, tmp_path)
    reader.fetch("run", 2)
    reader.shadow["model.embed.weight"][77] ^= 0x40
    reader.fetch("run", 3)
    assert same(reader.shadow, history[3])
    assert reader.anchor_loads == 1  # from the file on this host


@pytest.mark.fast
def test_a_half_applied_engine_gets_everything(store: ObjectStore, tmp_path: Path) -> None:
    history = publish_chain(Gang(store, "run"), 3)
    reader = Subscriber(store, tmp_path)
    held = reader.fetch("run", 1).target
    assert reader.fetch("run", 2, held).kind == "delta"
    for state in (Nothing(), HalfApplied("run", 2)):
        update = reader.fetch("run", 2, state)
        assert update.kind == "full"
        engine: dict[str, Any] = {}
        replay(engine, update)
        assert same(engine, history[2])
    assert reader.fetch("run", 2, held).kind in ("delta", "full")
    assert reader.fetch("run", 2, reader.state).tensors == {}


@pytest.mark.fast
def test_joiner_and_run_switch_count_their_loads(store: ObjectStore, tmp_path: Path) -> None:
    history = publish_chain(Gang(store, "a"), 6, anchors=(0, 4))
    other = Gang(store, "b")
    published = other.publish(history[0], "anchor")
    assert (published.objects_created, published.bytes_uploaded) == (0, 0)
    joiner = Subscriber(store, tmp_path)
    assert joiner.fetch("a", 5).kind == "full"
    assert same(joiner.shadow, history[5])
    assert joiner.anchor_loads == 1
    joiner.fetch("b", 0)
    assert same(joiner.shadow, history[0])
    assert joiner.anchor_loads == 2
    again = Subscriber(store, tmp_path)  # a later run on the same host
    for run, version in (("b", 0), ("a", 3), ("b", 0)):
        again.fetch(run, version)
        assert same(again.shadow, history[version])
    assert again.anchor_loads == 0
    for path in (tmp_path / "anchors").iterdir():  # damaged files are downloaded again
        path.write_bytes(path.read_bytes()[:-3])
    assert again.fetch("a", 5, Nothing()).kind == "full"
    assert same(again.shadow, history[5])
    assert again.anchor_loads == 1


@pytest.mark.fast
def test_an_anchor_on_the_way_costs_a_follower_nothing(store: ObjectStore, tmp_path: Path) -> None:
    history = publish_chain(Gang(store, "run", ranks=3), 7, anchors=(0, 2, 5))
    follower = Subscriber(store, tmp_path / "follower")
    held: Any = Nothing()
    for version in range(7):
        update = follower.fetch("run", version, held)
        assert update.kind == ("delta" if version else "full")
        held = update.target
        assert same(follower.shadow, history[version])
    assert follower.anchor_loads == 1
    joiner = Subscriber(store, tmp_path / "joiner")  # begins at 5, with an empty history
    joiner.fetch("run", 6)
    assert same(joiner.shadow, history[6])
    for reader in (follower, joiner):
        reader.close()


@pytest.mark.fast
def test_a_long_chain_makes_an_anchor_due(store: ObjectStore) -> None:
    """For who takes the run over in the middle of it, too."""

    def due() -> bool:
        young = Gang(store, "run", resume=True)
        young.adopt(weights)
        (all_of_them,) = {p.anchor_due(1000) for p in (*gang.ranks, *young.ranks)}
        return all_of_them

    gang = Gang(store, "run")
    weights = random_weights(0)
    published = gang.publish(weights, "anchor")
    spent = 0
    rng = np.random.default_rng(0)
    while not due():
        shuffled: Weights = {}
        for name, (shape, dtype, bits) in weights.items():
            shuffled[name] = (shape, dtype, rng.permutation(bits))
        weights = shuffled
        delta = gang.publish(weights, "delta")
        spent += delta.delta_bytes
        assert spent - delta.delta_bytes <= published.anchor_bytes
    assert spent > published.anchor_bytes
    weights = perturbed(weights, 1)
    assert gang.publish(weights, "anchor").delta_bytes > 0
    assert not due(), "its own delta is not of the chain"
    assert gang.ranks[0].anchor_due(gang.ranks[0].next_version)


@pytest.mark.fast
def test_engines_of_a_host_share_one_shadow(store: ObjectStore, tmp_path: Path) -> None:
    """Whoever comes second downloads and decodes nothing, and is given what it lacks."""
    history = publish_chain(Gang(store, "run"), 6)
    first, second = Subscriber(store, tmp_path), Subscriber(store, tmp_path)
    held = second.fetch("run", 1).target
    engine: dict[str, Any] = {}
    replay(engine, second.fetch("run", 1, Nothing()))
    downloaded = second.bytes_downloaded
    first.fetch("run", 4)
    update = second.fetch("run", 4, held)
    assert update.kind == "delta"
    replay(engine, update)
    assert same(engine, history[4])
    assert second.bytes_downloaded == downloaded
    full = first.fetch("run", 4, Nothing())
    with first.reading(full) as shown:
        assert shown is full
        assert same({n: t.values for n, t in full.tensors.items()}, history[4])
    five = second.fetch("run", 5, update.target)
    with first.reading(full) as shown:  # the shadow has moved on, and is brought back
        assert shown.version == 4
        assert same({n: t.values for n, t in shown.tensors.items()}, history[4])
    assert second.fetch("run", 5, five.target).tensors == {}
    late = first.fetch("run", 5, Nothing())
    assert late.kind == "full"
    assert first.fetch("run", 5, held).kind == "delta"  # every step since 1 is known
    first.close()
    second.close()
    third = Subscriber(store, tmp_path)
    assert third.fetch("run", 5).tensors == {}  # a new process of the host finds it there
    third.close()
    publish_chain(Gang(store, "other"), 1)
    fourth = Subscriber(store, tmp_path)
    fourth.fetch("other", 0)
    assert [path.name for path in (tmp_path / "shadows").iterdir()] == ["other"]


@pytest.mark.fast
def test_weights_compared_where_they_lie_make_the_same_bytes(store: ObjectStore) -> None:
    """The way of an accelerator, on CPU tensors: objects and digests as those of host shards."""
    other = memory_store()
    here, there = RankPublisher(store, "run", 0), RankPublisher(other, "run", 0)
    weights = random_weights(0)
    for version in range(4):
        host = [LocalShard(n, s, 0, bits, dtype) for n, (s, dtype, bits) in weights.items()]
        device = [
            DeviceShard(n, s, 0, from_bits(bits.copy(), dtype, s))
            for n, (s, dtype, bits) in weights.items()
        ]
        kind: Kind = "delta" if version % 3 else "anchor"
        parts = [
            here.prepare(host, kind, whole=True),
            there.prepare(iter(device), kind, whole=True),
        ]
        assert (parts[0].shards, parts[0].anchor) == (parts[1].shards, parts[1].anchor)
        assert parts[0].tensors == parts[1].tensors
        if version == 2:  # nothing was committed: the same again
            parts = [here.prepare(host, kind), there.prepare(device, kind)]
        for publisher, part, where in ((here, parts[0], store), (there, parts[1], other)):
            publisher.confirm(commit(where, "run", version, [part]))
        if version == 1:  # others take over
            assert here.base is not None
            chain = since_anchor(store, "run", here.base)
            here, there = (RankPublisher(one, "run", 0, resume=True) for one in (store, other))
            for publisher, shards in ((here, host), (there, device)):
                assert publisher.base is not None
                publisher.adopt(shards, publisher.base, *chain)
        weights = perturbed(weights, version)
    bad = torch.full((2,), float("nan"), dtype=torch.bfloat16)
    with pytest.raises(NotFiniteError, match="bad"):
        there.prepare([DeviceShard("bad", (2,), 0, bad)], "delta")
    with pytest.raises(IntegrityError, match="other ranges"):
        there.prepare(host[:1], "delta")  # never compared on that device before


# The same through the real S3 server.


def test_publish_and_subscribe_through_s3(object_store: ObjectStore, tmp_path: Path) -> None:
    gang = Gang(object_store, "s3-a", ranks=2)
    history = publish_chain(gang, 6, anchors=(0,))
    objects = keys_with(object_store.list("objects/"), "objects/")
    other = Gang(object_store, "s3-b", ranks=3)
    published = other.publish(history[0], "anchor")
    assert published.objects_created == 0
    assert keys_with(object_store.list("objects/"), "objects/") == objects
    joiner = Subscriber(object_store, tmp_path)
    joiner.fetch("s3-a", 5)
    assert same(joiner.shadow, history[5])
    joiner.fetch("s3-b", 0)
    assert same(joiner.shadow, history[0])
    assert joiner.anchor_loads == 1

    rival = Gang(object_store, "s3-a", resume=True)
    parts = rival.prepare(perturbed(history[5], 1), "anchor")
    new = perturbed(history[5], 2)
    assert gang.publish(new, "delta").version == 6
    with pytest.raises(StoreConflict, match="another publisher"):
        commit(object_store, "s3-a", 6, parts)

    head = read_ref(object_store, "s3-a")
    assert head is not None
    manifest = load_manifest(object_store, "s3-a", head)
    key = object_key(manifest.shards[0].digest)
    content = object_store.get(key)
    for damaged in (content[:-1], bytes([content[0] ^ 1]) + content[1:]):
        object_store.put(key, damaged)
        with pytest.raises(IntegrityError):
            joiner.fetch("s3-a", 6)
        assert same(joiner.shadow, history[0]) or not isinstance(joiner.state, Holds)
    object_store.delete([key])
    with pytest.raises(StoreError):
        joiner.fetch("s3-a", 6)
    object_store.put(key, content)
    joiner.fetch("s3-a", 6)
    assert same(joiner.shadow, new)
