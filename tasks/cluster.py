"""The flow's hold on a Dask cluster: which workers there are, and pinned calls to them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distributed import Client, Future

from tasks.store import StoreLocation
from tasks.warm import require_here

Log = logging.Logger | logging.LoggerAdapter

ROLLOUT = "ROLLOUT"
TRAINER = "TRAINER"


@dataclass(frozen=True)
class Attached:
    """What a flow works with once it is attached: a cluster, a store, a folder on every host for
    caches, and where it logs."""

    client: Client
    store: StoreLocation
    cache_dir: Path
    log: Log


def workers_with(client: Client, resource: str) -> list[str]:
    """Addresses of the workers that offer a resource, ordered by worker name."""
    found = [
        (str(info.get("name", address)), address)
        for address, info in client.scheduler_info(n_workers=-1)["workers"].items()
        if info.get("resources", {}).get(resource)
    ]
    return [address for _, address in sorted(found)]


def _call(address: str, function: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    require_here(address)
    return function(*arguments)


def submit_to(
    client: Client, address: str, key: str, function: Callable[..., Any], *arguments: Any
) -> Future:
    """Runs `function(*arguments)` on one worker, once: no retry behind the flow's back.

    Args:
        key: the Dask key, unique for the work (run, stage, step, rank).
    """
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
