"""How many rollout workers a run should have: a pure function of its queue and its limits."""

from __future__ import annotations

import math
from collections.abc import Mapping
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
