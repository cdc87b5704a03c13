"""Where further workers come from: processes of this machine, or jobs and pods elsewhere."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from distributed import Client

from infra.cluster import connect, gpus_of, start_worker, worker_name
from infra.leave import IDLE_S
from infra.processes import ProcessGroup, is_alive
from tasks.cluster import ROLLOUT, TRAINER, WorkerPool, names_of
from tasks.config_cluster import ClusterConfig
from tasks.errors import ClusterError, SchedulerLost
from tasks.rollout.scaling import Starts

logger = logging.getLogger(__name__)
TOP_UP_S = 10.0
"""Seconds between two looks at whether a launched worker has ended: its node or its time may."""


class LocalPool:
    """`tasks.cluster.WorkerPool` on one machine; its workers end with it at the latest.

    Not thread-safe.
    """

    def __init__(self, scheduler: str, cluster: ClusterConfig, home: Path) -> None:
        self._scheduler = scheduler
        self._cluster = cluster
        self._folder = home / "dask"
        self._gpus = gpus_of(cluster)
        self._group = ProcessGroup(home / "logs")

    def start(self, count: int) -> None:
        """Starts workers under the lowest numbers that are free, and so on the GPUs that are: where
        there are GPUs, no more than have one.

        Raises:
            ClusterError: the scheduler does not answer.
        """
        with connect(self._scheduler, self._cluster.wait_s) as client:
            # Also the names of others': Dask refuses a worker whose name is taken.
            taken = {*self.names(), *names_of(client, ROLLOUT).values()}
        least, most = self._cluster.rollout_workers, self._cluster.rollout_workers_most
        numbers = range(least, most or least) if self._gpus else itertools.count(least)
        free = (index for index in numbers if worker_name(ROLLOUT, index) not in taken)
        for index in itertools.islice(free, count):
            start_worker(
                self._group,
                self._scheduler,
                self._cluster,
                self._folder,
                ROLLOUT,
                index,
                self._gpus,
            )

    def names(self) -> list[str]:
        """Dask names of the workers whose processes live; forgets the others."""
        for child in list(self._group.children):
            if not is_alive(child.pid, child.created):
                self._group.discard(child)
        return [child.name for child in self._group.children]

    def give_back(self, name: str) -> None:
        """Nothing more to do: the process of a worker that was told to close ends by itself."""

    def close(self) -> None:
        """Stops all that are left."""
        self._group.stop()


@contextmanager
def growth(cluster: ClusterConfig, scheduler: str, home: Path) -> Iterator[WorkerPool | None]:
    """Where a run that may grow takes rollout workers from; None for one that may not."""
    if not cluster.grows:
        yield None
        return
    with _closing(_launcher(cluster, ROLLOUT, home) or LocalPool(scheduler, cluster, home)) as pool:
        yield pool


@contextmanager
def base_workers(cluster: ClusterConfig, home: Path) -> Iterator[None]:
    """Asks for the workers that the scheduler lacks, where the configuration says from whom, and
    again for those that end before this context does; they end with it. Does not wait for them.

    Raises:
        ClusterError: the scheduler does not answer, or whoever was asked refused.
    """
    wanted = {ROLLOUT: cluster.rollout_workers, TRAINER: cluster.trainers}
    with ExitStack() as stack:
        bases = []
        for kind, count in wanted.items():
            pool = _launcher(cluster, kind, home)
            if pool is not None:
                bases.append(_Base(kind, count, stack.enter_context(_closing(pool))))
        if bases and cluster.scheduler is not None:
            client = stack.enter_context(connect(cluster.scheduler, cluster.wait_s))
            for base in bases:
                base.top_up(client)
            stack.enter_context(_kept(bases, client))
        yield


class _Base:
    """The workers of a kind that a run is to have at least, some of them asked for here."""

    def __init__(self, kind: str, count: int, pool: WorkerPool) -> None:
        self._kind, self._count, self._pool = kind, count, pool
        self._starts = Starts()

    def top_up(self, client: Client) -> None:
        """Asks for those that are missing and not on their way.

        Raises:
            ClusterError: the scheduler does not answer, or whoever was asked refused.
        """
        there, ours = set(names_of(client, self._kind).values()), set(self._pool.names())
        now = time.monotonic()
        wait = self._starts.look(ours, there, now)
        if wait is not None:
            logger.warning(
                "workers with %s=1 that were asked for ended before they joined, see their logs; "
                "no more are asked for in the next %.0f s",
                self._kind,
                wait,
            )
        missing = self._count - len(there | ours)
        if missing > 0 and self._starts.may(now):
            self._pool.start(missing)
            self._starts.asked_for(set(self._pool.names()) - ours)


@contextmanager
def _kept(bases: Sequence[_Base], client: Client) -> Iterator[None]:
    """Tops up the bases from time to time."""
    over = threading.Event()

    def keep() -> None:
        while not over.wait(TOP_UP_S):
            for base in bases:
                try:
                    base.top_up(client)
                except SchedulerLost:
                    return  # the run's own next call says so
                except ClusterError as error:  # a controller that is busy now may answer later
                    logger.warning("%s", error)

    thread = threading.Thread(target=keep, name="top-up", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextmanager
def _closing(pool: WorkerPool) -> Iterator[WorkerPool]:
    """Closes a pool at the end. That it cannot be is no failure of the run, which is done."""
    try:
        yield pool
    finally:
        try:
            pool.close()
        except ClusterError as error:
            logger.warning(
                "%s; workers that stay end by themselves, without work for %g s", error, IDLE_S
            )


def _launcher(cluster: ClusterConfig, resource: str, home: Path) -> WorkerPool | None:
    """The pool of workers on other machines; its library is imported where one is configured."""
    if cluster.scheduler is None:
        return None
    if cluster.slurm is not None:
        from infra.slurm import SlurmPool

        return SlurmPool(cluster.scheduler, cluster, cluster.slurm, resource, home / "logs")
    if cluster.kubernetes is not None:
        from infra.kubernetes import KubernetesPool

        return KubernetesPool(cluster.scheduler, cluster, cluster.kubernetes, resource)
    return None
