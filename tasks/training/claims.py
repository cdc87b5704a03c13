"""Which trainer workers a run has to itself: as many as it has ranks, or none.

Pure; `tasks.rollout.board` keeps the claims of all open runs on the scheduler, where one thread
decides. Because a run that gets too few gets none, two runs never wait for each other with half
the workers each.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Claim:
    """The answer to a run that wants `size` workers.

    Attributes:
        workers: `size` of them, or none. present: trainer workers in the cluster.
        held_by: other run -> how many of them it holds.
    """

    size: int
    workers: tuple[str, ...]
    present: int
    held_by: dict[str, int]

    def why(self) -> str:
        """Why there are none, for a message."""
        others = ", ".join(f"{count} by run {run}" for run, count in self.held_by.items())
        held = f", of which {others} are in use" if others else ""
        return f"{self.size} trainer workers are needed and the cluster has {self.present}{held}"


def claim(
    size: int,
    present: Sequence[str],
    mine: Collection[str],
    others: Mapping[str, Collection[str]],
) -> Claim:
    """Grants a run its workers, those first that it holds.

    Args:
        present: trainer workers of the cluster, those first that are to be taken first.
        mine: what the run holds now. others: what each other run holds.
    """
    taken = {worker for held in others.values() for worker in held}
    free = [worker for worker in present if worker not in taken]
    free.sort(key=lambda worker: worker not in mine)  # stable
    granted = tuple(free[:size]) if len(free) >= size else ()
    held_by = {run: count for run, held in others.items() if (count := len(set(held)))}
    return Claim(size, granted, len(present), held_by)
