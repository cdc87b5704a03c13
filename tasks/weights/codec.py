"""Codecs: the changed values of one tensor range as bytes, exact for every bit pattern.

A codec sees the old and the new pattern of a flat range and nothing else. The decoder holds the old
pattern too, so a codec may lean on it; `raw-pairs` does not.

Written format of `raw-pairs`, version 1 (all integers little-endian):

    offset  size      content
    0       1         format version, 1
    1       1         bytes of a value: 2 or 4
    2       2         zero
    4       4         n, the number of changed values, uint32
    8       4 n       their positions relative to the start of the range, int32, strictly ascending
    8 + 4n  2n or 4n  their new bit patterns, in the same order

A value counts as changed when its bits differ. Nothing follows the last value. A range has at most
2**31 - 1 values.
"""

from __future__ import annotations

import struct
from typing import Protocol

import numpy as np

from tasks.errors import IntegrityError, PolicyError
from tasks.weights.bits import Bits

MAX_RANGE = 2**31 - 1
_HEADER = struct.Struct("<BBHI")


class Codec(Protocol):
    """Encodes what changed in a range; stateless, so ranges may be coded in parallel."""

    name: str

    def encode(self, old: Bits, indices: Bits, values: Bits) -> bytes:
        """The changes of one range as bytes.

        Args:
            old: the range's old pattern, uint16 or uint32, shape (n,), n <= `MAX_RANGE`.
            indices: positions that changed, int64 or int32, strictly ascending, shape (k,).
            values: new patterns at these positions, dtype of `old`, shape (k,).
        """
        ...

    def decode(self, payload: bytes | memoryview, old: Bits) -> tuple[Bits, Bits]:
        """The (indices int32, values) that `encode` was given.

        Args:
            payload: what `encode` returned.
            old: the pattern that `encode` was given.

        Raises:
            IntegrityError: the payload is not one that `encode` writes for such a range.
        """
        ...


def changed(old: Bits, new: Bits) -> tuple[Bits, Bits]:
    """(indices int64, new patterns) of the positions whose bits differ, ascending.

    Args:
        old, new: patterns of the same length and dtype, shape (n,).
    """
    indices = np.flatnonzero(old != new)
    return indices, new[indices]


class RawPairs:
    """int32 positions and raw new values; the format is in the module's docstring."""

    name = "raw-pairs"

    def encode(self, old: Bits, indices: Bits, values: Bits) -> bytes:
        if old.size > MAX_RANGE:
            raise PolicyError(f"a range of {old.size} values is too long; split it at {MAX_RANGE}")
        if indices.shape != values.shape or values.dtype != old.dtype:
            raise ValueError(
                f"{indices.shape} positions and {values.shape} {values.dtype} values do not "
                f"describe changes of {old.dtype} values"
            )
        header = _HEADER.pack(1, old.itemsize, 0, indices.size)
        return header + indices.astype("<i4").tobytes() + values.tobytes()

    def decode(self, payload: bytes | memoryview, old: Bits) -> tuple[Bits, Bits]:
        if len(payload) < _HEADER.size:
            raise IntegrityError(f"a raw-pairs payload of {len(payload)} bytes has no header")
        version, itemsize, zero, count = _HEADER.unpack_from(payload)
        if version != 1 or zero:
            raise IntegrityError(f"raw-pairs format version {version} is unknown; expected 1")
        if itemsize != old.itemsize:
            raise IntegrityError(f"raw-pairs values of {itemsize} bytes, expected {old.itemsize}")
        expected = _HEADER.size + count * (4 + itemsize)
        if len(payload) != expected:
            raise IntegrityError(
                f"a raw-pairs payload of {count} changes has {len(payload)} bytes, "
                f"expected {expected}"
            )
        indices = np.frombuffer(payload, "<i4", count, _HEADER.size)
        values = np.frombuffer(payload, old.dtype, count, _HEADER.size + 4 * count)
        if count and (
            indices[0] < 0 or indices[-1] >= old.size or not bool((np.diff(indices) > 0).all())
        ):
            raise IntegrityError(f"raw-pairs positions are not ascending within 0..{old.size - 1}")
        return indices, values


CODECS: dict[str, Codec] = {codec.name: codec for codec in (RawPairs(),)}
DEFAULT_CODEC = RawPairs.name


def codec_named(name: str) -> Codec:
    """
    Raises:
        IntegrityError: no codec has this name (written by a newer Kindling?).
    """
    try:
        return CODECS[name]
    except KeyError:
        raise IntegrityError(f"codec {name!r} is unknown; known: {sorted(CODECS)}") from None
