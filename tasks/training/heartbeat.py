"""A trainer rank's signs of life, and how it learns that its epoch is over.

A thread of its own tells the coordinator every second that the process lives, whatever the rank
computes meanwhile, and reads which epoch is current. The rank itself asks between two pieces of
work (`Heartbeat.check`) and stops as soon as its epoch is over: the flow has ended, was killed or
cancelled, or has formed a younger gang. A collective that waits for a dead peer is not woken by
this (gloo's `abort` does not reach it); it fails when the peer's process is gone.
"""

from __future__ import annotations

import threading
from datetime import timedelta

import torch.distributed as dist

from tasks.errors import GangError
from tasks.training.group import alive_key, current_epoch

BEAT_S = 1.0
"""Seconds between two signs of life."""
_ANSWER_S = 30.0  # a coordinator that takes longer is gone


class Heartbeat:
    """The signs of life of one rank in one epoch, until `stop` or the epoch's end."""

    def __init__(self, address: str, port: int, epoch: int, rank: int) -> None:
        self._where = f"rank {rank}, epoch {epoch}"
        self._address, self._port = address, port
        self._epoch, self._rank = epoch, rank
        self._over = ""
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Between two pieces of work, on the rank's own thread.

        Raises:
            GangError: the epoch is over; whatever the rank still did for it would count for
                nothing.
        """
        if self._over:
            raise GangError(f"{self._where}: {self._over}")

    def stop(self, why: str) -> None:
        """No more signs of life; `check` raises from now on. Does not wait for the thread."""
        self._over = self._over or why
        self._stopped.set()

    def _run(self) -> None:
        try:
            # A connection of its own: one that waits holds its lock.
            store = dist.TCPStore(
                self._address, self._port, is_master=False, timeout=timedelta(seconds=_ANSWER_S)
            )
            while True:
                store.add(alive_key(self._epoch, self._rank), 1)
                current = current_epoch(store)
                if current != self._epoch:
                    self._over = f"the epoch is over, the coordinator is at {current}"
                    return
                if self._stopped.wait(BEAT_S):
                    return
        except (dist.DistError, RuntimeError) as error:
            if not self._stopped.is_set():
                self._over = f"the coordinator at {self._address}:{self._port} is gone: {error}"
