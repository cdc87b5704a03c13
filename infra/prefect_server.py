"""A Prefect server of this machine: loopback, a free port, its SQLite file in the state folder."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx

from infra.processes import ProcessGroup, environment, free_ports

READY_S = 120.0
HEARTBEAT_S = 30
"""Seconds between a flow run's signs of life: Prefect's shortest."""
_DRAIN_S = 10.0


def start_prefect(group: ProcessGroup, home: Path, ready_s: float = READY_S) -> str:
    """Start `prefect server start` and return the API's URL once it is healthy.

    Raises:
        ServiceError: it ended, or is not healthy in time.
    """
    folder = (home / "prefect").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    (port,) = free_ports(1)
    # The user's own PREFECT_* settings (a cloud profile, another database) are not this server's.
    inherited: dict[str, str | None] = {
        name: None for name in os.environ if name.startswith("PREFECT_")
    }
    api = f"http://127.0.0.1:{port}/api"
    command = [sys.executable, "-m", "prefect", "server", "start"]
    child = group.start(
        "prefect",
        [*command, "--host", "127.0.0.1", "--port", str(port)],
        env={
            **inherited,
            "PREFECT_HOME": str(folder),
            # Without it the UI's pages ask port 4200, whatever port the server has.
            "PREFECT_SERVER_UI_API_URL": api,
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
            "DO_NOT_TRACK": "1",
        },
    )
    return group.wait_ready(child, lambda: api if is_healthy(api) else None, ready_s)


def is_healthy(api: str, timeout_s: float = 2.0) -> bool:
    """Whether a Prefect API answers at this URL."""
    try:
        answer = httpx.get(f"{api.rstrip('/')}/health", timeout=timeout_s)
    except (httpx.HTTPError, httpx.InvalidURL):
        return False
    return answer.status_code == 200


def configured_api() -> str | None:
    """The API that PREFECT_API_URL or the active Prefect profile names, if it answers."""
    from prefect.settings import get_current_settings

    # The variable may have been set after Prefect read its settings.
    url = os.environ.get("PREFECT_API_URL") or get_current_settings().api.url
    if not url:
        return None
    if get_current_settings().api.key is not None:  # Prefect Cloud: its own client must ask
        return url
    return url if is_healthy(url) else None


@contextmanager
def using_api(api: str) -> Iterator[str]:
    """Make this API the one that flows started in this process use, and its children's; they say
    that they live as often as `infra.zombies` expects."""
    from prefect import context
    from prefect.settings import PREFECT_API_URL, temporary_settings

    try:
        beats = {"PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(HEARTBEAT_S)}
        with environment({"PREFECT_API_URL": api, **beats}):
            # Prefect's own threads have no settings context and read the global one.
            context.refresh_global_settings_context()
            with temporary_settings({PREFECT_API_URL: api}):
                try:
                    yield api
                finally:
                    _drain()
    finally:
        context.refresh_global_settings_context()


def _drain() -> None:
    """Have Prefect's background threads send what they hold: with their server gone they would
    retry every item, and keep the interpreter from ending for minutes."""
    from prefect.events.worker import EventsWorker
    from prefect.logging.handlers import APILogWorker

    # In a thread, because these return coroutines where an event loop runs.
    with ThreadPoolExecutor(1) as pool:
        for worker in (APILogWorker, EventsWorker):
            pool.submit(worker.drain_all, timeout=_DRAIN_S).result()
