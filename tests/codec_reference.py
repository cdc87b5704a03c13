"""A second decoder of the delta format, in plain Python from its written specification alone."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from decimal import ROUND_FLOOR, Decimal, getcontext
from functools import cache

getcontext().prec = 60
BLOCK = 2**22
HALF = Decimal(1) / 2


def rounded_power(scale: int, numerator: int, denominator: int) -> int:
    """floor(scale * 2**(numerator / denominator) + 1/2), exactly."""
    power = Decimal(2) ** (Decimal(numerator) / denominator)
    return int((scale * power + HALF).to_integral_value(ROUND_FLOOR))


@cache
def hazard(level: int) -> int:
    return rounded_power(8, level - 1, 8)


@cache
def table(j: int) -> int:
    return rounded_power(2**31, -j, 4096)


def survival(a: int) -> int:
    f = a % 2**24
    j = f >> 12
    return (table(j) - (((table(j) - table(j + 1)) * (f % 4096)) >> 12)) >> (a >> 24)


def frequencies(weights: bytes) -> list[int]:
    values = [rounded_power(1, b, 8) if b else 0 for b in weights]
    found = [max(1, v * 2**14 // sum(values)) if v else 0 for v in values]
    while sum(found) != 2**14:
        found[found.index(max(found))] += 1 if sum(found) < 2**14 else -1
    return found


class Coder:
    def __init__(self, words: list[int]) -> None:
        self.x = words[0] | words[1] << 32
        self.rest = words[2:]

    def slot(self, r: int) -> int:
        return self.x % 2**r

    def take(self, low: int, frequency: int, r: int) -> None:
        s = self.slot(r)
        assert low <= s < low + frequency
        self.x = frequency * (self.x >> r) + s - low
        if self.x < 2**31:
            self.x = self.x << 32 | self.rest.pop(0)


def decode_section(
    tables: bytes, blocks: bytes, ranges: list[tuple[list[int], bytes]], width: int
) -> list[list[tuple[int, int]]]:
    """[(position, new pattern)] of each range (old patterns, history bytes) of one dtype."""
    version, _, n = struct.unpack_from("<BBH", tables)
    assert version == 1
    at = 4
    tokens = 68 if width == 16 else 136
    levels = tables[at : (at := at + 128 * 256)]
    classes = struct.unpack_from(f"<{64 * 256}H", tables, at)
    at += 2 * 64 * 256
    rows = [frequencies(tables[at + i * tokens : at + (i + 1) * tokens]) for i in range(n)]
    at += n * tokens
    cuts = [
        (i, low, min(low + BLOCK, len(old)))
        for i, (old, _) in enumerate(ranges)
        for low in range(0, max(1, len(old)), BLOCK)
    ]
    groups: list[list[int]] = [[]]
    held = 0
    for number, (_, low, high) in enumerate(cuts):
        if held >= BLOCK:
            groups.append([])
            held = 0
        groups[-1].append(number)
        held += high - low
    counts = struct.unpack_from(f"<{len(cuts)}I", tables, at)
    scales = struct.unpack_from(f"<{len(cuts)}b", tables, at := at + 4 * len(cuts))
    sizes = struct.unpack_from(f"<{len(groups)}I", tables, at + len(cuts))
    found: list[list[tuple[int, int]]] = [[] for _ in ranges]
    start = 0
    for group, size in zip(groups, sizes, strict=True):
        coder = Coder(list(struct.unpack_from(f"<{size}I", blocks, start)))
        start += 4 * size
        for number in group:
            i, low, high = cuts[number]
            old, history = ranges[i][0][low:high], ranges[i][1][low:high]
            for position, value in _segment(
                coder, old, history, counts[number], scales[number], levels, classes, rows, width
            ):
                found[i].append((low + position, value))
        assert coder.x == 2**31
        assert not coder.rest
    return found


def _segment(
    coder: Coder,
    old: list[int],
    history: bytes,
    count: int,
    scale: int,
    levels: bytes,
    classes: tuple[int, ...],
    rows: list[list[int]],
    width: int,
) -> Iterator[tuple[int, int]]:
    at = a = done = 0
    while done < count:
        e = (old[at] >> (7 if width == 16 else 23)) & 255
        h = history[at]
        q = levels[(h >> 1) << 8 | e]
        before = a
        a += hazard(min(max(q + scale, 1), 201)) if q else 0
        at += 1
        slot = coder.slot(31)
        if 2**31 - survival(before) <= slot < 2**31 - survival(a):
            coder.take(2**31 - survival(before), survival(before) - survival(a), 31)
            yield at - 1, _moved(old[at - 1], h, coder, rows[classes[(h >> 2) << 8 | e]], width)
            a = 0
            done += 1
        elif a >= 2**27:
            coder.take(2**31 - survival(a), survival(a), 31)
            a = 0


def _moved(old: int, h: int, coder: Coder, row: list[int], width: int) -> int:
    low = token = 0
    while low + row[token] <= coder.slot(14):
        low += row[token]
        token += 1
    coder.take(low, row[token], 14)
    c = token
    if token >= 16:
        k = 4 + (token - 16) // 4
        raw = coder.slot(k - 2)
        coder.take(raw, 1, k - 2)
        c = (4 + (token - 16) % 4) << (k - 2) | raw
    d = c // 2 + 1 if c % 2 == 0 else -(c // 2 + 1)
    d = -d if h & 1 else d
    sign, ones = 2 ** (width - 1), 2**width - 1
    rank = (ones - old if old & sign else old + sign) + d
    return rank - sign if rank & sign else ones - rank


def advance(history: bytes, moves: dict[int, int]) -> bytes:
    """The history after a step whose signed distances are `moves`."""
    bounds = [0] + [rounded_power(2**10, 2 * level - 27, 6) for level in range(1, 64)]
    after = bytearray()
    for i, h in enumerate(history):
        if i not in moves:
            after.append(max((h & 0xFD) - 12, 0))
            continue
        level = h >> 2
        v = rounded_power(2**10, level - 13, 3) if level else 0
        v = (-v if h & 1 else v) + moves[i] * 2**10
        new = max(k for k in range(64) if bounds[k] <= abs(v) // 2)
        after.append(new << 2 | 2 | (1 if v < 0 and new else 0))
    return bytes(after)
