"""What the delta codec codes, and the tables it fits to it; `tasks.weights.codec` is the format."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache

import numpy as np

from tasks.errors import PolicyError
from tasks.weights import fitting, kernels
from tasks.weights.bits import Bits, DtypeName

MAX_RANGE = 2**31 - 1
ROWS = 128 * 256
CONTEXTS = 64 * 256
TOKENS = {2: 68, 4: 136}
_POSITION_PRICE, _TOKEN_PRICE = 6.0, 5.0  # bits a table entry takes after compression, about


@dataclass(frozen=True)
class Range:
    """What both sides know of flat values [start, start + old.size) of a tensor.

    Attributes:
        old: pattern, uint16 or uint32, shape (n,), n <= `MAX_RANGE`.
        history: uint8, shape (n,).
    """

    tensor: str
    start: int
    dtype: DtypeName
    old: Bits
    history: Bits


@dataclass(frozen=True)
class Change:
    """What changed in a range.

    Attributes:
        indices: positions relative to the range, int32, strictly ascending, shape (k,).
        values: new patterns there, dtype of the range's `old`, shape (k,).
    """

    indices: Bits
    values: Bits


def check_length(old: Bits) -> None:
    """
    Raises:
        PolicyError: positions in this range would not fit 32 bits.
    """
    if old.size > MAX_RANGE:
        raise PolicyError(f"a range of {old.size} values is too long; split it at {MAX_RANGE}")


def threads() -> int:
    """Threads to code with: what this process may use."""
    return len(os.sched_getaffinity(0))


@dataclass(frozen=True)
class Model:
    """A section's tables, as written."""

    levels: Bits  # uint8 [R]
    classes: Bits  # uint16 [C]
    weights: Bits  # uint8 [n, T]

    def hazards(self, scale: int) -> Bits:
        scaled = np.clip(self.levels.astype(np.int64) + scale, 1, kernels.LEVELS - 1)
        return np.where(self.levels == 0, 0, kernels.HAZARDS[scaled]).astype(np.int32)

    def frequencies(self) -> tuple[Bits, Bits]:
        """(lows, frequencies), int64 [n, T]."""
        freqs = np.array([_frequencies(row) for row in self.weights], np.int64)
        freqs = freqs.reshape(self.weights.shape)
        return np.cumsum(freqs, 1) - freqs, freqs


def shift_sign(old: Bits) -> tuple[int, int]:
    return (7, 0x8000) if old.itemsize == 2 else (23, 0x80000000)


@dataclass(frozen=True)
class Segment:
    """A segment with its changes and how many values lie in each position context, about."""

    old: Bits
    history: Bits
    change: Change
    rows: Bits  # which contexts
    counts: Bits  # how many values there


def look_at(one: Range, change: Change, low: int, high: int, every: tuple[int, int]) -> Segment:
    """Values [low, high) of a range, looked at.

    Args:
        every: as `fitting.count_rows` takes them.
    """
    first, last = np.searchsorted(change.indices, (low, high))
    inside = Change(change.indices[first:last] - np.int32(low), change.values[first:last])
    old, history = one.old[low:high], one.history[low:high]
    counts = np.zeros(ROWS, np.int64)
    if inside.indices.size:  # nothing is coded where nothing changed
        fitting.count_rows(old, history, shift_sign(old)[0], *every, counts)
    rows = np.flatnonzero(counts)
    return Segment(old, history, inside, rows, counts[rows])


def fit(segments: Sequence[Segment], pool: ThreadPoolExecutor) -> tuple[Model, Bits]:
    """The tables for what is to be coded, and the chance of a change by position context."""
    values = np.zeros(ROWS, np.int64)
    for segment in segments:
        values[segment.rows] += segment.counts
    hits, tokens = _count_changes(segments, pool)
    chances, levels = _fit_positions(values, hits)
    classes, weights = _fit_tokens(tokens)
    return Model(levels, classes, weights), chances


def _count_changes(segments: Sequence[Segment], pool: ThreadPoolExecutor) -> tuple[Bits, Bits]:
    shift, sign = shift_sign(segments[0].old)
    width = TOKENS[segments[0].old.itemsize]

    def count(part: int) -> tuple[Bits, Bits]:
        rows, tokens = np.zeros(ROWS, np.int64), np.zeros((CONTEXTS, width), np.int32)
        for one in segments[part :: threads()]:
            indices, values = one.change.indices, one.change.values
            fitting.count_changes(one.old, one.history, indices, values, shift, sign, rows, tokens)
        return rows, tokens

    counted = list(pool.map(count, range(threads())))
    return sum(rows for rows, _ in counted), sum(tokens for _, tokens in counted)  # type: ignore[return-value]


def _fit_positions(values: Bits, hits: Bits) -> tuple[Bits, Bits]:
    """(chance, hazard level) of every position context; exponents alike share theirs."""
    chances, levels = np.zeros(ROWS), np.zeros(ROWS, np.uint8)
    values = np.maximum(values, hits)  # counted on a sample
    for start in range(0, ROWS, 256):
        used = start + np.flatnonzero(hits[start : start + 256])
        if not used.size:
            continue
        pairs = np.stack([values[used] - hits[used], hits[used]], 1)
        first = fitting.merge_neighbours(pairs, _POSITION_PRICE)
        for group in np.unique(first):
            rows = used[first == group]
            chance = hits[rows].sum() / values[rows].sum()
            chances[rows] = chance
            # Never certain: the last value of a context may be one that did not change.
            hazard = -math.log2(max(1 - chance, 2**-16)) * 2**kernels.HAZARD_BITS
            level = 1 + round(8 * math.log2(max(hazard, 8.0) / 8))
            levels[rows] = min(level, kernels.LEVELS - 1)
    return chances, levels


def scale_of(segment: Segment, chances: Bits) -> int:
    """How much likelier changes are here than elsewhere in the same contexts, in 1/8 octaves."""
    expected = float(segment.counts @ chances[segment.rows])
    if not segment.change.indices.size or not expected:
        return 0
    return max(-64, min(64, round(8 * math.log2(segment.change.indices.size / expected))))


def _fit_tokens(tokens: Bits) -> tuple[Bits, Bits]:
    """(class of every distance context, weights of every class)."""
    classes = np.zeros(CONTEXTS, "<u2")
    sums: list[Bits] = []
    for start in range(0, CONTEXTS, 256):
        used = start + np.flatnonzero(tokens[start : start + 256].any(1))
        if not used.size:
            continue
        first = fitting.merge_neighbours(tokens[used], _TOKEN_PRICE)
        for group in np.unique(first):
            rows = used[first == group]
            classes[rows] = len(sums)
            sums.append(tokens[rows].sum(0))
    weights = np.zeros((len(sums), tokens.shape[1]), np.uint8)
    for row, counts in enumerate(sums):
        weights[row] = _weights(counts)
    return classes, weights


def _weights(counts: Bits) -> Bits:
    """Weight bytes of token counts: the largest gets 112, which is 2**14."""
    with np.errstate(divide="ignore"):
        octaves = np.log2(counts / counts.max())
    return np.where(counts == 0, 0, np.clip(np.rint(112 + 8 * octaves), 1, 112)).astype(np.uint8)


@cache
def _weight_values() -> Bits:
    return np.array([0, *(math.floor(2 ** (b / 8) + 0.5) for b in range(1, 256))], np.int64)


def _frequencies(weights: Bits) -> Bits:
    values = _weight_values()[weights]
    total = 1 << kernels.TOKEN_BITS
    freqs = np.where(values > 0, np.maximum(1, values * total // max(1, int(values.sum()))), 0)
    while (over := int(freqs.sum()) - total) != 0 and freqs.any():
        freqs[int(freqs.argmax())] -= 1 if over > 0 else -1
    return freqs
