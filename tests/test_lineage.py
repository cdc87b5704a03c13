"""Who may move a run's head, and which versions lie on its present line: over a store in memory
and the real one."""

from __future__ import annotations

import pytest

from tasks.errors import StoreConflict
from tasks.store import ObjectStore
from tasks.weights.commit import (
    TRAINED,
    Published,
    commit,
    differing,
    fence_off,
    lineage,
    load_manifest,
    published_before,
    read_head,
    require_fence,
)
from tasks.weights.publisher import survey
from tests.weights_helpers import Gang, Weights, memory_store, perturbed, random_weights, shards_of

pytestmark = pytest.mark.fast


@pytest.fixture
def store() -> ObjectStore:
    return memory_store()


def _publish(gang: Gang, weights: Weights, trained: int, fence: str = "") -> Published:
    kind = "anchor" if gang.base is None or gang.ranks[0].anchor_due(99) else "delta"
    parts = gang.prepare(weights, kind)
    version = gang.ranks[0].next_version
    made = commit(gang.store, gang.run, version, parts, {TRAINED: trained}, fence)
    for rank in gang.ranks:
        rank.confirm(made)
    return made


def test_a_fenced_publisher_loses_and_the_next_one_wins(store: ObjectStore) -> None:
    assert fence_off(store, "run", "0.1") is None, "there is no head yet"
    old = Gang(store, "run")
    first = random_weights(1)
    _publish(old, first, 0, "0.1")
    # Thought dead while it prepares the next version.
    parts = old.prepare(perturbed(first, 2), "delta")
    head = fence_off(store, "run", "0.2")
    assert head is not None
    assert (head.version, head.fence) == (0, "0.2")
    assert fence_off(store, "run", "0.2") == head, "again is the same"
    with pytest.raises(StoreConflict, match=r"belongs to the publishers of '0\.2'.*from '0\.1'"):
        commit(store, "run", 1, parts, {TRAINED: 1}, "0.1")
    with pytest.raises(StoreConflict, match="belongs to"):
        commit(store, "run", 1, parts, {TRAINED: 1})
    for older in ("0.1", ""):
        with pytest.raises(StoreConflict, match=r"younger flow \(epoch 0\.2"):
            fence_off(store, "run", older)
        with pytest.raises(StoreConflict, match=r"belongs to epoch 0\.2"):
            require_fence(store, "run", older)
    require_fence(store, "run", "0.2")
    young = Gang(store, "run", resume=True)
    assert _publish(young, perturbed(first, 3), 1, "0.2").version == 1
    found = read_head(store, "run")
    assert found is not None
    assert (found[0].version, found[0].fence) == (1, "0.2")


def test_a_commit_that_got_through_is_seen_by_who_fences_it(store: ObjectStore) -> None:
    old = Gang(store, "run")
    first = random_weights(1)
    _publish(old, first, 0, "0.1")
    made = _publish(old, perturbed(first, 2), 1, "0.1")
    head = fence_off(store, "run", "0.2")
    assert head is not None
    assert head.ref == made.ref
    assert lineage(store, "run", 0)[1] == made.ref


def test_the_present_line_leaves_out_what_was_left_behind(store: ObjectStore) -> None:
    weights = [random_weights(1)]
    gang = Gang(store, "run")
    for trained in range(6):
        _publish(gang, weights[-1], trained)
        weights.append(perturbed(weights[-1], trained))
    assert {t: ref.version for t, ref in lineage(store, "run", 2).items()} == {
        2: 2,
        3: 3,
        4: 4,
        5: 5,
    }
    # Resumed after step 2 with other bits: steps 3 and 4 once more.
    resumed = Gang(store, "run", resume=True)
    for trained in (3, 4):
        _publish(resumed, perturbed(weights[trained], 50), trained)
    line = {t: ref.version for t, ref in lineage(store, "run", 1).items()}
    assert line == {1: 1, 2: 2, 3: 6, 4: 7}
    assert lineage(store, "nobody", 0) == {}


def test_weights_are_compared_with_a_version_by_any_number_of_ranks(store: ObjectStore) -> None:
    first = random_weights(1)
    made = _publish(Gang(store, "run"), first, 0)
    manifest = load_manifest(store, "run", made.ref)
    for ranks in (1, 2, 3):
        surveyed = [survey(shards_of(first, rank, ranks)) for rank in range(ranks)]
        assert differing(manifest, surveyed) == []
    name = next(n for n, (_, _, bits) in sorted(first.items()) if bits.size)
    other = {**first, name: (first[name][0], first[name][1], first[name][2] ^ 1)}
    surveyed = [survey(shards_of(other, rank, 2)) for rank in range(2)]
    assert differing(manifest, surveyed) == [name]
    less = {n: one for n, one in first.items() if n != name}
    assert differing(manifest, [survey(shards_of(less, 0, 1))]) == [name]
    again = published_before(store, "run", made.ref)
    assert (again.ref, again.bytes_uploaded) == (made.ref, 0)
    assert again.full_bytes == made.full_bytes
