"""The delta codec: what a step changed in a rank's weights, near the limit of what can be known.

Input: flat ranges of tensors, for each the old bit pattern, the changed positions with their new
patterns, and a *history* byte a value (`tasks.weights.history`), which both sides derive alike from
the deltas since it began. Output: bytes, exact for every bit pattern.

The idea. An optimizer with momentum moves a weight about as far as it moved it last time, and a
bf16 value changes when the float32 master behind it crosses a rounding boundary. So whether a
value changes, and by how many units in the last place, is foretold by how fast it moved (the
history's velocity, in units in the last place a step) and by how large a unit is (the old value's
exponent). Each position is coded with the chance of its (velocity, moved last, exponent), each
distance with the distribution of its (velocity, exponent), both by one arithmetic coder (64-bit
rANS: Duda 2013, arXiv:1311.2540, in Giesen's formulation, 2014). Positions are not coded one by
one: an event says how far the *hazard* (-log2 of the chance of no change, summed over the values
passed) runs until the next change, so coding costs time a change, and passing over a value is an
addition. Figures: `python -m tests.bench.codec`.

Written format `velocity-rans`, version 1
-----------------------------------------
All integers are little-endian. A *section* holds the ranges of one dtype (bfloat16, float16,
float32, in this order; ranges keep their order inside). Ranges are cut at multiples of 2**22 values
from their start into *segments*; consecutive segments of a section form a *block*, which ends with
the segment that brings it to 2**22 values or more. With R = 128 * 256 and C = 64 * 256 a section is

    u8       format version, 1
    u8       dtype: 0, 1, 2
    u16      n, number of token classes
    u8[R]    hazard level q of every position context
    u16[C]   token class of every distance context
    u8[n,T]  token weights; T = 68 tokens for 16-bit values, 136 for 32-bit ones
    u32[s]   changed values of each segment
    i8[s]    scale of each segment
    u32[b]   words of each block

and then, outside of the compressed tables, the blocks, u32 words each.

*Contexts.* e = (old >> 7) & 255 (>> 23 for float32). The history byte h is level << 2 | moved << 1
| down. Position context: (h >> 1) << 8 | e. Distance context: (h >> 2) << 8 | e.

*Hazards.* A value's hazard is W[min(max(q + scale, 1), 201)], or 0 where q = 0, in 2**-24 bits,
with W[q] = floor(8 * 2**((q - 1) / 8) + 1/2). The survival S(a) of a sum a of hazards: with f = a
mod 2**24, j = f >> 12 and t[j] = floor(2**(31 - j / 4096) + 1/2), it is (t[j] - (((t[j] - t[j+1]) *
(f mod 4096)) >> 12)) >> (a >> 24).

*Events* of a segment: for each change, beginning with a = 0 at the value after the last one (or the
segment's first): every value adds its hazard to a. At the changed value, with a before and a'
after: low 2**31 - S(a), frequency S(a) - S(a'), of 2**31. Where a reaches 2**27 at a value that did
not change: low 2**31 - S(a), frequency S(a), of 2**31, and a = 0 again. After the last change
nothing. Each change is followed by its distance.

*Distances.* Patterns are ranked as floats: sign bit set: rank = all ones - bits, else bits + sign
bit. d = new rank - old rank, negated where h is down. Code c = 2d - 2 for d > 0, -2d - 1 for d < 0.
c < 16 is token c; else with k = floor(log2 c) token 16 + 4 (k - 4) + ((c >> (k - 2)) & 3), followed
by the low k - 2 bits of c as an event with low their value and frequency 1 of 2**(k-2). A token's
event: frequencies of its class, of 2**14: with weight bytes b, v = floor(2**(b / 8) + 1/2) for b >
0 and 0 for b = 0, frequency = max(1, floor(v * 2**14 / sum v)) for v > 0; then, until they sum to
2**14, one is taken from (or given to) the token of the largest frequency, the first of equals. low:
the sum before.

*Coder.* State x, 64 bits, in [2**31, 2**63). An event (low, frequency, of 2**r) is read by: s = x
mod 2**r lies in [low, low + frequency); x = frequency * (x >> r) + s - low; if x < 2**31: x = x <<
32 | next word. A block's first two words are the first x (low word first). After its last event x =
2**31 and no word is left.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from tasks.errors import IntegrityError
from tasks.weights import kernels
from tasks.weights.bits import Bits, DtypeName
from tasks.weights.frames import Reader
from tasks.weights.model import (
    CONTEXTS,
    ROWS,
    TOKENS,
    Change,
    Model,
    Range,
    Segment,
    check_length,
    fit,
    look_at,
    scale_of,
    shift_sign,
    threads,
)

__all__ = ["CODEC", "CODECS", "Change", "Range", "decode", "encode", "threads"]

CODEC = "velocity-rans"
CODECS = (CODEC,)
BLOCK_VALUES = 1 << 22
_VERSION = 1
_DTYPES: tuple[DtypeName, ...] = ("bfloat16", "float16", "float32")
_HEAD = np.dtype([("version", "u1"), ("dtype", "u1"), ("classes", "<u2")])
# How many values are counted, about, to estimate how many lie in each context: of those with a
# history, and a quarter of that of those without.
_COUNTED = 1 << 25


@dataclass(frozen=True)
class _Cut:
    """A segment: values [low, high) of one range of a section."""

    range: int
    low: int
    high: int


def encode(ranges: Sequence[Range], changes: Sequence[Change]) -> tuple[bytes, bytes]:
    """(tables, blocks) of the changes; see the module's docstring.

    Args:
        changes: one for each range; a range without a change is better left out.

    Raises:
        PolicyError: a range is too long.
        ValueError: a change does not fit its range.
    """
    for one, change in zip(ranges, changes, strict=True):
        _check(one, change)
    tables: list[bytes] = []
    blocks: list[bytes] = []
    with ThreadPoolExecutor(threads()) as pool:
        for dtype in _DTYPES:
            chosen = [i for i, one in enumerate(ranges) if one.dtype == dtype]
            if chosen:
                parts = _encode_section(
                    dtype, [ranges[i] for i in chosen], [changes[i] for i in chosen], pool
                )
                tables.append(parts[0])
                blocks += parts[1]
    return b"".join(tables), b"".join(blocks)


def decode(tables: bytes, blocks: bytes | memoryview, ranges: Sequence[Range]) -> list[Change]:
    """The changes that `encode` was given for these ranges.

    Raises:
        IntegrityError: the bytes are not what `encode` writes for such ranges.
    """
    found: dict[int, Change] = {}
    at = done = 0
    with ThreadPoolExecutor(threads()) as pool:
        for dtype in _DTYPES:
            chosen = [i for i, one in enumerate(ranges) if one.dtype == dtype]
            if chosen:
                section = [ranges[i] for i in chosen]
                parts, at, done = _decode_section(dtype, section, tables, at, blocks, done, pool)
                found.update(zip(chosen, parts, strict=True))
    if at != len(tables) or done != len(blocks):
        raise IntegrityError("a delta's tables or blocks are longer than its ranges ask for")
    return [found[i] for i in range(len(ranges))]


def _check(one: Range, change: Change) -> None:
    check_length(one.old)
    if change.indices.shape != change.values.shape or change.values.dtype != one.old.dtype:
        raise ValueError(
            f"{one.tensor}: {change.indices.shape} positions and {change.values.shape} "
            f"{change.values.dtype} values do not describe changes of {one.old.dtype} values"
        )
    if one.history.size != one.old.size or one.history.dtype != np.uint8:
        raise ValueError(f"{one.tensor}: the history is not one byte a value")


def _cuts(ranges: Sequence[Range]) -> list[list[_Cut]]:
    """The segments of a section, block by block."""
    blocks: list[list[_Cut]] = [[]]
    held = 0
    for at, one in enumerate(ranges):
        for low in range(0, max(one.old.size, 1), BLOCK_VALUES):
            if held >= BLOCK_VALUES:
                blocks.append([])
                held = 0
            cut = _Cut(at, low, min(low + BLOCK_VALUES, one.old.size))
            blocks[-1].append(cut)
            held += cut.high - cut.low
    return blocks


# ------------------------------------------------------------------------------ encoding


def _encode_section(
    dtype: DtypeName, ranges: list[Range], changes: list[Change], pool: ThreadPoolExecutor
) -> tuple[bytes, list[bytes]]:
    cuts = _cuts(ranges)
    moving_every = max(1, sum(one.old.size for one in ranges) // _COUNTED)
    every = (moving_every, 4 * moving_every if moving_every > 1 else 1)

    def look(block: Sequence[_Cut]) -> list[Segment]:
        return [
            look_at(ranges[cut.range], changes[cut.range], cut.low, cut.high, every)
            for cut in block
        ]

    blocks = list(pool.map(look, cuts))
    segments = [segment for block in blocks for segment in block]
    model, chances = fit(segments, pool)
    scales = [scale_of(segment, chances) for segment in segments]
    tables = model.frequencies()
    at = np.cumsum([0, *(len(block) for block in blocks)])
    coded = list(
        pool.map(
            lambda b: _encode_block(blocks[b], scales[at[b] : at[b + 1]], model, tables),
            range(len(blocks)),
        )
    )
    head = np.array([(_VERSION, _DTYPES.index(dtype), len(model.weights))], _HEAD)
    written = [
        head.tobytes(),
        model.levels.tobytes(),
        model.classes.tobytes(),
        model.weights.tobytes(),
        np.array([segment.change.indices.size for segment in segments], "<u4").tobytes(),
        np.array(scales, "i1").tobytes(),
        np.array([words.size for words in coded], "<u4").tobytes(),
    ]
    return b"".join(written), [words.tobytes() for words in coded]


def _encode_block(
    block: Sequence[Segment], scales: Sequence[int], model: Model, tables: tuple[Bits, Bits]
) -> Bits:
    changes = sum(segment.change.indices.size for segment in block)
    room = 3 * changes + changes // 2 + 256
    while True:
        events = np.empty((room, 3), np.uint32)
        count = 0
        for segment, scale in zip(block, scales, strict=True):
            count = kernels.emit(
                segment.old,
                segment.history,
                segment.change.indices,
                segment.change.values,
                *shift_sign(segment.old),
                model.hazards(scale),
                model.classes,
                *tables,
                events,
                count,
            )
            if count < 0:
                break
        if count >= 0:
            return kernels.pack(events, count)
        room *= 2  # long stretches without a change take events, too


# ------------------------------------------------------------------------------ decoding


def _decode_section(
    dtype: DtypeName,
    ranges: list[Range],
    tables: bytes,
    at: int,
    blocks: bytes | memoryview,
    done: int,
    pool: ThreadPoolExecutor,
) -> tuple[list[Change], int, int]:
    cuts = _cuts(ranges)
    flat = [cut for block in cuts for cut in block]
    reader = Reader(tables, at)
    head = reader.take(_HEAD, 1)[0]
    if head["version"] != _VERSION or head["dtype"] != _DTYPES.index(dtype):
        raise IntegrityError(
            f"a delta section of version {head['version']} and dtype {head['dtype']}; expected "
            f"version {_VERSION} of {dtype}"
        )
    itemsize = ranges[0].old.itemsize
    model = Model(
        reader.take(np.dtype("u1"), ROWS),
        reader.take(np.dtype("<u2"), CONTEXTS),
        reader.take(np.dtype("u1"), int(head["classes"]) * TOKENS[itemsize]).reshape(
            -1, TOKENS[itemsize]
        ),
    )
    counts = reader.take(np.dtype("<u4"), len(flat)).astype(np.int64)
    scales = reader.take(np.dtype("i1"), len(flat))
    words = reader.take(np.dtype("<u4"), len(cuts)).astype(np.int64)
    _check_tables(model, counts, flat)
    ends = done + 4 * np.cumsum(words)
    if int(ends[-1]) > len(blocks):
        raise IntegrityError("a delta's blocks are shorter than its tables say")
    lows_freqs = model.frequencies()
    starts = np.cumsum([0, *(len(block) for block in cuts)])

    def decode_block(b: int) -> list[Change]:
        low, high = starts[b], starts[b + 1]
        data = np.frombuffer(blocks, "<u4", int(words[b]), int(ends[b] - 4 * words[b]))
        return _decode_block(
            data, ranges, flat[low:high], counts[low:high], scales[low:high], model, lows_freqs
        )

    parts = [change for block in pool.map(decode_block, range(len(cuts))) for change in block]
    return list(_joined(ranges, flat, parts)), reader.at, int(ends[-1])


def _check_tables(model: Model, counts: Bits, cuts: Sequence[_Cut]) -> None:
    if any(int(count) > cut.high - cut.low for count, cut in zip(counts, cuts, strict=True)):
        raise IntegrityError("a delta says that more values changed than there are")
    if model.levels.max() >= kernels.LEVELS:
        raise IntegrityError("a delta's tables hold a hazard level that does not exist")
    if not counts.any():
        return
    if not len(model.weights) or model.classes.max() >= len(model.weights):
        raise IntegrityError("a delta's tables name a token class that does not exist")
    if not model.weights.any(1).all():
        raise IntegrityError("a delta's tables hold an empty token class")


def _decode_block(
    words: Bits,
    ranges: Sequence[Range],
    cuts: Sequence[_Cut],
    counts: Bits,
    scales: Bits,
    model: Model,
    tables: tuple[Bits, Bits],
) -> list[Change]:
    if words.size < 2:
        raise IntegrityError("a delta block has no coder state")
    coder = np.array([int(words[0]) | int(words[1]) << 32, 2, 0], np.uint64)
    sane = int(coder[0]) >= 1 << 31 and int(coder[0]) < 1 << 63
    found: list[Change] = []
    for cut, count, scale in zip(cuts, counts, scales, strict=True):
        old = ranges[cut.range].old[cut.low : cut.high]
        change = Change(np.empty(count, np.int32), np.empty(count, old.dtype))
        sane = sane and kernels.unpack(
            words,
            coder,
            old,
            ranges[cut.range].history[cut.low : cut.high],
            *shift_sign(old),
            model.hazards(int(scale)),
            model.classes,
            *tables,
            change.indices,
            change.values,
        )
        found.append(change)
    if not sane or int(coder[0]) != 1 << 31 or int(coder[1]) != words.size:
        raise IntegrityError(
            "a delta block does not decode against the weights and the history held here"
        )
    return found


def _joined(
    ranges: Sequence[Range], cuts: Sequence[_Cut], parts: Sequence[Change]
) -> Iterator[Change]:
    """The changes of each range from those of its segments."""
    held: list[list[Change]] = [[] for _ in ranges]
    for cut, part in zip(cuts, parts, strict=True):
        held[cut.range].append(Change(part.indices + np.int32(cut.low), part.values))
    for pieces in held:
        if len(pieces) == 1:
            yield pieces[0]
        else:
            yield Change(
                np.concatenate([piece.indices for piece in pieces]),
                np.concatenate([piece.values for piece in pieces]),
            )
