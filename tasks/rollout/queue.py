"""The unit queue of one run: pending -> leased to a worker -> done, each unit accepted once.

A pure state machine. It knows no clock, no network and no Dask: `tasks.rollout.board` keeps it on
the scheduler and tells it what happens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

MAX_ATTEMPTS = 3
"""A unit that failed this often is poisonous: it is reported and not tried again."""

Wire = dict[str, Any]
"""A unit or a result as it crosses processes: a dict of plain values with a `unit_id`."""


@dataclass(slots=True)
class UnitQueue:
    """Workers pull units, so a slow one gets fewer; a lost worker's units return to the front."""

    pending: deque[Wire] = field(default_factory=deque)
    leased: dict[str, tuple[str, Wire]] = field(default_factory=dict)
    done: list[Wire] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    workers: set[str] = field(default_factory=set)
    _attempts: dict[str, int] = field(default_factory=dict)
    _known: set[str] = field(default_factory=set)
    _finished: set[str] = field(default_factory=set)

    def offer(self, units: Sequence[Wire]) -> None:
        """Adds units at the back. A unit id is offered once in a run."""
        for unit in units:
            if unit["unit_id"] not in self._known:
                self._known.add(unit["unit_id"])
                self.pending.append(unit)

    def pull(self, worker: str, count: int) -> list[Wire]:
        """Leases at most `count` units, and no more than bring this worker to its fair share of
        all that is outstanding.

        Without the share the first workers to ask would take a whole step and the others idle.
        """
        self.workers.add(worker)
        outstanding = len(self.pending) + len(self.leased)
        held = sum(holder == worker for holder, _ in self.leased.values())
        share = -(-outstanding // len(self.workers)) - held
        taken = [
            self.pending.popleft() for _ in range(max(0, min(count, share, len(self.pending))))
        ]
        for unit in taken:
            self.leased[unit["unit_id"]] = (worker, unit)
        return taken

    def complete(self, worker: str, result: Wire) -> bool:
        """Takes a result; False when that unit already had one (or is not this run's)."""
        unit_id = result["unit_id"]
        if unit_id in self._finished or unit_id not in self._known:
            return False
        holder = self.leased.get(unit_id)
        if holder is None:
            # Its worker was believed lost and the unit went back: no need to do it again.
            self.pending = deque(u for u in self.pending if u["unit_id"] != unit_id)
        self.leased.pop(unit_id, None)
        self.failed.pop(unit_id, None)
        self._finished.add(unit_id)
        self.done.append(result)
        return True

    def fail(self, worker: str, unit_id: str, message: str) -> None:
        """One attempt failed: again at the front, or set aside when it was the last one."""
        holder = self.leased.get(unit_id)
        if holder is None or holder[0] != worker:
            return
        del self.leased[unit_id]
        self._attempts[unit_id] = self._attempts.get(unit_id, 0) + 1
        if self._attempts[unit_id] >= MAX_ATTEMPTS:
            self.failed[unit_id] = message
        else:
            self.pending.appendleft(holder[1])

    def lose(self, worker: str) -> list[str]:
        """A worker died or left: its units return to the front. Returns their ids."""
        self.workers.discard(worker)
        returned = [unit_id for unit_id, (holder, _) in self.leased.items() if holder == worker]
        for unit_id in reversed(returned):
            self.pending.appendleft(self.leased.pop(unit_id)[1])
        return returned
