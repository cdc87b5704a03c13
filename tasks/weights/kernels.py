"""The inner loops of the delta codec: integers only, so that every machine writes the same bytes.

`tasks.weights.codec` says what they compute and why. They are compiled by numba on first use (kept
in its cache folder) and run without the GIL: blocks are coded in parallel by threads. None checks
what it is given, except that a decoder stays inside its buffers whatever the payload says.

Fixed point. A *hazard* is -log2(1 - p) of a value's chance p of having changed, in units of 2**-24
bit; a *survival* is 2**-hazard in units of 2**-31, from a table of 4,096 steps an octave with
linear interpolation.
"""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np

from tasks.weights.bits import Bits

HAZARD_BITS = 24
SURVIVAL_BITS = 31
HORIZON = 8 << HAZARD_BITS  # a stretch less likely than 1/256 is coded as "none here", then left
LEVELS = 202  # of hazard: 0 is "never", q > 0 is 8 * 2**((q - 1) / 8) units
TOKEN_BITS = 14  # the frequencies of a class's tokens sum to 2**14
DIRECT = 16  # distance codes below have a token of their own
STEP = 12  # of the history byte, for one octave: three levels

HAZARDS: Bits = np.array(
    [0, *(math.floor(8 * 2 ** ((q - 1) / 8) + 0.5) for q in range(1, LEVELS))], np.int64
)
SURVIVALS: Bits = np.array(
    [math.floor(2 ** (SURVIVAL_BITS - j / 4096) + 0.5) for j in range(4097)], np.int64
)
# Velocity of a level, and the smallest one that belongs to it, in 2**-10 units in the last place.
VELOCITIES: Bits = np.array(
    [0, *(math.floor(2 ** (10 + (level - 13) / 3) + 0.5) for level in range(1, 64))], np.int64
)
THRESHOLDS: Bits = np.array(
    [0, *(math.floor(2 ** (10 + (level - 13.5) / 3) + 0.5) for level in range(1, 64))], np.int64
)

_CHUNK = 16  # values looked up at once; measured against 8, 32 and 64
_ONE = 1 << SURVIVAL_BITS
_FRACTION = (1 << HAZARD_BITS) - 1
_LOW = np.uint64(1 << 31)  # the coder's state stays in [2**31, 2**63)
_WORD = np.uint64(32)
_jit: Any = numba.njit(nogil=True, cache=True)
_inline: Any = numba.njit(nogil=True, cache=True, inline="always")

# ------------------------------------------------------------------------------ probabilities


@_jit
def survival(hazard: int) -> int:
    """2**31 * 2**(-hazard / 2**24), rounded down."""
    fraction = hazard & _FRACTION
    j = fraction >> 12
    drop = (SURVIVALS[j] - SURVIVALS[j + 1]) * (fraction & 4095)
    return (SURVIVALS[j] - (drop >> 12)) >> (hazard >> HAZARD_BITS)


@_inline
def _before_survival(limit: int) -> int:
    """A hazard whose survival is at least `limit`, just before it gets smaller, 1 <= limit <=
    2**31."""
    # Where to begin to look: the interpolation is off by less than a unit, and a unit at the
    # horizon moves a survival by 1/3. Integers decide.
    return int((SURVIVAL_BITS - math.log2(limit)) * (1 << HAZARD_BITS)) - 16


@_inline
def row(old: Bits, history: Bits, at: Any, shift: int) -> Any:
    """A value's position context: velocity level, whether it moved last, exponent.

    Unsigned, as all indices of the hot loops: numba would look for negative ones otherwise.
    """
    exponent = (np.uint64(old[at]) >> np.uint64(shift)) & np.uint64(255)
    return ((np.uint64(history[at]) >> np.uint64(1)) << np.uint64(8)) | exponent


@_inline
def _look_up(
    old: Bits, history: Bits, start: int, count: int, shift: int, hazards: Bits, chunk: Bits
) -> int:
    """The hazards of `count` values from `start` on, into `chunk`; their sum."""
    total = 0
    at = np.uint64(start)
    if count < _CHUNK:
        for k in range(count):
            chunk[k] = hazards[row(old, history, at + np.uint64(k), shift)]
            total += chunk[k]
        return total
    for k in range(_CHUNK):  # a fixed number: the compiler unrolls it
        chunk[k] = hazards[row(old, history, at + np.uint64(k), shift)]
    for k in range(_CHUNK):
        total += chunk[k]
    return total


@_inline
def _ordered(bits: int, sign: int) -> int:
    """The rank of a pattern in the order of the floats: neighbours differ by one."""
    if bits & sign:
        return (sign << 1) - 1 - bits
    return bits | sign


@_inline
def _unordered(rank: int, sign: int) -> int:
    if rank & sign:
        return rank ^ sign
    return (sign << 1) - 1 - rank


@_inline
def distance_code(old: int, new: int, sign: int, down: int) -> int:
    """Distance in units in the last place, not 0, as a code: small and expected ones first."""
    distance = _ordered(new, sign) - _ordered(old, sign)
    if down:
        distance = -distance
    if distance > 0:
        return 2 * distance - 2
    return -2 * distance - 1


@_inline
def token(code: int) -> tuple[int, int]:
    """(token, raw bits that follow) of a distance code."""
    if code < DIRECT:
        return code, 0
    top = 4
    while code >> (top + 1):
        top += 1
    return DIRECT + (top - 4) * 4 + ((code >> (top - 2)) & 3), top - 2


# ------------------------------------------------------------------------------ looking


@_jit
def find_changed(old: Bits, new: Bits, mask: Any, found: Bits) -> tuple[int, bool]:
    """Writes the positions whose bits differ, ascending; how many, and whether `new` is finite.

    Args:
        mask: the exponent's bits: all of them set in a NaN or an infinity; of the patterns' dtype.
        found: int32, with one place more than there are values.
    """
    count = 0
    odd = False
    whole = old.size - old.size % _CHUNK
    for start in range(0, whole, _CHUNK):
        differ = False
        for i in range(start, start + _CHUNK):
            differ |= old[i] != new[i]
            odd |= (new[i] & mask) == mask
        if differ:
            for i in range(start, start + _CHUNK):
                found[count] = i
                count += old[i] != new[i]
    for i in range(whole, old.size):
        found[count] = i
        count += old[i] != new[i]
        odd |= (new[i] & mask) == mask
    return count, not odd


@_jit
def advance(history: Bits, old: Bits, indices: Bits, values: Bits, sign: int) -> None:
    """The history after a step, in place: velocity <- (velocity + distance) / 2 for every value."""
    moved = np.empty(indices.size, np.uint8)
    for j in range(indices.size):
        i = indices[j]
        velocity = VELOCITIES[history[i] >> 2]
        if history[i] & 1:
            velocity = -velocity
        distance = _ordered(int(values[j]), sign) - _ordered(int(old[i]), sign)
        velocity += distance << 10
        down = 0
        if velocity < 0:
            velocity, down = -velocity, 1
        velocity >>= 1
        low, high = 0, 63
        while low < high:
            middle = (low + high + 1) >> 1
            if velocity >= THRESHOLDS[middle]:
                low = middle
            else:
                high = middle - 1
        moved[j] = (low << 2) | 2 | (down if low else 0)
    for i in range(history.size):
        history[i] = max(history[i] & 0xFD, STEP) - STEP
    for j in range(indices.size):
        history[indices[j]] = moved[j]


# ------------------------------------------------------------------------------ coding


@_jit
def emit(
    old: Bits,
    history: Bits,
    indices: Bits,
    values: Bits,
    shift: int,
    sign: int,
    hazards: Bits,
    classes: Bits,
    lows: Bits,
    freqs: Bits,
    events: Bits,
    count: int,
) -> int:
    """Appends the events of one segment; how many there are then, or -1 where they do not fit.

    Args:
        indices: positions inside the segment, ascending; each has a hazard above 0.
        hazards: int64 by position context. classes: by level << 8 | exponent.
        lows, freqs: of the tokens, [class, token].
        events: uint32 [n, 3], each (low, frequency, bits of the total).
    """
    if not indices.size:
        return count
    chunk = np.empty(_CHUNK, np.int32)
    j = acc = 0
    target = int(indices[0])
    for start in range(0, old.size, _CHUNK):
        length = min(_CHUNK, old.size - start)
        total = _look_up(old, history, start, length, shift, hazards, chunk)
        if target >= start + length and acc + total < HORIZON:
            acc += total
            continue
        if count + 3 * _CHUNK > events.shape[0]:
            return -1
        for k in range(length):
            before = acc
            acc += chunk[k]
            if start + k == target:
                events[count, 0] = _ONE - survival(before)
                events[count, 1] = survival(before) - survival(acc)
                events[count, 2] = SURVIVAL_BITS
                down = int(history[target]) & 1
                code = distance_code(int(old[target]), int(values[j]), sign, down)
                symbol, raw = token(code)
                context = int(row(old, history, np.uint64(target), shift))
                kind = classes[((context >> 9) << 8) | (context & 255)]
                events[count + 1, 0] = lows[kind, symbol]
                events[count + 1, 1] = freqs[kind, symbol]
                events[count + 1, 2] = TOKEN_BITS
                count += 2
                if raw:
                    events[count, 0] = code & ((1 << raw) - 1)
                    events[count, 1] = 1
                    events[count, 2] = raw
                    count += 1
                acc = 0
                j += 1
                if j == indices.size:
                    return count
                target = int(indices[j])
            elif acc >= HORIZON:
                events[count, 0] = _ONE - survival(acc)
                events[count, 1] = survival(acc)
                events[count, 2] = SURVIVAL_BITS
                count += 1
                acc = 0
    return count


@_jit
def pack(events: Bits, count: int) -> Bits:
    """The block of these events, uint32 words: the coder's state (low word first), then what it
    gave off, in the order the decoder takes it."""
    words = np.empty(count + 2, np.uint32)
    at = words.size
    state = _LOW
    for number in range(count - 1, -1, -1):
        low = np.uint64(events[number, 0])
        frequency = np.uint64(events[number, 1])
        bits = np.uint64(events[number, 2])
        # frequency << (63 - bits) overflows nothing: frequency <= 2**bits.
        if state >= frequency << (np.uint64(63) - bits):
            at -= 1
            words[at] = np.uint32(state & np.uint64(0xFFFFFFFF))
            state >>= _WORD
        state = ((state // frequency) << bits) + state % frequency + low
    at -= 1
    words[at] = np.uint32(state >> _WORD)
    at -= 1
    words[at] = np.uint32(state & np.uint64(0xFFFFFFFF))
    return words[at:].copy()


@_inline
def _take(coder: Bits, words: Bits, low: int, frequency: int, bits: int) -> None:
    """Moves the coder past an event; coder is uint64 (state, next word, error)."""
    mask = (np.uint64(1) << np.uint64(bits)) - np.uint64(1)
    state = coder[0]
    state = np.uint64(frequency) * (state >> np.uint64(bits)) + (state & mask) - np.uint64(low)
    if state < _LOW:
        if coder[1] < np.uint64(words.size):
            state = (state << _WORD) | np.uint64(words[int(coder[1])])
            coder[1] += np.uint64(1)
        else:
            coder[2] = np.uint64(1)
    coder[0] = state


@_inline
def _slot(coder: Bits, bits: int) -> int:
    return int(coder[0] & ((np.uint64(1) << np.uint64(bits)) - np.uint64(1)))


@_inline
def _take_code(coder: Bits, words: Bits, lows: Bits, freqs: Bits, kind: int) -> int:
    """Reads a distance code."""
    slot = _slot(coder, TOKEN_BITS)
    token = 0
    while lows[kind, token] + freqs[kind, token] <= slot:
        token += 1
    _take(coder, words, lows[kind, token], freqs[kind, token], TOKEN_BITS)
    if token < DIRECT:
        return token
    raw = 2 + (token - DIRECT) // 4
    rest = _slot(coder, raw)
    _take(coder, words, rest, 1, raw)
    return ((4 | ((token - DIRECT) & 3)) << raw) | rest


@_jit
def unpack(
    words: Bits,
    coder: Bits,
    old: Bits,
    history: Bits,
    shift: int,
    sign: int,
    hazards: Bits,
    classes: Bits,
    lows: Bits,
    freqs: Bits,
    indices: Bits,
    values: Bits,
) -> bool:
    """Decodes one segment into `indices` (int32) and `values`; whether it made sense.

    Args:
        coder: uint64 (state, next word, 0), carried from segment to segment of a block.
    """
    if not indices.size:
        return True
    chunk = np.empty(_CHUNK, np.int32)
    j = acc = 0
    limit = _ONE - _slot(coder, SURVIVAL_BITS)
    stop = min(_before_survival(limit), HORIZON)
    for start in range(0, old.size, _CHUNK):
        length = min(_CHUNK, old.size - start)
        total = _look_up(old, history, start, length, shift, hazards, chunk)
        if acc + total < stop:
            acc += total
            continue
        for k in range(length):
            before = acc
            acc += chunk[k]
            if acc < stop or acc == before:
                continue
            left = survival(acc)
            if left < limit:  # the event ends here: a change
                until = survival(before)
                _take(coder, words, _ONE - until, until - left, SURVIVAL_BITS)
                i = start + k
                context = int(row(old, history, np.uint64(i), shift))
                kind = classes[((context >> 9) << 8) | (context & 255)]
                code = _take_code(coder, words, lows, freqs, kind)
                distance = (code >> 1) + 1
                if (code & 1) != (int(history[i]) & 1):
                    distance = -distance
                rank = _ordered(int(old[i]), sign) + distance
                if coder[2] or rank < 0 or rank >= sign << 1:
                    return False
                indices[j] = i
                values[j] = _unordered(rank, sign)
                j += 1
                if j == indices.size:
                    return True
            elif acc >= HORIZON:
                _take(coder, words, _ONE - left, left, SURVIVAL_BITS)
                if coder[2]:
                    return False
            else:
                continue
            acc = 0
            limit = _ONE - _slot(coder, SURVIVAL_BITS)
            stop = min(_before_survival(limit), HORIZON)
    return False
