"""Where further workers come from: processes of this machine, or jobs and pods elsewhere."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from infra.cluster import connect, gpus_of, start_worker, workers_present
from infra.leave import IDLE_S
from infra.processes import ProcessGroup, is_alive
from tasks.cluster import ROLLOUT, TRAINER, WorkerPool
from tasks.config_cluster import ClusterConfig
from tasks.errors import ClusterError

logger = logging.getLogger(__name__)


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
        """Starts workers under the lowest numbers that are free, and so on the GPUs that are."""
        taken = set(self.names())
        free = (
            index
            for index in itertools.count(self._cluster.rollout_workers)
            if f"rollout-{index}" not in taken
        )
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
    """Asks for the workers that the scheduler lacks, where the configuration says from whom; they
    end with this context. Does not wait for them.

    Raises:
        ClusterError: the scheduler does not answer, or whoever was asked refused.
    """
    wanted = {ROLLOUT: cluster.rollout_workers, TRAINER: cluster.trainers}
    with ExitStack() as pools:
        for kind, count in wanted.items():
            pool = _launcher(cluster, kind, home)
            if pool is None or cluster.scheduler is None:
                continue
            pools.enter_context(_closing(pool))
            with connect(cluster.scheduler, cluster.wait_s) as client:
                pool.start(max(0, count - workers_present(client)[kind]))
        yield


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
