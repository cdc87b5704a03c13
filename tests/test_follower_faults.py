"""The follower's decisions, and what it does about faults of a (fake) server and of the store."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from infra.processes import ROOT, free_ports
from tasks.errors import ConfigError, IntegrityError, ServiceError, StoreError
from tasks.store import ObjectStore, StoreLocation
from tasks.weights.follower import Bring, Follower, Rest, Resume, Step, Wait, next_step
from tasks.weights.subscriber import Subscriber
from tasks.weights.vllm_server import Served, VllmServer
from tests.vllm_fake import FakeVllm, eventually, fake_vllm
from tests.weights_helpers import Failing, Gang, memory_store, publish_chain

pytestmark = [pytest.mark.fast, pytest.mark.timeout(120)]

RUN = "followed"


@pytest.mark.parametrize(
    ("head", "served", "settled", "expected"),
    [
        (None, Served("default", False), False, Wait()),
        (0, Served("default", False), False, Bring(0)),
        (4, Served("r/3", False), True, Bring(4)),
        (4, Served("r/3", True), True, Bring(4)),
        (4, Served("r/5", False), True, Bring(4)),  # the run went back to a checkpoint
        (4, Served("other/4", False), True, Bring(4)),
        (4, Served("default", False), True, Bring(4)),  # restarted
        (4, Served("r/4", False), False, Rest()),
        (4, Served("r/4", True), False, Resume()),  # left by a follower that was killed
        (4, Served("r/4", True), True, Rest()),  # paused by somebody else
    ],
)
def test_next_step(head: int | None, served: Served, settled: bool, expected: Step) -> None:
    assert next_step("r", head, served, settled=settled) == expected


@pytest.fixture
def vllm() -> Iterator[FakeVllm]:
    with fake_vllm() as fake:
        yield fake


@pytest.fixture
def store() -> ObjectStore:
    made = memory_store()
    made.location = StoreLocation("http://store", "bucket")
    publish_chain(Gang(made, RUN), 3)
    return made


@pytest.fixture
def follower(vllm: FakeVllm, store: ObjectStore, tmp_path: Path) -> Follower:
    return follower_of(vllm.url, store, tmp_path)


def follower_of(
    url: str, store: ObjectStore, cache: Path, run: str = RUN, patience_s: float = 20
) -> Follower:
    return Follower(VllmServer(url), store, run, cache, poll_s=0.01, patience_s=patience_s)


def follow_until(follower: Follower, done: Callable[[], bool]) -> None:
    """`follow` in a thread until `done`; then it must end by its stop event."""
    stop = threading.Event()
    failures: list[BaseException] = []

    def target() -> None:
        try:
            follower.follow(stop)
        except Exception as error:  # noqa: BLE001 - shown below, in the test's own thread
            failures.append(error)

    thread = threading.Thread(target=target)
    thread.start()
    try:
        eventually(lambda: done() or not thread.is_alive(), lambda: "not done", 20)
    finally:
        stop.set()
        thread.join(20)
    assert not failures
    assert not thread.is_alive()


def holds(vllm: FakeVllm, version: int) -> bool:
    return (vllm.label, vllm.version, vllm.paused, vllm.open) == (
        f"{RUN}/{version}",
        version,
        False,
        False,
    )


def test_one_update_stops_generation_only_around_the_apply(
    vllm: FakeVllm, follower: Follower, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    follower.round()
    assert holds(vllm, 2)
    assert vllm.calls[2:] == [
        "/init_weight_transfer_engine",
        "/pause",
        "/start_weight_update",
        "/update_weights",
        "/reset_prefix_cache",
        "/finish_weight_update",
        "/resume",
    ]
    assert "version 2: " in caplog.text
    vllm.calls.clear()
    follower.round()
    assert vllm.calls == ["/weight_info", "/is_paused"]


def test_an_update_that_touched_nothing_lets_the_server_go_on(
    vllm: FakeVllm, follower: Follower
) -> None:
    vllm.failures["/update_weights"] = 1
    with pytest.raises(ServiceError, match=r"/update_weights with status 500: injected into"):
        follower.round()
    assert (vllm.label, vllm.paused, vllm.open) == ("default", False, False)
    follower.round()
    assert holds(vllm, 2)


@pytest.mark.parametrize("path", ["/update_weights", "/reset_prefix_cache"])
def test_a_server_that_must_not_generate_stays_paused_until_it_is_mended(
    vllm: FakeVllm, follower: Follower, path: str
) -> None:
    vllm.failures[path], vllm.half = 1, True
    with pytest.raises(ServiceError, match=path):
        follower.round()
    assert vllm.paused
    follower.round()
    assert holds(vllm, 2)


def test_a_cache_that_is_not_reset_keeps_the_server_paused(
    vllm: FakeVllm, follower: Follower
) -> None:
    vllm.resets = False
    with pytest.raises(ServiceError, match="did not reset its prefix cache"):
        follower.round()
    assert vllm.paused
    vllm.resets = True
    follower.round()
    assert holds(vllm, 2)


def test_a_lost_resume_is_repeated(vllm: FakeVllm, follower: Follower) -> None:
    vllm.failures["/resume"] = 1
    with pytest.raises(ServiceError, match="/resume"):
        follower.round()
    assert (vllm.label, vllm.paused) == (f"{RUN}/2", True)
    follower.round()
    assert holds(vllm, 2)
    assert vllm.calls.count("/update_weights") == 1


def test_failures_are_retried_and_a_restart_noticed(vllm: FakeVllm, follower: Follower) -> None:
    vllm.failures = {"/weight_info": 2, "/init_weight_transfer_engine": 1}
    restarted = [False]

    def done() -> bool:
        if holds(vllm, 2) and not restarted[0]:
            vllm.label, vllm.version, restarted[0] = "default", None, True
        return holds(vllm, 2) and restarted[0]

    follow_until(follower, done)
    assert vllm.calls.count("/update_weights") == 2


def test_a_run_that_does_not_exist_is_waited_for(
    vllm: FakeVllm, store: ObjectStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    follower = follower_of(vllm.url, store, tmp_path, run="later")
    for _ in range(3):
        follower.round()
    assert caplog.text.count("has published nothing") == 1
    publish_chain(Gang(store, "later"), 1)
    follower.round()
    assert vllm.label == "later/0"


def test_it_gives_up_on_a_server_that_is_not_there(
    store: ObjectStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (port,) = free_ports(1)
    follower = follower_of(f"http://127.0.0.1:{port}", store, tmp_path, patience_s=0.3)
    with pytest.raises(ServiceError, match=f"127.0.0.1:{port} does not answer"):
        follower.follow(threading.Event())
    assert "trying again for 0.3 s" in caplog.text


def test_it_gives_up_at_once_on_a_server_without_the_endpoints(
    vllm: FakeVllm, follower: Follower
) -> None:
    vllm.lacks.add("/weight_info")
    with pytest.raises(ConfigError, match="VLLM_SERVER_DEV_MODE=1"):
        follower.follow(threading.Event())
    assert len(vllm.calls) == 1


def test_a_store_that_fails_leaves_the_server_alone(
    vllm: FakeVllm, store: ObjectStore, tmp_path: Path
) -> None:
    for at in range(1, 9):  # more than the reads of a cold follower: the last fails not at all
        vllm.calls.clear()
        vllm.label = "default"
        failing = Failing(store, at, late=False)
        follower = follower_of(vllm.url, cast(ObjectStore, failing), tmp_path / str(at))
        try:
            follower.round()
        except StoreError:
            assert "/pause" not in vllm.calls
            follower.round()
        else:
            assert failing.calls < at
        assert holds(vllm, 2)


def test_it_gives_up_on_a_damaged_run(
    vllm: FakeVllm, store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damaged(*_: Any) -> Any:
        raise IntegrityError("object damaged")

    monkeypatch.setattr(Subscriber, "fetch", damaged)
    with pytest.raises(IntegrityError, match="damaged"):
        follower_of(vllm.url, store, tmp_path, patience_s=0.3).follow(threading.Event())
    assert "/pause" not in vllm.calls


def test_the_command_says_what_is_wrong_and_fails(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tasks.weights.follower", "--server", "http://127.0.0.1:1"]
    command += ["--store", "ftp://store", "--bucket", "b", "--run", "r", "--cache-dir", "c"]
    ended = subprocess.run(
        command, cwd=ROOT, env={**os.environ}, capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 1
    assert "'ftp://store' is not a URL" in ended.stderr
    assert "Traceback" not in ended.stderr
