"""The two kinds of objects that hold weights: delta shards and anchor files.

A delta shard holds what changed in one rank's ranges. Written format, version 2 (little-endian):

    offset   size  content
    0        4     b"KDS2": format and version
    4        4     h, bytes of the frame, uint32
    8        h     one Zstandard frame: j, uint32; j bytes of UTF-8 JSON {"ranges": [[tensor, start,
                   count], ...]}; then the codec's tables for these ranges
    8 + h          the codec's blocks

Ranges without a change are left out. An anchor file is a plain safetensors file in Hugging Face
naming (metadata {"format": "pt"}), readable by safetensors alone: whole tensors, never a rank's
rows, so that two trainers of any sizes write the same bytes and the store keeps them once.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch
import zstandard
from safetensors import SafetensorError, safe_open

from tasks.errors import IntegrityError
from tasks.weights import codec
from tasks.weights.bits import Bits, dtype_name, to_bits
from tasks.weights.frames import unpacked

ANCHOR_FILE_BYTES = 10**9  # of tensors in one anchor object; a larger tensor is alone in its file
_MAGIC = b"KDS2"
_PREFIX = struct.Struct("<4sI")
_COUNT = struct.Struct("<I")
_MAX_FRAME = 1 << 30  # of a shard's tables: what a damaged frame may make us allocate


@dataclass(frozen=True)
class Place:
    """Flat values [start, start + count) of a tensor."""

    tensor: str
    start: int
    count: int


@dataclass(frozen=True)
class DeltaShard:
    """A shard taken apart; `codec.decode(tables, blocks, ranges)` of its places is the rest."""

    places: tuple[Place, ...]
    tables: bytes
    blocks: memoryview


def pack_delta(ranges: Sequence[codec.Range], changes: Sequence[codec.Change]) -> bytes:
    """The bytes of a delta shard; see `codec.encode`."""
    tables, blocks = codec.encode(ranges, changes)
    places = [[one.tensor, one.start, one.old.size] for one in ranges]
    text = json.dumps({"ranges": places}, separators=(",", ":")).encode()
    frame = zstandard.ZstdCompressor(level=15).compress(_COUNT.pack(len(text)) + text + tables)
    return b"".join([_PREFIX.pack(_MAGIC, len(frame)), frame, blocks])


def unpack_delta(data: bytes, sizes: Mapping[str, int]) -> DeltaShard:
    """Takes a delta shard apart.

    Args:
        sizes: number of values of each tensor of the manifest.

    Raises:
        IntegrityError: not a delta shard, or ranges that do not fit the tensors.
    """
    if len(data) < _PREFIX.size:
        raise IntegrityError(f"a delta shard of {len(data)} bytes has no header")
    magic, length = _PREFIX.unpack_from(data)
    body = _PREFIX.size + length
    if magic != _MAGIC or body > len(data):
        raise IntegrityError(f"not a delta shard of a known version: it begins with {magic!r}")
    content = unpacked(data[_PREFIX.size : body], _MAX_FRAME, "delta shard's tables")
    try:
        (size,) = _COUNT.unpack_from(content)
        items = json.loads(content[_COUNT.size : _COUNT.size + size])["ranges"]
        places = tuple(_place(item, sizes) for item in items)
    except (KeyError, TypeError, ValueError, struct.error) as error:
        raise IntegrityError(f"a delta shard's header is not valid: {error!r}") from None
    return DeltaShard(places, content[_COUNT.size + size :], memoryview(data)[body:])


def _place(item: object, sizes: Mapping[str, int]) -> Place:
    if not isinstance(item, list) or len(item) != 3:
        raise IntegrityError(f"a delta shard's range {item!r} is not [tensor, start, count]")
    tensor, start, count = item
    if type(start) is not int or type(count) is not int or start < 0 or count < 0:
        raise IntegrityError(f"a delta shard's range {item!r} is not of natural numbers")
    if start + count > sizes[tensor]:
        raise IntegrityError(f"a delta shard's range of {tensor} lies outside the tensor")
    return Place(tensor, start, count)


def anchor_files(
    tensors: Iterable[tuple[str, torch.Tensor]], limit: int = ANCHOR_FILE_BYTES
) -> Iterator[tuple[tuple[str, ...], bytes]]:
    """Safetensors files of about `limit` bytes: (names in order, the file's bytes).

    Streams: holds the tensors of one file at a time. The same tensors in the same order always
    give the same bytes.
    """
    batch: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in tensors:
        if batch and size + tensor.nbytes > limit:
            yield tuple(batch), _serialise(batch)
            batch, size = {}, 0
        batch[name] = tensor.detach().to("cpu").contiguous()
        size += tensor.nbytes
    if batch:
        yield tuple(batch), _serialise(batch)


def _serialise(batch: dict[str, torch.Tensor]) -> bytes:
    return safetensors.torch.save(batch, metadata={"format": "pt"})


def read_anchor(path: Path) -> Iterator[tuple[str, str, tuple[int, ...], Bits]]:
    """(name, dtype, shape, a copy of the flat pattern) of each tensor of a safetensors file.

    Raises:
        IntegrityError: not a safetensors file.
    """
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                tensor = file.get_tensor(name)
                yield name, dtype_name(tensor.dtype), tuple(tensor.shape), to_bits(tensor).copy()
    except SafetensorError as error:
        raise IntegrityError(f"{path.name} is not a safetensors file: {error}") from error
