"""The flow's hold on its rollout workers: offers units, collects groups, serves new workers."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import cast

from distributed import Client, Future

from tasks.cluster import ROLLOUT, WorkerPool, names_of, restart, submit_to
from tasks.errors import (
    ClusterError,
    IntegrityError,
    KindlingError,
    RewardError,
    RunClosed,
    SchedulerLost,
    UnitFailed,
)
from tasks.rollout.accepted import AcceptedLog, batch_of
from tasks.rollout.agent import Unit
from tasks.rollout.batches import summary_from_wire
from tasks.rollout.board import RENEW_S, FlowQueue, keep_open
from tasks.rollout.elastic import Scaler
from tasks.rollout.queue import Wire
from tasks.rollout.trajectory import GroupSummary
from tasks.rollout.worker import RolloutSpec, serve_run

LOOK_AGAIN_S = 2.0
MAX_STOPS = 2
"""A worker whose loop has stopped this often, by no fault of the run's, is left out of it."""


class Fleet:
    """All rollout workers of the cluster, each running the resident loop for this run.

    Attributes:
        loads: what the workers loaded for this run: engines, indexes, anchors.
        applied: the workers' reports of applied versions, in order.
        reused: results that an earlier flow of this run had accepted, and nobody sampled again.
    """

    def __init__(
        self,
        client: Client,
        spec: RolloutSpec,
        log: logging.Logger | logging.LoggerAdapter,
        pool: WorkerPool | None = None,
        serve: Callable[[RolloutSpec], None] = serve_run,
        accepted: AcceptedLog | None = None,
        queue: FlowQueue | None = None,
    ) -> None:
        """
        Args:
            pool: where more workers come from. serve: the loop of a worker.
            accepted: where results are written down, and earlier ones are found.
            queue: the run's, where it is open already.

        Raises:
            RunClosed: the run is open in another flow.
        """
        self._client = client
        self._accepted = accepted
        self._known: dict[str, dict[str, Wire]] = {}
        self.reused = 0
        self._log = log
        self._serve = serve
        self._groups: dict[str, GroupSummary] = {}
        self._dropped: dict[str, str] = {}
        self._given_up: dict[str, str] = {}
        self._offered: dict[str, int] = {}  # the version each unit is to be sampled at
        # Units that came to nothing and are not yet written down, see `collect`.
        self._unwritten: dict[str, Wire] = {}
        self._serving: dict[str, Future] = {}
        self._stops: Counter[str] = Counter()  # Dask name -> how often its loop was at fault
        self._alone_since: float | None = None
        self._look_again = 0.0
        self.loads: dict[str, int] = {"engines": 0, "indexes": 0, "anchors": 0}
        self.applied: list[Wire] = []
        self._queue = queue or FlowQueue(client, spec.run)
        self._spec = spec = replace(spec, token=self._queue.token)
        self._over = threading.Event()
        lease = partial(keep_open, self._queue, self._over, RENEW_S)
        self._keepers = [threading.Thread(target=lease, name="lease", daemon=True)]
        if pool is not None:
            scaler = Scaler(client, self._queue, pool, spec.config.cluster, log)
            keep = partial(self._keep_scaled, scaler)
            self._keepers.append(threading.Thread(target=keep, name="scaler", daemon=True))
        for keeper in self._keepers:
            keeper.start()
        self._serve_everywhere()

    def offer(self, units: Sequence[Unit]) -> None:
        """Puts units into the queue, but for those of which there is a result at that version."""
        new = [unit for unit in units if not self._is_known(unit)]
        self._offered |= {unit.unit_id: unit.version for unit in new}
        self._queue.offer([asdict(unit) for unit in new])

    def _is_known(self, unit: Unit) -> bool:
        batch = batch_of(unit.unit_id)
        if self._accepted is None:
            return False
        if batch not in self._known:
            self._known = {batch: self._accepted.read(batch)}  # batches come one after another
        result = self._known[batch].get(unit.unit_id)
        if result is None or result["version"] != unit.version:
            return False
        if "trajectories" in result and len(result["trajectories"]) != unit.size:
            return False  # evaluation.samples may change between a run and its resumption
        self._take(result)
        self.reused += 1
        return True

    def collect(
        self,
        unit_ids: Sequence[str],
        progress: Callable[[int], None] | None = None,
        may_fail: float = 0.0,
    ) -> list[GroupSummary]:
        """Waits for these units' groups; returns them in the order asked for.

        A group that the run's reward function failed on is left out, with a warning; so is a unit
        that failed on every try, where some may. Which these are is written down when this returns
        and not when it raises: once the cause is mended, a resumed run samples them anew.

        Args:
            progress: called with the number that is there whenever it may have grown.
            may_fail: share of the units that may be given up; one at least unless it is 0, and
                so with the rewards that may fail: a single unit is asked for, too.

        Raises:
            UnitFailed: more units were given up.
            RewardError: more than rollout.max_failed_rewards of them were left out.
            ClusterError: no rollout worker is left and none came back in time.
            KindlingError: what stopped a worker's loop.
        """
        while True:
            there = [unit_id for unit_id in unit_ids if unit_id in self._groups]
            dropped = [unit_id for unit_id in unit_ids if unit_id in self._dropped]
            given_up = [unit_id for unit_id in unit_ids if unit_id in self._given_up]
            if progress is not None:
                progress(len(there))
            self._require_rewards(dropped, len(unit_ids))
            if len(given_up) > _allowed(may_fail, len(unit_ids)):
                raise UnitFailed(
                    f"unit {given_up[0]} failed on every try: {self._given_up[given_up[0]]} "
                    f"({len(given_up)} of {len(unit_ids)} units did)"
                )
            if len(there) + len(dropped) + len(given_up) == len(unit_ids):
                self._write_down([*dropped, *given_up])
                for unit_id in unit_ids:
                    self._offered.pop(unit_id, None)
                return [self._groups.pop(unit_id) for unit_id in there]
            done, events, failed = self._queue.collect()
            # One that was given up may come after all, from a worker that was thought lost.
            done = [result for result in done if result["unit_id"] not in self._given_up]
            done += [
                {"unit_id": unit_id, "version": self._offered[unit_id], "given_up": failed[unit_id]}
                for unit_id in unit_ids
                if unit_id in failed and unit_id not in self._given_up
            ]
            sampled = [result for result in done if not _is_nothing(result)]
            if sampled and self._accepted is not None:
                self._accepted.append(sampled)
            for result in done:
                if _is_nothing(result):
                    self._unwritten[result["unit_id"]] = result
                self._take(result)
            for event in events:
                self._note(event)
            lost = any(event["kind"] == "worker_lost" for event in events)
            if lost or time.monotonic() > self._look_again:
                self._serve_everywhere()

    def _write_down(self, unit_ids: Sequence[str]) -> None:
        """Has it that these units came to nothing: the run goes on without them for good."""
        results = [self._unwritten.pop(one) for one in unit_ids if one in self._unwritten]
        if results and self._accepted is not None:
            self._accepted.append(results)

    def _take(self, result: Wire) -> None:
        unit_id = result["unit_id"]
        if "given_up" in result:
            self._given_up[unit_id] = result["given_up"]
            self._log.warning("unit %s is given up: %s", unit_id, result["given_up"])
        elif "dropped" in result:
            self._dropped[unit_id] = result["dropped"]
            self._log.warning("group %s is left out: %s", unit_id, result["dropped"])
        else:
            self._groups[unit_id] = summary_from_wire(result)

    def _require_rewards(self, dropped: Sequence[str], asked: int) -> None:
        limit = self._spec.config.rollout.max_failed_rewards
        if len(dropped) > _allowed(limit, asked):
            raise RewardError(
                f"the reward failed on {len(dropped)} of {asked} groups, more than the share "
                f"rollout.max_failed_rewards = {limit:g} allows; the last: "
                f"{self._dropped[dropped[-1]]}"
            )

    def close(self) -> None:
        """Closes the run: its workers finish their engine step and are free."""
        self._over.set()
        self._queue.close()  # first: a keeper may wait for a batch system's answer
        for keeper in self._keepers:
            keeper.join()

    def _serve_everywhere(self) -> None:
        """Starts the loop on rollout workers that do not run it, and looks after those that do."""
        self._look_again = time.monotonic() + LOOK_AGAIN_S
        for address in self._queue.frozen(ROLLOUT):
            self._log.warning("rollout worker %s is frozen: its process is started again", address)
            restart(self._client, [address])
        names = names_of(self._client, ROLLOUT)
        for address in list(self._serving):
            if address not in names:
                del self._serving[address]
        present = [address for address, name in names.items() if not self._is_out(name)]
        for address in present:
            future = self._serving.get(address)
            if future is None:
                # This opening's own: Dask would answer with a loop of the last, which has ended.
                key = f"{self._spec.run}-{self._spec.token}-serve-{address}"
                self._serving[address] = submit_to(
                    self._client, address, key, self._serve, self._spec
                )
            elif future.status == "error":
                self._stopped(address, future)
        self._require_workers(bool(present))

    def _is_out(self, name: str) -> bool:
        return self._stops[name] >= MAX_STOPS

    def _stopped(self, address: str, future: Future) -> None:
        """A worker's loop has raised. What any worker would raise ends the run; what may be this
        process' or this host's own costs the worker, as long as there is another.

        Raises:
            KindlingError: what stopped the loop.
            UnitFailed: the same for other errors, if no worker is left.
        """
        error = cast("BaseException | None", future.exception())
        names = names_of(self._client, ROLLOUT)
        del self._serving[address]
        if (name := names.get(address)) is None:
            return
        if isinstance(error, KindlingError) and not isinstance(error, IntegrityError):
            raise error
        self._stops[name] += 1
        message = f"rollout worker {address} stopped: {type(error).__name__}: {error}"
        if all(map(self._is_out, names.values())):
            raise UnitFailed(message) from error
        if self._is_out(name):
            self._log.warning("%s; it is left out of this run", message)
        else:
            self._log.warning("%s; its process is started again", message)
            restart(self._client, [address])

    def _require_workers(self, some: bool) -> None:
        if some:
            self._alone_since = None
            return
        now = time.monotonic()
        self._alone_since = self._alone_since or now
        limit = self._spec.config.cluster.wait_s
        if now - self._alone_since > limit:
            raise ClusterError(
                f"no rollout worker has been there for {limit:g} s; start one with "
                "--resources ROLLOUT=1 and resume the run"
            )

    def _note(self, event: Wire) -> None:
        worker = event.get("worker")
        match event["kind"]:
            case "ready":
                for name, count in event["loads"].items():
                    self.loads[name] += count
                self._log.info("rollout worker %s is ready; loaded %s", worker, event["loads"])
            case "applied":
                self.loads["anchors"] += event["anchor_loads"]
                self.applied.append(event)
                self._log.debug("worker %s applied version %s", worker, event["version"])
            case "worker_lost":
                self._log.warning(
                    "rollout worker %s %s; its %d units go on elsewhere",
                    worker,
                    event["how"],
                    len(event["units"]),
                )
                if event["silent"]:  # its nanny starts another, which is served like any that joins
                    restart(self._client, [str(worker)])
            case "quarantined":
                self._log.warning(
                    "rollout worker %s gets no more units in this run: %s; restart it",
                    worker,
                    event["message"],
                )
            case "unit_failed":
                self._log.warning("unit %s failed: %s", event["unit_id"], event["message"])

    def _has_ended(self, address: str) -> bool:
        """Whether this run's loop has ended on a worker that is still there."""
        future = self._serving.get(address)
        return future is not None and future.status == "finished"

    def _keep_scaled(self, scaler: Scaler) -> None:
        """In a thread of its own: what goes wrong here costs the run its growth and not its
        lease."""
        while not self._over.wait(LOOK_AGAIN_S):
            try:
                scaler.look(self._has_ended, self._is_out)
            except (RunClosed, SchedulerLost):  # the flow's own next call says so
                return
            except ClusterError as error:  # a controller that is busy now may answer later
                self._log.warning("the run keeps the rollout workers it has for now: %s", error)


def _is_nothing(result: Wire) -> bool:
    """Whether a unit came to nothing: it was given up, or its group is left out."""
    return "given_up" in result or "dropped" in result


def _allowed(share: float, asked: int) -> float:
    """How many of so many units may come to nothing."""
    return max(1.0, share * asked) if share else 0.0
