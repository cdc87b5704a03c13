"""Seconds a training step takes outside engine, trainer and store calls.

    python -m tests.bench.step [--json FILE] [--steps 4]

14 rollout and 2 trainer workers (Dask processes under nannies, as `infra.cluster` starts them), a
Prefect server and an object store, all on this machine. The flow is `flows.train`'s inner loop over
the product's own tasks: rollout, update, publish, record. 512 groups x 5 trajectories of about
2,000 ids a step.

What is excluded, and how. Intervals spent in store calls by 16 processes on a few cores overlap
with everybody else's control work, so subtracting them (their sum, or their union) would take away
control work as well. Instead the same steps run again with the excluded calls replaced by ones that
return at once, and all the wall seconds that remain are control plane, nothing subtracted:

- engine: sampling, weights and retrieval are no-ops in every pass (`tests.noop`). The agent loop
  over the engine is the product's and counts.
- trainer: the ranks plan the update, read their groups and take their bytes apart (all of which
  counts), and neither train nor diff weights.
- store: pass `stored` puts every group into the real store and the ranks read it back; in the other
  passes put and get return at once, but groups are still made into bytes and taken apart.

Passes, each a run of its own with a fresh Fleet, the first step of each left out, medians a step:

- `stored`: raw wall seconds with the real store (`wall_s_per_step`);
- `payload`: `control_plane_s_per_step`;
- `empty`: trajectories of a prompt and one turn of 2 ids, nothing else changed:
  `control_plane_s_per_step_empty`.

A step's wall seconds go from the call of rollout-k to the return of its record: Prefect's task
runs, Dask's dispatch, the queue, summaries and history are in it. On 14 + 2 machines the workers'
part (agent loop, bytes) would run side by side; here they share the cores, and all of it counts.

Measured on 2 cores of an Intel Xeon, otherwise idle (2026-12-06): stored 4.12 s, payload 0.80 s,
empty 0.56 s a step.
"""

from __future__ import annotations

import cProfile
import logging
import pstats
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any, cast

import typer
from distributed import Client
from prefect import flow

from infra.cluster import connect, start_scheduler, start_workers, wait_for_workers
from infra.object_store import read_credentials, start_store
from infra.prefect_server import start_prefect, using_api
from infra.processes import ProcessGroup, environment
from tasks import artifacts, stages
from tasks.cluster import ROLLOUT, workers_with
from tasks.config import TrainConfig
from tasks.inputs import Inputs, load_inputs
from tasks.presets import resolve
from tasks.rollout.batches import Producer
from tasks.rollout.fleet import Fleet
from tasks.rollout.worker import RolloutSpec
from tasks.run import Run
from tasks.store import ObjectStore, StoreLocation
from tasks.training.member import TrainerSpec
from tasks.training.tiny_policy import build_model, build_tokenizer
from tests import noop
from tests.bench import report

ROLLOUT_WORKERS, TRAINER_RANKS = 14, 2
GROUPS, GROUP_SIZE, TOKENS = 512, 5, 2000
LOG = logging.getLogger("tests.bench.step")


@dataclass
class Pass:
    """What one pass measured, a value a step."""

    shape: noop.Shape
    wall: list[float] = field(default_factory=list)
    stages: dict[str, list[float]] = field(default_factory=dict)
    trajectories: int = 0
    tokens: int = 0
    store_s: float = 0.0


def _config(steps: int, policy: Path) -> TrainConfig:
    return resolve(
        "tiny",
        {
            "model": {"path": str(policy), "context": 4096},
            "rollout": {
                "questions_per_step": GROUPS,
                "group_size": GROUP_SIZE,
                "max_new_tokens": TOKENS,
                "max_sequences": 256,
            },
            "training": {
                "steps": steps,
                "mini_batch_size": 256,
                "tokens_per_micro_batch": 16384,
            },
            "cluster": {
                "rollout_workers": ROLLOUT_WORKERS,
                "trainer_ranks": TRAINER_RANKS,
                "rollout_threads": 1,
            },
        },
    )


@contextmanager
def _cluster(config: TrainConfig, folder: Path) -> Iterator[tuple[Client, StoreLocation]]:
    with ProcessGroup(folder / "logs") as group:
        location = start_store(group, folder, "kindling-bench")
        with environment(read_credentials(folder).environment()):
            ObjectStore(location).check()
            scheduler = start_scheduler(group, folder / "dask")
            start_workers(group, scheduler, config.cluster, folder / "dask")
            api = start_prefect(group, folder)
            with connect(scheduler, 60) as client, using_api(api):
                wait_for_workers(client, ROLLOUT_WORKERS, TRAINER_RANKS, 300)
                yield client, location


@contextmanager
def _run(client: Client, location: StoreLocation, inputs: Inputs, name: str,
         shape: noop.Shape) -> Iterator[Run]:  # fmt: skip
    """A run as `tasks.run.open_run` opens it, over no-op workers."""
    config = inputs.config
    spec = RolloutSpec(name, name, config, location, inputs.index_key, "/nowhere")
    fleet = Fleet(client, spec, LOG, None, partial(noop.serve, shape=shape))
    try:
        trainers = noop.NoopTrainers(
            client, TrainerSpec(name, 0, config, location, "/nowhere", None), shape
        )
        store: Any = ObjectStore(location) if shape.stored else noop.NoopStore(shape, GROUP_SIZE)
        producer = Producer(config.training.steps, 0, 0)
        _wait_for_loops(client)
        yield Run(name, inputs, store, fleet, trainers, producer, LOG)
    finally:
        fleet.close()


def _wait_for_loops(client: Client) -> None:
    """Workers import torch and transformers once; that is no part of a step."""
    workers = len(workers_with(client, ROLLOUT))
    while sum(cast("dict[str, int]", client.run(noop.loops_here)).values()) < workers:
        time.sleep(0.5)


@flow(name="bench-step", persist_result=False, validate_parameters=False)
def steps_flow(run: Run, made: Pass) -> None:
    """`flows.train`'s loop without evaluations and checkpoints."""
    published = run.trainers.publish(0)
    released = stages.Released(0, published, 0.0)
    run.progress_id = artifacts.start_progress()
    for step in run.remaining_steps:
        began = time.perf_counter()
        batch = stages.at(stages.rollout, step)(run, step, released)
        updated = stages.at(stages.update, step)(run, batch)
        released = stages.at(stages.publish, step)(run, updated)
        record = stages.record(run, batch, updated, released)
        if step > 0:  # the first opens connections and fills caches
            made.wall.append(time.perf_counter() - began)
            inside = sum(record.seconds.values())
            named = {**record.seconds, "between": made.wall[-1] - inside}
            for name, seconds in named.items():
                made.stages.setdefault(name, []).append(seconds)
            made.trajectories += record.batch.trajectories
            made.tokens += record.batch.tokens


def _measure(client: Client, location: StoreLocation, inputs: Inputs, name: str,
             shape: noop.Shape, profile: bool) -> Pass:  # fmt: skip
    made = Pass(shape)
    before = _store_seconds(client)
    profiler = cProfile.Profile() if profile else None
    with _run(client, location, inputs, name, shape) as run:
        if profiler is not None:
            profiler.enable()
        steps_flow(run, made)
        if profiler is not None:
            profiler.disable()
            pstats.Stats(profiler).sort_stats("cumulative").print_stats(45)
    made.store_s = (_store_seconds(client) - before) / inputs.config.training.steps
    steps = len(made.wall)
    assert made.trajectories == steps * GROUPS * GROUP_SIZE
    return made


def _store_seconds(client: Client) -> float:
    return sum(cast("dict[str, float]", client.run(noop.store_seconds)).values())


def _show(passes: dict[str, Pass]) -> None:
    names = list(next(iter(passes.values())).stages)
    rows = [
        [
            name,
            median(p.wall),
            min(p.wall),
            max(p.wall),
            *(median(p.stages[stage]) for stage in names),
            p.store_s,
            f"{p.tokens / max(1, p.trajectories):.0f}",
        ]
        for name, p in passes.items()
    ]
    columns = ["pass", "wall s", "min", "max", *names, "store, all threads", "tokens"]
    report.show(f"seconds a step; {report.machine()}", columns, rows)


def main(
    json: Annotated[Path | None, typer.Option(help="Also write the last line here.")] = None,
    steps: Annotated[int, typer.Option(help="Measured steps a pass.")] = 5,
    profile: Annotated[bool, typer.Option(help="Profile the flow's thread.")] = False,
) -> None:
    """Measures and prints; see the module."""
    shapes = {
        "stored": noop.Shape(TOKENS, stored=True),
        "payload": noop.Shape(TOKENS, stored=False),
        "empty": noop.Shape(2, turns=1, stored=False),
    }
    with tempfile.TemporaryDirectory(prefix="kindling-bench-", ignore_cleanup_errors=True) as place:
        folder = Path(place)
        tokenizer = build_tokenizer()
        tokenizer.save_pretrained(folder / "policy")
        build_model(tokenizer, 0).save_pretrained(folder / "policy")
        inputs = load_inputs(_config(steps + 1, folder / "policy"), folder / "cache")
        with _cluster(inputs.config, folder) as (client, location):
            passes = {
                name: _measure(client, location, inputs, name, shape, profile)
                for name, shape in shapes.items()
            }
    _show(passes)
    report.finish(
        {
            "control_plane_s_per_step": median(passes["payload"].wall),
            "control_plane_s_per_step_empty": median(passes["empty"].wall),
            "wall_s_per_step": median(passes["stored"].wall),
            "store_thread_s_per_step": passes["stored"].store_s,
            "steps": steps,
        },
        json,
    )


if __name__ == "__main__":
    typer.run(main)
