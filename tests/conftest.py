"""Shared stacks, started once a test run, and the check that nothing of them is left."""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from infra.object_store import read_credentials, start_store
from infra.processes import ProcessGroup, environment
from tasks.store import ObjectStore, StoreLocation

RUN_VARIABLE = "KINDLING_TEST_RUN"
_SETTLE_S = 5.0  # a child that was told to end may take a moment


def pytest_configure(config: pytest.Config) -> None:
    # Our own warnings are errors; those of other packages (vllm warns on import) are not ours.
    for ours in ("flows", "tasks", "infra", "tests"):
        config.addinivalue_line("filterwarnings", rf"error:::{ours}(\.|$)")
    # One a process, so that a pytest-xdist worker does not take its sibling's stack for a leftover.
    os.environ["SPT_NOENV"] = "1"  # or Dask's process titles overwrite what `leftovers` reads
    os.environ[RUN_VARIABLE] = secrets.token_hex(8)


def leftovers() -> list[str]:
    """Processes this test run started that still run: descendants, and re-parented ones."""
    found: dict[int, psutil.Process] = {}
    own = psutil.Process()
    spared = {own.pid, *(parent.pid for parent in own.parents())}
    for child in own.children(recursive=True):
        found[child.pid] = child
    for process in psutil.process_iter():
        try:
            if process.environ().get(RUN_VARIABLE) == _run_id():
                found[process.pid] = process
        except psutil.Error:  # gone meanwhile, or another user's
            continue
    described = []
    for pid, process in found.items():
        try:
            command = " ".join(process.cmdline())
            if pid in spared or process.status() == psutil.STATUS_ZOMBIE or _helper(command):
                continue
            described.append(f"{pid}: {command[:200]}")
        except psutil.NoSuchProcess:
            continue
    return described


def _run_id() -> str:
    return os.environ[RUN_VARIABLE]


def _helper(command: str) -> bool:
    """Python's and pytest-xdist's own helpers, which end with the run."""
    return any(
        part in command for part in ("multiprocessing.resource_tracker", "import sys;exec(eval(")
    )


@pytest.fixture(scope="session", autouse=True)
def no_process_left() -> Iterator[None]:
    """Fail the run if a process that it started remains at its end."""
    yield
    deadline = time.monotonic() + _SETTLE_S
    pause = threading.Event()
    while (remaining := leftovers()) and time.monotonic() < deadline:
        pause.wait(0.1)
    assert not remaining, "processes left by the tests:\n" + "\n".join(remaining)


@pytest.fixture(scope="session")
def store_location(
    tmp_path_factory: pytest.TempPathFactory, no_process_left: None
) -> Iterator[StoreLocation]:
    """A real S3 server on loopback, its credentials in the environment."""
    folder = Path(tmp_path_factory.mktemp("store"))
    with ProcessGroup(folder / "logs") as group:
        location = start_store(group, folder, "kindling-tests")
        with environment(read_credentials(folder).environment()):
            yield location


@pytest.fixture(scope="session")
def object_store(store_location: StoreLocation) -> ObjectStore:
    return ObjectStore(store_location)
