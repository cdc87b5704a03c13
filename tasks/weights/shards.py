"""The two kinds of objects that hold weights: delta shards and anchor files.

A delta shard holds what changed in one rank's ranges. Written format, version 1 (little-endian):

    offset   size  content
    0        4     b"KDS1": format and version
    4        4     h, bytes of the header, uint32
    8        h     UTF-8 JSON: {"codec": name, "records": [{"tensor", "start", "count", "offset",
                   "bytes"}, ...]}, offsets from the end of the header, without holes
    8 + h          the records' payloads, each by that codec for flat values
                   [start, start + count) of that tensor

Ranges without a change have no record. An anchor file is a plain safetensors file in Hugging Face
naming (metadata {"format": "pt"}), readable by safetensors alone: whole tensors, never a rank's
rows, so that two trainers of any sizes write the same bytes and the store keeps them once.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open

from tasks.errors import IntegrityError
from tasks.weights.bits import Bits, dtype_name, to_bits
from tasks.weights.codec import codec_named

ANCHOR_FILE_BYTES = 10**9  # of tensors in one anchor object; a larger tensor is alone in its file
_MAGIC = b"KDS1"
_PREFIX = struct.Struct("<4sI")


@dataclass(frozen=True)
class Record:
    """The coded changes of flat values [start, start + count) of a tensor."""

    tensor: str
    start: int
    count: int
    payload: bytes | memoryview


def pack_delta(codec: str, records: Iterable[Record]) -> bytes:
    """The bytes of a delta shard."""
    header: list[dict[str, Any]] = []
    payloads: list[bytes | memoryview] = []
    offset = 0
    for record in records:
        header.append(
            {
                "tensor": record.tensor,
                "start": record.start,
                "count": record.count,
                "offset": offset,
                "bytes": len(record.payload),
            }
        )
        payloads.append(record.payload)
        offset += len(record.payload)
    text = json.dumps({"codec": codec, "records": header}, separators=(",", ":")).encode()
    return b"".join([_PREFIX.pack(_MAGIC, len(text)), text, *payloads])


def unpack_delta(data: bytes, codec: str, sizes: Mapping[str, int]) -> list[Record]:
    """The records of a delta shard, their payloads as views into `data`.

    Args:
        codec: what the manifest names.
        sizes: number of values of each tensor of the manifest.

    Raises:
        IntegrityError: not a delta shard, another codec, or records that do not fit the tensors.
    """
    if len(data) < _PREFIX.size:
        raise IntegrityError(f"a delta shard of {len(data)} bytes has no header")
    magic, length = _PREFIX.unpack_from(data)
    body = _PREFIX.size + length
    if magic != _MAGIC or body > len(data):
        raise IntegrityError(f"not a delta shard of a known version: it begins with {magic!r}")
    view = memoryview(data)
    records: list[Record] = []
    try:
        header = json.loads(data[_PREFIX.size : body])
        if header["codec"] != codec_named(codec).name:
            raise IntegrityError(f"shard coded by {header['codec']!r}, its manifest says {codec!r}")
        offset = body
        for item in header["records"]:
            start, count, size = _naturals(item, "start", "count", "bytes")
            if item["offset"] != offset - body or offset + size > len(data):
                raise IntegrityError(f"shard record of {item['tensor']} lies outside the shard")
            if start + count > sizes[item["tensor"]]:
                raise IntegrityError(f"shard record of {item['tensor']} lies outside the tensor")
            records.append(Record(item["tensor"], start, count, view[offset : offset + size]))
            offset += size
    except (KeyError, TypeError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise IntegrityError(f"delta shard header is not valid: {error!r}") from None
    if offset != len(data):
        raise IntegrityError(f"delta shard has {len(data) - offset} bytes after its last record")
    return records


def _naturals(item: Mapping[str, Any], *names: str) -> list[int]:
    values = [item[name] for name in names]
    if not all(type(value) is int and value >= 0 for value in values):
        raise IntegrityError(f"delta shard record {item} has a size that is not a natural number")
    return values


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
