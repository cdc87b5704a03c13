"""The inner loops that fit the codec's tables to what is to be coded.

Unlike `tasks.weights.kernels` they decide nothing about the format: what they estimate is written
into the delta. numba's cache looks at one file at a time; so these may run with stale copies of the
inlined helpers after an edit there, and would then only compress worse.
"""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np

from tasks.weights.bits import Bits
from tasks.weights.kernels import distance_code, row, token

_jit: Any = numba.njit(nogil=True, cache=True)


@_jit
def count_rows(
    old: Bits, history: Bits, shift: int, moving_every: int, still_every: int, counts: Bits
) -> None:
    """Adds how many values lie in each context, estimated from runs of 64.

    Contexts with a history hold few values each, so more runs are counted for them.

    Args:
        moving_every: one run in so many is counted for values with a history. still_every: for
            those without; a multiple of it.
    """
    for start in range(0, old.size, 64 * moving_every):
        stop = min(start + 64, old.size)
        for i in range(start, stop):
            if history[i] > 1:
                counts[row(old, history, np.uint64(i), shift)] += moving_every
        if start % (64 * still_every) == 0:
            for i in range(start, stop):
                if history[i] <= 1:
                    counts[row(old, history, np.uint64(i), shift)] += still_every


@_jit
def count_changes(
    old: Bits,
    history: Bits,
    indices: Bits,
    values: Bits,
    shift: int,
    sign: int,
    rows: Bits,
    tokens: Bits,
) -> None:
    """Adds a range's changes to the counts: `rows` by position context, `tokens` [level << 8 |
    exponent, token]."""
    for j in range(indices.size):
        i = indices[j]
        context = int(row(old, history, np.uint64(i), shift))
        rows[context] += 1
        code = distance_code(int(old[i]), int(values[j]), sign, int(history[i]) & 1)
        tokens[((context >> 9) << 8) | (context & 255), token(code)[0]] += 1


@_jit
def _cost(histogram: Bits, price: float) -> float:
    """Bits of coding what a histogram counts with a table of it, and of writing the table."""
    total = 0.0
    bits = price
    for count in histogram:
        total += count
    for count in histogram:
        if count:
            bits += count * math.log2(total / count) + price
    return bits


@_jit
def merge_neighbours(histograms: Bits, price: float) -> Bits:
    """Groups neighbouring histograms [m, symbols] while that makes the whole shorter.

    Returns the first row of each row's group, int64 [m]. Greedy: the best pair first. `price`: bits
    that one entry of a table costs.
    """
    m = histograms.shape[0]
    sums = histograms.astype(np.float64)
    first = np.arange(m)
    starts = list(range(m))
    costs = [_cost(sums[i], price) for i in range(m)]
    while len(starts) > 1:
        best, at = 0.0, -1
        for i in range(len(starts) - 1):
            joint = _cost(sums[starts[i]] + sums[starts[i + 1]], price)
            gain = costs[i] + costs[i + 1] - joint
            if gain > best:
                best, at = gain, i
        if at < 0:
            break
        sums[starts[at]] += sums[starts[at + 1]]
        costs[at] = _cost(sums[starts[at]], price)
        for i in range(m):
            if first[i] == starts[at + 1]:
                first[i] = starts[at]
        starts.pop(at + 1)
        costs.pop(at + 1)
    return first
