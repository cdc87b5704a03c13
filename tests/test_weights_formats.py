"""Digests, shard files, manifests: properties of the written formats."""

from __future__ import annotations

import itertools
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load

from tasks.errors import ConfigError, IntegrityError, PolicyError
from tasks.weights import digest as digests
from tasks.weights.bits import from_bits, to_bits
from tasks.weights.codec import CODEC, Range, decode
from tasks.weights.compare import Compared, begin, changed
from tasks.weights.digest import BLOCK_VALUES, combine, piece, tensor_digest
from tasks.weights.frames import unpacked
from tasks.weights.history import no_history
from tasks.weights.manifest import (
    Head,
    Manifest,
    ManifestRef,
    Shard,
    TensorState,
    check_child,
    head_key,
    manifest_key,
)
from tasks.weights.shards import anchor_files, pack_delta, unpack_delta

pytestmark = pytest.mark.fast


def _compared(old: torch.Tensor, new: torch.Tensor, name: Any) -> Compared:
    with ThreadPoolExecutor(2) as pool:
        return begin(pool, to_bits(old), to_bits(new), name, 0)()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_bits_round_trip_and_finiteness(dtype: torch.dtype) -> None:
    name: Any = str(dtype).removeprefix("torch.")
    for shape in ((), (0, 3), (4, 5)):
        tensor = torch.randn(shape).to(dtype)
        assert torch.equal(from_bits(to_bits(tensor), name, shape), tensor)
        assert _compared(tensor, tensor, name).finite
    # In the part that is looked at by vectors, and in the rest after it.
    for bad in (float("inf"), float("-inf"), float("nan")):
        for at in (3, 36):
            tensor = torch.full((37,), -torch.finfo(dtype).max, dtype=dtype)
            odd = tensor.clone()
            odd[at] = bad
            assert _compared(odd, tensor, name).finite
            assert not _compared(tensor, odd, name).finite
            assert not _compared(odd, odd, name).finite
    with pytest.raises(PolicyError, match="int64"):
        to_bits(torch.zeros(1, dtype=torch.int64))


@given(data=st.data())
def test_digest_does_not_depend_on_the_split(data: st.DataObject) -> None:
    size = data.draw(st.integers(0, 4 * BLOCK_VALUES) | st.sampled_from([0, 1, BLOCK_VALUES]))
    dtype = data.draw(st.sampled_from([np.uint16, np.uint32]))
    bits = np.random.default_rng(size).integers(0, 60_000, size).astype(dtype)
    near = st.builds(lambda b, o: b * BLOCK_VALUES + o, st.integers(0, 4), st.integers(-2, 2))
    cuts = data.draw(st.lists(st.integers(0, size) | near, max_size=6))
    edges = [0, *sorted(min(max(cut, 0), size) for cut in cuts), size]
    parts = [piece(bits[a:b], a) for a, b in itertools.pairwise(edges)]
    shuffled = data.draw(st.permutations(parts))
    assert combine(shuffled, size) == tensor_digest(bits)


def test_digest_is_the_written_definition() -> None:
    import xxhash

    bits = np.arange(BLOCK_VALUES + 3, dtype="<u2")
    blocks = [bits[:BLOCK_VALUES], bits[BLOCK_VALUES:]]
    joined = b"".join(xxhash.xxh3_128_digest(block.tobytes()) for block in blocks)
    assert tensor_digest(bits) == xxhash.xxh3_128_hexdigest(joined)
    assert tensor_digest(bits[:0]) == xxhash.xxh3_128_hexdigest(b"")
    assert digests.BLOCK_VALUES == 16_384  # part of the format


def test_digest_refuses_gaps_overlaps_and_wrong_totals() -> None:
    bits = np.arange(100, dtype="<u2")
    for parts in (
        [piece(bits[:50], 0), piece(bits[51:], 51)],
        [piece(bits[:50], 0), piece(bits[49:], 49)],
        [piece(bits[:50], 0)],
        [piece(bits[:50], 0), piece(bits[50:].astype("<u4"), 50)],
    ):
        with pytest.raises(IntegrityError):
            combine(parts, 100)


def test_delta_shard_round_trip() -> None:
    rng = np.random.default_rng(3)
    ranges, changes = [], []
    for number in range(3):
        old = rng.integers(0, 0x7F00, 50).astype("<u2")
        new = old ^ (rng.random(50) < 0.3)
        ranges.append(Range(f"t{number}", 7 * number, "bfloat16", old, no_history(50)))
        changes.append(changed(old, new.astype("<u2")))
    data = pack_delta(ranges, changes)
    sizes = {f"t{i}": 80 for i in range(3)}
    shard = unpack_delta(data, sizes)
    assert [(p.tensor, p.start, p.count) for p in shard.places] == [
        (r.tensor, r.start, r.old.size) for r in ranges
    ]
    for found, wanted in zip(decode(shard.tables, shard.blocks, ranges), changes, strict=True):
        assert np.array_equal(found.indices, wanted.indices)
        assert np.array_equal(found.values, wanted.values)
    frame = bytearray(data)
    frame[20] ^= 0xFF
    for wrong in (b"KDS3" + data[4:], data[:6], data[:20], bytes(frame)):
        with pytest.raises(IntegrityError):
            unpack_delta(wrong, sizes)
    for longer in (data[:-1], data + b"x"):
        shard = unpack_delta(longer, sizes)
        with pytest.raises(IntegrityError):
            decode(shard.tables, shard.blocks, ranges)
    with pytest.raises(IntegrityError):
        unpack_delta(data, {"t0": 80})
    with pytest.raises(IntegrityError):
        unpack_delta(data, {f"t{i}": 60 for i in range(3)})


def test_frames_have_a_bound() -> None:
    frame = zstandard.ZstdCompressor().compress(bytes(1000))
    assert unpacked(frame, 1000, "thing") == bytes(1000)
    sizeless = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(10))
    for wrong in (frame[:-1], frame + b"x", b"", b"plain", sizeless):
        with pytest.raises(IntegrityError, match="thing"):
            unpacked(wrong, 1000, "thing")
    with pytest.raises(IntegrityError, match="at most 999"):
        unpacked(frame, 999, "thing")


def test_anchor_files_split_and_are_deterministic() -> None:
    tensors = {f"t{i}": torch.randn(10).bfloat16() for i in range(5)}
    files = list(anchor_files(tensors.items(), limit=45))
    assert [names for names, _ in files] == [("t0", "t1"), ("t2", "t3"), ("t4",)]
    assert files == list(anchor_files(tensors.items(), limit=45))
    for names, data in files:
        found = load(data)
        assert all(torch.equal(found[name], tensors[name]) for name in names)


ANCHOR = Shard(digest="e" * 64, bytes=99, rank=0, tensors=("w", "v"))


def manifest(version: int = 1, **changes: Any) -> Manifest:
    parent = ManifestRef(version=version - 1, manifest="a" * 64) if version else None
    fields: dict[str, Any] = {
        "run": "r",
        "version": version,
        "parent": parent,
        "kind": "delta" if version else "anchor",
        "codec": CODEC if version else None,
        "shards": (Shard(digest="b" * 64, bytes=10, rank=0),) if version else (),
        "anchor": () if version else (ANCHOR,),
        "tensors": (
            TensorState(name="w", shape=(2, 3), dtype="bfloat16", digest="c" * 32, changed=1),
            TensorState(name="v", shape=(4,), dtype="float32", digest="d" * 32, changed=0),
        ),
        "writer": "x",
        "created": "2026-01-01T00:00:00+00:00",
        "creation": {"step": 3, "host": "h", "loss": 0.5},
    }
    return Manifest(**(fields | changes))


def test_a_manifest_says_so_where_its_delta_begins_a_history() -> None:
    usual, first = manifest(7), manifest(7, history="new")
    assert "history" not in json.loads(zstandard.decompress(usual.to_bytes())), "as ever"
    assert Manifest.from_bytes(usual.to_bytes()).history == "kept"
    assert Manifest.from_bytes(first.to_bytes()).history == "new"
    assert first.ref() != usual.ref()
    with pytest.raises(ValueError, match="no delta that begins it"):
        manifest(0, history="new")


def test_manifest_round_trip_and_sums() -> None:
    both = manifest(7, kind="anchor", anchor=(ANCHOR,))
    for made in (manifest(0), both, manifest(1), manifest(7)):
        found = Manifest.from_bytes(made.to_bytes())
        assert found == made
        assert found.ref() == made.ref()
    assert (both.values, both.changed, both.full_bytes) == (10, 1, 28)
    assert (both.delta_bytes, both.anchor_bytes) == (10, 99)
    key = manifest_key("r", both.ref())
    assert key == f"runs/r/manifests/00000007-{both.ref().manifest}.json.zst"


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("format",), 2),
        (("version",), -1),
        (("version",), 2),
        (("version",), 1.0),
        (("version",), "1"),
        (("parent",), None),
        (("kind",), "patch"),
        (("codec",), "zip"),
        (("codec",), None),
        (("history",), "some"),
        (("kind",), "anchor"),
        (("anchor",), [{"digest": "e" * 64, "bytes": 9, "rank": 0, "tensors": ["w", "v"]}]),
        (("run",), "../x"),
        (("surprise",), 1),
        (("tensors",), []),
        (("tensors", 0, "dtype"), "int8"),
        (("tensors", 0, "shape"), [2, -3]),
        (("tensors", 0, "changed"), 7),
        (("tensors", 0, "digest"), "c" * 31),
        (("tensors", 0, "name"), "v"),
        (("shards", 0, "digest"), "B" * 64),
        (("shards", 0, "tensors"), ["w"]),
        (("created",), None),
    ],
)
def test_odd_manifests_are_refused(path: tuple[Any, ...], value: Any) -> None:
    document = json.loads(zstandard.decompress(manifest().to_bytes()))
    target = document
    for step in path[:-1]:
        target = target[step]
    target[path[-1]] = value
    with pytest.raises(IntegrityError):
        Manifest.from_bytes(zstandard.compress(json.dumps(document).encode()))
    for data in (b"{", zstandard.compress(b"{"), json.dumps(document).encode()):
        with pytest.raises(IntegrityError):
            Manifest.from_bytes(data)


def test_a_child_must_fit_its_parent() -> None:
    parent = manifest(1)
    tensors = parent.tensors
    moved = tensors[0].model_copy(update={"digest": "e" * 32})

    def child(**changes: Any) -> Manifest:
        return manifest(2, **({"parent": parent.ref(), "tensors": (moved, tensors[1])} | changes))

    check_child(parent, child())
    for wrong in (
        child(run="other"),
        child(parent=ManifestRef(version=1, manifest="f" * 64)),
        child(tensors=(moved,)),
        child(tensors=(moved, tensors[1].model_copy(update={"shape": (2, 2)}))),
        child(tensors=(moved, tensors[1].model_copy(update={"dtype": "bfloat16"}))),
        child(tensors=tensors),  # one value changed, the digest did not
        child(tensors=(moved, tensors[1].model_copy(update={"digest": "e" * 32}))),
    ):
        with pytest.raises(IntegrityError):
            check_child(parent, wrong)


def test_heads_and_run_names() -> None:
    head = Head(run="r", version=3, manifest="a" * 64)
    assert Head.from_bytes(head.to_bytes(), "r") == head
    for data, run in ((head.to_bytes(), "s"), (b"", "r"), (b'{"run":"r"}', "r")):
        with pytest.raises(IntegrityError):
            Head.from_bytes(data, run)
    for name in ("", "a/b", "..", ".x", "a" * 129):
        with pytest.raises(ConfigError):
            head_key(name)
