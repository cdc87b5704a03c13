"""The codec's kernels compiled ahead of their first use, into numba's cache."""

from __future__ import annotations

import numpy as np

from tasks.weights.bits import DtypeName, pattern_dtype
from tasks.weights.codec import Change, Range, decode
from tasks.weights.compare import changed
from tasks.weights.history import advance, no_history
from tasks.weights.shards import pack_delta, unpack_delta

# One dtype of each pattern's size: kernels do not tell bfloat16 from float16.
_DTYPES: tuple[DtypeName, ...] = ("bfloat16", "float32")
_VALUES = 4096


def compile_kernels() -> None:
    """Publishes and follows a small delta as a run does, so that every kernel is compiled for the
    types it meets there: 16- and 32-bit patterns, int32 positions in a publisher, int64 ones in a
    reader, payloads that cannot be written to."""
    for dtype in _DTYPES:
        pattern = pattern_dtype(dtype)
        old = (np.arange(_VALUES) << 8 * pattern.itemsize - 12).astype(pattern)
        new = old ^ (np.arange(_VALUES) % 3 == 0).astype(pattern)
        change = changed(old, new)
        data = pack_delta([Range("w", 0, dtype, old, no_history(_VALUES))], [change])
        advance(no_history(_VALUES), old, change.indices, change.values)
        shard = unpack_delta(data, {"w": _VALUES})
        ranges = [Range("w", 0, dtype, old, no_history(_VALUES))]
        (found,) = decode(shard.tables, shard.blocks, ranges)
        read = Change(found.indices.astype(np.int64), found.values)
        advance(no_history(_VALUES), old, read.indices, read.values)
