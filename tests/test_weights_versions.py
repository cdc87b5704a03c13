"""The version state machine: whatever is held, the plan leads to the target or says why not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.errors import IntegrityError
from tasks.weights.codec import CODEC
from tasks.weights.manifest import Manifest, ManifestRef, Shard, TensorState
from tasks.weights.versions import HalfApplied, Holds, Nothing, Plan, Refusal, State, plan

pytestmark = pytest.mark.fast


def link(run: str, parent: Manifest | None, kind: str, mark: int) -> Manifest:
    """A manifest whose tensor's digest is its version; kind "both" is an anchor with a delta."""
    version = parent.version + 1 if parent else 0
    state = TensorState(
        name="w", shape=(9,), dtype="bfloat16", digest=f"{mark:016x}{version:016x}", changed=1
    )
    anchor = Shard(digest=f"{version:064x}", bytes=100, rank=0, tensors=("w",))
    shard = Shard(digest=f"{mark:032x}{version:032x}", bytes=30, rank=0)
    delta = kind != "anchor" and parent is not None
    return Manifest(
        run=run,
        version=version,
        parent=parent.ref() if parent else None,
        kind="delta" if kind == "delta" else "anchor",
        codec=CODEC if delta else None,
        shards=(shard,) if delta else (),
        anchor=() if kind == "delta" else (anchor,),
        tensors=(state,),
        writer="w",
        created="2026-01-01T00:00:00+00:00",
    )


def chain(run: str, kinds: list[str], mark: int = 0) -> list[Manifest]:
    made: list[Manifest] = []
    for kind in kinds:
        made.append(link(run, made[-1] if made else None, kind, mark))
    return made


class Reader:
    """The store's side: manifests by link; counts what is read."""

    def __init__(self, *chains: list[Manifest]) -> None:
        self.manifests = {m.ref(): m for c in chains for m in c}
        self.reads: list[ManifestRef] = []

    def __call__(self, ref: ManifestRef) -> Manifest:
        self.reads.append(ref)
        if ref not in self.manifests:
            raise IntegrityError(f"version {ref.version} is damaged")
        return self.manifests[ref]


def walk(state: State, road: Plan) -> tuple[str, ManifestRef] | None:
    """What a reader holds after the steps, each applied only where it fits."""
    held = (state.run, state.ref) if isinstance(state, Holds) else None
    for at, step in enumerate(road.steps):
        if at or road.kind == "delta":
            assert step.codec is not None
            assert held == (step.run, step.parent)
        else:
            assert step.anchor
        held = (step.run, step.ref())
    return held


kinds = st.lists(st.sampled_from(["anchor", "both", "delta", "delta", "delta"]), max_size=14).map(
    lambda rest: ["anchor", *rest]
)


@given(data=st.data(), shape=kinds)
def test_a_plan_leads_from_any_state_to_any_version(data: st.DataObject, shape: list[str]) -> None:
    ours, rival, other = chain("r", shape), chain("r", shape, mark=1), chain("s", shape)
    load = Reader(ours)
    states = [Nothing(), HalfApplied("r", 0)]
    states += [Holds(m.run, m.ref()) for m in (*ours, *rival, *other)]
    state = data.draw(st.sampled_from(states))
    version = data.draw(st.integers(0, len(ours) - 1))
    road = plan("r", state, ours[-1].ref(), version, load)
    assert isinstance(road, Plan)
    target = ours[version]
    assert road.target == target
    assert walk(state, road) == ("r", target.ref())
    anchor = max(v for v in range(version + 1) if shape[v] != "delta")
    wall = max(v for v in range(version + 1) if shape[v] == "anchor")
    deltas = 30 * (version - state.ref.version) if isinstance(state, Holds) else 0
    if state == Holds("r", target.ref()):
        assert road.steps == ()
    elif (
        isinstance(state, Holds)
        and state.ref in {m.ref() for m in ours[wall:version]}
        and (state.ref.version >= anchor or deltas <= 100 + 30 * (version - anchor))
    ):
        assert len(road.steps) == version - state.ref.version
        assert road.kind == "delta"
    else:
        assert road.kind == "full"
        assert road.steps == tuple(ours[anchor : version + 1])
    assert len(load.reads) == len(set(load.reads))  # each link is read once
    assert min(ref.version for ref in load.reads) >= wall  # and none below the way's end


@given(data=st.data(), shape=kinds)
def test_a_damaged_history_is_refused(data: st.DataObject, shape: list[str]) -> None:
    ours = chain("r", shape)
    version = data.draw(st.integers(0, len(ours) - 1))
    anchor = max(v for v in range(version + 1) if shape[v] != "delta")
    missing = data.draw(st.integers(anchor, len(ours) - 1))
    load = Reader([m for m in ours if m.version != missing])
    road = plan("r", Nothing(), ours[-1].ref(), version, load)
    assert isinstance(road, Refusal)
    assert road.broken


def test_unpublished_versions_are_refused_but_not_broken() -> None:
    ours = chain("r", ["anchor", "delta"])
    for head, version in ((None, 0), (ours[-1].ref(), 2), (ours[-1].ref(), -1)):
        road = plan("r", Nothing(), head, version, Reader(ours))
        assert isinstance(road, Refusal)
        assert not road.broken


def test_wrong_parents_swapped_manifests_and_chains_without_anchor_are_refused() -> None:
    ours, rival = chain("r", ["anchor", "delta", "delta"]), chain("r", ["anchor", "delta"], mark=1)
    swapped = Reader(ours)
    swapped.manifests[ours[1].ref()] = rival[1]
    stranger = Reader(ours)
    stranger.manifests[ours[0].ref()] = chain("s", ["anchor"])[0]
    for load in (swapped, stranger):
        road = plan("r", Nothing(), ours[-1].ref(), 2, load)
        assert isinstance(road, Refusal)
        assert road.broken
