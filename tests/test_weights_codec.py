"""The delta codec: exact for every bit pattern, as specified, and safe on any bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tasks.errors import IntegrityError
from tasks.weights import codec, kernels, model
from tasks.weights.bits import Bits, to_bits
from tasks.weights.codec import Change, Range, decode, encode
from tasks.weights.compare import changed
from tasks.weights.history import advance, no_history
from tests import codec_reference as reference

pytestmark = pytest.mark.fast

SPECIAL = [0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0xFFFF, 0x7FFF, 0x0001, 0x3F80]
DTYPES = ["bfloat16", "float16", "float32"]


@st.composite
def ranges_and_changes(draw: st.DrawFn) -> tuple[list[Range], list[Change]]:
    """Ranges of any dtypes and bits under any history; nothing, everything or anything changed."""
    ranges, changes = [], []
    for number in range(draw(st.integers(0, 4))):
        dtype: Any = draw(st.sampled_from(DTYPES))
        pattern = np.dtype("<u4" if dtype == "float32" else "<u2")
        top = 2 ** (8 * pattern.itemsize) - 1
        values = st.one_of(st.sampled_from(SPECIAL), st.integers(0, top))
        old = draw(hnp.arrays(pattern, st.integers(0, 120), elements=values))
        history = draw(hnp.arrays(np.uint8, old.shape, elements=st.integers(0, 255)))
        how = draw(st.sampled_from(["same", "all", "some", "near"]))
        new = old.copy()
        if how == "all":
            new = ~old
        elif how == "some":
            new = draw(hnp.arrays(pattern, old.shape, elements=values))
        elif how == "near":
            new ^= draw(hnp.arrays(pattern, old.shape, elements=st.integers(0, 3)))
        ranges.append(Range(f"t{number}", 0, dtype, old, history))
        changes.append(changed(old, new))
    return ranges, changes


def same(found: list[Change], wanted: list[Change]) -> bool:
    return len(found) == len(wanted) and all(
        np.array_equal(f.indices, w.indices)
        and f.indices.dtype == np.int32
        and f.values.tobytes() == w.values.tobytes()
        for f, w in zip(found, wanted, strict=True)
    )


@settings(deadline=None)
@given(ranges_and_changes())
def test_exact_for_every_bit_pattern(made: tuple[list[Range], list[Change]]) -> None:
    ranges, changes = made
    assert same(decode(*encode(ranges, changes), ranges), changes)


@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_segments_and_blocks(data: st.DataObject) -> None:
    """Ranges cut into several segments, blocks of several ranges and of one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codec, "BLOCK_VALUES", data.draw(st.integers(1, 300)))
        ranges, changes = data.draw(ranges_and_changes())
        assert same(decode(*encode(ranges, changes), ranges), changes)


@settings(deadline=None, max_examples=40)
@given(ranges_and_changes())
def test_another_implementation_of_the_specification_reads_it(
    made: tuple[list[Range], list[Change]],
) -> None:
    for dtype in DTYPES:
        chosen = [i for i, one in enumerate(made[0]) if one.dtype == dtype]
        if not chosen:
            continue
        ranges, changes = [made[0][i] for i in chosen], [made[1][i] for i in chosen]
        tables, blocks = encode(ranges, changes)
        plain = [(one.old.tolist(), one.history.tobytes()) for one in ranges]
        found = reference.decode_section(tables, blocks, plain, 32 if dtype == "float32" else 16)
        assert found == [
            list(zip(c.indices.tolist(), c.values.tolist(), strict=True)) for c in changes
        ]


@settings(deadline=None, max_examples=40)
@given(
    old=hnp.arrays(np.uint16, 40, elements=st.integers(0, 0xFFFF)),
    history=hnp.arrays(np.uint8, 40, elements=st.integers(0, 255)),
    data=st.data(),
)
def test_history_is_as_specified(old: Bits, history: Bits, data: st.DataObject) -> None:
    moved = data.draw(st.sets(st.integers(0, 39)))
    indices = np.array(sorted(moved), np.int64)
    values = old[indices] ^ data.draw(
        hnp.arrays(np.uint16, indices.shape, elements=st.sampled_from([1, 2, 3, 0x8000, 0xFFFF]))
    )

    def rank(bits: int) -> int:
        return 0xFFFF - bits if bits & 0x8000 else bits + 0x8000

    moves = {int(i): rank(int(v)) - rank(int(old[i])) for i, v in zip(indices, values, strict=True)}
    wanted = reference.advance(history.tobytes(), moves)
    advance(history, old, indices, values)
    assert history.tobytes() == wanted


def test_tables_are_the_exact_powers() -> None:
    """A libm that rounds otherwise must not change the format."""
    assert kernels.HAZARDS.tolist() == [0, *map(reference.hazard, range(1, kernels.LEVELS))]
    assert kernels.SURVIVALS.tolist() == [reference.table(j) for j in range(4097)]
    assert kernels.VELOCITIES[1:].tolist() == [
        reference.rounded_power(2**10, level - 13, 3) for level in range(1, 64)
    ]
    assert kernels.THRESHOLDS[1:].tolist() == [
        reference.rounded_power(2**10, 2 * level - 27, 6) for level in range(1, 64)
    ]
    assert model._weight_values().tolist()[1:] == [
        reference.rounded_power(1, b, 8) for b in range(1, 256)
    ]


def test_survival_falls_with_every_step() -> None:
    """Or a change would have no interval: the smallest hazard still moves the survival."""
    rng = np.random.default_rng(0)
    smallest = int(kernels.HAZARDS[1])
    starts = [0, kernels.HORIZON - 1, *rng.integers(0, kernels.HORIZON, 20_000).tolist()]
    for start in starts:
        assert kernels.survival(start) > kernels.survival(start + smallest)
    largest = kernels.HORIZON + int(kernels.HAZARDS[-1])
    assert kernels.survival(largest) > 0
    limits = [1 << 31, (1 << 31) - 1, 1 << 23, *rng.integers(1 << 23, 1 << 31, 20_000).tolist()]
    for limit in limits:  # where the decoder begins to look is before the end of the event, not far
        start = kernels._before_survival(limit)
        assert start < 0 or kernels.survival(start) >= limit
        assert kernels.survival(start + 40) < limit


@settings(deadline=None)
@given(made=ranges_and_changes(), data=st.data())
def test_any_other_bytes_are_refused(
    made: tuple[list[Range], list[Change]], data: st.DataObject
) -> None:
    """Cut or longer bytes are an error; flipped bits too, or other changes inside the ranges: there
    is no redundancy to find them by, which is what the digests of objects and tensors are for."""
    ranges, changes = made
    tables, blocks = encode(ranges, changes)
    for wrong in ((tables[:-1], blocks), (tables + b"\0", blocks), (tables, blocks + b"\0\0\0\0")):
        if ranges:
            with pytest.raises(IntegrityError):
                decode(*wrong, ranges)
    if not blocks:
        return
    with pytest.raises(IntegrityError):
        decode(tables, blocks[:-4], ranges)
    parts = [bytearray(tables), bytearray(blocks)]
    part = data.draw(st.sampled_from(parts))
    part[data.draw(st.integers(0, len(part) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        found = decode(bytes(parts[0]), bytes(parts[1]), ranges)
    except IntegrityError:
        return
    for one, change in zip(ranges, found, strict=True):
        assert change.indices.size == 0 or change.indices.max() < one.old.size
        assert change.indices.shape == change.values.shape


def test_another_history_is_noticed() -> None:
    """A reader that lost a step does not decode something else unnoticed."""
    rng = np.random.default_rng(1)
    old = to_bits(torch.from_numpy(rng.normal(0, 0.02, 50_000)).to(torch.bfloat16)).copy()
    history = no_history(old.size)
    indices = np.flatnonzero(rng.random(old.size) < 0.03).astype(np.int32)
    first = Change(indices, old[indices] ^ 1)
    advance(history, old, first.indices, first.values)
    old[first.indices] = first.values
    second = Change(indices, old[indices] ^ 3)
    coded = encode([Range("w", 0, "bfloat16", old, history)], [second])
    assert same(decode(*coded, [Range("w", 0, "bfloat16", old, history)]), [second])
    with pytest.raises(IntegrityError):
        decode(*coded, [Range("w", 0, "bfloat16", old, no_history(old.size))])


def test_what_is_foretold_costs_little() -> None:
    """Weights that go on as before take a fraction of what they took without a past."""
    rng = np.random.default_rng(2)
    old = to_bits(torch.from_numpy(rng.normal(0, 0.02, 200_000)).to(torch.bfloat16)).copy()
    history = no_history(old.size)
    indices = np.flatnonzero(rng.random(old.size) < 0.02).astype(np.int32)
    sizes: list[int] = []
    for _ in range(4):
        change = Change(indices, old[indices] + np.uint16(2))
        sizes.append(len(encode([Range("w", 0, "bfloat16", old, history)], [change])[1]))
        advance(history, old, change.indices, change.values)
        old[change.indices] = change.values
    assert sizes[1] < sizes[0] / 20


def test_a_change_that_does_not_fit_is_refused() -> None:
    old = np.zeros(4, "<u2")
    one = Range("w", 0, "bfloat16", old, no_history(4))
    with pytest.raises(ValueError, match="do not describe"):
        encode([one], [Change(np.array([1], np.int32), np.zeros(2, "<u2"))])
    with pytest.raises(ValueError, match="one byte a value"):
        encode([Range("w", 0, "bfloat16", old, no_history(3))], [changed(old, old)])


def test_signed_zero_and_nan_payloads_count_as_changes() -> None:
    old = to_bits(torch.tensor([0.0, float("nan"), 1.0], dtype=torch.bfloat16))
    new = old.copy()
    new[0] = 0x8000
    new[1] ^= 1
    assert changed(old, new).indices.tolist() == [0, 1]
    assert changed(old, old).indices.size == 0
