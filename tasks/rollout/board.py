"""Where the unit queues live: on the Dask scheduler, which sees workers and clients come and go.

`QueueBoard` is a scheduler plug-in with a queue for each open run; `FlowQueue` is the flow's side
and `WorkerQueue` a worker's. Waiting is a long poll answered by the scheduler's event loop, so
nobody sleeps. A run is open as long as its flow renews its lease; a flow that was killed stops
renewing (or its client disconnects, which closes the run at once), and every worker then learns at
its next call that the run is closed. With its lease a run also holds the trainer workers it has
claimed. A worker keeps its units as long as it calls: one that dies is
seen by Dask at once, one that hangs as a whole is missed after `queue.WORKER_SILENT_S`.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from distributed import Client, Scheduler, Worker
from distributed.diagnostics.plugin import SchedulerPlugin
from distributed.utils import sync

from tasks.cluster import TRAINER, ask_scheduler
from tasks.errors import RunClosed, SchedulerLost
from tasks.rollout.queue import WORKER_SILENT_S, UnitQueue, Wire
from tasks.training.claims import Claim, claim

POLL_S = 2.0
"""Seconds a long poll lasts at most."""
LEASE_S = 60.0
"""Seconds a run stays open without a sign of life from its flow."""
FROZEN_S = 40.0
"""Seconds without a heartbeat of Dask's own after which a worker is taken for frozen. Longer than a
worker's loop may be silent: an import or a load may hold the interpreter for a while."""
RENEW_S = 10.0
"""Seconds between two of them."""


@dataclass(frozen=True, slots=True)
class Pulled:
    """What a worker is told when it asks.

    Attributes:
        units: to start. cancel: ids of units of its own that another worker has done.
        retired: it is not needed any more and should end.
    """

    units: list[Wire]
    cancel: list[str]
    retired: bool


@dataclass(slots=True)
class _OpenRun:
    queue: UnitQueue
    deadline: float
    client: str
    token: str
    events: list[Wire] = field(default_factory=list)
    trainers: tuple[str, ...] = ()
    done_had: int = 0
    events_had: int = 0
    # One for each worker that waits for work, so that a result wakes the flow and not all of them.
    waiting: dict[str, asyncio.Event] = field(default_factory=dict)
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def forget(self, done: int, events: int) -> None:
        """Lets go of results and events that the flow has: so many since the run was opened."""
        self.queue.forget(done - self.done_had)
        del self.events[: events - self.events_had]
        self.done_had, self.events_had = done, events

    async def work_for(self, worker: str) -> bool:
        """Waits until there may be work for this worker; False after `POLL_S`."""
        event = self.waiting[worker] = asyncio.Event()
        try:
            return await _set_in_time(event)
        finally:
            if self.waiting.get(worker) is event:  # not that of a later call of the same worker
                del self.waiting[worker]

    def wake_workers(self) -> None:
        """Wakes the workers that wait now; whoever comes later waits for the next change."""
        for event in self.waiting.values():
            event.set()
        self.waiting.clear()

    def wake_worker(self, worker: str) -> None:
        """Wakes one, if it waits."""
        if (event := self.waiting.pop(worker, None)) is not None:
            event.set()

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
            self.kindling_alive,
            self.kindling_load,
            self.kindling_frozen,
            self.kindling_retire,
            self.kindling_claim_trainers,
            self.kindling_close,
        ):
            scheduler.handlers[method.__name__] = method

    def remove_worker(self, scheduler: Scheduler, worker: str, **_: Any) -> None:
        for state in self._runs.values():
            self._lose(state, worker, "was lost")

    def _lose(self, state: _OpenRun, worker: str, how: str, silent: bool = False) -> None:
        units = state.queue.lose(worker)
        if units or silent:
            event = {"kind": "worker_lost", "worker": worker, "how": how, "units": units}
            state.events.append(event | {"silent": silent})
            state.wake_workers()
        state.wake_flow()

    def remove_client(self, scheduler: Scheduler, client: str) -> None:
        """A flow that has gone will not come back: its tasks on the workers are released too."""
        for name in [name for name, run in self._runs.items() if run.client == client]:
            self._close(name)

    async def kindling_open(self, run: str, token: str, client: str) -> None:
        if run in self._runs and self._runs[run].deadline > time.monotonic():
            raise RunClosed(f"run {run!r} is already open in another flow; cancel that one first")
        self._close(run)
        self._runs[run] = _OpenRun(UnitQueue(), time.monotonic() + LEASE_S, client, token)

    async def kindling_renew(self, run: str, token: str) -> None:
        self._get(run, token).deadline = time.monotonic() + LEASE_S

    async def kindling_close(self, run: str, token: str) -> None:
        state = self._runs.get(run)
        if state is not None and state.token == token:
            self._close(run)

    def _close(self, run: str) -> None:
        closed = self._runs.pop(run, None)
        if closed is not None:
            closed.wake_workers()
            closed.wake_flow()

    async def kindling_offer(self, run: str, token: str, units: Sequence[Wire]) -> None:
        state = self._get(run, token)
        state.queue.offer(units)
        state.wake_workers()

    async def kindling_alive(self, run: str, token: str, worker: str) -> None:
        """A sign of life, and the question whether the run is still open."""
        self._get(run, token).queue.renew(worker, time.monotonic())

    async def kindling_pull(
        self, run: str, token: str, worker: str, count: int, wait: bool
    ) -> Wire:
        """At most `count` units, with `wait` none only after `POLL_S` or a result of its own; and
        what to cancel."""
        units = self._pull(run, token, worker, count)
        if not units and wait and await self._get(run, token).work_for(worker):
            units = self._pull(run, token, worker, count)
        queue = self._get(run, token).queue
        retired = worker in queue.retired
        return {"units": units, "cancel": queue.cancellations(worker), "retired": retired}

    def _pull(self, run: str, token: str, worker: str, count: int) -> list[Wire]:
        state = self._get(run, token)
        now = time.monotonic()
        # One that died while it waited here must get nothing: nobody would ever give it back.
        assert self._scheduler is not None
        return state.queue.pull(worker, count, now) if worker in self._scheduler.workers else []

    async def kindling_complete(
        self, run: str, token: str, worker: str, results: Sequence[Wire]
    ) -> None:
        state = self._get(run, token)
        for result in results:
            state.queue.complete(worker, result, time.monotonic())
        # It asks for its next unit while it hands in the last one, which still counts as its share.
        state.wake_worker(worker)
        state.wake_flow()

    async def kindling_fail(
        self, run: str, token: str, worker: str, unit_id: str, message: str
    ) -> None:
        state = self._get(run, token)
        quarantined = state.queue.fail(worker, unit_id, message, time.monotonic())
        state.events.append(
            {"kind": "unit_failed", "worker": worker, "unit_id": unit_id, "message": message}
        )
        if quarantined:
            why = state.queue.quarantined[worker]
            state.events.append({"kind": "quarantined", "worker": worker, "message": why})
        state.wake_workers()
        state.wake_flow()

    async def kindling_report(self, run: str, token: str, event: Wire) -> None:
        state = self._get(run, token)
        state.events.append(event)
        state.wake_flow()

    async def kindling_load(self, run: str, token: str) -> Wire:
        """What `scaling.Load` is made of."""
        queue = self._get(run, token).queue
        return {
            "outstanding": queue.outstanding,
            "worker_s": queue.worker_s,
            "workers": [one for one in queue.workers if one not in queue.quarantined],
            "idle": queue.idle(time.monotonic()),
        }

    async def kindling_frozen(self, run: str, token: str, resource: str) -> list[str]:
        """Workers with a resource that Dask itself has not heard of for `FROZEN_S`: also those that
        have never asked for a unit."""
        self._get(run, token)
        assert self._scheduler is not None
        heard_of = time.time() - FROZEN_S
        return [
            worker.address
            for worker in self._scheduler.workers.values()
            if worker.resources.get(resource) and worker.last_seen < heard_of
        ]

    async def kindling_retire(self, run: str, token: str, worker: str) -> bool:
        """Gives a worker no more units unless it holds some; whether it does not."""
        state = self._get(run, token)
        retired = state.queue.retire(worker)
        state.wake_workers()
        return retired

    async def kindling_claim_trainers(self, run: str, token: str, size: int) -> Wire:
        """`claims.Claim` of this run; what it held before and does not get again is free."""
        state = self._get(run, token)
        now = time.monotonic()
        others = {n: r.trainers for n, r in self._runs.items() if n != run and r.deadline > now}
        assert self._scheduler is not None
        # Also one that is frozen: whoever calls it finds that out, and has it started again.
        offering = [w for w in self._scheduler.workers.values() if w.resources.get(TRAINER)]
        present = [w.address for w in sorted(offering, key=lambda worker: str(worker.name))]
        made = claim(size, present, state.trainers, others)
        state.trainers = made.workers
        return asdict(made)

    async def kindling_collect(self, run: str, token: str, done: int, events: int) -> Wire:
        """Results and events after the first `done` and `events`; waits `POLL_S` at most."""
        state = self._get(run, token)
        state.deadline = time.monotonic() + LEASE_S
        state.forget(done, events)
        for silent in state.queue.silent(time.monotonic()):
            self._lose(
                state, silent, f"gave no sign of life for {WORKER_SILENT_S:g} s", silent=True
            )
        if not state.queue.done and not state.events:
            await _set_in_time(state.news)
            state = self._get(run, token)
        return {
            "done": list(state.queue.done),
            "events": list(state.events),
            "failed": dict(state.queue.failed),
        }

    def _get(self, run: str, token: str) -> _OpenRun:
        """The run, for those who speak for its present life: its flow, and the loops it started."""
        state = self._runs.get(run)
        if state is not None and state.deadline <= time.monotonic():
            self._close(run)
        elif state is not None and state.token == token:
            return state
        raise RunClosed(f"run {run!r} is closed: it ended, was cancelled or its flow died")


async def _set_in_time(event: asyncio.Event) -> bool:
    try:
        await asyncio.wait_for(event.wait(), POLL_S)
    except TimeoutError:
        return False
    return True


class FlowQueue:
    """The flow's side of its run's queue. Every call raises SchedulerLost once the scheduler is
    gone; only `close` does not, since the queue is gone with it.

    Attributes:
        token: of this opening of the run; whoever speaks for an earlier one is told RunClosed.
    """

    def __init__(self, client: Client, run: str) -> None:
        self._client = client
        self._run = run
        self.token = secrets.token_hex(8)
        self._done = 0
        self._events = 0
        client.register_plugin(QueueBoard())
        self._call("kindling_open", client=client.id)

    def _call(self, handler: str, **arguments: Any) -> Any:
        return ask_scheduler(self._client, handler, run=self._run, token=self.token, **arguments)

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

    def load(self) -> Wire:
        return self._call("kindling_load")

    def frozen(self, resource: str) -> list[str]:
        """Addresses of workers with a resource that give no sign of life at all."""
        return self._call("kindling_frozen", resource=resource)

    def retire(self, worker: str) -> bool:
        """Whether the worker holds no unit; it then gets none any more, and its loop ends."""
        return self._call("kindling_retire", worker=worker)

    def claim_trainers(self, size: int) -> Claim:
        """Has this run hold so many trainer workers, or none, until it closes or claims again."""
        found = self._call("kindling_claim_trainers", size=size)
        return Claim(**{**found, "workers": tuple(found["workers"])})

    def close(self) -> None:
        with suppress(SchedulerLost):
            self._call("kindling_close")


def keep_open(queue: FlowQueue, over: threading.Event, every_s: float = RENEW_S) -> None:
    """Renews a run's lease until `over` is set: for a thread of its own, since training may take
    minutes in which the flow asks the queue for nothing."""
    while not over.wait(every_s):
        try:
            queue.renew()
        except (SchedulerLost, RunClosed):
            return  # the flow's own next call says the same where it can be handled


class WorkerQueue:
    """A worker's side. Every call raises RunClosed once the run is closed."""

    def __init__(self, worker: Worker, run: str, token: str) -> None:
        self._worker = worker
        self._run = run
        self._token = token

    def _call(self, handler: str, **arguments: Any) -> Any:
        remote = getattr(self._worker.scheduler, handler)
        return sync(self._worker.loop, remote, run=self._run, token=self._token, **arguments)

    def alive(self) -> None:
        """To be called every few seconds, or the units go to others."""
        self._call("kindling_alive", worker=self._worker.address)

    def pull(self, count: int, wait: bool) -> Pulled:
        found = self._call("kindling_pull", worker=self._worker.address, count=count, wait=wait)
        return Pulled(**found)

    def complete(self, results: Sequence[Wire]) -> None:
        self._call("kindling_complete", worker=self._worker.address, results=list(results))

    def fail(self, unit_id: str, message: str) -> None:
        self._call("kindling_fail", worker=self._worker.address, unit_id=unit_id, message=message)

    def report(self, event: Wire) -> None:
        self._call("kindling_report", event={"worker": self._worker.address, **event})
