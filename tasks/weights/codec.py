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

Written format of `xor-zstd`, version 1: the same eight bytes, but for the third, which is the mode,
and then one Zstandard frame (RFC 8878) whose content is

    mode 0, sparse   n gaps, uint32 (the first position, then the distance to the one before), and
                     then n values old XOR new
    mode 1, dense    old XOR new of every value of the range

both with their bytes in planes: the lowest byte of every integer, then the next of every one, and
so on. Neighbouring weights change alike in their low bytes and not at all in the high ones: that is
what Zstandard finds. Dense where more than one value in eight changed.
"""

from __future__ import annotations

import struct
from typing import Protocol

import numpy as np
import zstandard

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

    @staticmethod
    def check(old: Bits, indices: Bits, values: Bits) -> None:
        """
        Raises:
            PolicyError: the range is too long.
            ValueError: positions and values do not fit each other or the range.
        """
        if old.size > MAX_RANGE:
            raise PolicyError(f"a range of {old.size} values is too long; split it at {MAX_RANGE}")
        if indices.shape != values.shape or values.dtype != old.dtype:
            raise ValueError(
                f"{indices.shape} positions and {values.shape} {values.dtype} values do not "
                f"describe changes of {old.dtype} values"
            )

    def encode(self, old: Bits, indices: Bits, values: Bits) -> bytes:
        self.check(old, indices, values)
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


class XorZstd:
    """Gaps and differences, or differences alone, compressed; the format is in the module's
    docstring.

    Tiny preset, mean bytes a step of a run on a 2-core AMD EPYC: 388 kB; an earlier run from
    another warm start, in raw pairs, took 2.56 MB, more than the model's own 1.43 MB.
    """

    name = "xor-zstd"

    def encode(self, old: Bits, indices: Bits, values: Bits) -> bytes:
        RawPairs.check(old, indices, values)
        different = old[indices] ^ values
        dense = indices.size > old.size // 8
        if dense:
            everywhere = np.zeros_like(old)
            everywhere[indices] = different
            body = _planes(everywhere)
        else:
            gaps = np.diff(indices, prepend=0).astype("<u4")
            body = _planes(gaps) + _planes(different)
        header = _HEADER.pack(1, old.itemsize, int(dense), indices.size)
        return header + zstandard.ZstdCompressor(level=1).compress(body)

    def decode(self, payload: bytes | memoryview, old: Bits) -> tuple[Bits, Bits]:
        if len(payload) < _HEADER.size:
            raise IntegrityError(f"an xor-zstd payload of {len(payload)} bytes has no header")
        version, itemsize, mode, count = _HEADER.unpack_from(payload)
        if version != 1 or mode not in (0, 1) or itemsize != old.itemsize or count > old.size:
            raise IntegrityError(
                f"xor-zstd version {version}, mode {mode}, {count} values of {itemsize} bytes do "
                f"not fit a range of {old.size} values of {old.itemsize} bytes"
            )
        size = old.nbytes if mode else count * (4 + itemsize)
        body = _decompress(bytes(payload[_HEADER.size :]), size)
        if mode:
            different = _unplanes(body, old.dtype)
            indices = np.flatnonzero(different).astype(np.int32)
            different = different[indices]
        else:
            gaps = _unplanes(body[: 4 * count], np.dtype("<u4"))
            indices = np.cumsum(gaps, dtype=np.int64)
            different = _unplanes(body[4 * count :], old.dtype)
            if count and (indices[-1] >= old.size or not bool((gaps[1:] > 0).all())):
                raise IntegrityError(f"xor-zstd positions leave 0..{old.size - 1}")
        if indices.size != count or not bool(different.all()):
            raise IntegrityError(f"xor-zstd says {count} values changed, it holds another number")
        return indices.astype(np.int32), old[indices] ^ different


def _planes(values: Bits) -> bytes:
    return values.view(np.uint8).reshape(-1, values.itemsize).T.tobytes()


def _unplanes(data: bytes, dtype: np.dtype) -> Bits:
    planes = np.frombuffer(data, np.uint8).reshape(dtype.itemsize, -1)
    return np.ascontiguousarray(planes.T).reshape(-1).view(dtype)


def _decompress(frame: bytes, size: int) -> bytes:
    """The content of one frame that says it has `size` bytes, has them, and ends with them."""
    try:
        said = zstandard.get_frame_parameters(frame).content_size
        whole = zstandard.ZstdDecompressor().decompressobj()
        body = whole.decompress(frame) if said == size else b""
    except zstandard.ZstdError as error:
        raise IntegrityError(f"an xor-zstd payload does not decompress: {error}") from None
    if said != size or not whole.eof or whole.unused_data or len(body) != size:
        raise IntegrityError(f"an xor-zstd payload does not hold the {size} bytes it should")
    return body


CODECS: dict[str, Codec] = {codec.name: codec for codec in (RawPairs(), XorZstd())}
DEFAULT_CODEC = XorZstd.name


def codec_named(name: str) -> Codec:
    """
    Raises:
        IntegrityError: no codec has this name (written by a newer Kindling?).
    """
    try:
        return CODECS[name]
    except KeyError:
        raise IntegrityError(f"codec {name!r} is unknown; known: {sorted(CODECS)}") from None
