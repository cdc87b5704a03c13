"""New weights against the last committed ones: what changed, and whether all of it is finite.

Both are answered by one pass over the values, segment by segment on all threads, while another job
computes the tensor's digest.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from tasks.weights import kernels
from tasks.weights.bits import Bits, DtypeName, exponent_mask
from tasks.weights.digest import Piece, piece
from tasks.weights.model import Change, check_length, threads

_SEGMENT = 1 << 22


@dataclass(frozen=True)
class Compared:
    """A range after an update.

    Attributes:
        finite: whether no new value is NaN or infinite.
        piece: of the new values.
    """

    change: Change
    finite: bool
    piece: Piece


def begin(
    pool: ThreadPoolExecutor, old: Bits, new: Bits, dtype: DtypeName, start: int
) -> Callable[[], Compared]:
    """Starts a comparison; the result waits for it.

    Args:
        old, new: patterns of the same length and dtype, shape (n,); `new` must not change until
            the result is there.
        start: flat index of the first value in the full tensor.

    Raises:
        PolicyError: the range is too long.
    """
    check_length(old)
    mask = exponent_mask(dtype)
    digest = pool.submit(piece, new, start)
    lows = range(0, max(1, old.size), _SEGMENT)
    parts = [pool.submit(_find, old, new, mask, low) for low in lows]

    def result() -> Compared:
        found = [part.result() for part in parts]
        indices = np.concatenate([indices for indices, _ in found])
        finite = all(finite for _, finite in found)
        return Compared(Change(indices, new[indices]), finite, digest.result())

    return result


def changed(old: Bits, new: Bits) -> Change:
    """The positions whose bits differ, whatever the values are."""
    with ThreadPoolExecutor(threads()) as pool:
        return begin(pool, old, new, "float32" if old.itemsize == 4 else "bfloat16", 0)().change


def _find(old: Bits, new: Bits, mask: int, low: int) -> tuple[Bits, bool]:
    part = slice(low, low + _SEGMENT)
    # Room for all: the pages that are not written to cost nothing.
    found = np.empty(old[part].size + 1, np.int32)
    count, finite = kernels.find_changed(old[part], new[part], old.dtype.type(mask), found)
    return found[:count] + np.int32(low), finite
