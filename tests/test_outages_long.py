"""Services under a run: one that is away for a while, frozen or dead, is waited for; one that stays
dead ends the run, and it is resumed on new ones. The same bits."""

from __future__ import annotations

import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from prefect.client.orchestration import get_client

from infra.prefect_server import using_api
from infra.state import read_record
from tasks.store import ObjectStore
from tests import chaos
from tests.waiting import eventually

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
STEPS = 5
OUTAGE_S = 20.0


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("outages")
    with chaos.standing(folder):
        yield folder


@pytest.fixture(scope="module")
def stage(home: Path) -> chaos.Chaos:
    return chaos.Chaos(home, seed=0)


@pytest.fixture(scope="module")
def undisturbed(stage: chaos.Chaos) -> str:
    return stage.run(chaos.settings(STEPS), kills=0)


def _child(home: Path, name: str) -> psutil.Process:
    """The process of a standing service that serves, not what started it."""
    record = read_record(home)
    assert record is not None
    (child,) = [one for one in record.children if one.name == name]
    return psutil.Process(child.pid)


def _midway(store: ObjectStore, flow: subprocess.Popen[bytes], before: set[str]) -> str:
    """Waits until the run has published its second step; its name."""
    deadline = time.monotonic() + 120
    while True:
        assert flow.poll() is None, "the flow ended before its time"
        assert time.monotonic() < deadline
        new = chaos.runs(store) - before
        if new and chaos.progress(store, next(iter(new)))[0] >= 2:
            return new.pop()
        threading.Event().wait(0.1)


def _freeze(family: list[psutil.Process]) -> None:
    for one in family:
        one.send_signal(signal.SIGSTOP)
    threading.Event().wait(OUTAGE_S)
    for one in family:
        one.send_signal(signal.SIGCONT)


@pytest.mark.parametrize("service", ["store", "prefect", "scheduler"])
def test_a_service_that_freezes(
    home: Path, stage: chaos.Chaos, undisturbed: str, service: str
) -> None:
    before = chaos.runs(stage.store)
    flow = chaos.begin(chaos.settings(STEPS))
    name = _midway(stage.store, flow, before)
    process = _child(home, service)
    _freeze([process, *process.children(recursive=True)])
    assert flow.wait(300) == 0, "it is waited for"
    chaos.check(stage.store, name, undisturbed, STEPS)


def _task_states(home: Path) -> list[str | None]:
    """Of all tasks of all flow runs, as Prefect shows them."""
    record = read_record(home)
    assert record is not None
    with using_api(record.prefect_api), get_client(sync_client=True) as api:
        return [task.state_name for task in api.read_task_runs()]


def _kill_and_start_again(family: list[psutil.Process], log: Path) -> None:
    """What a supervisor does: the same command, so at the same address, on the same files."""
    first = family[0]
    command, folder, variables = first.cmdline(), first.cwd(), first.environ()
    for one in reversed(family):
        with suppress(psutil.NoSuchProcess):  # it ended with its children
            one.kill()
    threading.Event().wait(OUTAGE_S)
    # Its variables hold the token by which `down` finds it in the end.
    with log.open("ab") as output:
        subprocess.Popen(
            command,
            cwd=folder,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


@pytest.mark.parametrize("service", ["store", "prefect"])
def test_a_service_that_dies_and_is_started_again(tmp_path: Path, service: str) -> None:
    with chaos.standing(tmp_path):
        stage = chaos.Chaos(tmp_path, seed=0)
        undisturbed = stage.run(chaos.settings(STEPS), kills=0)
        before = chaos.runs(stage.store)
        flow = chaos.begin(chaos.settings(STEPS))
        name = _midway(stage.store, flow, before)
        process = _child(tmp_path, service)
        log = tmp_path / "logs" / f"{service}.log"
        _kill_and_start_again([process, *process.children(recursive=True)], log)
        assert flow.wait(300) == 0, "it is waited for"
        chaos.check(stage.store, name, undisturbed, STEPS)
        assert eventually(lambda: set(_task_states(tmp_path)) == {"Completed"}, 60), "in the UI too"


# Prefect's client waits about 70 s for its server to come back, at each of the last three calls.
@pytest.mark.parametrize(
    ("service", "limit_s"),
    [("scheduler", chaos.LIMIT_S), ("store", chaos.LIMIT_S), ("prefect", 280.0)],
)
def test_a_service_that_dies_ends_the_run_and_new_ones_resume_it(
    tmp_path: Path, service: str, limit_s: float
) -> None:
    with chaos.standing(tmp_path):
        stage = chaos.Chaos(tmp_path, seed=0)
        undisturbed = stage.run(chaos.settings(STEPS), kills=0)
        before = chaos.runs(stage.store)
        flow = chaos.begin(chaos.settings(STEPS))
        name = _midway(stage.store, flow, before)
        process = _child(tmp_path, service)
        for one in (*process.children(recursive=True), process):
            one.kill()
        began = time.monotonic()
        assert flow.wait(300) != 0
        took = time.monotonic() - began
    with chaos.standing(tmp_path):
        stage = chaos.Chaos(tmp_path, seed=0)
        flow = chaos.begin(chaos.settings(STEPS), name)
        assert flow.wait(300) == 0
        chaos.check(stage.store, name, undisturbed, STEPS)
    assert took < limit_s, f"the run stood still for {took:.0f} s before it ended"
