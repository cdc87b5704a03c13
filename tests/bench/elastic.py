"""A burst of work on a run that may grow, against one that had all its workers from the start.

    python -m tests.bench.elastic [--json FILE]

400 units of 50 ms each, one at a time on a worker, on no-op engines: real Dask workers under
nannies, a real store, the product's queue, fleet and scaler.

- `drain_over_fixed`: seconds until the burst is done with 2 workers that may become 14, over the
  seconds with 14 that serve already. New workers are processes that import torch first, on the
  cores of this one machine.
- `overhead_ms_per_unit`: wall milliseconds a unit costs when it takes no time at all: 400 such
  units on 14 workers, by 400. Pulling, the agent loop, making bytes, reporting and collecting are
  in it; storing is not.

Measured on 2 cores of an Intel Xeon (2026-12-01), which 14 processes share: 12.6 s growing, which
is mostly twelve processes importing torch, 3.3 s fixed (ratio 3.8); 1.5 ms a unit.
"""

from __future__ import annotations

import logging
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Annotated, cast

import typer
from distributed import Client

from infra.cluster import connect, start_scheduler, start_workers, wait_for_workers
from infra.elastic import LocalPool
from infra.object_store import read_credentials, start_store
from infra.processes import ProcessGroup, environment
from tasks.cluster import WorkerPool
from tasks.config import TrainConfig
from tasks.presets import resolve
from tasks.rollout.agent import Unit
from tasks.rollout.engine import Sampling
from tasks.rollout.fleet import Fleet
from tasks.rollout.worker import RolloutSpec
from tasks.store import StoreLocation
from tasks.training.tiny_policy import build_tokenizer
from tests import noop
from tests.bench import report

LEAST, MOST = 2, 14
UNITS, UNIT_S, GROUP_SIZE = 400, 0.05, 2
LOG = logging.getLogger("tests.bench.elastic")


def _config(policy: Path) -> TrainConfig:
    return resolve(
        "tiny",
        {
            "model": {"path": str(policy)},
            "rollout": {
                "questions_per_step": UNITS,
                "group_size": GROUP_SIZE,
                "max_sequences": GROUP_SIZE,
            },
            "cluster": {
                "rollout_workers": LEAST,
                "rollout_workers_most": MOST,
                "rollout_threads": 1,
                "trainer_ranks": 1,
                "drain_s": 1.0,
                "idle_s": 600.0,
            },
        },
    )


def _loops(client: Client) -> int:
    return sum(cast("dict[str, int]", client.run(noop.loops_here)).values())


def _burst(
    client: Client,
    config: TrainConfig,
    store: StoreLocation,
    name: str,
    shape: noop.Shape,
    serving: int,
    pool: WorkerPool | None = None,
) -> float:
    """Seconds until all units are done, from the moment they are offered to `serving` workers."""
    spec = RolloutSpec(name, name, config, store, "no-index", "/nowhere")
    fleet = Fleet(client, spec, LOG, pool, partial(noop.serve, shape=shape))
    try:
        while _loops(client) < serving:
            time.sleep(0.1)
        sampling = Sampling(1.0, 1.0)
        units = [
            Unit(f"train-{name}-{i}", f"q{i}", "Who?", ("gold",), 0, 0, GROUP_SIZE, sampling)
            for i in range(UNITS)
        ]
        began = time.perf_counter()
        fleet.offer(units)
        fleet.collect([unit.unit_id for unit in units])
        return time.perf_counter() - began
    finally:
        fleet.close()
        while _loops(client):
            time.sleep(0.1)


def main(
    json_path: Annotated[Path | None, typer.Option("--json", help="Figures as a file.")] = None,
) -> None:
    """Prints a table and, last, one JSON line."""
    usual = noop.Shape(tokens=60, turns=1, pause_s=UNIT_S)
    none = noop.Shape(tokens=60, turns=1, stored=False)
    with tempfile.TemporaryDirectory(prefix="kindling-bench-") as name:
        folder = Path(name)
        build_tokenizer().save_pretrained(folder / "policy")
        config = _config(folder / "policy")
        with ProcessGroup(folder / "logs") as group:
            store = start_store(group, folder / "store", "bench")
            with environment(read_credentials(folder / "store").environment()):
                scheduler = start_scheduler(group, folder / "dask")
                start_workers(group, scheduler, config.cluster, folder / "dask")
                pool = LocalPool(scheduler, config.cluster, folder)
                try:
                    with connect(scheduler, 60) as client:
                        wait_for_workers(client, LEAST, 1, 120)
                        grown = _burst(client, config, store, "grown", usual, LEAST, pool)
                        reached = LEAST + len(pool.names())
                        pool.start(MOST - reached)
                        wait_for_workers(client, MOST, 1, 300)
                        fixed = _burst(client, config, store, "fixed", usual, MOST)
                        empty = _burst(client, config, store, "empty", none, MOST)
                finally:
                    pool.close()
    overhead = 1000 * empty / UNITS
    report.show(
        f"{UNITS} units of {1000 * UNIT_S:g} ms",
        ["workers", "s to drain"],
        [
            [f"{LEAST}, asked to grow to {reached}", grown],
            [f"{MOST} from the start", fixed],
            [f"{MOST}, units of 0 ms", empty],
        ],
    )
    report.finish(
        {
            "drain_over_fixed": grown / fixed,
            "overhead_ms_per_unit": overhead,
            "fixed_over_ideal": fixed / (UNITS * UNIT_S / MOST),
        },
        json_path,
    )


if __name__ == "__main__":
    typer.run(main)
