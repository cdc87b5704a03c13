"""How many rollout workers a run should have, and how soon more may be asked for: pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """What the configuration allows.

    Attributes:
        least, most: workers.
        drain_s: what is outstanding should be done within this many seconds.
        idle_s: a worker that held no unit for so long may go.
    """

    least: int
    most: int
    drain_s: float
    idle_s: float


@dataclass(frozen=True, slots=True)
class Load:
    """A run's queue at one moment.

    Attributes:
        outstanding: units pending or leased.
        worker_s: seconds of one worker that a unit costs; None while nothing is known.
        workers: how many serve.
        starting: how many were asked for and do not serve yet.
        idle: worker -> seconds since it last held a unit.
    """

    outstanding: int
    worker_s: float | None
    workers: int
    starting: int
    idle: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Change:
    """Workers to start, or workers to retire; never both."""

    start: int = 0
    retire: tuple[str, ...] = ()


def decide(load: Load, limits: Limits) -> Change:
    """What to do now.

    Out when what is outstanding would take longer than `drain_s`: to as many as would do it in
    that time. In when workers have been idle for `idle_s`, the longest idle first. While nothing
    is known about how long units take, only up to the least.
    """
    wanted = limits.least
    if load.worker_s is not None:
        wanted = max(wanted, math.ceil(load.outstanding * load.worker_s / limits.drain_s))
    missing = min(wanted, limits.most) - load.workers - load.starting
    if missing > 0:
        return Change(start=missing)
    surplus = load.workers - min(wanted, limits.most)
    tired = sorted(
        (worker for worker, seconds in load.idle.items() if seconds >= limits.idle_s),
        key=lambda worker: (-load.idle[worker], worker),
    )
    return Change(retire=tuple(tired[: max(0, surplus)]))


FIRST_WAIT_S, LONGEST_WAIT_S = 5.0, 300.0


class Starts:
    """Workers that were asked for, and how long to wait before more are where they do not last.

    One whose machine, image or environment is wrong ends as it starts; asked for again at every
    look, it would fill a batch system's queue.
    """

    def __init__(self) -> None:
        self._unproven: set[str] = set()
        self._ended_early = 0
        self._not_before = 0.0

    def asked_for(self, names: Iterable[str]) -> None:
        self._unproven |= set(names)

    def look(self, alive: Collection[str], proven: Collection[str], now: float) -> float | None:
        """Takes which of all workers live, and which have come to serve.

        Returns the seconds that no more are to be asked for, where some have just ended early.
        """
        came = self._unproven & set(proven)
        ended = self._unproven - came - set(alive)
        self._unproven -= came | ended
        if came:
            self._ended_early = 0
        if not ended:
            return None
        self._ended_early += 1
        wait = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2 ** (self._ended_early - 1))
        self._not_before = now + wait
        return wait

    def may(self, now: float) -> bool:
        """Whether more may be asked for."""
        return now >= self._not_before
