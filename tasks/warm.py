"""Warm state: what a Dask worker process keeps between tasks, steps and runs.

It lives on the worker object (not in module globals, not in Actors: a call to a dead actor hangs),
is built lazily by the first task that needs it, and dies with the process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from distributed import Worker, get_worker

from tasks.errors import ClusterError

T = TypeVar("T")
_LOCK = threading.Lock()


def this_worker() -> Worker:
    """The Dask worker this task runs on."""
    return get_worker()


def warm(name: str, build: Callable[[], T]) -> T:
    """The worker's object of that name, built on first use; two tasks never build it twice."""
    worker = this_worker()
    with _LOCK:
        state: dict[str, Any] = vars(worker).setdefault("kindling", {})
        if name not in state:
            state[name] = build()
        return state[name]


def require_here(address: str) -> None:
    """Refuses to run on another worker than the one a task was meant for.

    Tasks are pinned with `allow_other_workers=True`, since a task pinned strictly to a worker that
    has gone waits for ever; so it may arrive elsewhere, and must then fail at once.

    Raises:
        ClusterError: this is another worker.
    """
    here = this_worker().address
    if here != address:
        raise ClusterError(f"meant for worker {address}, which has gone, and arrived at {here}")
