"""Keeps a plain vLLM server at the newest version of a run.

    python -m tasks.weights.follower --server http://127.0.0.1:8000 \\
        --store ENDPOINT --bucket BUCKET --run RUN --cache-dir DIR

It runs on the server's host and shares `--cache-dir` with it: the follower downloads, decodes and
verifies a version into the host's shadow while the server generates, so that the server stops for
writing the values alone. Credentials of the store come from the environment, of both processes.

It holds no state of its own: what is to be done follows from the run's head and from what the
server says of itself, so that either may be killed and started again at any time.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeAlias

import typer
from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception_type,
    sleep_using_event,
    stop_after_delay,
    wait_random_exponential,
)

from tasks.errors import IntegrityError, KindlingError, ServiceError, StoreError
from tasks.store import ObjectStore, StoreLocation
from tasks.weights.subscriber import Subscriber
from tasks.weights.vllm_server import Served, VllmServer, label_of

logger = logging.getLogger(__name__)

PATIENCE_S = 900.0  # a large model takes minutes to load when its server is restarted
_PAUSE_S = 5.0  # the longest between two attempts: a restarted server does not wait long


@dataclass(frozen=True)
class Wait:
    """The run has published nothing yet."""


@dataclass(frozen=True)
class Rest:
    """The server is where it should be."""


@dataclass(frozen=True)
class Resume:
    """The server has the version, but was not let go on: a follower died, or its call was lost."""


@dataclass(frozen=True)
class Bring:
    """The server is at another version, or was restarted."""

    version: int


Step: TypeAlias = Wait | Rest | Resume | Bring


def next_step(run: str, head: int | None, served: Served, *, settled: bool) -> Step:
    """What to do about a server.

    Args:
        head: the run's newest version.
        settled: this follower has seen the server at a version since it last changed it. A pause
            is somebody else's then; before, it is what this follower, or one that was killed, left.
    """
    if head is None:
        return Wait()
    if served.label != label_of(run, head):
        return Bring(head)
    return Resume() if served.paused and not settled else Rest()


class Follower:
    """Follows one run with one server. Not thread-safe."""

    def __init__(
        self,
        server: VllmServer,
        store: ObjectStore,
        run: str,
        cache_dir: Path,
        poll_s: float = 1.0,
        patience_s: float = PATIENCE_S,
    ) -> None:
        """
        Args:
            cache_dir: folder of this host, shared with the server.
            patience_s: for how long failures may go on before `follow` raises.
        """
        self._server, self._store, self._run, self._cache_dir = server, store, run, cache_dir
        self._poll_s, self._patience_s = poll_s, patience_s
        self._subscriber = Subscriber(store, cache_dir)
        self._settled = False
        self._said = ""

    def follow(self, stop: threading.Event) -> None:
        """Polls until `stop` is set; an update that began is ended first.

        Raises:
            ServiceError, StoreError, IntegrityError: the last failure, once they lasted for
                `patience_s` without a success between.
            ConfigError: the server lacks the endpoints.
        """
        retrying = Retrying(
            retry=retry_if_exception_type((ServiceError, StoreError, IntegrityError)),
            stop=stop_after_delay(self._patience_s),
            wait=wait_random_exponential(multiplier=0.5, max=_PAUSE_S),
            sleep=sleep_using_event(stop),
            before_sleep=self._say_failure,
            reraise=True,
        )
        try:
            while not stop.is_set():
                retrying(self._unless, stop)
                stop.wait(self._poll_s)
        finally:
            self._subscriber.close()

    def _unless(self, stop: threading.Event) -> None:
        if not stop.is_set():  # it may have been set while a repetition was waited for
            self.round()

    def round(self) -> None:
        """Looks once, and does what is to be done."""
        head = self._subscriber.newest(self._run)
        step = next_step(self._run, head, self._server.look(), settled=self._settled)
        match step:
            case Wait():
                where = self._store.location
                self._say(
                    f"run {self._run!r} has published nothing in {where.endpoint} (bucket "
                    f"{where.bucket}) yet; waiting for it"
                )
            case Bring(version):
                self._bring(version)
            case Resume():
                self._server.resume()
                self._say("the server was left paused; it goes on")
            case Rest():
                self._said = ""  # a failure that comes back is said again
        self._settled = not isinstance(step, Wait)

    def _bring(self, version: int) -> None:
        before, began = self._subscriber.bytes_downloaded, time.perf_counter()
        self._subscriber.fetch(self._run, version)
        fetched = time.perf_counter() - began
        self._settled = False
        stopped = self._server.bring_to(self._store.location, self._cache_dir, self._run, version)
        size = self._subscriber.bytes_downloaded - before
        self._said = ""
        logger.info(
            "run %s version %d: %d bytes fetched in %.2f s, generation stopped for %.3f s",
            self._run,
            version,
            size,
            fetched,
            stopped,
        )

    def _say_failure(self, state: RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome else None
        self._say(f"failed, trying again for {self._patience_s:g} s: {error}")

    def _say(self, message: str) -> None:
        """Logs a line unless it is the one logged last."""
        if message != self._said:
            logger.warning("%s", message)
            self._said = message


def main(
    server: Annotated[str, typer.Option(help="URL of the vLLM server, on this host.")],
    store: Annotated[str, typer.Option(help="Endpoint of the object store: http://HOST:PORT.")],
    bucket: Annotated[str, typer.Option(help="Bucket of the run.")],
    run: Annotated[str, typer.Option(help="Run to follow; it need not exist yet.")],
    cache_dir: Annotated[Path, typer.Option(help="Folder of this host for the shadow copy.")],
    poll_s: Annotated[float, typer.Option(min=0.01, help="Seconds between two looks.")] = 1.0,
) -> None:
    """Keep a plain vLLM server at the newest version of a run, until SIGTERM or Ctrl-C."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s")
    logger.setLevel(logging.INFO)  # others log every request
    stop = threading.Event()

    def end(*_: object) -> None:
        # Not here: the handler may interrupt the event's own wait, which holds the event's lock.
        threading.Thread(target=stop.set).start()

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    try:
        objects = ObjectStore(StoreLocation(store, bucket))
        Follower(VllmServer(server), objects, run, cache_dir, poll_s).follow(stop)
    except KindlingError as error:
        logger.error("error: %s", error)
        raise typer.Exit(1) from None
    logger.info("stopped; the server keeps what it has")


if __name__ == "__main__":
    typer.run(main)
