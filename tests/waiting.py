"""Waiting in tests for what happens elsewhere."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


def eventually(check: Callable[[], bool], within_s: float = 20.0) -> bool:
    """Whether `check` comes true in time; asked ten times a second."""
    deadline, pause = time.monotonic() + within_s, threading.Event()
    while not check():
        if time.monotonic() > deadline:
            return False
        pause.wait(0.1)
    return True
