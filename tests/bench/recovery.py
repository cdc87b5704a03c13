"""Seconds from a process's death to the work going on elsewhere.

    python -m tests.bench.recovery [--json FILE] [--repeats 3]

- `gang_recovery_s`: from the SIGKILL of one of two trainer ranks, in the middle of an update, to
  the end of that update's repetition: the flow notices, the gang forms anew with a warm spare (a
  third trainer worker that has done nothing yet but import), repeats the updates since the
  checkpoint (here one) and takes its optimizer steps. `gang_recovery_nanny_s` is the same without
  a spare: the nanny starts a new process, which imports torch.
- `rollout_recovery_s`: from the SIGKILL of one of two rollout workers that hold units to the first
  result of such a unit from the other one, less the time that a unit takes.

A tiny random policy on real Dask workers and a real store; engines are no-ops, whose units take
half a second. Medians.

Measured on 2 cores of an Intel Xeon (2026-12-01): gang 1.4 s with a spare, 5.5 s without (1.0
and 4.9 s when the next version was an anchor, and nobody looked whether it could be a delta);
rollout 0.02 s.
"""

from __future__ import annotations

import logging
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any, cast

import typer
from distributed import Client

from infra.cluster import connect, start_scheduler, start_workers, wait_for_workers
from infra.object_store import read_credentials, start_store
from infra.processes import ProcessGroup, environment
from tasks.cluster import ROLLOUT, TRAINER, workers_with
from tasks.config import TrainConfig
from tasks.errors import GangError
from tasks.presets import resolve
from tasks.rollout.agent import Unit
from tasks.rollout.engine import Sampling
from tasks.rollout.fleet import Fleet
from tasks.rollout.trajectory import GroupSummary, group_to_bytes
from tasks.rollout.worker import RolloutSpec
from tasks.store import ObjectStore, StoreLocation
from tasks.training.claims import claim
from tasks.training.member import TrainerSpec
from tasks.training.tiny_policy import build_model, build_tokenizer
from tasks.training.trainers import Trainers
from tests import noop
from tests.bench import report
from tests.training_helpers import make_batch, summary_of

RANKS, SPARES = 2, 1
UNIT_S = 0.5
LOG = logging.getLogger("tests.bench.recovery")


def _config(policy: Path) -> TrainConfig:
    return resolve(
        "tiny",
        {
            "model": {"path": str(policy)},
            "rollout": {"questions_per_step": 4, "group_size": 4, "max_sequences": 4},
            "training": {"mini_batch_size": 8, "mismatch_alarm": 1e9},
            "cluster": {"rollout_workers": 2, "trainer_ranks": RANKS},
        },
    )


def _pid(client: Client, worker: str) -> int:
    return cast("dict[str, int]", client.run(os.getpid, workers=[worker]))[worker]


def _batch(store: ObjectStore, step: int) -> list[GroupSummary]:
    made: list[GroupSummary] = []
    for group in make_batch(4, 4, seed=step)[0]:
        summary = replace(summary_of(group), key=f"bench/{step}/{group.unit_id}")
        store.put(summary.key, group_to_bytes(group))
        made.append(summary)
    return made


def _gang(client: Client, config: TrainConfig, store: ObjectStore, name: str, cache: Path) -> float:
    """Seconds from the death of rank 1 to the end of the update that it broke."""
    spec = TrainerSpec(name, 0, config, store.location, str(cache), None)

    def claims(size: int) -> Any:
        return claim(size, workers_with(client, TRAINER), (), {})

    trainers = Trainers(client, spec, "127.0.0.1", claims, LOG)
    try:
        trainers.publish(0)
        trainers.update(0, _batch(store, 0))
        batch = _batch(store, 1)
        victim = _pid(client, workers_with(client, TRAINER)[1])
        os.kill(victim, signal.SIGSTOP)  # so that the update is under way when it dies
        killed: list[float] = []

        def kill() -> None:
            killed.append(time.perf_counter())
            os.kill(victim, signal.SIGKILL)

        threading.Timer(0.5, kill).start()
        try:
            trainers.update(1, batch)
        except GangError:
            trainers.update(1, batch)
        return time.perf_counter() - killed[0]
    finally:
        trainers.close()


def _rollout(client: Client, config: TrainConfig, store: StoreLocation, name: str) -> float:
    spec = RolloutSpec(name, name, config, store, "no-index", "/nowhere")
    shape = noop.Shape(tokens=60, turns=1, pause_s=UNIT_S)
    fleet = Fleet(client, spec, LOG, None, partial(noop.serve, shape=shape))
    try:
        while sum(cast("dict[str, int]", client.run(noop.loops_here)).values()) < 2:
            time.sleep(0.2)
        sampling = Sampling(1.0, 1.0)
        units = [
            Unit(f"train-{name}-{i}", f"q{i}", "Who?", ("gold",), 0, 0, 4, sampling)
            for i in range(2)
        ]
        fleet.offer(units)
        time.sleep(UNIT_S / 2)  # each worker has one of them
        victim = workers_with(client, ROLLOUT)[0]
        pid = _pid(client, victim)
        began = time.perf_counter()
        os.kill(pid, signal.SIGKILL)
        groups = fleet.collect([unit.unit_id for unit in units])
        took = time.perf_counter() - began
        assert all(group.worker != victim for group in groups), "the dead one was done already"
        # The survivor ends its own unit first, of which half is left.
        return took - 1.5 * UNIT_S
    finally:
        fleet.close()


def main(
    json_path: Annotated[Path | None, typer.Option("--json", help="Figures as a file.")] = None,
    repeats: Annotated[int, typer.Option(help="Deaths of each kind.")] = 3,
) -> None:
    """Prints a table and, last, one JSON line."""
    with tempfile.TemporaryDirectory(prefix="kindling-bench-") as name:
        folder = Path(name)
        policy = folder / "policy"
        tokenizer = build_tokenizer()
        build_model(tokenizer, 0).save_pretrained(policy)
        tokenizer.save_pretrained(policy)
        config = _config(policy)
        with ProcessGroup(folder / "logs") as group:
            location = start_store(group, folder / "store", "bench")
            with environment(read_credentials(folder / "store").environment()):
                took = _measure(group, folder, location, config, repeats)
    rows = [[label, *(f"{value:.2f}" for value in values)] for label, values in took.items()]
    report.show("Seconds from death to work", ["what", *map(str, range(repeats))], rows)
    report.finish({label: median(values) for label, values in took.items()}, json_path)


def _measure(
    group: ProcessGroup,
    folder: Path,
    location: StoreLocation,
    config: TrainConfig,
    repeats: int,
) -> dict[str, list[float]]:
    store = ObjectStore(location)
    scheduler = start_scheduler(group, folder / "dask")
    all_of = config.cluster.model_copy(update={"trainer_ranks": RANKS + SPARES})
    start_workers(group, scheduler, all_of, folder / "dask")
    took: dict[str, list[float]] = {}

    def repeat(label: str, once: Callable[[str], float], trainers: int) -> None:
        for number in range(repeats):
            wait_for_workers(client, 2, trainers, 120)
            took.setdefault(label, []).append(once(f"{label}-{number}"))

    with connect(scheduler, 60) as client:
        wait_for_workers(client, 2, RANKS + SPARES, 120)

        def gang(name: str) -> float:
            client.run(_import_trainer, workers=workers_with(client, TRAINER))
            return _gang(client, config, store, name, folder / "cache")

        repeat("gang_recovery_s", gang, RANKS + SPARES)
        repeat("rollout_recovery_s", lambda name: _rollout(client, config, location, name), RANKS)
        wait_for_workers(client, 2, RANKS + SPARES, 120)
        spare = workers_with(client, TRAINER)[RANKS:]
        client.retire_workers(spare, close_workers=True, remove=True)
        repeat("gang_recovery_nanny_s", gang, RANKS)
    return took


def _import_trainer() -> None:
    import tasks.training.member  # noqa: F401


if __name__ == "__main__":
    typer.run(main)
