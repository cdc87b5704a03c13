"""Digest of a tensor's bits, computable from any split of it.

Definition: cut the flat little-endian bit pattern into blocks of `BLOCK_VALUES` values (the last
one may be shorter, an empty tensor has none); the tensor's digest is the XXH3-128 of the
concatenated XXH3-128 digests (16 bytes each, canonical big-endian form) of the blocks in order, as
32 hexadecimal digits. Shape, dtype and name are not part of it: the manifest holds them.

A holder of the flat range [start, start + count) hashes the blocks that lie wholly inside and hands
over the bytes of its two ragged edges, less than two blocks; `combine` joins the pieces. So the
digest does not depend on the number of ranks, and 6 GB are never gathered to hash them. XXH3 finds
accidents at the speed of memory and is no protection against a forger: objects are named, and
manifests linked, by BLAKE3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from tasks.errors import IntegrityError
from tasks.weights.bits import Bits

BLOCK_VALUES = 16_384
_DIGEST_BYTES = 16


@dataclass(frozen=True)
class Piece:
    """What a holder of values [start, start + count) of a tensor knows about its digest.

    Attributes:
        head: bytes before the first block boundary inside the range (all of them where there is
            no whole block).
        blocks: digests of the whole blocks inside the range, 16 bytes each.
        tail: bytes after the last boundary inside the range.
    """

    start: int
    count: int
    itemsize: int
    head: bytes
    blocks: bytes
    tail: bytes


def piece(bits: Bits, start: int) -> Piece:
    """The piece of flat values `bits` (uint16 or uint32), which begin at index `start`."""
    bits = bits.reshape(-1)
    stop = start + bits.size
    first = -(-start // BLOCK_VALUES) * BLOCK_VALUES
    last = stop // BLOCK_VALUES * BLOCK_VALUES
    if first >= last:  # no whole block inside
        return Piece(start, bits.size, bits.itemsize, bits.tobytes(), b"", b"")
    return Piece(
        start,
        bits.size,
        bits.itemsize,
        bits[: first - start].tobytes(),
        _block_digests(bits[first - start : last - start]),
        bits[last - start :].tobytes(),
    )


def _block_digests(bits: Bits) -> bytes:
    view = bits.data.cast("B") if bits.size else memoryview(b"")
    step = BLOCK_VALUES * bits.itemsize
    return b"".join(
        xxhash.xxh3_128_digest(view[at : at + step]) for at in range(0, len(view), step)
    )


def tensor_digest(bits: Bits) -> str:
    """The digest of a whole tensor from its pattern (uint16 or uint32, contiguous)."""
    return xxhash.xxh3_128_hexdigest(_block_digests(bits.reshape(-1)))


def combine(pieces: Sequence[Piece], total: int) -> str:
    """The digest of a tensor of `total` values from pieces in any order; empty ones are ignored.

    Raises:
        IntegrityError: the pieces overlap, leave a gap, or differ in the size of a value.
    """
    ordered = sorted((p for p in pieces if p.count), key=lambda p: p.start)
    if len({p.itemsize for p in ordered}) > 1:
        raise IntegrityError("pieces of one tensor have values of different sizes")
    outer = xxhash.xxh3_128()
    ragged = b""
    at = 0
    for part in ordered:
        if part.start != at:
            what = "overlap" if part.start < at else "leave a gap"
            raise IntegrityError(
                f"pieces {what}: one begins at value {part.start}, expected {at} of {total}"
            )
        _check_sizes(part)
        at += part.count
        ragged = _flush(outer, ragged + part.head, part.itemsize)
        if part.blocks:
            if ragged:
                raise IntegrityError(f"piece at value {part.start} begins inside a block")
            outer.update(part.blocks)
            ragged = part.tail
    if at != total:
        raise IntegrityError(f"pieces end at value {at}, expected {total}")
    if ragged:
        outer.update(xxhash.xxh3_128_digest(ragged))
    return outer.hexdigest()


def _flush(outer: xxhash.xxh3_128, ragged: bytes, itemsize: int) -> bytes:
    """Hashes the whole blocks at the front of `ragged`; returns the rest."""
    step = BLOCK_VALUES * itemsize
    whole = len(ragged) // step * step
    for at in range(0, whole, step):
        outer.update(xxhash.xxh3_128_digest(ragged[at : at + step]))
    return ragged[whole:]


def _check_sizes(part: Piece) -> None:
    blocks, rest = divmod(len(part.blocks), _DIGEST_BYTES)
    values, odd = divmod(len(part.head) + len(part.tail), part.itemsize)
    if rest or odd or blocks * BLOCK_VALUES + values != part.count:
        raise IntegrityError(f"piece at value {part.start} does not hold its {part.count} values")
