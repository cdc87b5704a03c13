"""What brings one engine to a version: absolute values, verified."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from tasks.weights.bits import Bits, DtypeName
from tasks.weights.manifest import Manifest
from tasks.weights.versions import Holds, State


@dataclass(frozen=True)
class TensorUpdate:
    """Absolute values for one tensor.

    Attributes:
        shape, dtype: of the full checkpoint tensor.
        indices: flat positions, int64, strictly ascending, shape (k,); None: all of them.
        values: patterns, uint16 or uint32, shape (k,) or (numel,). A full tensor's are the
            shadow's own memory: to be read inside `Subscriber.reading` alone, never written.
    """

    shape: tuple[int, ...]
    dtype: DtypeName
    indices: Bits | None
    values: Bits


@dataclass(frozen=True)
class Update:
    """What brings an engine that is in state `base` (any state where full) to `manifest`."""

    manifest: Manifest
    kind: Literal["full", "delta"]
    base: State
    tensors: Mapping[str, TensorUpdate]

    @property
    def run(self) -> str:
        return self.manifest.run

    @property
    def version(self) -> int:
        return self.manifest.version

    @property
    def target(self) -> Holds:
        """The engine's state once this is applied."""
        return Holds(self.manifest.run, self.manifest.ref())

    @property
    def changed(self) -> int:
        """Values written."""
        return sum(tensor.values.size for tensor in self.tensors.values())
