"""Checkpoints: whole or not there, restorable by any number of ranks, exact."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tasks.errors import IntegrityError, StoreError
from tasks.store import ObjectStore, StoreLocation
from tasks.training import checkpoint
from tasks.training.checkpoint import (
    KINDS,
    Range,
    RankState,
    Store,
    commit,
    latest,
    load_part,
    manifest_key,
    read,
    save_part,
)
from tests.trainer_pool import FolderStore

pytestmark = pytest.mark.fast
SHAPES = {"embed": (10, 4), "norm": (7,), "deep": (3, 2, 5)}


def _cut(shape: tuple[int, ...], rank: int, world: int) -> Range:
    chunk = -(-shape[0] // world)
    row = torch.Size(shape[1:]).numel()
    first, last = min(rank * chunk, shape[0]), min((rank + 1) * chunk, shape[0])
    return Range(shape, first * row, last * row)


def _whole() -> dict[str, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    return {
        kind: {n: torch.randn(torch.Size(shape).numel()) for n, shape in SHAPES.items()}
        for kind in KINDS
    }


def _state(rank: int, world: int, steps: int = 3) -> RankState:
    ranges = {name: _cut(shape, rank, world) for name, shape in SHAPES.items()}
    kinds = KINDS if steps else KINDS[:1]
    values = {
        kind: {name: _whole()[kind][name][one.start : one.end] for name, one in ranges.items()}
        for kind in kinds
    }
    return RankState(rank, world, steps, ranges, values)


@pytest.fixture
def store(tmp_path: Path) -> FolderStore:
    return FolderStore(tmp_path / "store")


def _commit(store: Store, world: int, step: int = 5, steps: int = 3) -> checkpoint.Checkpoint:
    parts = [save_part(store, _state(rank, world, steps)) for rank in range(world)]
    return commit(store, "r", step, reversed(parts), {"version": step})


@pytest.mark.parametrize("object_bytes", [16, 100, 1 << 20])
@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("into", [1, 3, 8])
def test_any_gang_restores_what_any_gang_saved(
    store: FolderStore, world: int, into: int, object_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "OBJECT_BYTES", object_bytes)
    _commit(store, world)
    found = latest(store, "r")
    assert found is not None
    assert (found.step, found.optimizer_steps, found.extra) == (5, 3, {"version": 5})
    for rank in range(into):
        wanted = {name: _cut(shape, rank, into) for name, shape in SHAPES.items()}
        state = load_part(store, found, wanted, rank, into)
        for kind in KINDS:
            for name, one in wanted.items():
                assert torch.equal(
                    state.values[kind][name], _whole()[kind][name][one.start : one.end]
                )


def test_before_the_first_optimizer_step_there_are_no_moments(store: FolderStore) -> None:
    found = _commit(store, 2, steps=0)
    wanted = {name: _cut(shape, 0, 1) for name, shape in SHAPES.items()}
    assert load_part(store, found, wanted, 0, 1).values.keys() == {"parameter"}


def test_only_committed_checkpoints_exist_and_the_latest_wins(store: FolderStore) -> None:
    assert latest(store, "r") is None
    save_part(store, _state(0, 2))
    assert latest(store, "r") is None
    for step in (9, 10, 2):
        _commit(store, 2, step)
    store.put("runs/r/checkpoints/00000099.json.tmp", b"half")
    found = latest(store, "r")
    assert found is not None
    assert found.step == 10
    assert _commit(store, 2, 10) == found, "the same step again is the same checkpoint"
    with pytest.raises(StoreError):
        read(store, "r", 3)


def test_parts_that_do_not_make_a_whole_are_refused(store: FolderStore) -> None:
    parts = [save_part(store, _state(rank, 2)) for rank in range(2)]
    other = save_part(store, _state(1, 2, steps=4))
    for wrong in ([], parts[:1], [parts[0], parts[0]], [parts[0], other]):
        with pytest.raises(IntegrityError):
            commit(store, "r", 1, wrong, {})
    gap = checkpoint.Part(1, 2, 3, parts[1].shapes, parts[1].records[1:])
    with pytest.raises(IntegrityError, match="only"):
        commit(store, "r", 1, [parts[0], gap], {})
    assert latest(store, "r") is None


def test_damage_and_other_models_are_refused(store: FolderStore) -> None:
    found = _commit(store, 2)
    wanted = {name: _cut(shape, 0, 1) for name, shape in SHAPES.items()}
    with pytest.raises(IntegrityError, match=r"another model: \['norm'\]"):
        load_part(store, found, {**wanted, "norm": Range((8,), 0, 8)}, 0, 1)
    digest = found.records[0].digest
    store.put(f"objects/{digest}", b"damaged")
    with pytest.raises(IntegrityError, match=digest):
        load_part(store, found, wanted, 0, 1)
    content = json.loads(store.get(manifest_key("r", 5)))
    for damage in (b"{", b"[]", json.dumps({**content, "format": 2}).encode()):
        store.put(manifest_key("r", 5), damage)
        with pytest.raises(IntegrityError, match="no checkpoint manifest"):
            latest(store, "r")


def test_the_object_store_fits_the_protocol() -> None:
    store: Store = ObjectStore(StoreLocation("http://127.0.0.1:1", "bucket"))
    assert store is not None
