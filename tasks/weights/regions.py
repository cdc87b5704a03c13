"""Regions: where a strided block of a checkpoint tensor lies in an engine parameter."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from tasks.weights.bits import Bits


@dataclass(frozen=True)
class Region:
    """A block of `size` values of one checkpoint tensor and its place in one parameter.

    Value (i, j, ...) of the block is flat value `source_offset` + i * source_stride[0] + ... of the
    checkpoint tensor, and value `offset` + i * stride[0] + ... of the parameter's *storage*.
    `simplified` merges dimensions, so a block that is contiguous on both sides has one.
    """

    parameter: str
    size: tuple[int, ...]
    offset: int
    stride: tuple[int, ...]
    source_offset: int
    source_stride: tuple[int, ...]

    @property
    def contiguous(self) -> bool:
        """A flat range on both sides: the fast path."""
        return self.stride == (1,) and self.source_stride == (1,)

    def simplified(self) -> Region:
        """The same block with dimensions of size 1 dropped and mergeable neighbours merged."""
        dims: list[tuple[int, int, int]] = []
        for size, stride, source in zip(self.size, self.stride, self.source_stride, strict=True):
            if size == 1:
                continue
            if dims and dims[-1][1] == size * stride and dims[-1][2] == size * source:
                dims[-1] = (dims[-1][0] * size, stride, source)
            else:
                dims.append((size, stride, source))
        dims = dims or [(1, 1, 1)]
        size, stride, source = (tuple(column) for column in zip(*dims, strict=True))
        return Region(self.parameter, size, self.offset, stride, self.source_offset, source)

    def view(self, storage: torch.Tensor) -> torch.Tensor:
        """The block inside the flat tensor of the parameter's whole storage."""
        return storage.as_strided(self.size, self.stride, self.offset)

    def source_view(self, flat: torch.Tensor) -> torch.Tensor:
        """The block inside the flat checkpoint tensor."""
        return flat.as_strided(self.size, self.source_stride, self.source_offset)

    def locate(self, indices: Bits) -> tuple[slice | Bits, Bits]:
        """Which of the flat checkpoint positions lie in this block, and where they go.

        Args:
            indices: int64, strictly ascending, shape (k,).

        Returns:
            What selects them from `indices` (a slice where contiguous, else a boolean mask), and
            their positions in the parameter's storage, int64.
        """
        if self.contiguous:
            stop = self.source_offset + self.size[0]
            low, high = np.searchsorted(indices, (self.source_offset, stop))
            part = slice(int(low), int(high))
            return part, indices[part] + (self.offset - self.source_offset)
        # A block of a contiguous tensor: from the largest stride down, each coordinate is a
        # quotient, and what is left of a position inside the block is zero.
        rest = indices - self.source_offset
        inside = rest >= 0
        target = np.full(indices.shape, self.offset, np.int64)
        for axis in sorted(range(len(self.size)), key=lambda a: -self.source_stride[a]):
            coordinate, rest = np.divmod(rest, self.source_stride[axis])
            inside &= coordinate < self.size[axis]
            target += coordinate * self.stride[axis]
        inside &= rest == 0
        return inside, target[inside]
