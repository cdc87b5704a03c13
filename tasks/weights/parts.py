"""What a rank gives its publisher, and what it tells rank 0 of a version it has prepared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from tasks.weights.bits import Bits, DtypeName, dtype_name, numel, pattern_dtype, to_bits
from tasks.weights.digest import Piece
from tasks.weights.manifest import History, ManifestRef, Shard

Kind = Literal["anchor", "delta"]


@dataclass(frozen=True)
class LocalShard:
    """A rank's contiguous flat range [start, start + len(values)) of one tensor; may be empty.

    Attributes:
        shape: of the full tensor.
        values: flat pattern, uint16 or uint32 as `dtype` asks.
        dtype: "bfloat16", "float16" or "float32".
    """

    name: str
    shape: tuple[int, ...]
    start: int
    values: Bits
    dtype: DtypeName = "bfloat16"

    @property
    def count(self) -> int:
        return self.values.size

    @staticmethod
    def from_tensor(
        name: str, tensor: torch.Tensor, shape: Sequence[int] | None = None, start: int = 0
    ) -> LocalShard:
        """From this rank's rows (any shape; a CPU copy where it lies elsewhere).

        Args:
            shape: of the full tensor; None: `tensor` is the full tensor.
            start: flat index of its first value in the full tensor.
        """
        full = tuple(tensor.shape) if shape is None else tuple(shape)
        return LocalShard(name, full, start, to_bits(tensor), dtype_name(tensor.dtype))

    def __post_init__(self) -> None:
        expected = pattern_dtype(self.dtype)
        if self.values.ndim != 1 or self.values.dtype != expected:
            raise ValueError(
                f"{self.name}: values are {self.values.dtype} of {self.values.ndim} dimensions; "
                f"expected a flat {expected} pattern of {self.dtype}"
            )
        if not 0 <= self.start <= self.start + self.values.size <= numel(self.shape):
            raise ValueError(
                f"{self.name}: values {self.start}..{self.start + self.values.size} lie outside "
                f"the tensor of shape {self.shape}"
            )


@dataclass(frozen=True)
class DeviceShard:
    """A `LocalShard` that stays where it is: compared there, so that only what changed leaves it.

    Attributes:
        tensor: this rank's rows, any shape, on any device; must not change before the commit.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    tensor: torch.Tensor

    @property
    def dtype(self) -> DtypeName:
        return dtype_name(self.tensor.dtype)

    @property
    def count(self) -> int:
        return self.tensor.numel()

    def integers(self) -> torch.Tensor:
        """The flat pattern, int16 or int32, on the tensor's device; shares memory where it can."""
        flat = self.tensor.detach().contiguous().reshape(-1)
        return flat.view(torch.int16 if flat.element_size() == 2 else torch.int32)

    def is_finite(self) -> bool:
        return bool(torch.isfinite(self.tensor).all())


@dataclass(frozen=True)
class TensorPart:
    """What one rank says about one tensor after the update."""

    name: str
    shape: tuple[int, ...]
    dtype: DtypeName
    changed: int
    piece: Piece


@dataclass(frozen=True)
class PreparedPart:
    """What one rank hands to rank 0: small and picklable.

    Attributes:
        base: the version this part builds on; None where the run has none.
        codec: of the delta; None where the rank held no version to build one on.
        history: as in the manifest.
        shards, anchor: objects this rank made sure are in the store.
        full_digests: an anchor's tensor digests as rank 0 wrote them.
        bytes_uploaded, objects_created: without what the store already had.
    """

    run: str
    rank: int
    kind: Kind
    codec: str | None
    history: History
    writer: str
    base: ManifestRef | None
    tensors: tuple[TensorPart, ...]
    shards: tuple[Shard, ...]
    anchor: tuple[Shard, ...]
    bytes_uploaded: int
    objects_created: int
    full_digests: Mapping[str, str] = field(default_factory=dict)
