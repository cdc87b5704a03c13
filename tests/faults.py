"""Faults armed inside worker processes: what happens to one at its next visit to a place.

Importable by Dask workers; arm one with `Client.run(faults.arm, ..., workers=[address])`.
"""

from __future__ import annotations

import os
import signal
import threading
from typing import Any, Literal

How = Literal["kill", "freeze", "raise", "linger"]
LINGER_S = 5.0


class InjectedError(Exception):
    """Nothing that the product knows."""


def arm(place: str, visit: int, how: How) -> None:
    """At the given visit (1: the next) to a place, this process is killed or frozen, raises, or is
    held up for `LINGER_S`.

    Places: forward, all_reduce, upload (a weight object), commit, committed (just after), save (a
    checkpoint's object), form (called, and nothing begun), join.
    """
    owner, name, after = _place(place)
    good = getattr(owner, name)
    left = visit

    def bad(*arguments: Any, **named: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0 and not after:
            _strike(how, place)
        made = good(*arguments, **named)
        if left == 0 and after:
            _strike(how, place)
        return made

    setattr(owner, name, bad)


def at_work(dask_worker: Any = None) -> bool:
    """Whether a stage runs on this trainer worker; for `Client.run`."""
    return vars(dask_worker)["kindling"]["trainer"].at_work.locked()


def _place(place: str) -> tuple[Any, str, bool]:
    import torch.distributed

    from tasks.store import ObjectStore
    from tasks.training import member
    from tasks.training.update import BatchUpdate

    found: dict[str, tuple[Any, str, bool]] = {
        "forward": (BatchUpdate, "_micro_batch", False),
        "all_reduce": (torch.distributed, "all_reduce", False),
        "upload": (ObjectStore, "exists", False),
        "commit": (member, "commit", False),
        "committed": (member, "commit", True),
        "save": (ObjectStore, "create_object", False),
        "form": (member, "form", False),
        "join": (member, "join", False),
    }
    return found[place]


def _strike(how: How, place: str) -> None:
    if how == "raise":
        raise InjectedError(f"at {place}")
    if how == "linger":
        threading.Event().wait(LINGER_S)
        return
    os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)
