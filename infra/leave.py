"""A preload of workers on other machines: one that nobody gives work ends by itself.

A flow that is killed cannot give back the jobs and pods it asked for. Its workers are free again
within the run's lease, and then idle; this keeps them from holding a node until somebody looks.
A rollout worker that serves a run always executes a task, its loop; a trainer rank waits while
trajectories are sampled, so the limit is far above a step.
"""

from __future__ import annotations

import logging
import time

from distributed import Worker
from tornado.ioloop import PeriodicCallback

PRELOAD = "infra.leave"
IDLE_S = 3600.0
LOOK_S = 10.0

logger = logging.getLogger(__name__)


def dask_setup(worker: Worker) -> None:
    """Called by Dask in the worker's process, on its event loop."""
    last_busy = time.monotonic()

    async def look() -> None:
        nonlocal last_busy
        now = time.monotonic()
        if worker.state.executing_count or worker.state.long_running:
            last_busy = now
        elif now - last_busy > IDLE_S:
            timer.stop()
            logger.warning("no work for %.0f s: the worker ends", now - last_busy)
            await worker.close_gracefully(restart=False, reason="nobody gives it work")

    timer = PeriodicCallback(look, 1000 * LOOK_S)
    timer.start()
