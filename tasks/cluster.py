"""The flow's hold on a Dask cluster: which workers there are, and pinned calls to them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from distributed import Client, Future
from distributed.client import ClosedClientError

from tasks.errors import SchedulerLost
from tasks.store import StoreLocation
from tasks.warm import require_here

Log = logging.Logger | logging.LoggerAdapter

ROLLOUT = "ROLLOUT"
TRAINER = "TRAINER"
RESTART_S = 20.0
"""Seconds a nanny has to kill its worker."""
ANSWER_S = 30.0
"""Seconds the scheduler has to answer; it may be frozen, with its connections open."""


class WorkerPool(Protocol):
    """Where a run takes further rollout workers from, and where they go back to."""

    def start(self, count: int) -> None:
        """Asks for so many more; they join the scheduler when they are up.

        Raises:
            ClusterError: whoever is asked refuses or does not answer; so with the other calls.
        """
        ...

    def names(self) -> list[str]:
        """Dask names of those asked for that have not ended."""
        ...

    def give_back(self, name: str) -> None:
        """Lets go of a worker that has been told to close."""
        ...

    def close(self) -> None:
        """Ends all that are left."""
        ...


@dataclass(frozen=True)
class Attached:
    """What a flow works with once it is attached: a cluster, a store, a folder on every host for
    caches, where it logs, and where more workers come from, if from anywhere."""

    client: Client
    store: StoreLocation
    cache_dir: Path
    log: Log
    pool: WorkerPool | None = None


@contextmanager
def scheduler_errors(client: Client) -> Iterator[None]:
    """Says SchedulerLost where the scheduler is gone, or does not answer."""
    try:
        yield
    except (OSError, AttributeError, RuntimeError, ClosedClientError) as error:
        # A client that has given up has no scheduler any more, or a closed pool of connections.
        if not isinstance(error, OSError) and client.status not in ("closing", "closed"):
            raise
        raise SchedulerLost(
            f"the Dask scheduler does not answer ({error}); what the run has in the store is "
            "whole: see the scheduler's log, start the services again and resume the run"
        ) from error


def ask_scheduler(client: Client, handler: str, /, **arguments: Any) -> Any:
    """What a handler of the scheduler's answers.

    Raises:
        SchedulerLost: it is gone, or does not answer within `ANSWER_S`.
    """
    with scheduler_errors(client):
        ask = getattr(client.scheduler, handler)
        return client.sync(ask, callback_timeout=ANSWER_S, **arguments)


def workers_of(client: Client) -> dict[str, dict[str, Any]]:
    """Address -> what the scheduler knows of a worker, for all there are; asked of it now.

    Not `Client.scheduler_info`: the client's own timer overwrites what that returns every two
    seconds, with an answer that names no worker, also between its request and its return. A run
    was so told that it had no trainers.

    Raises:
        SchedulerLost: the scheduler does not answer.
    """
    return ask_scheduler(client, "identity", n_workers=-1)["workers"]


def names_of(client: Client, resource: str) -> dict[str, str]:
    """Address -> name of the workers that offer a resource, ordered by name."""
    found = {
        address: str(info.get("name", address))
        for address, info in workers_of(client).items()
        if info.get("resources", {}).get(resource)
    }
    return dict(sorted(found.items(), key=lambda item: item[1]))


def workers_with(client: Client, resource: str) -> list[str]:
    """Addresses of the workers that offer a resource, ordered by worker name."""
    return list(names_of(client, resource))


def restart(client: Client, addresses: Sequence[str]) -> None:
    """Kills the processes of these workers, frozen ones too; their nannies start new ones, which
    join when they are up. Workers that have gone already are left out.

    Raises:
        SchedulerLost: the scheduler does not answer.
    """
    ask_scheduler(
        client,
        "restart_workers",
        workers=list(addresses),
        timeout=RESTART_S,
        wait_for_workers=False,
        on_error="return",
        stimulus_id="kindling-restart",
    )


def _call(address: str, function: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    require_here(address)
    return function(*arguments)


def submit_to(
    client: Client, address: str, key: str, function: Callable[..., Any], *arguments: Any
) -> Future:
    """Runs `function(*arguments)` on one worker, once: no retry behind the flow's back.

    Args:
        key: the Dask key, unique for the work (run, stage, step, rank).

    Raises:
        SchedulerLost: there is no scheduler any more.
    """
    with scheduler_errors(client):
        return client.submit(
            _call,
            address,
            function,
            arguments,
            key=key,
            workers=[address],
            allow_other_workers=True,
            retries=0,
            pure=False,
        )
