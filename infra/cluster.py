"""The Dask cluster on one machine: a scheduler, rollout workers and trainer workers.

Every worker is a process of its own under a nanny, holds one unit of its resource (`ROLLOUT` or
`TRAINER`), and sees one GPU where there are GPUs. Its environment is complete before Python
starts, since torch, OpenMP and vLLM read theirs once, at import.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Mapping
from pathlib import Path

from distributed import Client

from infra.processes import Child, ProcessGroup
from tasks.cluster import ROLLOUT, TRAINER, workers_of
from tasks.config_cluster import ClusterConfig
from tasks.errors import ClusterError

logger = logging.getLogger(__name__)

READY_S = 60.0
CONTROL_THREADS = 2
"""Dask threads of a worker: a control call gets through while a long task runs."""
RECONNECT_S = 10.0
"""Seconds a client tries to connect, again too when it has lost its scheduler: the runs' queues are
lost with it, so a longer wait would only keep the user from resuming."""
DEATH_TIMEOUT_S = 60
"""A worker that finds no scheduler for so many seconds ends."""

# Read by the scheduler and the nannies alike.
_DASK: dict[str, str | None] = {
    # A long hold of the GIL (a compile, a load) looks like death for a while.
    "DASK_DISTRIBUTED__SCHEDULER__WORKER_TTL": "5 minutes",
    # Work whose worker died fails at once: re-running it behind Prefect's back would be wrong.
    "DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES": "0",
    # Its profiler calls sys._current_frames() on the event loop ten times a second. Beside an
    # engine it was twice seen to wait in that call for ever, and the worker with it.
    "DASK_DISTRIBUTED__WORKER__PROFILE__ENABLED": "False",
    "DASK_DISTRIBUTED__WORKER__DAEMON": "False",  # workers may have child processes
}

_WORKER: dict[str, str | None] = {
    "OMP_WAIT_POLICY": "passive",  # spinning threads of several processes stall each other
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine lives in the worker itself
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}


def start_scheduler(group: ProcessGroup, folder: Path, ready_s: float = READY_S) -> str:
    """Start a scheduler on a free loopback port and return its address.

    Raises:
        ServiceError: it ended, or is not ready in time.
    """
    folder.mkdir(parents=True, exist_ok=True)
    contact = folder / "scheduler.json"
    contact.unlink(missing_ok=True)
    command = [sys.executable, "-m", "distributed.cli.dask_scheduler", "--host", "127.0.0.1"]
    command += ["--port", "0", "--dashboard-address", "127.0.0.1:0"]
    command += ["--scheduler-file", str(contact)]
    child = group.start("scheduler", command, env=_DASK)

    def address() -> str | None:
        try:
            return str(json.loads(contact.read_text())["address"])
        except (FileNotFoundError, json.JSONDecodeError):  # not there, or half written
            return None

    return group.wait_ready(child, address, ready_s)


def start_workers(
    group: ProcessGroup, scheduler: str, cluster: ClusterConfig, folder: Path
) -> list[Child]:
    """Start the workers the configuration asks for; `wait_for_workers` waits for them.

    The store's credentials come from this process's environment.

    Raises:
        ClusterError: the machine has GPUs, but fewer than one role needs.
    """
    gpus = gpus_of(cluster)
    plan = [(ROLLOUT, i) for i in range(cluster.rollout_workers)]
    plan += [(TRAINER, i) for i in range(cluster.trainers)]
    return [
        start_worker(group, scheduler, cluster, folder, resource, index, gpus)
        for resource, index in plan
    ]


def start_worker(
    group: ProcessGroup,
    scheduler: str,
    cluster: ClusterConfig,
    folder: Path,
    resource: str,
    index: int,
    gpus: Mapping[str, str],
) -> Child:
    """Start one worker; its Dask name is `worker_name`."""
    name = worker_name(resource, index)
    env = worker_environment(worker_threads(cluster, resource), gpus.get(name))
    return group.start(name, worker_command(scheduler, name, resource, folder), env=env)


def worker_name(resource: str, index: int) -> str:
    return f"{resource.lower()}-{index}"


def launched_name(resource: str) -> str:
    """Dask name of a worker on another machine, unlike that of any other run's."""
    return f"{resource.lower()}-{uuid.uuid4().hex[:8]}"


def worker_threads(cluster: ClusterConfig, resource: str) -> int:
    """CPU threads of a worker's computations."""
    return cluster.rollout_threads if resource == ROLLOUT else cluster.trainer_threads


def gpus_of(cluster: ClusterConfig) -> dict[str, str]:
    """The GPU of each worker that this cluster has or may grow to; empty without GPUs.

    Raises:
        ClusterError: the machine has GPUs, but fewer than one role needs.
    """
    rollout = cluster.rollout_workers_most or cluster.rollout_workers
    return assign_gpus(visible_gpus(), rollout, cluster.trainers)


def worker_command(scheduler: str, name: str, resource: str, folder: Path) -> list[str]:
    """The command line of one worker of this machine under a nanny."""
    arguments = worker_arguments(scheduler, name, resource, str(folder))
    return [sys.executable, *arguments, "--host", "127.0.0.1"]


def worker_arguments(scheduler: str, name: str, resource: str, folder: str) -> list[str]:
    """What the interpreter is told to become one worker under a nanny."""
    options = {
        "name": name,
        "resources": f"{resource}=1",
        "nthreads": str(CONTROL_THREADS),
        "nworkers": "1",
        "memory-limit": "0",  # an engine's memory would count against it
        "death-timeout": str(DEATH_TIMEOUT_S),
        "local-directory": folder,
    }
    arguments = ["-m", "distributed.cli.dask_worker", scheduler, "--no-dashboard"]
    return arguments + [part for key, value in options.items() for part in (f"--{key}", value)]


def worker_environment(threads: int, gpu: str | None) -> dict[str, str | None]:
    """What a worker's environment has beyond its launcher's."""
    own: dict[str, str | None] = {**_DASK, **_WORKER, "OMP_NUM_THREADS": str(threads)}
    # The nanny writes its own OMP_NUM_THREADS=1 (and MKL's, OpenBLAS') over the environment.
    spawn: dict[str, str | int] = dict.fromkeys(
        ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), threads
    )
    own["DASK_DISTRIBUTED__NANNY__PRE_SPAWN_ENVIRON"] = repr(spawn)
    if gpu is not None:
        own["CUDA_VISIBLE_DEVICES"] = gpu
    return own


def visible_gpus(environ: Mapping[str, str] = os.environ) -> list[str]:
    """The GPUs a worker may be given: CUDA_VISIBLE_DEVICES if set, else all the driver lists."""
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        devices = [device.strip() for device in chosen.split(",")]
        return [device for device in devices if device not in ("", "-1")]
    try:
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return []
    lines = [line for line in listing.stdout.splitlines() if line.startswith("GPU ")]
    return [str(index) for index in range(len(lines))] if listing.returncode == 0 else []


def assign_gpus(gpus: list[str], rollout: int, trainer: int) -> dict[str, str]:
    """One GPU a worker, by worker name; empty without GPUs.

    With fewer GPUs than workers a rollout worker may share one with a trainer rank, never two of
    a kind.

    Raises:
        ClusterError: there are fewer GPUs than workers of one kind.
    """
    if not gpus:
        return {}
    if max(rollout, trainer) > len(gpus):
        raise ClusterError(
            f"{len(gpus)} GPUs are visible, and the run asks for {rollout} rollout workers and "
            f"{trainer} trainer ranks, each kind on GPUs of its own; lower "
            "cluster.rollout_workers or cluster.trainer_ranks, or set CUDA_VISIBLE_DEVICES= to "
            "run on the CPU"
        )
    if rollout + trainer > len(gpus):
        logger.warning("%d workers share %d GPUs", rollout + trainer, len(gpus))
    names = [f"trainer-{i}" for i in range(trainer)] + [f"rollout-{i}" for i in range(rollout)]
    return {name: gpus[place % len(gpus)] for place, name in enumerate(names)}


def connect(scheduler: str, wait_s: float) -> Client:
    """A client of the scheduler at this address; the caller closes it.

    Raises:
        ClusterError: nothing answers there within `wait_s`.
    """
    deadline = time.monotonic() + wait_s
    while True:
        left = deadline - time.monotonic()
        try:
            return Client(scheduler, timeout=min(RECONNECT_S, wait_s), set_as_default=False)
        except (OSError, ValueError) as error:  # no answer; not an address at all
            if isinstance(error, OSError) and left > RECONNECT_S:
                continue
            raise ClusterError(
                f"no Dask scheduler answers at {scheduler!r} within {wait_s:g} s ({error}); "
                "expected one at cluster.scheduler; start it (`python -m infra.local up`) or "
                "correct the address"
            ) from error


def wait_for_workers(client: Client, rollout: int, trainer: int, wait_s: float) -> None:
    """Wait until the cluster has the workers asked for.

    Raises:
        ClusterError: it still lacks some after `wait_s`, or the scheduler does not answer; says
            how many of which resource are there and missing.
    """
    deadline = time.monotonic() + wait_s
    wanted = {ROLLOUT: rollout, TRAINER: trainer}
    pause = threading.Event()
    while True:
        present = workers_present(client)
        missing = {kind: count - present[kind] for kind, count in wanted.items()}
        if all(count <= 0 for count in missing.values()):
            return
        if time.monotonic() >= deadline:
            detail = ", ".join(
                f"{kind}: {present[kind]} of {wanted[kind]} there, {max(0, missing[kind])} missing"
                for kind in wanted
            )
            raise ClusterError(
                f"the scheduler at {client.scheduler.addr if client.scheduler else '?'} lacks "
                f"workers after {wait_s:g} s ({detail}); start workers with --resources "
                f"{' or '.join(f'{kind}=1' for kind, count in missing.items() if count > 0)}, "
                "start services of this preset's size (`python -m infra.local down`, then `up "
                "--preset NAME`), lower cluster.rollout_workers or cluster.trainer_ranks, or raise "
                "cluster.wait_s"
            )
        pause.wait(0.1)


def workers_present(client: Client) -> dict[str, int]:
    """How many workers run, by the resource they hold.

    Raises:
        SchedulerLost: the scheduler does not answer.
    """
    running = [w for w in workers_of(client).values() if w.get("status", "running") == "running"]
    held = {ROLLOUT: 0, TRAINER: 0}
    for kind in held:
        held[kind] = sum(1 for w in running if w.get("resources", {}).get(kind, 0) >= 1)
    return held
