"""Where the unit queues live: on the Dask scheduler, which sees workers and clients come and go.

`QueueBoard` is a scheduler plug-in with a queue for each open run; `FlowQueue` is the flow's side
and `WorkerQueue` a worker's. Waiting is a long poll answered by the scheduler's event loop, so
nobody sleeps. A run is open as long as its flow renews its lease; a flow that was killed stops
renewing (or its client disconnects, which closes the run at once), and every worker then learns at
its next pull that the run is closed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from distributed import Client, Scheduler, Worker
from distributed.diagnostics.plugin import SchedulerPlugin
from distributed.utils import sync

from tasks.errors import RunClosed
from tasks.rollout.queue import UnitQueue, Wire

POLL_S = 2.0
"""Seconds a long poll lasts at most."""
LEASE_S = 60.0
"""Seconds a run stays open without a sign of life from its flow."""


@dataclass(slots=True)
class _OpenRun:
    queue: UnitQueue
    deadline: float
    client: str
    events: list[Wire] = field(default_factory=list)
    # Two, so that a result wakes the flow and not every idle worker.
    work: asyncio.Event = field(default_factory=asyncio.Event)
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def wake_workers(self) -> None:
        """Wakes the workers that wait now; whoever comes later waits for the next change."""
        self.work.set()
        self.work = asyncio.Event()

    def wake_flow(self) -> None:
        self.news.set()
        self.news = asyncio.Event()


class QueueBoard(SchedulerPlugin):
    """The queues of all open runs. Every method runs on the scheduler's event loop."""

    name = "kindling-queues"
    idempotent = True

    def __init__(self) -> None:
        self._runs: dict[str, _OpenRun] = {}
        self._scheduler: Scheduler | None = None

    async def start(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        for method in (
            self.kindling_open,
            self.kindling_offer,
            self.kindling_pull,
            self.kindling_complete,
            self.kindling_fail,
            self.kindling_report,
            self.kindling_collect,
            self.kindling_renew,
            self.kindling_close,
        ):
            scheduler.handlers[method.__name__] = method

    def remove_worker(self, scheduler: Scheduler, worker: str, **_: Any) -> None:
        for name, run in self._runs.items():
            returned = run.queue.lose(worker)
            if returned:
                run.events.append(
                    {"kind": "worker_lost", "run": name, "worker": worker, "units": returned}
                )
                run.wake_workers()
            run.wake_flow()

    def remove_client(self, scheduler: Scheduler, client: str) -> None:
        """A flow that has gone will not come back: its tasks on the workers are released too."""
        for name in [name for name, run in self._runs.items() if run.client == client]:
            self._close(name)

    async def kindling_open(self, run: str, client: str) -> None:
        if run in self._runs and self._runs[run].deadline > time.monotonic():
            raise RunClosed(f"run {run!r} is already open in another flow; cancel that one first")
        self._runs[run] = _OpenRun(UnitQueue(), time.monotonic() + LEASE_S, client)

    async def kindling_renew(self, run: str) -> None:
        self._get(run).deadline = time.monotonic() + LEASE_S

    async def kindling_close(self, run: str) -> None:
        self._close(run)

    def _close(self, run: str) -> None:
        closed = self._runs.pop(run, None)
        if closed is not None:
            closed.wake_workers()
            closed.wake_flow()

    async def kindling_offer(self, run: str, units: Sequence[Wire]) -> None:
        state = self._get(run)
        state.queue.offer(units)
        state.wake_workers()

    async def kindling_pull(self, run: str, worker: str, count: int, wait: bool) -> list[Wire]:
        """At most `count` units; with `wait`, an empty list only after `POLL_S`."""
        units = self._pull(run, worker, count)
        if not units and wait and await _set_in_time(self._get(run).work):
            units = self._pull(run, worker, count)
        return units

    def _pull(self, run: str, worker: str, count: int) -> list[Wire]:
        queue = self._get(run).queue
        # One that died while it waited here must get nothing: nobody would ever give it back.
        assert self._scheduler is not None
        return queue.pull(worker, count) if worker in self._scheduler.workers else []

    async def kindling_complete(self, run: str, worker: str, results: Sequence[Wire]) -> None:
        state = self._get(run)
        for result in results:
            state.queue.complete(worker, result)
        state.wake_flow()

    async def kindling_fail(self, run: str, worker: str, unit_id: str, message: str) -> None:
        state = self._get(run)
        state.queue.fail(worker, unit_id, message)
        state.events.append(
            {"kind": "unit_failed", "worker": worker, "unit_id": unit_id, "message": message}
        )
        state.wake_workers()
        state.wake_flow()

    async def kindling_report(self, run: str, event: Wire) -> None:
        state = self._get(run)
        state.events.append(event)
        state.wake_flow()

    async def kindling_collect(self, run: str, done: int, events: int) -> Wire:
        """Results and events after the first `done` and `events`; waits `POLL_S` at most."""
        state = self._get(run)
        state.deadline = time.monotonic() + LEASE_S
        if len(state.queue.done) == done and len(state.events) == events:
            await _set_in_time(state.news)
            state = self._get(run)
        return {
            "done": state.queue.done[done:],
            "events": state.events[events:],
            "failed": state.queue.failed,
        }

    def _get(self, run: str) -> _OpenRun:
        state = self._runs.get(run)
        if state is not None and state.deadline > time.monotonic():
            return state
        self._runs.pop(run, None)
        raise RunClosed(f"run {run!r} is closed: it ended, was cancelled or its flow died")


async def _set_in_time(event: asyncio.Event) -> bool:
    try:
        await asyncio.wait_for(event.wait(), POLL_S)
    except TimeoutError:
        return False
    return True


class FlowQueue:
    """The flow's side of its run's queue."""

    def __init__(self, client: Client, run: str) -> None:
        self._client = client
        self._run = run
        self._done = 0
        self._events = 0
        client.register_plugin(QueueBoard())
        self._call("kindling_open", client=client.id)

    def _call(self, handler: str, **arguments: Any) -> Any:
        remote: Callable[..., Coroutine[Any, Any, Any]] = getattr(self._client.scheduler, handler)
        return self._client.sync(remote, run=self._run, **arguments)

    def offer(self, units: Sequence[Wire]) -> None:
        self._call("kindling_offer", units=list(units))

    def collect(self) -> tuple[list[Wire], list[Wire], dict[str, str]]:
        """New results, new events, and the poisonous units with their messages; waits a little."""
        news = self._call("kindling_collect", done=self._done, events=self._events)
        self._done += len(news["done"])
        self._events += len(news["events"])
        return news["done"], news["events"], news["failed"]

    def renew(self) -> None:
        self._call("kindling_renew")

    def close(self) -> None:
        self._call("kindling_close")


class WorkerQueue:
    """A worker's side. Every call raises RunClosed once the run is closed."""

    def __init__(self, worker: Worker, run: str) -> None:
        self._worker = worker
        self._run = run

    def _call(self, handler: str, **arguments: Any) -> Any:
        remote = getattr(self._worker.scheduler, handler)
        return sync(self._worker.loop, remote, run=self._run, **arguments)

    def pull(self, count: int, wait: bool) -> list[Wire]:
        return self._call("kindling_pull", worker=self._worker.address, count=count, wait=wait)

    def complete(self, results: Sequence[Wire]) -> None:
        self._call("kindling_complete", worker=self._worker.address, results=list(results))

    def fail(self, unit_id: str, message: str) -> None:
        self._call("kindling_fail", worker=self._worker.address, unit_id=unit_id, message=message)

    def report(self, event: Wire) -> None:
        self._call("kindling_report", event={"worker": self._worker.address, **event})
