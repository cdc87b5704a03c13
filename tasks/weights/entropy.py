"""The information in a delta, given what its receiver knows without any history: a yardstick.

A receiver holds every old value, so it can class positions by the old value's exponent: small
weights change more often, and by more units in the last place, than large ones. What it cannot know
is then, with for each exponent e

    n_e      values, over all tensors
    k_e      values that changed
    c_e,d    changed values that moved by d units in the last place: d = new rank - old rank, with
             its sign, in the order of the floats (-0.0 and 0.0 are neighbours)

    positions   sum over e of  n_e H(k_e / n_e),  H(p) = -p log2 p - (1 - p) log2(1 - p)
    distances   sum over e, d of  c_e,d log2(k_e / c_e,d)

`exponent_limit` is their sum: the empirical conditional entropy, in bits. No code that looks at the
exponent alone takes less, and it would have to send the counts as well. One that remembers how
values moved before (`tasks.weights.codec`) may.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from tasks.weights.bits import Bits, DtypeName
from tasks.weights.codec import Change

# Where a pattern's exponent lies: bits below it, and its mask. (The codec takes bits 7 to 14 of a
# float16 as well: five of exponent and three of fraction.)
_EXPONENTS: dict[DtypeName, tuple[int, int]] = {
    "bfloat16": (7, 0xFF),
    "float16": (10, 0x1F),
    "float32": (23, 0xFF),
}
_CHUNK = 1 << 22  # values counted at once: bounds the temporaries
_DISTANCE_BITS = 34  # a distance of 32-bit patterns lies strictly inside +-2**32


def exponent_limit(pairs: Iterable[tuple[Bits, Change]], dtype: DtypeName) -> float:
    """Bits that changes take at least, given each old value's exponent; see the module.

    Args:
        pairs: for each tensor (or range) of one dtype the old flat pattern, uint16 or uint32, shape
            (n,), and what changed in it; those without a change count, too: their values are among
            those that could have changed. Taken one at a time; what is kept of each are counts.
        dtype: of all of them; of a mixed model, add the limits of its dtypes.

    Returns:
        Bits for all changes together; 0.0 where nothing changed.
    """
    shift, mask = _EXPONENTS[dtype]
    values = np.zeros(mask + 1, np.int64)
    keys, counts = np.empty(0, np.int64), np.empty(0, np.int64)
    for old, change in pairs:
        for at in range(0, old.size, _CHUNK):
            exponents = (old[at : at + _CHUNK] >> shift) & mask
            values += np.bincount(exponents, minlength=mask + 1)
        for at in range(0, change.indices.size, _CHUNK):
            before = old[change.indices[at : at + _CHUNK]]
            found = _keys(before, change.values[at : at + _CHUNK], shift, mask)
            keys, counts = _merged(keys, counts, *np.unique(found, return_counts=True))
    exponents = keys >> _DISTANCE_BITS
    changed = np.zeros(mask + 1, np.int64)
    np.add.at(changed, exponents, counts)
    positions = _surprise(changed, values) + _surprise(values - changed, values)
    return positions + _surprise(counts, changed[exponents])


def _keys(old: Bits, new: Bits, shift: int, mask: int) -> Bits:
    """Exponent << `_DISTANCE_BITS` | distance, shifted to be positive, int64, of each change."""
    exponents = ((old >> shift) & mask).astype(np.int64)
    return (exponents << _DISTANCE_BITS) + _ranks(new) - _ranks(old) + (1 << _DISTANCE_BITS - 1)


def _ranks(bits: Bits) -> Bits:
    """The place of each pattern in the order of the floats, int64: neighbours differ by one."""
    sign = 1 << (8 * bits.itemsize - 1)
    wide = bits.astype(np.int64)
    return np.where(wide & sign, 2 * sign - 1 - wide, wide | sign)


def _merged(keys: Bits, counts: Bits, more: Bits, more_counts: Bits) -> tuple[Bits, Bits]:
    """Both histograms as one, keys ascending."""
    both, place = np.unique(np.concatenate([keys, more]), return_inverse=True)
    total = np.zeros(both.size, np.int64)
    np.add.at(total, place, np.concatenate([counts, more_counts]))
    return both, total


def _surprise(part: Bits, whole: Bits) -> float:
    """Sum of part * log2(whole / part), in bits; an empty part has none."""
    some = part > 0
    return float(np.sum(part[some] * np.log2(whole[some] / part[some])))
