"""Codec, digests, shard files, manifests: properties of the written formats."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors.torch import load

from tasks.errors import ConfigError, IntegrityError, PolicyError
from tasks.weights import digest as digests
from tasks.weights.bits import Bits, from_bits, is_finite, to_bits
from tasks.weights.codec import CODECS, changed, codec_named
from tasks.weights.digest import BLOCK_VALUES, combine, piece, tensor_digest
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
from tasks.weights.shards import Record, anchor_files, pack_delta, unpack_delta

pytestmark = pytest.mark.fast

SPECIAL = [0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0xFFFF, 0x0001, 0x3F80]


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Bits, Bits]:
    """Old and new patterns: nothing, everything or anything changed; any bits."""
    dtype = np.dtype(draw(st.sampled_from(["<u2", "<u4"])))
    top = 2 ** (8 * dtype.itemsize) - 1
    values = st.one_of(st.sampled_from(SPECIAL), st.integers(0, top))
    old = draw(hnp.arrays(dtype, st.integers(0, 200), elements=values))
    how = draw(st.sampled_from(["same", "all", "some"]))
    if how == "same":
        return old, old.copy()
    if how == "all":
        return old, ~old
    return old, draw(hnp.arrays(dtype, old.shape, elements=values))


@pytest.mark.parametrize("name", sorted(CODECS))
@given(pair=pairs())
def test_codec_is_exact_for_every_bit_pattern(name: str, pair: tuple[Bits, Bits]) -> None:
    old, new = pair
    codec = codec_named(name)
    indices, values = changed(old, new)
    payload = codec.encode(old, indices, values)
    found_indices, found_values = codec.decode(payload, old)
    assert found_indices.dtype == np.int32
    rebuilt = old.copy()
    rebuilt[found_indices] = found_values
    assert rebuilt.tobytes() == new.tobytes()
    assert found_indices.size == int((old != new).sum())


@pytest.mark.parametrize("name", sorted(CODECS))
@given(pair=pairs(), cut=st.integers(1, 8))
def test_codec_refuses_cut_and_padded_payloads(
    name: str, pair: tuple[Bits, Bits], cut: int
) -> None:
    codec = codec_named(name)
    payload = codec.encode(pair[0], *changed(*pair))
    for wrong in (payload[:-cut], payload + b"\0" * cut):
        with pytest.raises(IntegrityError):
            codec.decode(wrong, pair[0])


def test_raw_pairs_format_is_as_written() -> None:
    old = np.array([1, 2, 3], "<u2")
    codec = codec_named("raw-pairs")
    payload = codec.encode(old, *changed(old, np.array([1, 0x8000, 4], "<u2")))
    assert payload.hex() == "0102000002000000" + "01000000" + "02000000" + "0080" + "0400"
    for position, byte in ((0, 2), (1, 4), (2, 1), (8, 2), (12, 3)):
        damaged = bytearray(payload)
        damaged[position] = byte
        with pytest.raises(IntegrityError):
            codec.decode(bytes(damaged), old)
    with pytest.raises(IntegrityError, match="unknown"):
        codec_named("zip")


def test_signed_zero_and_nan_payloads_count_as_changes() -> None:
    old = to_bits(torch.tensor([0.0, float("nan"), 1.0], dtype=torch.bfloat16))
    new = old.copy()
    new[0] = 0x8000
    new[1] ^= 1
    assert changed(old, new)[0].tolist() == [0, 1]
    assert changed(old, old)[0].size == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_bits_round_trip_and_finiteness(dtype: torch.dtype) -> None:
    name: Any = str(dtype).removeprefix("torch.")
    for shape in ((), (0, 3), (4, 5)):
        tensor = torch.randn(shape).to(dtype)
        assert torch.equal(from_bits(to_bits(tensor), name, shape), tensor)
        assert is_finite(to_bits(tensor), name)
    for bad in (float("inf"), float("-inf"), float("nan")):
        assert not is_finite(to_bits(torch.tensor([1.0, bad], dtype=dtype)), name)
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


@settings(max_examples=30)
@given(st.lists(st.binary(max_size=20), max_size=4))
def test_delta_shard_round_trip(payloads: list[bytes]) -> None:
    records = [Record(f"t{i}", i, 3, payload) for i, payload in enumerate(payloads)]
    data = pack_delta("raw-pairs", records)
    sizes = {f"t{i}": 10 for i in range(len(payloads))}
    found = unpack_delta(data, "raw-pairs", sizes)
    assert [(r.tensor, r.start, r.count, bytes(r.payload)) for r in found] == [
        (r.tensor, r.start, r.count, bytes(r.payload)) for r in records
    ]
    for wrong in (data[:-1], data + b"x", b"KDS2" + data[4:], data[:6]):
        with pytest.raises(IntegrityError):
            unpack_delta(wrong, "raw-pairs", sizes)
    if records:
        with pytest.raises(IntegrityError):
            unpack_delta(data, "raw-pairs", {"t0": 2})


def test_anchor_files_split_and_are_deterministic() -> None:
    tensors = {f"t{i}": torch.randn(10).bfloat16() for i in range(5)}
    files = list(anchor_files(tensors.items(), limit=45))
    assert [names for names, _ in files] == [("t0", "t1"), ("t2", "t3"), ("t4",)]
    assert files == list(anchor_files(tensors.items(), limit=45))
    for names, data in files:
        found = load(data)
        assert all(torch.equal(found[name], tensors[name]) for name in names)


def manifest(version: int = 1, **changes: Any) -> Manifest:
    parent = ManifestRef(version=version - 1, manifest="a" * 64) if version else None
    fields: dict[str, Any] = {
        "run": "r",
        "version": version,
        "parent": parent,
        "kind": "delta" if version else "anchor",
        "codec": "raw-pairs" if version else "safetensors",
        "shards": (
            Shard(digest="b" * 64, bytes=10, rank=0, tensors=() if version else ("w", "v")),
        ),
        "tensors": (
            TensorState(name="w", shape=(2, 3), dtype="bfloat16", digest="c" * 32, changed=1),
            TensorState(name="v", shape=(4,), dtype="float32", digest="d" * 32, changed=0),
        ),
        "writer": "x",
        "created": "2026-01-01T00:00:00+00:00",
        "creation": {"step": 3, "host": "h", "loss": 0.5},
    }
    return Manifest(**(fields | changes))


def test_manifest_round_trip_and_sums() -> None:
    for version in (0, 1, 7):
        made = manifest(version)
        found = Manifest.from_bytes(made.to_bytes())
        assert found == made
        assert found.ref() == made.ref()
    assert (made.values, made.changed, made.full_bytes) == (10, 1, 28)
    assert manifest_key("r", made.ref()) == f"runs/r/manifests/00000007-{made.ref().manifest}.json"


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
        (("codec",), "safetensors"),
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
    document = json.loads(manifest().to_bytes())
    target = document
    for step in path[:-1]:
        target = target[step]
    target[path[-1]] = value
    with pytest.raises(IntegrityError):
        Manifest.from_bytes(json.dumps(document).encode())
    with pytest.raises(IntegrityError):
        Manifest.from_bytes(b"{")


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
