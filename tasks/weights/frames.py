"""Reading what may be damaged or forged: its cost is bounded, and it ends where it should."""

from __future__ import annotations

import numpy as np
import zstandard

from tasks.errors import IntegrityError
from tasks.weights.bits import Bits


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


class Reader:
    """Takes the tables of a delta off a byte string; `at` is how far it has come."""

    def __init__(self, data: bytes, at: int) -> None:
        self._data = data
        self.at = at

    def take(self, dtype: np.dtype, count: int) -> Bits:
        """The next `count` values.

        Raises:
            IntegrityError: there are not so many left.
        """
        end = self.at + dtype.itemsize * count
        if end > len(self._data):
            raise IntegrityError(f"a delta's tables of {len(self._data)} bytes end too early")
        found = np.frombuffer(self._data, dtype, count, self.at)
        self.at = end
        return found
