"""Weights as bit patterns: the integers that are compared, hashed, published and scattered.

Nothing in this package compares floating-point values: -0.0 and 0.0 differ, a NaN equals itself,
and a round trip is exact. A pattern is a flat little-endian `uint16` (bfloat16, float16) or
`uint32` (float32) numpy array beside the name of its dtype.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, cast

import numpy as np
import torch

from tasks.errors import PolicyError

if sys.byteorder != "little":  # the written formats are little-endian views of memory
    raise ImportError("tasks.weights needs a little-endian machine")

Bits: TypeAlias = np.ndarray[Any, np.dtype[Any]]
DtypeName: TypeAlias = Literal["bfloat16", "float16", "float32"]

TORCH_DTYPES: dict[str, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}
_PATTERNS: dict[str, np.dtype[Any]] = {
    "bfloat16": np.dtype("<u2"),
    "float16": np.dtype("<u2"),
    "float32": np.dtype("<u4"),
}
_EXPONENTS: dict[DtypeName, int] = {"bfloat16": 0x7F80, "float16": 0x7C00, "float32": 0x7F800000}
_INTEGERS = {2: torch.int16, 4: torch.int32}


def pattern_dtype(dtype: str) -> np.dtype[Any]:
    """The numpy dtype of the patterns of `dtype`.

    Raises:
        PolicyError: `dtype` is not one of `TORCH_DTYPES`.
    """
    try:
        return _PATTERNS[dtype]
    except KeyError:
        raise PolicyError(
            f"dtype {dtype!r} cannot be published; expected one of {sorted(_PATTERNS)}"
        ) from None


def dtype_name(dtype: torch.dtype) -> DtypeName:
    """`torch.bfloat16` -> "bfloat16".

    Raises:
        PolicyError: the dtype is not one of `TORCH_DTYPES`.
    """
    name = str(dtype).removeprefix("torch.")
    pattern_dtype(name)
    return cast(DtypeName, name)


def to_bits(tensor: torch.Tensor) -> Bits:
    """The flat pattern of a tensor of any shape, shape (numel,), uint16 or uint32.

    Shares memory with a contiguous CPU tensor; otherwise a copy.

    Raises:
        PolicyError: the tensor's dtype is not one of `TORCH_DTYPES`.
    """
    name = dtype_name(tensor.dtype)
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return flat.view(_INTEGERS[flat.element_size()]).numpy().view(_PATTERNS[name])


def from_bits(bits: Bits, dtype: str, shape: Sequence[int] | None = None) -> torch.Tensor:
    """The tensor of a flat pattern, of `shape` (flat where None); shares memory with `bits`."""
    signed = np.dtype("<i2") if pattern_dtype(dtype).itemsize == 2 else np.dtype("<i4")
    tensor = torch.from_numpy(bits.view(signed)).view(TORCH_DTYPES[dtype])
    return tensor if shape is None else tensor.view(tuple(shape))


def exponent_mask(dtype: DtypeName) -> int:
    """The bits that are all set in a NaN, in an infinity, and in nothing else."""
    return _EXPONENTS[dtype]


def numel(shape: Sequence[int]) -> int:
    """The number of values of a tensor of this shape; 1 for a scalar's ()."""
    return math.prod(shape)
