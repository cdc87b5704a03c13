"""Rollout workers that a run adds while work waits, as processes of this machine."""

from __future__ import annotations

import itertools
from pathlib import Path

from infra.cluster import ROLLOUT, gpus_of, start_worker
from infra.processes import ProcessGroup, is_alive
from tasks.config import ClusterConfig


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

    def close(self) -> None:
        """Stops all that are left."""
        self._group.stop()
