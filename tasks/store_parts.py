"""Objects on the wire: one request for a small one, parallel parts for a large one."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias, TypeVar

import s3fs

from tasks.store_errors import CONFLICT_CODES, RANGE_CODES, Transient, s3_code

Data: TypeAlias = bytes | bytearray | memoryview
T = TypeVar("T")

SINGLE_PUT = 256 * 2**20  # larger objects go up in parts, so that a failure repeats one part only
PART = 64 * 2**20  # also the range of one parallel read
AT_ONCE = 4  # parts of one object: enough for a fast link, and more would only hold more memory


async def upload(fs: s3fs.S3FileSystem, bucket: str, key: str, data: Data, mode: str) -> None:
    """Writes an object; `mode` "create" only where there is none, "overwrite" always."""
    # s3fs sends one request below twice the chunk size, and honours `mode` in both ways.
    chunk = SINGLE_PUT if len(data) <= SINGLE_PUT else PART
    await fs._pipe_file(
        f"{bucket}/{key}", as_body(data), chunksize=chunk, max_concurrency=AT_ONCE, mode=mode
    )


async def fetch(
    fs: s3fs.S3FileSystem, bucket: str, key: str, keep: Callable[[int, bytes], object]
) -> tuple[int, str]:
    """One ranged read, and parallel ones of the same state for what it leaves: (bytes, ETag).

    Args:
        keep: is given every part with its offset, in any order.
    """
    where = {"Bucket": bucket, "Key": key}
    try:
        first = await fs._call_s3("get_object", **where, Range=f"bytes=0-{PART - 1}")
    except OSError as error:
        if s3_code(error) not in RANGE_CODES:
            raise
        first = await fs._call_s3("get_object", **where)  # an empty object has no range
    data, etag = await _body_of(first), str(first["ETag"])
    size = int(str(first.get("ContentRange", f"/{len(data)}")).rpartition("/")[2])
    keep(0, data)
    slots = asyncio.Semaphore(AT_ONCE)

    async def part(start: int) -> None:
        async with slots:
            span = f"bytes={start}-{min(start + PART, size) - 1}"
            answer = await fs._call_s3("get_object", **where, Range=span, IfMatch=etag)
            keep(start, await _body_of(answer))

    try:
        await asyncio.gather(*(part(start) for start in range(PART, size, PART)))
    except OSError as error:
        if s3_code(error) in CONFLICT_CODES:  # overwritten while we read: read again
            raise Transient("the object was replaced during the read") from error
        raise
    return size, etag


async def _body_of(answer: Any) -> bytes:
    async with answer["Body"] as stream:
        return await stream.read()


def as_body(data: Data) -> bytes | bytearray:
    """What the S3 client takes as a body."""
    return bytes(data) if isinstance(data, memoryview) else data


def write_at(handle: int, offset: int, data: bytes) -> None:
    """All of the data: a single write may be short."""
    view = memoryview(data)
    while view:
        written = os.pwrite(handle, view, offset)
        view, offset = view[written:], offset + written


def parallel(call: Callable[[str], T], keys: list[str], concurrency: int) -> list[T]:
    """`call` of every key, some at once; in their order."""
    if not keys:
        return []
    with ThreadPoolExecutor(min(concurrency, len(keys)), thread_name_prefix="store") as pool:
        return list(pool.map(call, keys))
