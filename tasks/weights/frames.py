"""Zstandard frames read with a bound: what a damaged or forged one may cost is known."""

from __future__ import annotations

import zstandard

from tasks.errors import IntegrityError


def unpacked(frame: bytes | memoryview, limit: int, what: str) -> bytes:
    """The content of a frame that says its size, at most `limit` bytes, and ends with it.

    Args:
        what: is named in errors.

    Raises:
        IntegrityError: it does not decompress, says no size or a larger one, or has bytes behind.
    """
    data = bytes(frame)
    try:
        said = zstandard.get_frame_parameters(data).content_size
        if not 0 <= said <= limit:
            raise IntegrityError(f"a {what} says it holds {said} bytes; at most {limit} expected")
        whole = zstandard.ZstdDecompressor().decompressobj()
        content = whole.decompress(data)
    except zstandard.ZstdError as error:
        raise IntegrityError(
            f"a {what} of {len(data)} bytes does not decompress: {error}"
        ) from None
    if not whole.eof or whole.unused_data or len(content) != said:
        raise IntegrityError(f"a {what} does not hold the {said} bytes it says")
    return content
