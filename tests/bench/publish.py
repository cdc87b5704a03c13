"""From a publisher's new weights to four engines that hold them: a delta against a full export.

    python -m tests.bench.publish [--json FILE]

One publisher, four engines in processes of their own on one host, the embedded S3 server, all on
this machine. An engine is a set of bf16 parameters that the product's index map scatters into;
what it would generate meanwhile is not simulated, so nothing competes for the cores but the
transfer itself. Both ways are the product's own: the delta is downloaded, decoded and verified
once, into the host's shadow; the full export (an anchor that carries no delta) is downloaded once a
host as well, and written whole into every engine.

Seconds go from the call that prepares the publish to the last engine's report; `stopped` are those
in which the slowest engine could not have generated: the scatter. A step moves about 1 % of the
values by a unit in the last place. Sizes: 2 MB, SmolLM2's 270 MB, and 2 GB; 2 GB takes 20 GB of
memory.

Measured on 2 cores of an AMD EPYC (2026-11-30), delta against full: 2 MB 0.113 and 0.133 s; 270 MB
1.04 and 4.73 s (1.0 and 256 MB sent, stopped for 0.05 s); 2 GB 5.4 and 40.8 s (7.8 MB and 1.97 GB,
stopped for 0.17 s).
"""

from __future__ import annotations

import math
import multiprocessing
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
import typer

from infra.cluster import worker_environment
from infra.object_store import read_credentials, start_store
from infra.processes import ProcessGroup, environment
from tasks.store import ObjectStore, StoreLocation
from tasks.weights.codec import BLOCK_VALUES
from tasks.weights.commit import Published, commit
from tasks.weights.index_map import IndexMap, TensorSpec
from tasks.weights.publisher import Kind, LocalShard, RankPublisher
from tasks.weights.regions import Region
from tasks.weights.subscriber import Subscriber
from tasks.weights.versions import Nothing, State
from tests.bench.codec import like_training
from tests.bench.report import finish, show

ENGINES = 4
WARM_UP = 6
"""Deltas before those that count: the first one's history is empty, and whichever engine's process
is first to want a version decodes it for all, and loads the compiled kernels when it first does."""
Shapes = Sequence[tuple[int, ...]]
SIZES: dict[str, tuple[Shapes, int]] = {  # and how often each way is measured
    "2 MB": ([(1024, 512), (512, 1024)], 5),
    "270 MB": ([(49152, 576), *([(576, 576), (192, 576), (1536, 576), (1536, 576)] * 45)], 3),
    "2 GB": ([(2048, 2048), (11008, 2048), (2048, 11008)] * 20, 1),
}


@dataclass(frozen=True)
class Took:
    """What one publish took.

    Attributes:
        seconds: until the last engine had it. stopped: of the slowest engine's scatter.
        downloaded: bytes that the host took from the store.
    """

    seconds: float
    publish: float
    stopped: float
    uploaded: int
    downloaded: int


def _name(at: int) -> str:
    return f"w{at}"


def _engine(location: StoreLocation, cache: Path, shapes: Shapes, pipe: Connection) -> None:
    """A process with one engine: brings it to the versions it is told, and says what it took."""
    specs = [TensorSpec(_name(at), shape, "bfloat16") for at, shape in enumerate(shapes)]
    parameters = {s.name: torch.zeros(s.shape, dtype=torch.bfloat16) for s in specs}
    regions = {s.name: (Region(s.name, (math.prod(s.shape),), 0, (1,), 0, (1,)),) for s in specs}
    index_map = IndexMap({s.name: s for s in specs}, regions)
    subscriber = Subscriber(ObjectStore(location), cache)
    state: State = Nothing()
    pipe.send("ready")
    while (order := pipe.recv()) is not None:
        run, version = order
        before = subscriber.bytes_downloaded
        update = subscriber.fetch(run, version, state)
        with subscriber.reading(update) as update:
            began = time.perf_counter()
            index_map.scatter(update, parameters)
            stopped = time.perf_counter() - began
        state = update.target
        pipe.send((stopped, subscriber.bytes_downloaded - before))
    subscriber.close()


class _Run:
    """A run whose small weights move up or down, about 1 % of all at a step."""

    def __init__(self, store: ObjectStore, name: str, shapes: Shapes, pipes: list[Connection]):
        self._store, self._name, self._shapes, self._pipes = store, name, shapes, pipes
        self._weights = like_training(list(shapes)).old
        self._rng = np.random.default_rng(1)
        self._publisher = RankPublisher(store, name, 0)

    def _step(self) -> None:
        """In place: the publisher compares with its own snapshot."""
        for bits in self._weights:
            for low in range(0, bits.size, BLOCK_VALUES):
                part = bits[low : low + BLOCK_VALUES]
                exponents = ((part >> 7) & 255).astype(np.float32)
                chance = self._rng.random(part.size, np.float32)
                moved = chance < np.minimum(0.5, 0.012 * 2.0 ** (118 - exponents))
                up = chance * 1024 % 1 < 0.5  # the fraction's lower bits, as good as any
                part += np.where(up, moved, -moved.astype(np.int8)).astype(np.uint16)

    def publish(self, kind: Kind) -> Took:
        """New weights as the next version, into all engines."""
        self._step()
        version = self._publisher.next_version
        if kind == "anchor" and version:  # as resumed with other weights: no delta leads to it
            self._publisher = RankPublisher(self._store, self._name, 0, resume=True)
        began = time.perf_counter()
        shards = (
            LocalShard(_name(at), shape, 0, bits)
            for at, (shape, bits) in enumerate(zip(self._shapes, self._weights, strict=True))
        )
        part = self._publisher.prepare(shards, kind, whole=kind == "anchor")
        published: Published = commit(self._store, self._name, version, [part])
        self._publisher.confirm(published)
        ready = time.perf_counter()
        for pipe in self._pipes:
            pipe.send((self._name, version))
        reports: list[tuple[float, int]] = [pipe.recv() for pipe in self._pipes]
        done = time.perf_counter()
        return Took(
            done - began,
            ready - began,
            max(stopped for stopped, _ in reports),
            published.delta_bytes + published.anchor_bytes,
            sum(downloaded for _, downloaded in reports),
        )


def _measure(store: ObjectStore, folder: Path, size: str) -> dict[str, Any]:
    shapes, repeats = SIZES[size]
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    # As workers have it: else waiting threads spin on the others' cores.
    variables = {k: v for k, v in worker_environment(1, None).items() if v is not None}
    with environment(variables):
        for _ in range(ENGINES):
            ours, theirs = context.Pipe()
            arguments = (store.location, folder / "cache", shapes, theirs)
            processes.append(context.Process(target=_engine, args=arguments))
            processes[-1].start()
            pipes.append(ours)
    for pipe in pipes:
        assert pipe.recv() == "ready"
    run = _Run(store, size.replace(" ", "-"), shapes, pipes)
    run.publish("anchor")
    took: dict[Literal["delta", "anchor"], list[Took]] = {"delta": [], "anchor": []}
    for _ in range(WARM_UP):
        run.publish("delta")
    for _ in range(repeats):
        took["delta"].append(run.publish("delta"))
    for _ in range(repeats):
        took["anchor"].append(run.publish("anchor"))
    for pipe, process in zip(pipes, processes, strict=True):
        pipe.send(None)
        process.join()
    return {kind: _median(found) for kind, found in took.items()}


def _median(found: list[Took]) -> Took:
    return sorted(found, key=lambda took: took.seconds)[len(found) // 2]


def main(
    json_path: Annotated[Path | None, typer.Option("--json", help="Figures as a file.")] = None,
    only: Annotated[str | None, typer.Option("--size", help=f"One of {list(SIZES)}.")] = None,
) -> None:
    """Prints a table and, last, one JSON line: the ratios at 270 MB, or at the one size."""
    sizes = [only] if only else list(SIZES)
    figures: dict[str, Any] = {"sizes": {}}
    rows: list[list[Any]] = []
    for size in sizes:
        with tempfile.TemporaryDirectory(prefix="kindling-bench-") as name:
            folder = Path(name)
            with ProcessGroup(folder / "logs") as group:
                location = start_store(group, folder / "store", "bench")
                with environment(read_credentials(folder / "store").environment()):
                    took = _measure(ObjectStore(location), folder, size)
        delta, full = took["delta"], took["anchor"]
        for label, one in (("delta", delta), ("full", full)):
            rows.append([size, label, one.seconds, one.publish, one.stopped, one.uploaded,
                         one.downloaded])  # fmt: skip
        figures["sizes"][size] = {
            "full_over_delta_s": full.seconds / delta.seconds,
            "full_over_delta_bytes": full.uploaded / delta.uploaded,
            "stopped_share": delta.stopped / delta.seconds,
            "delta_s": delta.seconds,
            "full_s": full.seconds,
        }
    columns = ["size", "way", "s in all", "s to publish", "s stopped", "bytes up", "bytes down"]
    show(f"{ENGINES} engines of one host", columns, rows)
    finish({**figures, **figures["sizes"][only or "270 MB"]}, json_path)


if __name__ == "__main__":
    typer.run(main)
