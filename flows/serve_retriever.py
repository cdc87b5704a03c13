"""Serve a BM25 index over HTTP, by the protocol of Search-R1's retrieval server.

    python -m flows.serve_retriever --preset tiny --port 8000
    python -m flows.train --preset tiny --set retrieval.url=http://127.0.0.1:8000/retrieve

A plain command, not a Prefect flow: a flow run is work that ends, and would hold its worker's slot
and show as running for as long as the service stands. Stop it by Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import signal
import socket
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from flows.cli import overrides_from
from infra.local import reported
from infra.state import home_folder
from tasks.config import TrainConfig
from tasks.data.hotpotqa import load_questions
from tasks.data.questions import Passage, pool
from tasks.errors import ServiceError
from tasks.presets import resolve

if TYPE_CHECKING:
    from tasks.retrieval.bm25 import Index

STOP_WITHIN_S = 5
"""Requests that run get this long to finish once the service is told to stop."""


def serve_retriever(index: Index, host: str, port: int) -> None:
    """Serves until SIGTERM or Ctrl-C; writes the service's address once it answers.

    Raises:
        ServiceError: the host and port cannot be listened on.
    """
    import uvicorn

    from tasks.retrieval.service import PATH, make_app

    class Announced(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            sys.stdout.write(f"serving {len(index)} passages at {_address(listener)}{PATH}\n")
            sys.stdout.flush()

    with _listen(host, port) as listener:
        server = Announced(
            uvicorn.Config(
                make_app(index),
                log_level="warning",
                access_log=False,
                timeout_graceful_shutdown=STOP_WITHIN_S,
            )
        )
        # uvicorn raises its signals again when it has stopped; the stop asked for is no failure.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        server.run(sockets=[listener])


def served_passages(config: TrainConfig, data: list[str]) -> tuple[Passage, ...]:
    """The passages of the questions named, else all that a run of this configuration searches."""
    if data:
        return pool(question for name in data for question in load_questions(name))
    train, held_out = config.data.train, config.data.held_out
    questions = list(load_questions(train))
    if held_out != "split":
        questions += load_questions(held_out)[: config.data.held_out_questions]
    return pool(questions)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise ServiceError(
            f"cannot listen on {host} port {port}: {error.strerror}; name another --port (0 takes "
            "a free one) or --host"
        ) from error


def _address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def main(
    preset: Annotated[str, typer.Option(help="A file of deployments/presets.")] = "tiny",
    data: Annotated[
        list[str] | None,
        typer.Option(help="Questions whose passages to serve, in place of the preset's; repeat."),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 is all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    changes: Annotated[
        list[str] | None, typer.Option("--set", help="Any field: retrieval.k1=0.9")
    ] = None,
) -> None:
    """Serves a BM25 index over HTTP, as Search-R1's retrieval server does."""
    with reported():
        from tasks.retrieval.stored import local_index

        config = resolve(preset, overrides_from({}, changes or ()))
        retrieval = config.retrieval
        passages = served_passages(config, data or [])
        folder = home_folder() / "cache" / "indexes"
        index = local_index(passages, retrieval.k1, retrieval.b, folder)
        serve_retriever(index, host, port)


if __name__ == "__main__":
    typer.run(main)
