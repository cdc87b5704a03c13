"""Which ranks have stopped giving signs of life: pure, over counts and a clock it is given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SILENT_S = 20.0
"""Seconds without a sign of life after which a rank that has given some is taken for hung."""
START_S = 120.0
"""Seconds a rank has for the first one: a cold worker imports torch before."""


@dataclass(frozen=True, slots=True)
class Silent:
    rank: int
    seconds: float

    def why(self) -> str:
        return f"gave no sign of life for {self.seconds:.0f} s"


class Silence:
    """How long each rank of an epoch has been silent."""

    def __init__(self, ranks: int, now: float) -> None:
        self._counts = [0] * ranks
        self._since = [now] * ranks

    def look(self, counts: Sequence[int], now: float) -> Silent | None:
        """Takes the ranks' counts of signs so far; the rank that has been silent for too long, the
        longest where there are several."""
        for rank, count in enumerate(counts):
            if count != self._counts[rank]:
                self._counts[rank], self._since[rank] = count, now
        overdue = [
            Silent(rank, now - since)
            for rank, since in enumerate(self._since)
            if now - since > (SILENT_S if self._counts[rank] else START_S)
        ]
        return max(overdue, key=lambda silent: silent.seconds, default=None)
