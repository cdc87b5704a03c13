"""Which ranks have stopped giving signs of life: pure, over counts and a clock it is given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SILENT_S = 20.0
"""Seconds without a sign of life after which a rank is taken for hung."""
START_S = 120.0
"""Seconds a rank has until it says so itself: a cold worker imports torch before. Until then its
Dask worker speaks for it."""


@dataclass(frozen=True, slots=True)
class Silent:
    rank: int
    seconds: float

    def why(self) -> str:
        return f"gave no sign of life for {self.seconds:.0f} s"


class Silence:
    """How long each rank of an epoch has been silent."""

    def __init__(self, ranks: int, now: float) -> None:
        self._signs: list[object] = [None] * ranks
        self._since = [now] * ranks
        self._began = now

    def look(self, counts: Sequence[int], seen: Sequence[object], now: float) -> Silent | None:
        """The rank that has been silent for too long, the longest where there are several.

        Args:
            counts: how often each rank has given a sign itself.
            seen: what changes whenever a rank's worker has been heard of; of those that have
                given none.
        """
        overdue = []
        for rank, count in enumerate(counts):
            sign = count or ("worker", seen[rank])
            if sign != self._signs[rank]:
                self._signs[rank], self._since[rank] = sign, now
            if now - self._since[rank] > SILENT_S:
                overdue.append(Silent(rank, now - self._since[rank]))
            elif not count and now - self._began > START_S:
                overdue.append(Silent(rank, now - self._began))
        return max(overdue, key=lambda silent: silent.seconds, default=None)
