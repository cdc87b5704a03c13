"""The unit queue of one run: pending -> leased to workers -> done, each unit accepted once.

A pure state machine. It knows no network and no Dask, and no clock but the seconds it is given:
`tasks.rollout.board` keeps it on the scheduler and tells it what happens.

A unit may be leased twice: when nothing is pending, an idle worker takes over a copy of a unit that
another one has held unusually long (Dean and Barroso 2013, "The Tail at Scale": a backup request
costs what an idle worker has too much of). Whichever result comes first counts, and the other
worker is told to drop the unit. Attempts are numbered, so that what two of them store never shares
a name.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

MAX_FAILURES = 3
"""A unit that failed this often is poisonous: it is reported and not tried again."""
MAX_LOSSES = 5
"""So is one whose workers died or fell silent this often: it may be what kills them."""
MAX_BAD_ROW = 4
"""A worker that failed this often in a row, while others succeed, gets no more units. Units that it
held at the same time fail for one reason, and count once."""
WORKER_SILENT_S = 20.0
"""Seconds without a call after which a worker loses its leases. Workers call every few seconds
from a thread of their own, whatever their engine does."""
SLOW = 2.0
"""A unit held this many times as long as usual is given to an idle worker too."""
_DURATIONS_KEPT = 64

Wire = dict[str, Any]
"""A unit or a result as it crosses processes: a dict of plain values with a `unit_id`."""


@dataclass(slots=True)
class Lease:
    """A unit at work. `holders`: worker -> when it took the unit, in the order they did."""

    unit: Wire
    holders: dict[str, float]


@dataclass(slots=True)
class _Record:
    """What has happened to a unit so far."""

    attempts: int = 0
    failures: int = 0
    losses: int = 0
    message: str = ""


@dataclass(slots=True)
class UnitQueue:
    """Workers pull units, so a slow one gets fewer; a lost worker's units return to the front.

    Attributes:
        workers: those that asked for units, with the time of their last call.
        quarantined: those that get none any more, and why.
        retired: those that get none any more because they are not needed.
        cancelled: worker -> units that it still works on though they are done.
    """

    pending: deque[Wire] = field(default_factory=deque)
    leased: dict[str, Lease] = field(default_factory=dict)
    done: list[Wire] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    workers: dict[str, float] = field(default_factory=dict)
    quarantined: dict[str, str] = field(default_factory=dict)
    retired: set[str] = field(default_factory=set)
    cancelled: dict[str, set[str]] = field(default_factory=dict)
    _records: dict[str, _Record] = field(default_factory=dict)
    _finished: set[str] = field(default_factory=set)
    _bad_row: dict[str, tuple[int, float]] = field(default_factory=dict)  # how many, since when
    _durations: deque[float] = field(default_factory=lambda: deque(maxlen=_DURATIONS_KEPT))
    # Worker -> its last result, or when it began to be busy or idle; and how long results took.
    _marks: dict[str, float] = field(default_factory=dict)
    _gaps: deque[float] = field(default_factory=lambda: deque(maxlen=_DURATIONS_KEPT))

    def offer(self, units: Sequence[Wire]) -> None:
        """Adds units at the back. A unit id is offered once in a run."""
        for unit in units:
            if unit["unit_id"] not in self._records:
                self._records[unit["unit_id"]] = _Record()
                self.pending.append(unit)

    def forget(self, count: int) -> None:
        """Lets go of the first `count` results, which the flow has, and of what is known of their
        units: a late result of one is then as good as one of another run."""
        for result in self.done[:count]:
            self._finished.discard(result["unit_id"])
            self._records.pop(result["unit_id"], None)
        del self.done[:count]

    def pull(self, worker: str, count: int, now: float) -> list[Wire]:
        """Leases at most `count` units, and no more than bring this worker to its fair share of
        all that is outstanding; where nothing is pending and it holds none, a slow one's copy.

        Without the share the first workers to ask would take a whole step and the others idle.
        """
        if worker in self.retired:
            return []
        self.workers[worker] = now
        self._marks.setdefault(worker, now)
        if worker in self.quarantined:
            return []
        held = self._holds(worker)
        able = len(self.workers) - len(self.quarantined)
        share = -(-self.outstanding // able) - held
        taken = [
            self.pending.popleft() for _ in range(max(0, min(count, share, len(self.pending))))
        ]
        if not taken and not held and count:
            taken = self._straggling(now)
        return [self._lease(unit, worker, now) for unit in taken]

    def complete(self, worker: str, result: Wire, now: float) -> bool:
        """Takes a result; False when that unit already had one (or is not this run's)."""
        unit_id = result["unit_id"]
        self._bad_row.pop(worker, None)
        if unit_id in self._finished or unit_id not in self._records:
            return False
        lease = self.leased.pop(unit_id, None)
        if lease is None:
            # Its worker was believed lost and the unit went back: no need to do it again.
            self.pending = deque(u for u in self.pending if u["unit_id"] != unit_id)
        else:
            if worker in lease.holders:
                self._durations.append(now - lease.holders[worker])
                self._gaps.append(now - self._marks[worker])
                self._marks[worker] = now
            for other in lease.holders.keys() - {worker}:
                self.cancelled.setdefault(other, set()).add(unit_id)
        self.failed.pop(unit_id, None)
        self._finished.add(unit_id)
        self.done.append(result)
        return True

    def fail(self, worker: str, unit_id: str, message: str, now: float) -> bool:
        """One attempt failed: again at the front, or set aside when it was the last one.

        Returns whether this was the failure for which the worker is quarantined.
        """
        lease = self.leased.get(unit_id)
        if lease is None or worker not in lease.holders:
            return False
        since = lease.holders[worker]
        record = self._records[unit_id]
        record.failures += 1
        record.message = message
        self._release(unit_id, worker)
        row, last = self._bad_row.get(worker, (0, since))
        if since < last:
            return False
        self._bad_row[worker] = (row + 1, now)
        if row + 1 < MAX_BAD_ROW or worker in self.quarantined:
            return False
        # Where all fail it is the units or the code, and nobody would be left to say so.
        if not any(w not in self.quarantined and w not in self._bad_row for w in self.workers):
            return False
        self.quarantined[worker] = f"units failed {row + 1} times in a row, last: {message}"
        return True

    def renew(self, worker: str, now: float) -> None:
        """A sign of life of a worker that asked for units before."""
        if worker in self.workers:
            self.workers[worker] = now

    def lose(self, worker: str) -> list[str]:
        """A worker died, left or fell silent: its units return to the front. Returns their ids."""
        self.workers.pop(worker, None)
        self.quarantined.pop(worker, None)
        self.retired.discard(worker)
        self._marks.pop(worker, None)
        self.cancelled.pop(worker, None)
        self._bad_row.pop(worker, None)
        lost = [unit_id for unit_id, lease in self.leased.items() if worker in lease.holders]
        for unit_id in reversed(lost):
            record = self._records[unit_id]
            record.losses += 1
            record.message = record.message or f"{worker} and others were lost while they had it"
            self._release(unit_id, worker)
        return lost

    def silent(self, now: float) -> list[str]:
        """Workers that have not called for `WORKER_SILENT_S`; `lose` them."""
        return [worker for worker, at in self.workers.items() if now - at > WORKER_SILENT_S]

    def cancellations(self, worker: str) -> list[str]:
        """Units that this worker need not go on with: others have done them. Each once."""
        return sorted(self.cancelled.pop(worker, ()))

    def retire(self, worker: str) -> bool:
        """Gives a worker no more units, if it holds none now; whether it does not."""
        if self._holds(worker):
            return False
        self.workers.pop(worker, None)
        self.quarantined.pop(worker, None)
        self.retired.add(worker)
        return True

    def idle(self, now: float) -> dict[str, float]:
        """Workers that hold no unit, with the seconds since they last did or came."""
        return {w: now - self._marks[w] for w in self.workers if not self._holds(w)}

    @property
    def outstanding(self) -> int:
        return len(self.pending) + len(self.leased)

    @property
    def worker_s(self) -> float | None:
        """Seconds of one worker that a unit costs: a mean over the last results. Less than `unit_s`
        where workers do several at a time."""
        return sum(self._gaps) / len(self._gaps) if self._gaps else None

    def _holds(self, worker: str) -> int:
        return sum(worker in lease.holders for lease in self.leased.values())

    @property
    def unit_s(self) -> float | None:
        """Seconds that a unit takes, from lease to result: the median of the last ones."""
        return median(self._durations) if self._durations else None

    def _straggling(self, now: float) -> list[Wire]:
        """The unit that has been with its only worker for longest, if for unusually long."""
        usual = self.unit_s
        if usual is None:
            return []
        alone = [lease for lease in self.leased.values() if len(lease.holders) == 1]
        since = [min(lease.holders.values()) for lease in alone]
        if not since or now - min(since) <= SLOW * usual:
            return []
        return [alone[since.index(min(since))].unit]

    def _lease(self, unit: Wire, worker: str, now: float) -> Wire:
        if not self._holds(worker):
            self._marks[worker] = now
        lease = self.leased.setdefault(unit["unit_id"], Lease(unit, {}))
        lease.holders[worker] = now
        record = self._records[unit["unit_id"]]
        record.attempts += 1
        return {**unit, "attempt": record.attempts}

    def _release(self, unit_id: str, worker: str) -> None:
        """One holder less; the last one's unit goes back, or aside."""
        lease = self.leased[unit_id]
        del lease.holders[worker]
        if lease.holders:
            return
        del self.leased[unit_id]
        record = self._records[unit_id]
        if record.failures >= MAX_FAILURES or record.losses >= MAX_LOSSES:
            self.failed[unit_id] = record.message
        else:
            self.pending.appendleft(lease.unit)
