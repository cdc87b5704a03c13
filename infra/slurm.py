"""Workers as SLURM jobs, one job a worker, through dask-jobqueue.

A job ends with its worker: when the run gives it back, when the run that asked for it is over,
when its scheduler is gone, or when nobody has given it work for long (`infra.leave`), so that a
flow that was killed leaves no allocation behind.
"""

from __future__ import annotations

import getpass
import shlex
import subprocess
from collections.abc import Mapping
from pathlib import Path

from dask_jobqueue.slurm import SLURMJob

from infra.cluster import (
    CONTROL_THREADS,
    DEATH_TIMEOUT_S,
    launched_name,
    worker_environment,
    worker_threads,
)
from infra.leave import PRELOAD
from tasks.cluster import ROLLOUT
from tasks.config_cluster import ClusterConfig, SlurmConfig
from tasks.errors import ClusterError

_ANSWER_S = 60.0


class SlurmPool:
    """`tasks.cluster.WorkerPool` over sbatch, squeue and scancel; not thread-safe."""

    def __init__(
        self,
        scheduler: str,
        cluster: ClusterConfig,
        slurm: SlurmConfig,
        resource: str,
        logs: Path,
    ) -> None:
        """
        Args:
            resource: that of a worker. logs: folder of the jobs' output, on the shared file system.
        """
        self._scheduler = scheduler
        self._cluster = cluster
        self._slurm = slurm
        self._resource = resource
        self._logs = logs
        self._jobs: dict[str, str] = {}  # Dask name -> job id

    def start(self, count: int) -> None:
        """Submits so many jobs.

        Raises:
            ClusterError: sbatch is not there, or refuses one; those before it stay submitted.
        """
        for _ in range(count):
            name = launched_name(self._resource)
            job = self._job(name)
            with job.job_file() as path:
                answer = _call(["sbatch", "--parsable", path])
            self._jobs[name] = answer.strip().split(";")[0]  # "ID" or "ID;CLUSTER"

    def names(self) -> list[str]:
        """Dask names of the jobs that wait or run; forgets the others.

        Raises:
            ClusterError: squeue fails.
        """
        if self._jobs:
            # By user and not by id: an id that has left SLURM's memory would fail the whole call.
            listing = _call(["squeue", "--noheader", "--format=%A", "--user", getpass.getuser()])
            living = set(listing.split())
            self._jobs = {name: job for name, job in self._jobs.items() if job in living}
        return list(self._jobs)

    def give_back(self, name: str) -> None:
        """Cancels a job, which ends with its worker anyway, but perhaps after a grace period."""
        if name in self._jobs:
            self._cancel([self._jobs.pop(name)])

    def close(self) -> None:
        """Cancels all that are left.

        Raises:
            ClusterError: scancel fails.
        """
        jobs = list(self._jobs.values())
        self._jobs.clear()
        self._cancel(jobs)

    def _cancel(self, jobs: list[str]) -> None:
        if jobs:
            _call(["scancel", "--quiet", *jobs])  # quiet: some may have ended

    def _job(self, name: str) -> SLURMJob:
        slurm = self._slurm
        threads = worker_threads(self._cluster, self._resource)
        rollout = self._resource == ROLLOUT
        directives = slurm.rollout_directives if rollout else slurm.trainer_directives
        return SLURMJob(
            scheduler=self._scheduler,
            name=name,
            job_name=name,
            queue=slurm.partition,
            account=slurm.account,
            walltime=slurm.walltime,
            cores=CONTROL_THREADS,
            processes=1,
            job_cpu=threads,
            job_mem=slurm.memory,
            memory="1GB",  # dask-jobqueue asks for it; the worker's own limit is lifted below
            job_extra_directives=list(directives),
            job_script_prologue=[*_exports(worker_environment(threads, gpu=None)), *slurm.prologue],
            log_directory=str(self._logs),
            interface=slurm.interface,
            death_timeout=DEATH_TIMEOUT_S,
            worker_command="distributed.cli.dask_worker",
            worker_extra_args=[
                *("--resources", f"{self._resource}=1"),
                *("--memory-limit", "0"),  # an engine's memory would count against it
                *("--preload", PRELOAD),
                "--no-dashboard",
            ],
        )


def _exports(environment: Mapping[str, str | None]) -> list[str]:
    """Shell lines that set these variables; None removes one."""
    return [
        f"unset {name}" if value is None else f"export {name}={shlex.quote(value)}"
        for name, value in environment.items()
    ]


def _call(command: list[str]) -> str:
    """The standard output of one of SLURM's programs.

    Raises:
        ClusterError: it is not there, fails or does not answer; says what it said.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ANSWER_S)
    except FileNotFoundError:
        raise ClusterError(
            f"cluster.slurm is set and there is no {command[0]} here; start the run on a machine "
            "that submits to SLURM, or leave cluster.slurm out"
        ) from None
    except subprocess.TimeoutExpired:
        raise ClusterError(
            f"{command[0]} has not answered within {_ANSWER_S:g} s; see whether SLURM's controller "
            "is up"
        ) from None
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip() or "nothing").splitlines()
        raise ClusterError(
            f"{shlex.join(command)} ended with {done.returncode} and said: {said[-1]}; correct "
            "cluster.slurm"
        )
    return done.stdout
