"""Workers as Kubernetes pods, one pod a worker.

Bare pods that are never restarted, on whose environment and end the run decides alone: a worker
group of dask-kubernetes' operator chooses by itself which worker goes when it shrinks, and starts
one again that was told to close. The scheduler they join may well be the operator's. A pod ends
with its worker: see `infra.leave` for that of a flow that was killed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import kr8s
from kr8s.objects import Pod

from infra.cluster import launched_name, worker_arguments, worker_environment, worker_threads
from infra.leave import PRELOAD
from tasks.cluster import ROLLOUT
from tasks.config_cluster import ClusterConfig, KubernetesConfig
from tasks.errors import ClusterError

POOL_LABEL = "kindling/pool"
_ENDED = ("Succeeded", "Failed")


class KubernetesPool:
    """`tasks.cluster.WorkerPool` over the API server of the kubeconfig, or of the pod this runs
    in; not thread-safe."""

    def __init__(
        self, scheduler: str, cluster: ClusterConfig, kubernetes: KubernetesConfig, resource: str
    ) -> None:
        self._scheduler = scheduler
        self._cluster = cluster
        self._kubernetes = kubernetes
        self._resource = resource
        self._label = launched_name(resource)
        self._started = False

    def start(self, count: int) -> None:
        """Creates so many pods.

        Raises:
            ClusterError: the API server does not answer or refuses; those before stay.
        """
        for _ in range(count):
            self._started = True
            with self._asked("create a worker's pod"):
                Pod(self._pod(launched_name(self._resource)), api=kr8s.api()).create()

    def names(self) -> list[str]:
        """Dask names of the pods that wait or run, which are the pods' own.

        Raises:
            ClusterError: the API server does not answer or refuses.
        """
        phases = {pod.name: pod.raw.get("status", {}).get("phase") for pod in self._pods()}
        return [name for name, phase in phases.items() if phase not in _ENDED]

    def give_back(self, name: str) -> None:
        """Deletes a worker's pod."""
        self._delete(pod for pod in self._pods() if pod.name == name)

    def close(self) -> None:
        """Deletes all that are left, those that ended too."""
        self._delete(self._pods())

    def _pods(self) -> list[Pod]:
        if not self._started:
            return []
        with self._asked("list the workers' pods"):
            found: Any = Pod.list(
                namespace=self._kubernetes.namespace,
                label_selector={POOL_LABEL: self._label},
                api=kr8s.api(),
            )
            return list(found)

    def _delete(self, pods: Iterator[Pod] | list[Pod]) -> None:
        for pod in pods:
            with self._asked(f"delete pod {pod.name}"):
                try:
                    pod.delete()
                except kr8s.NotFoundError:
                    continue  # somebody else did

    @contextmanager
    def _asked(self, what: str) -> Iterator[None]:
        try:
            yield
        except (kr8s.ServerError, kr8s.APITimeoutError, httpx.HTTPError, ValueError) as error:
            raise ClusterError(
                f"cannot {what} in namespace {self._kubernetes.namespace!r}: "
                f"{str(error).splitlines()[0]}; see that "
                "`kubectl auth can-i create pods` says yes there, and correct cluster.kubernetes"
            ) from error

    def _pod(self, name: str) -> dict[str, Any]:
        kubernetes = self._kubernetes
        threads = worker_threads(self._cluster, self._resource)
        gpus = kubernetes.rollout_gpus if self._resource == ROLLOUT else kubernetes.trainer_gpus
        amounts = {"cpu": str(threads), "memory": kubernetes.memory}
        if gpus:
            amounts["nvidia.com/gpu"] = str(gpus)
        arguments = worker_arguments(self._scheduler, name, self._resource, "/tmp")
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": name,
                "namespace": kubernetes.namespace,
                "labels": {POOL_LABEL: self._label},
            },
            "spec": {
                "restartPolicy": "Never",
                "containers": [
                    {
                        "name": "worker",
                        "image": kubernetes.image,
                        "command": ["python", *arguments, "--preload", PRELOAD],
                        "env": [
                            {"name": key, "value": value}
                            for key, value in worker_environment(threads, gpu=None).items()
                            if value is not None
                        ],
                        "envFrom": [{"secretRef": {"name": kubernetes.secret}}],
                        "resources": {"requests": amounts, "limits": amounts},
                    }
                ],
            },
        }
