"""Workers that SLURM and Kubernetes start: real workers of a real scheduler, asked for through
stand-ins of SLURM's programs and of the Kubernetes API."""

from __future__ import annotations

import itertools
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import uvicorn
from distributed import Client

from infra import elastic
from infra.cluster import connect, start_scheduler, wait_for_workers, workers_present
from infra.elastic import base_workers, growth
from infra.processes import ROOT, ProcessGroup
from infra.slurm import SlurmPool
from tasks.cluster import ROLLOUT, TRAINER, WorkerPool, workers_with
from tasks.config import TrainConfig
from tasks.config_cluster import ClusterConfig, KubernetesConfig, SlurmConfig
from tasks.errors import ClusterError
from tasks.presets import resolve
from tasks.rollout.agent import Unit
from tasks.rollout.engine import Sampling
from tasks.rollout.fleet import Fleet
from tasks.rollout.worker import RolloutSpec
from tasks.store import ObjectStore
from tasks.training.tiny_policy import build_tokenizer
from tests import kubernetes_stand_in as kubernetes
from tests import noop
from tests import slurm_stand_in as slurm
from tests.waiting import eventually

pytestmark = pytest.mark.timeout(300)
LOG = logging.getLogger("tests.launchers")
START_S = 120.0
SLURM = SlurmConfig.model_validate({"memory": "2G", "walltime": "00:30:00"})
PODS = KubernetesConfig.model_validate(
    {
        "namespace": kubernetes.NAMESPACE,
        "image": "kindling",
        "secret": kubernetes.SECRET,
        "memory": "2Gi",
    }
)


def _cluster(**fields: object) -> ClusterConfig:
    return ClusterConfig.model_validate(fields)


def _growing(**launcher: object) -> ClusterConfig:
    """Of a run that may grow, at addresses where nobody answers."""
    nowhere = {"scheduler": "tcp://127.0.0.1:1", "store_endpoint": "http://127.0.0.1:1"}
    return _cluster(rollout_workers_most=2, **nowhere, **launcher)


@dataclass(frozen=True)
class Launcher:
    """
    Attributes:
        section: what the configuration says of it.
        living: Dask names, or job names, of what it runs now.
    """

    section: dict[str, dict[str, object]]
    living: Callable[[], list[str]]


@pytest.fixture
def slurm_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a stand-in's jobs; its programs are on the PATH."""
    jobs = tmp_path / "jobs"
    jobs.mkdir()
    monkeypatch.setenv(slurm.STATE, str(jobs))
    monkeypatch.setenv("PATH", f"{slurm.install(tmp_path)}:{os.environ['PATH']}")
    monkeypatch.chdir(ROOT)  # the jobs' working directory: they import the tests' no-op engine
    yield jobs
    for process in slurm.jobs(jobs).values():
        os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def kubernetes_here(
    object_store: ObjectStore, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[kubernetes.StandIn]:
    """A stand-in of the API server, which the kubeconfig names. One for the module, since kr8s
    keeps its first connection."""
    folder = Path(tmp_path_factory.mktemp("kubernetes"))
    keys = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
    stand_in = kubernetes.StandIn({key: os.environ[key] for key in keys}, folder)
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(stand_in.app(), log_config=None, lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    config = folder / "kubeconfig"
    config.write_text(kubernetes.kubeconfig(f"http://127.0.0.1:{listener.getsockname()[1]}"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KUBECONFIG", str(config))
        yield stand_in
    stand_in.stop()
    server.should_exit = True
    thread.join(20)
    listener.close()


@pytest.fixture(params=["slurm", "kubernetes"])
def launcher(request: pytest.FixtureRequest) -> Launcher:
    if request.param == "slurm":
        jobs: Path = request.getfixturevalue("slurm_here")
        return Launcher({"slurm": SLURM.model_dump()}, lambda: list(slurm.jobs(jobs)))
    stand_in: kubernetes.StandIn = request.getfixturevalue("kubernetes_here")
    return Launcher({"kubernetes": PODS.model_dump()}, lambda: list(stand_in.pods))


@pytest.fixture(scope="module")
def scheduler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = Path(tmp_path_factory.mktemp("scheduler"))
    with ProcessGroup(folder / "logs") as group:
        yield start_scheduler(group, folder)


@pytest.fixture
def client(scheduler: str) -> Iterator[Client]:
    with connect(scheduler, 20) as client:
        yield client


def _config(launcher: Launcher, scheduler: str, store: ObjectStore, policy: Path) -> TrainConfig:
    build_tokenizer().save_pretrained(policy)
    cluster = {
        "scheduler": scheduler,
        "store_endpoint": store.location.endpoint,
        "store_bucket": store.location.bucket,
        "rollout_workers": 1,
        "rollout_workers_most": 2,
        "trainer_ranks": 1,
        "drain_s": 1.0,
        "idle_s": 2.0,
        **launcher.section,
    }
    rollout = {"questions_per_step": 12, "group_size": 4, "max_sequences": 8}
    return resolve(
        "tiny",
        {
            "model": {"path": str(policy)},
            "rollout": rollout,
            "training": {"mini_batch_size": 48},
            "cluster": cluster,
        },
    )


def test_a_run_takes_its_workers_from_the_launcher_and_gives_them_back(
    launcher: Launcher, scheduler: str, client: Client, object_store: ObjectStore, tmp_path: Path
) -> None:
    config = _config(launcher, scheduler, object_store, tmp_path / "policy")
    with base_workers(config.cluster, tmp_path):
        wait_for_workers(client, 1, 1, START_S)
        with base_workers(config.cluster, tmp_path):
            assert len(launcher.living()) == 2, "nothing is missing: nobody more is asked for"
        with growth(config.cluster, scheduler, tmp_path) as pool:
            assert pool is not None
            _grow_and_shrink(client, config, object_store, pool)
            assert eventually(lambda: len(launcher.living()) == 2, 20)
            pool.start(1)
            assert len(pool.names()) == 1
        assert eventually(lambda: len(launcher.living()) == 2, 20), "also one that never joined"
        assert workers_present(client) == {ROLLOUT: 1, TRAINER: 1}
    assert eventually(lambda: not launcher.living(), 20)
    assert eventually(lambda: workers_present(client) == {ROLLOUT: 0, TRAINER: 0}, 20)


def test_a_launched_worker_that_ends_is_made_up_for(
    launcher: Launcher,
    scheduler: str,
    client: Client,
    object_store: ObjectStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its node fails, or its time is over."""
    monkeypatch.setattr(elastic, "TOP_UP_S", 0.5)
    config = _config(launcher, scheduler, object_store, tmp_path / "policy")
    with base_workers(config.cluster, tmp_path):
        wait_for_workers(client, 1, 1, START_S)
        (trainer,) = workers_with(client, TRAINER)
        client.retire_workers([trainer], close_workers=True, remove=True)
        assert eventually(lambda: workers_with(client, TRAINER) not in ([], [trainer]), START_S)
        assert workers_present(client) == {ROLLOUT: 1, TRAINER: 1}
    assert eventually(lambda: not launcher.living(), 20)


def _grow_and_shrink(
    client: Client, config: TrainConfig, store: ObjectStore, pool: WorkerPool
) -> None:
    name = f"launched-{store.location.bucket}-{id(pool)}"
    spec = RolloutSpec(name, name, config, store.location, "no-index", "/nowhere")
    serve = partial(noop.serve, shape=noop.Shape(tokens=60, pause_s=0.4))
    fleet = Fleet(client, spec, LOG, pool, serve)
    try:
        steps = itertools.count()

        def two_serve() -> bool:
            step = next(steps)
            units = [_unit(f"train-{step}-{place}") for place in range(20)]
            fleet.offer(units)
            groups = fleet.collect([unit.unit_id for unit in units])
            return len({group.worker for group in groups}) == 2

        assert eventually(two_serve, START_S)
        assert eventually(lambda: not pool.names(), 60), "an idle one is given back"
        assert eventually(lambda: workers_present(client)[ROLLOUT] == 1, 20)
    finally:
        fleet.close()


def _unit(unit_id: str) -> Unit:
    return Unit(unit_id, "q", "Who is she?", ("gold",), 0, 0, 4, Sampling(1.0, 1.0))


def test_what_slurm_is_asked_for(slurm_here: Path, tmp_path: Path) -> None:
    cluster = _cluster(rollout_threads=6, scheduler="tcp://login:8786")
    asked = SLURM.model_copy(
        update={
            "partition": "gpu",
            "account": "lab",
            "memory": "64G",
            "walltime": "12:00:00",
            "rollout_directives": ("--gres=gpu:1",),
            "trainer_directives": ("--gres=gpu:2",),
            "prologue": ("echo hello",),
            "interface": "ib0",
        }
    )
    pool = SlurmPool("tcp://login:8786", cluster, asked, ROLLOUT, tmp_path / "logs")
    pool.start(1)
    (name,) = pool.names()
    script = (slurm_here / "1000.sh").read_text().splitlines()
    header = [line.removeprefix("#SBATCH ") for line in script if line.startswith("#SBATCH")]
    assert header == [
        f"-J {name}",
        f"-e {tmp_path}/logs/{name}-%J.err",
        f"-o {tmp_path}/logs/{name}-%J.out",
        "-p gpu",
        "-A lab",
        "-n 1",
        "--cpus-per-task=6",
        "--mem=64G",
        "-t 12:00:00",
        "--gres=gpu:1",
    ]
    assert "echo hello" in script
    assert "export OMP_NUM_THREADS=6" in script
    command = next(line for line in script if "dask_worker" in line)
    assert command.startswith(f"{sys.executable} -m distributed.cli.dask_worker tcp://login:8786 ")
    for part in (f"--name {name}", "--resources ROLLOUT=1", "--nanny", "--interface ib0"):
        assert part in command
    assert not any("AWS" in line for line in script), "a script is no place for credentials"
    pool.close()
    assert eventually(lambda: not slurm.jobs(slurm_here), 20)


def _slurm_pool(tmp_path: Path, **changes: str) -> SlurmPool:
    cluster = _cluster(scheduler="tcp://127.0.0.1:1", store_endpoint="http://127.0.0.1:1")
    asked = SLURM.model_copy(update=changes)
    return SlurmPool("tcp://127.0.0.1:1", cluster, asked, ROLLOUT, tmp_path / "logs")


def test_what_slurm_refuses_is_said(slurm_here: Path, tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"sbatch .* ended with 1 .* invalid partition"):
        _slurm_pool(tmp_path, partition="nowhere").start(1)


def test_a_machine_without_slurm_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ClusterError, match="there is no sbatch here"):
        _slurm_pool(tmp_path).start(1)


def test_a_pool_that_cannot_be_closed_is_no_failure_of_the_run(
    slurm_here: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = _growing(slurm=SLURM)
    scancel = slurm_here.parent / "bin" / "scancel"
    with growth(cluster, "tcp://127.0.0.1:1", tmp_path) as pool:
        assert pool is not None
        pool.start(1)
        scancel.write_text("#!/bin/sh\necho controller is away >&2\nexit 1\n")
    assert "controller is away" in caplog.text
    assert "end by themselves" in caplog.text


def test_what_kubernetes_refuses_is_said(
    kubernetes_here: kubernetes.StandIn, tmp_path: Path
) -> None:
    cluster = _growing(kubernetes=PODS)
    with growth(cluster, "tcp://127.0.0.1:1", tmp_path) as pool:
        assert pool is not None
        for answer, said in (((403, "pods is forbidden"), "forbidden"), ((500, "etcd"), "500")):
            kubernetes_here.refuse = answer
            try:
                with pytest.raises(ClusterError, match=f"create a worker's pod .*{said}"):
                    pool.start(1)
            finally:
                kubernetes_here.refuse = None
        assert pool.names() == []
    assert kubernetes_here.pods == {}


LEAVES_SOON = """
from infra import leave
leave.IDLE_S, leave.LOOK_S = 3.0, 0.2
dask_setup = leave.dask_setup
"""


def test_a_worker_that_nobody_gives_work_ends(
    slurm_here: Path,
    scheduler: str,
    client: Client,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "leaves_soon.py").write_text(LEAVES_SOON)
    monkeypatch.setattr("infra.slurm.PRELOAD", str(tmp_path / "leaves_soon.py"))
    cluster = _cluster(scheduler=scheduler)
    pool = SlurmPool(scheduler, cluster, SLURM, ROLLOUT, tmp_path / "logs")
    pool.start(1)
    assert eventually(lambda: workers_present(client)[ROLLOUT] == 1, START_S)
    busy = client.submit(time.sleep, 6, resources={ROLLOUT: 1}, pure=False)
    busy.result(timeout=60)  # longer than it waits, and it was there to the end
    assert eventually(lambda: not pool.names(), 30), "nobody cancelled the job"
    assert workers_present(client)[ROLLOUT] == 0
