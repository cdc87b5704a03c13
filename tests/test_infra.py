"""Local services with real processes: SeaweedFS, Dask, Prefect."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from prefect import flow, task

from infra.cluster import (
    RECONNECT_S,
    assign_gpus,
    connect,
    start_scheduler,
    visible_gpus,
    wait_for_workers,
)
from infra.local import prefect_api, services, store_alone
from infra.object_store import read_credentials
from infra.processes import (
    ROOT,
    TOKEN_VARIABLE,
    Child,
    ProcessGroup,
    free_ports,
    group_members,
    is_alive,
    stop_children,
)
from infra.state import (
    STORE,
    Record,
    home_folder,
    living_services,
    locked,
    read_record,
    write_record,
)
from tasks.cluster import workers_of
from tasks.errors import ClusterError, ConfigError, SchedulerLost, ServiceError
from tasks.presets import resolve
from tasks.rollout.board import FlowQueue
from tasks.store import ObjectStore
from tests.waiting import eventually

pytestmark = pytest.mark.timeout(240)

STUBBORN = "trap '' TERM; setsid sleep 300 & sleep 300 & wait; wait; sleep 300"


@pytest.fixture(autouse=True)
def no_prefect_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PREFECT_API_URL", raising=False)


class TestProcessGroup:
    def test_stop_ends_the_whole_tree(self, tmp_path: Path) -> None:
        with ProcessGroup(tmp_path) as group:
            group.start("stubborn", ["bash", "-c", STUBBORN])
            token = group.token
            assert eventually(lambda: len(group_members(token)) == 3)
            group.stop(grace_s=0.2)
            assert group_members(token) == []

    def test_a_killed_launcher_leaves_nothing(self, tmp_path: Path) -> None:
        script = (
            "import sys, threading; from pathlib import Path\n"
            "from infra.processes import ProcessGroup\n"
            "group = ProcessGroup(Path(sys.argv[1]))\n"
            "group.start('stubborn', ['bash', '-c', sys.argv[2]])\n"
            "print(group.token, flush=True); threading.Event().wait()\n"
        )
        with _python(script, str(tmp_path), STUBBORN) as launcher:
            assert launcher.stdout is not None
            token = launcher.stdout.readline().strip()
            assert eventually(lambda: len(group_members(token)) == 3)
            launcher.kill()
            launcher.wait()
        assert eventually(lambda: group_members(token) == [])

    def test_a_dead_child_is_reported_with_its_log(self, tmp_path: Path) -> None:
        with ProcessGroup(tmp_path) as group:
            child = group.start("broken", ["bash", "-c", "echo the reason; exit 3"])
            with pytest.raises(ServiceError, match=r"(?s)broken.*code 3.*the reason"):
                group.wait_ready(child, lambda: None, 20)

    def test_not_ready_in_time(self, tmp_path: Path) -> None:
        with ProcessGroup(tmp_path) as group:
            child = group.start("slow", ["sleep", "300"])
            with pytest.raises(ServiceError, match=r"slow.*not ready after 0\.2 s"):
                group.wait_ready(child, lambda: False, 0.2)

    def test_outliving_children_stay_until_stopped(self, tmp_path: Path) -> None:
        with ProcessGroup(tmp_path, outlive=True) as group:
            child = group.start("service", ["sleep", "300"])
        assert is_alive(child.pid, child.created)
        assert not is_alive(child.pid, child.created - 100)  # another process with that pid
        stop_children([child], group.token)
        assert not is_alive(child.pid, child.created)

    def test_a_failing_start_of_outliving_children_stops_them(self, tmp_path: Path) -> None:
        group = ProcessGroup(tmp_path, outlive=True)
        with group:
            child = group.start("service", ["sleep", "300"])
        group.start("broken", ["false"])
        with pytest.raises(ServiceError), group:
            group.wait_ready(child, lambda: None, 20)
        assert not is_alive(child.pid, child.created)

    def test_environment_of_a_child(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("REMOVED", "1")
        with ProcessGroup(tmp_path) as group:
            group.start("env", ["env"], env={"ADDED": "2", "REMOVED": None})
            assert eventually(lambda: "ADDED=2" in (tmp_path / "env.log").read_text())
            assert "REMOVED" not in (tmp_path / "env.log").read_text()

    def test_free_ports_are_distinct(self) -> None:
        assert len(set(free_ports(50))) == 50


class TestState:
    def test_one_holder_of_a_lock(self, tmp_path: Path) -> None:
        with locked(tmp_path, "stack"):
            with pytest.raises(ServiceError, match=f"process {os.getpid()} runs stack"):
                locked(tmp_path, "stack").__enter__()
            with locked(tmp_path, "prefect"):
                pass
        with locked(tmp_path, "stack"):
            pass

    def test_damaged_record(self, tmp_path: Path) -> None:
        (tmp_path / "services.json").write_text('{"token": 1}')
        with pytest.raises(ServiceError, match=r"services\.json is damaged"):
            read_record(tmp_path)

    def test_partly_dead_services_are_named(self, tmp_path: Path) -> None:
        me = Child("store", os.getpid(), psutil.Process().create_time(), "log")
        gone = Child("scheduler", os.getpid(), 1.0, "log")
        record = Record("t", "tiny", "http://x", "b", "tcp://x", "http://y/api", (me, gone))
        write_record(tmp_path, record)
        assert read_record(tmp_path) == record
        with pytest.raises(ServiceError, match=r"dead: scheduler; run .* down"):
            living_services(tmp_path)

    def test_home_folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("KINDLING_HOME", str(tmp_path / "a"))
        assert home_folder() == (tmp_path / "a").resolve()
        assert home_folder(tmp_path / "b") == (tmp_path / "b").resolve()
        monkeypatch.delenv("KINDLING_HOME")
        assert home_folder() == ROOT / ".kindling"


class TestGpus:
    def test_one_each(self) -> None:
        given = assign_gpus([str(i) for i in range(16)], 14, 2)
        assert len(given) == 16
        assert sorted(given.values(), key=int) == [str(i) for i in range(16)]

    def test_none(self) -> None:
        assert assign_gpus([], 3, 2) == {}

    def test_kinds_share_but_not_one_kind(self) -> None:
        assert assign_gpus(["7"], 1, 1) == {"rollout-0": "7", "trainer-0": "7"}
        with pytest.raises(ClusterError, match=r"1 GPUs .* 2 trainer ranks"):
            assign_gpus(["7"], 1, 2)

    @pytest.mark.parametrize(
        ("value", "expected"), [("", []), ("-1", []), ("2,5", ["2", "5"]), ("GPU-a", ["GPU-a"])]
    )
    def test_chosen_by_the_environment(self, value: str, expected: list[str]) -> None:
        assert visible_gpus({"CUDA_VISIBLE_DEVICES": value}) == expected


class TestScheduler:
    def test_nothing_at_the_address(self) -> None:
        address = f"tcp://127.0.0.1:{free_ports(1)[0]}"
        started = time.monotonic()
        with pytest.raises(ClusterError, match=address):
            connect(address, 1.0)
        assert time.monotonic() - started < 10

    def test_not_an_address(self) -> None:
        with pytest.raises(ClusterError, match="carrier-pigeon"):
            connect("carrier-pigeon://x", 1.0)

    def test_without_workers(self, tmp_path: Path) -> None:
        with ProcessGroup(tmp_path / "logs") as group:
            address = start_scheduler(group, tmp_path)
            with connect(address, 10) as client:
                expected = r"ROLLOUT: 0 of 3 there, 3 missing, TRAINER: 0 of 2 there, 2 missing"
                with pytest.raises(ClusterError, match=expected):
                    wait_for_workers(client, 3, 2, wait_s=0.3)
                wait_for_workers(client, 0, 0, wait_s=0.3)

    def test_one_that_dies_under_a_run(self, tmp_path: Path) -> None:
        with ProcessGroup(tmp_path / "logs") as group:
            address = start_scheduler(group, tmp_path)
            with (
                connect(address, 20) as client,
                contextlib.closing(FlowQueue(client, "run")) as queue,
            ):
                group.stop()
                for ask in (queue.load, lambda: workers_of(client)):
                    with pytest.raises(SchedulerLost, match="resume the run"):
                        ask()
                assert eventually(lambda: client.status == "closed", 2 * RECONNECT_S)
                with pytest.raises(SchedulerLost, match="resume the run"):
                    workers_of(client)

    def test_a_scheduler_needs_a_store(self, tmp_path: Path) -> None:
        config = resolve("tiny", {"cluster": {"scheduler": "tcp://10.0.0.1:8786"}})
        with pytest.raises(ConfigError, match="store_endpoint"), services(config, tmp_path):
            pass


# The standing stack: one `up` for all its tests.


def _local(home: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "infra.local", *command, "--home", str(home)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=180,
        env={**os.environ, "COLUMNS": "200"},
    )


@pytest.fixture(scope="module")
def standing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    home = tmp_path_factory.mktemp("home")
    result = _local(home, "up", "--preset", "tiny")
    try:
        assert result.returncode == 0, result.stdout + result.stderr
        yield home
    finally:
        result = _local(home, "down")
        assert result.returncode == 0, result.stdout + result.stderr


@task
def _double(number: int) -> int:
    return 2 * number


@flow(name="infra-test")
def _doubling() -> int:
    return _double(21)


def _flow_runs(api: str) -> int:
    answer = httpx.post(
        f"{api}/flow_runs/filter", json={"flows": {"name": {"any_": ["infra-test"]}}}
    )
    return sum(run["state_type"] == "COMPLETED" for run in answer.raise_for_status().json())


def _worker_environment() -> dict[str, str]:
    return dict(os.environ)


def _child_process() -> int:
    return subprocess.run(["true"]).returncode


class TestUpStatusDown:
    def test_up_again_starts_nothing(self, standing: Path) -> None:
        before = read_record(standing)
        result = _local(standing, "up")
        assert result.returncode == 0
        assert "already up" in result.stdout
        assert read_record(standing) == before

    def test_status(self, standing: Path) -> None:
        result = _local(standing, "status")
        record = read_record(standing)
        assert record is not None
        assert result.returncode == 0
        for child in record.children:
            assert f"{child.pid}" in result.stdout
        assert {c.name for c in record.children} == {
            *("store", "scheduler", "rollout-0", "trainer-0", "trainer-1", "prefect")
        }
        assert f"export PREFECT_API_URL={record.prefect_api}" in result.stdout

    def test_the_record_holds_no_credentials(self, standing: Path) -> None:
        keys = json.loads((standing / "store" / "credentials.json").read_text())
        secret = keys["identities"][0]["credentials"][0]["secretKey"]
        for path in [standing / "services.json", *(standing / "logs").iterdir()]:
            assert secret not in path.read_text(errors="replace")

    def test_a_run_attaches(self, standing: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY", raising=False)
        config = resolve("tiny")
        with services(config, standing) as found:
            assert not found.embedded
            ObjectStore(found.store).put("attached", b"1")
            with connect(found.scheduler, 20) as client:
                future = client.submit(_read_from_worker, found.store, resources={"ROLLOUT": 1})
                assert future.result(60) == b"1"
        assert "AWS_SECRET_ACCESS_KEY" not in os.environ

    def test_a_run_with_another_store_is_told_what_to_do(self, standing: Path) -> None:
        record = read_record(standing)
        assert record is not None
        named = {"cluster": {"store_endpoint": record.store_endpoint}}
        with services(resolve("tiny", named), standing) as found:
            assert found.store.endpoint == record.store_endpoint
        other = {"cluster": {"store_endpoint": "http://127.0.0.1:1"}}
        with (
            pytest.raises(ConfigError, match=r"down` first, or name cluster\.scheduler"),
            services(resolve("tiny", other), standing),
        ):
            pass

    def test_credentials_of_a_store_elsewhere_stay(
        self, standing: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Services that were started for a store that is not theirs."""
        record = read_record(standing)
        assert record is not None
        others = tuple(child for child in record.children if child.name != STORE)
        write_record(tmp_path, replace(record, children=others))
        for name, value in read_credentials(standing / "store").environment().items():
            monkeypatch.setenv(name, value)
        with services(resolve("tiny"), tmp_path) as found:
            ObjectStore(found.store).put("elsewhere", b"1")
        with store_alone(home=tmp_path) as store:
            assert store.get("elsewhere") == b"1"

    def test_worker_environment(self, standing: Path) -> None:
        config = resolve("tiny")
        with services(config, standing) as found, connect(found.scheduler, 20) as client:
            info = workers_of(client)
            seen: Any = client.run(_worker_environment)
            assert sorted(worker["name"] for worker in info.values()) == [
                *("rollout-0", "trainer-0", "trainer-1")
            ]
            for address, worker in info.items():
                env = seen[address]
                assert worker["nthreads"] == 2
                assert worker["memory_limit"] == 0
                rollout = worker["name"].startswith("rollout")
                threads = config.cluster.rollout_threads if rollout else 1
                assert env["OMP_NUM_THREADS"] == str(threads)
                assert env["OMP_WAIT_POLICY"] == "passive"
                assert env["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
                assert env["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
                assert env["TOKENIZERS_PARALLELISM"] == "false"
                assert "HF_HUB_OFFLINE" not in env or "HF_HUB_OFFLINE" in os.environ
            # The nanny lets its worker have child processes.
            exits: Any = client.run(_child_process)
            assert set(exits.values()) == {0}

    def test_too_few_workers(self, standing: Path) -> None:
        config = resolve("tiny", {"cluster": {"rollout_workers": 4, "wait_s": 0.5}})
        expected = r"ROLLOUT: 1 of 4 there, 3 missing, TRAINER: 2 of 2 there, 0 missing"
        with pytest.raises(ClusterError, match=expected), services(config, standing):
            pass

    def test_flows_use_its_prefect(self, standing: Path) -> None:
        record = read_record(standing)
        assert record is not None
        with prefect_api(standing) as api:
            assert api == record.prefect_api
            assert _doubling() == 42
        assert _flow_runs(api) == 1

    def test_a_configured_prefect_comes_first(
        self, standing: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        record = read_record(standing)
        assert record is not None
        monkeypatch.setenv("PREFECT_API_URL", record.prefect_api)
        with prefect_api(tmp_path) as api:  # a home where nothing is up
            assert api == record.prefect_api

    def test_a_dead_service_is_told(self, standing: Path) -> None:
        """Last of the stack's tests, since it breaks it."""
        record = read_record(standing)
        assert record is not None
        prefect = next(child for child in record.children if child.name == "prefect")
        os.kill(prefect.pid, signal.SIGKILL)
        assert eventually(lambda: not is_alive(prefect.pid, prefect.created))
        result = _local(standing, "status")
        assert result.returncode == 1
        assert "dead" in result.stdout
        result = _local(standing, "up")
        assert result.returncode == 1
        assert "down" in result.stderr
        with (
            pytest.raises(ServiceError, match="dead: prefect"),
            services(resolve("tiny"), standing),
        ):
            pass
        assert _local(standing, "down").returncode == 0
        assert group_members(record.token) == []
        result = _local(standing, "status")
        assert result.returncode == 1
        assert "nothing is up" in result.stdout


def _read_from_worker(location: object) -> bytes:
    from tasks.store import ObjectStore, StoreLocation

    assert isinstance(location, StoreLocation)
    return ObjectStore(location).get("attached")


EMBEDDED_RUN = """
import sys, threading
from dataclasses import replace
from pathlib import Path
from infra.local import services
from tasks.presets import resolve
from tasks.rollout.board import FlowQueue
from tasks.store import ObjectStore
with services(resolve("tiny"), Path(sys.argv[1])) as found:
    ObjectStore(found.store).put("kept", b"from the first run")
    print(found.embedded, flush=True)
    threading.Event().wait()
"""


class TestEmbedded:
    def test_a_killed_run_leaves_nothing_and_a_next_one_finds_the_data(
        self, tmp_path: Path
    ) -> None:
        with _python(EMBEDDED_RUN, str(tmp_path)) as launcher:
            assert launcher.stdout is not None
            assert launcher.stdout.readline().strip() == "True"
            started = psutil.Process(launcher.pid).children(recursive=True)
            assert len(started) >= 8  # store, scheduler, three nannies and workers, reaper
            with (
                pytest.raises(ServiceError, match="is in use"),
                services(resolve("tiny"), tmp_path),
            ):
                pass
            launcher.kill()
            launcher.wait()
        assert eventually(lambda: not any(_running(process) for process in started))
        config = resolve("tiny", {"cluster": {"trainer_ranks": 1, "spare_trainers": 1}})
        with services(config, tmp_path) as found:
            assert found.embedded
            with connect(found.scheduler, 20) as client:
                wait_for_workers(client, rollout=1, trainer=2, wait_s=60)
            assert ObjectStore(found.store).get("kept") == b"from the first run"
            token = _token_of_a_child()
        assert group_members(token) == []

    def test_prefect_for_the_flows_inside(self, tmp_path: Path) -> None:
        with prefect_api(tmp_path) as api:
            assert _doubling() == 42
            assert _flow_runs(api) == 1
            # The pages in the browser must ask this server, not the default port.
            settings = httpx.get(f"{api.removesuffix('/api')}/ui-settings").json()
            assert settings["api_url"] == api
            token = _token_of_a_child()
            with pytest.raises(ServiceError, match="is in use"), prefect_api_unset(tmp_path):
                pass
        assert group_members(token) == []
        assert "PREFECT_API_URL" not in os.environ


@contextlib.contextmanager
def prefect_api_unset(home: Path) -> Iterator[str]:
    """`prefect_api` as another process would call it: without the variable set here."""
    kept = os.environ.pop("PREFECT_API_URL")
    from prefect import context
    from prefect.settings import PREFECT_API_URL, temporary_settings

    try:
        context.refresh_global_settings_context()
        with temporary_settings(restore_defaults={PREFECT_API_URL}), prefect_api(home) as api:
            yield api
    finally:
        os.environ["PREFECT_API_URL"] = kept
        context.refresh_global_settings_context()


def _token_of_a_child() -> str:
    # The newest first: the store that the whole test run shares is a child as well.
    children = psutil.Process().children()
    for child in sorted(children, key=psutil.Process.create_time, reverse=True):
        token = child.environ().get(TOKEN_VARIABLE)
        if token:
            return token
    raise AssertionError("no child of a process group runs")


@contextlib.contextmanager
def _python(script: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", script, *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    try:
        with process:
            yield process
    finally:
        process.kill()


def _running(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False
