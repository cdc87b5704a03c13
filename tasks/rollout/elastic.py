"""A run's rollout workers grow and shrink with its queue: `tasks.rollout.scaling`, carried out."""

from __future__ import annotations

import time
from collections.abc import Callable

from distributed import Client

from tasks.cluster import ROLLOUT, Log, WorkerPool, names_of, scheduler_errors
from tasks.config_cluster import ClusterConfig
from tasks.rollout.board import FlowQueue
from tasks.rollout.scaling import Limits, Load, Starts, decide


class Scaler:
    """Starts and retires the workers of a pool; others that the cluster has only count.

    Not thread-safe.
    """

    def __init__(
        self, client: Client, queue: FlowQueue, pool: WorkerPool, cluster: ClusterConfig, log: Log
    ) -> None:
        self._client = client
        self._queue = queue
        self._pool = pool
        self._log = log
        least = cluster.rollout_workers
        self._limits = Limits(
            least, cluster.rollout_workers_most or least, cluster.drain_s, cluster.idle_s
        )
        self._starts = Starts()
        self._retired: dict[str, str] = {}  # address -> Dask name

    def look(self, has_ended: Callable[[str], bool], is_out: Callable[[str], bool]) -> None:
        """Looks at the queue once and does what it asks for.

        Args:
            has_ended: whether a worker's loop has: then its process may go, too.
            is_out: whether the run has left out the worker of a name.

        Raises:
            RunClosed: the run is over.
            ClusterError: the pool refuses or does not answer.
            SchedulerLost: the scheduler does not answer.
        """
        for address in [one for one in self._retired if has_ended(one)]:
            with scheduler_errors(self._client):
                self._client.retire_workers([address], close_workers=True, remove=True)
            self._pool.give_back(self._retired.pop(address))
        queue = self._queue.load()
        names = names_of(self._client, ROLLOUT)
        ours = set(self._pool.names())
        serving = set(queue["workers"])
        coming = [
            address
            for address, name in names.items()
            if address not in serving and address not in self._retired and not is_out(name)
        ]
        unseen = ours - set(names.values())
        idle = {a: s for a, s in queue["idle"].items() if names.get(a) in ours}
        load = Load(
            queue["outstanding"],
            queue["worker_s"],
            len(serving),
            len(coming) + len(unseen),
            idle,
        )
        change = decide(load, self._limits)
        now = time.monotonic()
        wait = self._starts.look(ours, {names[one] for one in serving if one in names}, now)
        if wait is not None:
            self._log.warning(
                "rollout workers that were started ended before they served, see their logs; no "
                "more are started for %.0f s",
                wait,
            )
        if change.start and self._starts.may(now):
            self._log.info(
                "%d units wait for %d rollout workers: %d more are started",
                load.outstanding,
                load.workers + load.starting,
                change.start,
            )
            self._pool.start(change.start)
            self._starts.asked_for(set(self._pool.names()) - ours)
        for address in change.retire:
            # The queue has the last word: a unit may have been given to it meanwhile.
            if self._queue.retire(address):
                self._retired[address] = names[address]
                self._log.info(
                    "rollout worker %s had no work for %.0f s and is given back",
                    names[address],
                    idle[address],
                )
