"""The fleet over real Dask processes and a real store, with no-op engines."""

from __future__ import annotations

import itertools
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
from distributed import Client

from infra.cluster import connect, start_scheduler, start_workers, wait_for_workers
from infra.elastic import LocalPool
from infra.processes import ROOT, ProcessGroup, child_environment
from tasks.cluster import ROLLOUT, TRAINER, WorkerPool, names_of, workers_with
from tasks.config import TrainConfig
from tasks.errors import RewardError, RunClosed, UnitFailed
from tasks.presets import resolve
from tasks.rollout import fleet as fleet_module
from tasks.rollout.accepted import AcceptedLog
from tasks.rollout.agent import Unit
from tasks.rollout.board import FlowQueue
from tasks.rollout.engine import Sampling
from tasks.rollout.fleet import Fleet
from tasks.rollout.trajectory import GroupSummary, group_from_bytes
from tasks.rollout.worker import RolloutSpec
from tasks.store import ObjectStore, StoreLocation
from tasks.training.tiny_policy import build_tokenizer
from tests import noop
from tests.waiting import eventually

pytestmark = pytest.mark.timeout(120)
WORKERS = 2
START_S = 90.0  # workers import torch at their first call: seconds on a machine to themselves
END_S = (
    20.0  # a loop learns of the end at its next call, two seconds later at most, if it gets to run
)
SHORT = noop.Shape(tokens=60)
LOG = logging.getLogger("tests.fleet")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    policy = Path(tmp_path_factory.mktemp("policy"))
    build_tokenizer().save_pretrained(policy)
    rollout = {"questions_per_step": 12, "group_size": 4, "max_sequences": 8}
    return resolve(
        "tiny",
        {
            "model": {"path": str(policy)},
            "rollout": rollout,
            "training": {"mini_batch_size": 48},
        },
    )


@pytest.fixture(scope="module")
def client(
    object_store: ObjectStore, tmp_path_factory: pytest.TempPathFactory, config: TrainConfig
) -> Iterator[Client]:
    folder = Path(tmp_path_factory.mktemp("cluster"))
    with ProcessGroup(folder / "logs") as group:
        scheduler = start_scheduler(group, folder)
        cluster = config.cluster.model_copy(
            update={"rollout_workers": WORKERS, "trainer_ranks": 1, "rollout_threads": 1}
        )
        start_workers(group, scheduler, cluster, folder)
        with connect(scheduler, 20) as client:
            wait_for_workers(client, WORKERS, 1, 60)
            yield client


@contextmanager
def _fleet(
    client: Client,
    config: TrainConfig,
    store: StoreLocation,
    name: str,
    shape: noop.Shape = SHORT,
    pool: WorkerPool | None = None,
) -> Iterator[Fleet]:
    spec = RolloutSpec(name, name, config, store, "no-index", "/nowhere")
    made = Fleet(client, spec, LOG, pool, partial(noop.serve, shape=shape))
    try:
        yield made
    finally:
        made.close()


def _life(client: Client, config: TrainConfig, store: ObjectStore, name: str, life: int) -> Fleet:
    """The fleet of a run that was opened so often before, with the log of what it accepted."""
    spec = RolloutSpec(name, name, config, store.location, "no-index", "/nowhere", life)
    log = AcceptedLog(store, name, life)
    return Fleet(client, spec, LOG, None, partial(noop.serve, shape=SHORT), log)


def _units(step: int, count: int, version: int, question: str = "Who is she?") -> list[Unit]:
    sampling = Sampling(1.0, 1.0)
    return [
        Unit(f"train-{step}-{i}", f"q{i}", question, ("gold",), version, 0, 4, sampling)
        for i in range(count)
    ]


def _ids(units: list[Unit]) -> list[str]:
    return [unit.unit_id for unit in units]


def _pids(client: Client, workers: list[str]) -> list[int]:
    return list(cast("dict[str, int]", client.run(os.getpid, workers=workers)).values())


def _loops(client: Client) -> int:
    return sum(cast("dict[str, int]", client.run(noop.loops_here)).values())


def _collect_in_thread(fleet: Fleet, units: list[Unit]) -> tuple[threading.Thread, list, list]:
    groups: list[GroupSummary] = []
    errors: list[BaseException] = []

    def collect() -> None:
        try:
            groups.extend(fleet.collect(_ids(units)))
        except BaseException as error:  # noqa: BLE001 (handed to the test)
            errors.append(error)

    thread = threading.Thread(target=collect)
    thread.start()
    return thread, groups, errors


def test_every_look_at_the_cluster_sees_all_of_it(client: Client) -> None:
    """Also while the client's own timer asks for the cluster without its workers."""
    over = threading.Event()

    def timer() -> None:
        update: Callable[..., object] = client._update_scheduler_info
        while not over.is_set():
            client.sync(update)

    threads = [threading.Thread(target=timer) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(200):
            assert len(workers_with(client, ROLLOUT)) == WORKERS
            assert len(workers_with(client, TRAINER)) == 1
    finally:
        over.set()
        for thread in threads:
            thread.join()


def test_all_units_of_several_steps_come_back_once(
    client: Client, config: TrainConfig, object_store: ObjectStore
) -> None:
    counts: list[int] = []
    with _fleet(client, config, object_store.location, "steps") as fleet:
        # A quick worker may do all units before a slow one has said that it is ready.
        assert eventually(lambda: _loops(client) == WORKERS, START_S)
        for step in range(3):
            units = _units(step, 12, version=step)
            fleet.offer(units)
            groups = fleet.collect(_ids(units), counts.append)
            assert [g.unit_id for g in groups] == _ids(units)
            assert {g.version for g in groups} == {step}
            for summary in groups[:2]:
                group = group_from_bytes(object_store.get(summary.key))
                assert (group.unit_id, len(group.trajectories)) == (summary.unit_id, 4)
                assert [len(t.ids) for t in group.trajectories] == [
                    t.tokens for t in summary.trajectories
                ]
                assert {int(v) for t in group.trajectories for v in t.versions} == {-1, step}
        assert fleet.loads == {"engines": WORKERS, "indexes": WORKERS, "anchors": 0}
        assert {event["version"] for event in fleet.applied} == {0, 1, 2}
        assert counts[0] == 0
        assert counts[-1] == 12
        assert _loops(client) == WORKERS, "one a rollout worker, none on the trainer's"
    assert eventually(lambda: _loops(client) == 0, END_S)


def test_work_is_shared_between_the_workers(
    client: Client, config: TrainConfig, object_store: ObjectStore
) -> None:
    slow = noop.Shape(tokens=60, pause_s=0.05)
    with _fleet(client, config, object_store.location, "shared", slow) as fleet:
        assert eventually(lambda: _loops(client) == WORKERS, START_S)
        units = _units(0, 24, version=0)
        fleet.offer(units)
        workers = [group.worker for group in fleet.collect(_ids(units))]
    shares = sorted(workers.count(worker) for worker in set(workers))
    assert len(shares) == WORKERS
    assert shares[0] >= 4


def test_a_killed_workers_units_are_done_elsewhere_and_its_successor_serves(
    client: Client, config: TrainConfig, object_store: ObjectStore
) -> None:
    slow = noop.Shape(tokens=60, pause_s=0.3)
    with _fleet(client, config, object_store.location, "killed", slow) as fleet:
        assert eventually(lambda: _loops(client) == WORKERS, START_S)
        units = _units(0, 18, version=0)
        fleet.offer(units)
        thread, groups, errors = _collect_in_thread(fleet, units)
        threading.Event().wait(0.4)  # every worker holds units and is in the middle of them
        victim = workers_with(client, ROLLOUT)[0]
        os.kill(_pids(client, [victim])[0], signal.SIGKILL)
        thread.join(30)
        assert not errors
        assert [g.unit_id for g in groups] == _ids(units)
        assert {g.worker for g in groups} - {victim}
        assert eventually(lambda: len(workers_with(client, ROLLOUT)) == WORKERS, 20)
        served = set(workers_with(client, ROLLOUT))
        assert victim not in served
        steps = itertools.count(1)
        workers: set[str] = set()

        def all_serve() -> bool:
            """The fleet looks for new workers while it waits for groups."""
            units = _units(next(steps), 6, version=1)
            fleet.offer(units)
            workers.update(group.worker for group in fleet.collect(_ids(units)))
            return workers == served

        assert eventually(all_serve, 30)


@pytest.mark.parametrize("place", ["joining", "applying"])
def test_a_worker_that_dies_before_it_samples_holds_nothing_up(
    client: Client, config: TrainConfig, object_store: ObjectStore, place: str
) -> None:
    assert eventually(lambda: len(workers_with(client, ROLLOUT)) == WORKERS, 30)
    workers = workers_with(client, ROLLOUT)
    # Long enough for a question to a worker that is importing torch.
    joins, applies = noop.Shape(tokens=60, join_s=12.0), noop.Shape(tokens=60, apply_s=12.0)
    slow = joins if place == "joining" else applies
    with _fleet(client, config, object_store.location, f"dies-{place}", slow) as fleet:
        units = _units(0, 12, version=0)
        fleet.offer(units)
        thread, groups, errors = _collect_in_thread(fleet, units)

        pids = cast("dict[str, int]", client.run(os.getpid, workers=workers))
        victims: list[str] = []

        def one_is_there() -> bool:
            at = cast("dict[str, bool]", client.run(noop.is_at, place, workers=workers))
            victims.extend(worker for worker, yes in at.items() if yes)
            return bool(victims)

        assert eventually(one_is_there, START_S)
        victim = victims[0]
        os.kill(pids[victim], signal.SIGKILL)
        thread.join(60)
        assert not thread.is_alive()
        assert not errors
        assert [g.unit_id for g in groups] == _ids(units)
        assert victim not in {g.worker for g in groups}
    assert eventually(lambda: len(workers_with(client, ROLLOUT)) == WORKERS, 30)


def test_workers_that_freeze_before_they_ask_for_anything_are_started_again(
    client: Client, config: TrainConfig, object_store: ObjectStore
) -> None:
    """The queue has never heard of them; only Dask has."""
    assert eventually(lambda: len(workers_with(client, ROLLOUT)) == WORKERS, 30)
    workers = workers_with(client, ROLLOUT)
    pids = _pids(client, workers)
    before = client.run_on_scheduler(noop.set_frozen, 6.0)
    try:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        with _fleet(client, config, object_store.location, "frozen-first") as fleet:
            units = _units(0, 12, version=0)
            fleet.offer(units)
            thread, groups, errors = _collect_in_thread(fleet, units)
            thread.join(90)
            assert not thread.is_alive()
            assert not errors
            assert [g.unit_id for g in groups] == _ids(units)
    finally:
        client.run_on_scheduler(noop.set_frozen, before)
    assert eventually(lambda: len(workers_with(client, ROLLOUT)) == WORKERS, 30)
    assert not set(workers) & set(workers_with(client, ROLLOUT))


def test_trainer_workers_belong_to_one_open_run(client: Client) -> None:
    (trainer,) = workers_with(client, TRAINER)
    with closing(FlowQueue(client, "first")) as first:
        assert first.claim_trainers(2).workers == (), "there is but one"
        assert first.claim_trainers(1).workers == (trainer,)
        with closing(FlowQueue(client, "second")) as second:
            refused = second.claim_trainers(1)
            assert (refused.workers, refused.held_by) == ((), {"first": 1})
            first.close()
            assert second.claim_trainers(1).workers == (trainer,)


def test_results_of_an_earlier_life_are_not_sampled_again(
    client: Client, config: TrainConfig, object_store: ObjectStore
) -> None:
    opened = partial(_life, client, config, object_store, "lives")
    units = _units(3, 6, version=7)
    with closing(opened(0)) as fleet:
        fleet.offer(units[:4])
        first = fleet.collect(_ids(units[:4]))
        assert fleet.reused == 0
    with closing(opened(1)) as fleet:
        fleet.offer(units)
        groups = fleet.collect(_ids(units))
        assert groups[:4] == first
        assert fleet.reused == 4
        assert all(".safetensors" in g.key and "-1." in g.key for g in groups[4:])
        # Sampled at another version, they are of no use.
        newer = [replace(unit, version=8) for unit in _units(4, 2, version=8)]
        fleet.offer(newer)
        fleet.collect(_ids(newer))
    with closing(opened(2)) as fleet:
        older = _units(4, 2, version=9)
        fleet.offer(older)
        assert {g.version for g in fleet.collect(_ids(older))} == {9}
        assert fleet.reused == 0


def test_a_straggler_does_not_hold_up_a_step_and_every_group_counts_once(
    client: Client, config: TrainConfig, object_store: ObjectStore
) -> None:
    slow = next(iter(names_of(client, ROLLOUT).values()))
    shape = noop.Shape(tokens=60, pause_s=0.05, slow=slow, slow_s=8.0)
    with _fleet(client, config, object_store.location, "straggler", shape) as fleet:
        assert eventually(lambda: _loops(client) == WORKERS, START_S)
        units = _units(0, 12, version=0)
        began = time.monotonic()
        fleet.offer(units)
        groups = fleet.collect(_ids(units))
        # The slow worker takes 16 s for any unit, and it was given some.
        assert time.monotonic() - began < 14
        assert [g.unit_id for g in groups] == _ids(units)
        assert any(g.key.endswith("-0.2.safetensors") for g in groups), "a second attempt counted"
        for summary in groups:
            group = group_from_bytes(object_store.get(summary.key))
            tokens = [len(t.ids) for t in group.trajectories]
            assert tokens == [t.tokens for t in summary.trajectories], "what the queue accepted"


@pytest.mark.parametrize("how_many", [1, WORKERS])
def test_frozen_workers_are_started_again_and_their_units_done(
    client: Client, config: TrainConfig, object_store: ObjectStore, how_many: int
) -> None:
    """Also where all of them are frozen, and none is left to ask for anything."""
    assert eventually(lambda: len(workers_with(client, ROLLOUT)) == WORKERS, 30)
    before = client.run_on_scheduler(noop.set_silent, 3.0)
    victims = workers_with(client, ROLLOUT)[:how_many]
    pids = _pids(client, victims)
    try:
        shape = noop.Shape(tokens=60, pause_s=0.2)
        with _fleet(client, config, object_store.location, f"frozen-{how_many}", shape) as fleet:
            assert eventually(lambda: _loops(client) == WORKERS, START_S)
            units = _units(0, 18, version=0)
            fleet.offer(units)
            thread, groups, errors = _collect_in_thread(fleet, units)
            threading.Event().wait(0.3)
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            # Where all are frozen new processes have to start, and import torch.
            thread.join(30 if how_many < WORKERS else 60)
            assert not thread.is_alive()
            assert not errors
            assert [g.unit_id for g in groups] == _ids(units)
    finally:
        client.run_on_scheduler(noop.set_silent, before)
    assert eventually(lambda: len(workers_with(client, ROLLOUT)) == WORKERS, 30)
    assert not set(victims) & set(workers_with(client, ROLLOUT))


def test_a_worker_whose_loop_breaks_is_started_again_once_and_then_left_out(
    client: Client, config: TrainConfig, object_store: ObjectStore, caplog: pytest.LogCaptureFixture
) -> None:
    assert eventually(lambda: len(workers_with(client, ROLLOUT)) == WORKERS, 30)
    victim = next(iter(names_of(client, ROLLOUT).values()))
    shape = noop.Shape(tokens=60, pause_s=0.2, breaks=victim)
    with _fleet(client, config, object_store.location, "breaks", shape) as fleet:
        steps = itertools.count()

        def is_left_out() -> bool:
            units = _units(next(steps), 4, version=0)
            fleet.offer(units)
            assert [g.unit_id for g in fleet.collect(_ids(units))] == _ids(units)
            return "it is left out of this run" in caplog.text

        assert eventually(is_left_out, 60)
    assert caplog.text.count("a lost accelerator; its process is started again") == 1


def test_workers_whose_loops_all_break_end_the_run(
    client: Client, config: TrainConfig, object_store: ObjectStore
) -> None:
    assert eventually(lambda: len(workers_with(client, ROLLOUT)) == WORKERS, 30)
    shape = noop.Shape(tokens=60, breaks="all")
    with _fleet(client, config, object_store.location, "all-break", shape) as fleet:
        units = _units(0, 4, version=0)
        fleet.offer(units)
        with pytest.raises(UnitFailed, match="RuntimeError: a lost accelerator"):
            fleet.collect(_ids(units))
    assert eventually(lambda: len(workers_with(client, ROLLOUT)) == WORKERS, 30)


def test_a_pool_leaves_the_names_of_others_alone(
    client: Client, config: TrainConfig, tmp_path: Path
) -> None:
    """Dask refuses a worker whose name is taken, so that it would end as it starts."""
    assert eventually(lambda: len(workers_with(client, ROLLOUT)) == WORKERS, 30)
    fewer = {"rollout_workers": 1, "rollout_workers_most": 3}
    cluster = config.cluster.model_copy(update=fewer)
    assert client.scheduler is not None
    pool = LocalPool(str(client.scheduler.addr), cluster, tmp_path)
    try:
        pool.start(1)
        assert pool.names() == [f"rollout-{WORKERS}"]
        assert eventually(lambda: len(workers_with(client, ROLLOUT)) == WORKERS + 1, 30)
    finally:
        pool.close()
    assert eventually(lambda: len(workers_with(client, ROLLOUT)) == WORKERS, 30)


@pytest.mark.timeout(300)
def test_a_run_grows_while_work_waits_and_shrinks_when_it_is_done(
    client: Client, config: TrainConfig, object_store: ObjectStore, tmp_path: Path
) -> None:
    cluster = config.cluster.model_copy(
        update={
            "rollout_workers": WORKERS,
            "rollout_workers_most": WORKERS + 2,
            "drain_s": 1.0,
            "idle_s": 2.0,
        }
    )
    grows = config.model_copy(update={"cluster": cluster})
    standing = set(workers_with(client, ROLLOUT))
    assert client.scheduler is not None
    pool = LocalPool(str(client.scheduler.addr), cluster, tmp_path)
    shape = noop.Shape(tokens=60, pause_s=0.4)
    try:
        with _fleet(client, grows, object_store.location, "grows", shape, pool) as fleet:
            assert eventually(lambda: _loops(client) == WORKERS, START_S)
            steps = itertools.count()

            def others_serve() -> bool:
                """A worker takes seconds to start; so work goes on until one has joined."""
                units = _units(next(steps), 40, version=0)
                fleet.offer(units)
                groups = fleet.collect(_ids(units))
                assert [g.unit_id for g in groups] == _ids(units)
                return not {g.worker for g in groups} <= standing

            assert eventually(others_serve, START_S)
            assert eventually(lambda: set(workers_with(client, ROLLOUT)) == standing, 40)
            assert eventually(lambda: not pool.names(), 20), "their processes are gone"
            again = _units(next(steps), 6, version=0)
            fleet.offer(again)
            assert {g.worker for g in fleet.collect(_ids(again))} <= standing
    finally:
        pool.close()


def test_closing_and_a_lease_that_runs_out_free_the_workers(
    client: Client,
    config: TrainConfig,
    object_store: ObjectStore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    busy = noop.Shape(tokens=60, turns=4, pause_s=0.5)
    with _fleet(client, config, object_store.location, "closed-busy", busy) as fleet:
        fleet.offer(_units(0, 60, version=0))
        assert eventually(lambda: _loops(client) == WORKERS, START_S)
    assert eventually(lambda: _loops(client) == 0, END_S), "also with work left"
    monkeypatch.setattr(fleet_module, "RENEW_S", 3600.0)
    before = client.run_on_scheduler(noop.set_lease, 2.0)
    try:
        with _fleet(client, config, object_store.location, "no-lease") as fleet:
            assert eventually(lambda: _loops(client) == WORKERS, START_S)
            assert eventually(lambda: _loops(client) == 0, END_S)
            with pytest.raises(RunClosed, match="'no-lease' is closed"):
                fleet.collect(["train-0-0"])
    finally:
        client.run_on_scheduler(noop.set_lease, before)


FLOW = """
import logging, sys, threading
from functools import partial
from infra.cluster import connect
from tasks.presets import resolve
from tasks.rollout.fleet import Fleet
from tasks.rollout.worker import RolloutSpec
from tasks.store import StoreLocation
from tasks.training.tiny_policy import build_tokenizer
from tests import noop
scheduler, endpoint, bucket, policy = sys.argv[1:]
config = resolve("tiny", {"model": {"path": policy}})
spec = RolloutSpec("orphan", "orphan", config, StoreLocation(endpoint, bucket), "none", "/nowhere")
with connect(scheduler, 20) as client:
    serve = partial(noop.serve, shape=noop.Shape(60))
    fleet = Fleet(client, spec, logging.getLogger(), None, serve)
    print("open", flush=True)
    threading.Event().wait(60)
"""


def test_a_killed_flow_frees_the_workers(
    client: Client, config: TrainConfig, object_store: ObjectStore
) -> None:
    location = object_store.location
    assert client.scheduler is not None
    where = [client.scheduler.addr, location.endpoint, location.bucket, config.model.path]
    flow = subprocess.Popen(
        [sys.executable, "-c", FLOW, *where],
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env=child_environment({}),
    )
    try:
        assert flow.stdout is not None
        assert flow.stdout.readline() == b"open\n"
        assert eventually(lambda: _loops(client) == WORKERS, START_S)
    finally:
        flow.kill()
        flow.wait()
    assert eventually(lambda: _loops(client) == 0, END_S)
    with _fleet(client, config, location, "orphan"):
        pass  # the name is free again


def test_a_run_is_open_in_one_flow_at_a_time(
    client: Client, config: TrainConfig, object_store: ObjectStore
) -> None:
    with _fleet(client, config, object_store.location, "twice") as fleet:
        with (
            pytest.raises(RunClosed, match="'twice' is already open in another flow"),
            _fleet(client, config, object_store.location, "twice"),
        ):
            pass
        units = _units(0, 3, version=0)
        fleet.offer(units)
        assert len(fleet.collect(_ids(units))) == 3, "the first goes on"


def test_failing_units(client: Client, config: TrainConfig, object_store: ObjectStore) -> None:
    with _fleet(client, config, object_store.location, "failing") as fleet:
        once = _units(0, 6, 0) + [
            replace(u, unit_id=f"once-{i}", question=noop.FAILS_ONCE)
            for i, u in enumerate(_units(0, 2, 0))
        ]
        fleet.offer(once)
        assert len(fleet.collect(_ids(once))) == 8, "a unit that fails once is tried again"
        always = replace(once[0], unit_id="always", question=noop.FAILS)
        fleet.offer([always])
        with pytest.raises(
            UnitFailed, match=r"unit always failed on every try: tcp://.*told to fail"
        ):
            fleet.collect(["always"])
        long = replace(once[0], unit_id="long", question="Ada " * 200)
        fleet.offer([long])
        message = r"unit long failed.*[0-9]+ tokens, more than rollout.max_prompt_tokens = 96"
        with pytest.raises(UnitFailed, match=message):
            fleet.collect(["long"])
        later = [replace(u, unit_id=f"{noop.FAILS_LATER}-{u.unit_id}") for u in _units(2, 2, 0)]
        fleet.offer([*later, *_units(2, 6, 0)])
        assert len(fleet.collect(_ids(_units(2, 6, 0)))) == 6, "those beside them are untouched"
        with pytest.raises(UnitFailed, match=r"fails-later-.*ValueError: the engine was told to"):
            fleet.collect(_ids(later))
        units = _units(1, 6, 0)
        fleet.offer(units)
        assert len(fleet.collect(_ids(units))) == 6, "the fleet survives them"


def test_poisonous_units_are_given_up_where_some_may_be(
    client: Client, config: TrainConfig, object_store: ObjectStore
) -> None:
    opened = partial(_life, client, config, object_store, "bad")
    units = _units(0, 8, 0)
    units[3] = replace(units[3], question=noop.FAILS)
    with closing(opened(0)) as fleet:
        fleet.offer(units)
        groups = fleet.collect(_ids(units), may_fail=0.25)
        assert [g.unit_id for g in groups] == _ids(units[:3] + units[4:])
    with closing(opened(1)) as fleet:
        fleet.offer(units)
        assert fleet.collect(_ids(units), may_fail=0.25) == groups, "and it is not tried again"
        assert fleet.reused == 8
        worse = [replace(unit, question=noop.FAILS) for unit in _units(1, 8, 0)]
        fleet.offer(worse)
        with pytest.raises(UnitFailed, match=r"failed on every try.*of 8 units did"):
            fleet.collect(_ids(worse), may_fail=0.25)


def _rewarded(config: TrainConfig, **rollout: Any) -> TrainConfig:
    reward = {"reward": "tests.reward_functions:told", "reward_timeout_s": 2.0}
    return config.model_copy(
        update={"rollout": config.rollout.model_copy(update={**reward, **rollout})}
    )


@pytest.mark.parametrize("cause", ["engine", "reward"])
def test_what_stopped_a_run_is_tried_again_once_it_is_mended(
    client: Client, config: TrainConfig, object_store: ObjectStore, cause: str
) -> None:
    """A resumed run must not read in its own log that the retriever is still down, or its reward
    still wrong; what it went on without stays left out, for the same bits."""
    own = _rewarded(config, max_failed_rewards=0.25) if cause == "reward" else config
    broken, error = (noop.FAILS, UnitFailed) if cause == "engine" else ("raise", RewardError)
    opened = partial(_life, client, own, object_store, f"mended-{cause}")
    well = _units(0, 8, 0, question="1")
    one_bad = [replace(well[0], question=broken), *well[1:]]
    many_bad = [replace(unit, question=broken) for unit in _units(1, 8, 0)]
    with closing(opened(0)) as fleet:
        fleet.offer(one_bad)
        assert len(fleet.collect(_ids(one_bad), may_fail=0.25)) == 7
        fleet.offer(many_bad)
        with pytest.raises(error):
            fleet.collect(_ids(many_bad), may_fail=0.25)
    mended = _units(1, 8, 0, question="1")
    with closing(opened(1)) as fleet:
        fleet.offer(well)
        assert len(fleet.collect(_ids(well), may_fail=0.25)) == 7
        assert fleet.reused == 8
        fleet.offer(mended)
        assert len(fleet.collect(_ids(mended))) == 8
        assert fleet.reused == 8


def test_a_single_further_question_may_come_to_nothing(
    client: Client, config: TrainConfig, object_store: ObjectStore
) -> None:
    """A refill asks for few: the share that may fail is one of them at least."""
    own = _rewarded(config, max_failed_rewards=0.5)
    with _fleet(client, own, object_store.location, "refilled") as fleet:
        bad = replace(_units(0, 1, 0)[0], question="raise")
        fleet.offer([bad])
        assert fleet.collect([bad.unit_id]) == []


def test_a_result_of_another_number_of_samples_is_not_taken_up(
    client: Client, config: TrainConfig, object_store: ObjectStore
) -> None:
    opened = partial(_life, client, config, object_store, "resized")
    units = _units(0, 4, 0)
    with closing(opened(0)) as fleet:
        fleet.offer(units)
        assert len(fleet.collect(_ids(units))) == 4
    with closing(opened(1)) as fleet:
        more = [replace(unit, size=2 * unit.size) for unit in units]
        fleet.offer(more)
        assert {len(g.trajectories) for g in fleet.collect(_ids(more))} == {2 * units[0].size}
        assert fleet.reused == 0


def test_a_reward_that_fails_costs_its_group_and_too_many_the_run(
    client: Client, config: TrainConfig, object_store: ObjectStore
) -> None:
    own = _rewarded(config, max_failed_rewards=0.5)
    with _fleet(client, own, object_store.location, "rewards", noop.Shape(tokens=40)) as fleet:
        units = [
            replace(unit, question=question)
            for unit, question in zip(
                _units(0, 6, 0), ["1", "nan", "1", "hang", "raise", "1"], strict=True
            )
        ]
        fleet.offer(units)
        groups = fleet.collect(_ids(units))
        assert [g.unit_id for g in groups] == ["train-0-0", "train-0-2", "train-0-5"]
        assert {t.reward for g in groups for t in g.trajectories} == {1.0}
        stored = group_from_bytes(object_store.get(groups[0].key))
        assert [t.reward for t in stored.trajectories] == [1.0] * 4
        bad = [replace(u, question="raise") for u in _units(1, 3, 0)]
        fleet.offer([*bad, *_units(1, 5, 0)[3:]])
        message = (
            r"the reward failed on \d of 5 groups, more than the share rollout.max_failed_rewards "
            r"= 0.5 .*question 'q\d' .trajectory 0 of unit train-1-\d.: KeyError"
        )
        with pytest.raises(RewardError, match=message):
            fleet.collect([f"train-1-{i}" for i in range(5)])


def test_a_reward_that_a_worker_cannot_import_stops_the_run(
    client: Client, config: TrainConfig, object_store: ObjectStore
) -> None:
    own = _rewarded(config, reward="no_such_module:f")
    with _fleet(client, own, object_store.location, "no-reward") as fleet:
        fleet.offer(_units(0, 2, 0))
        with pytest.raises(RewardError, match="importing no_such_module failed"):
            fleet.collect(_ids(_units(0, 2, 0)))


def test_a_worker_that_died_while_it_waited_takes_no_unit_with_it(
    client: Client, config: TrainConfig, object_store: ObjectStore
) -> None:
    """Its question to the queue may still be open when units arrive."""
    with _fleet(client, config, object_store.location, "died-idle") as fleet:
        assert eventually(lambda: _loops(client) == WORKERS, START_S)
        victim = workers_with(client, ROLLOUT)[0]
        os.kill(_pids(client, [victim])[0], signal.SIGKILL)
        assert eventually(lambda: victim not in workers_with(client, ROLLOUT), 5)
        units = _units(0, 12, version=0)
        fleet.offer(units)
        thread, groups, errors = _collect_in_thread(fleet, units)
        thread.join(15)
        assert not thread.is_alive(), "units were given to a dead worker"
        assert not errors
        assert len(groups) == 12


def test_a_retriever_that_is_down_for_a_while_and_for_good(
    client: Client, config: TrainConfig, object_store: ObjectStore
) -> None:
    twice = noop.Shape(tokens=60, failing_searches=1)
    with _fleet(client, config, object_store.location, "searching", twice) as fleet:
        units = _units(0, 12, 0)
        fleet.offer(units)
        assert len(fleet.collect(_ids(units))) == 12, "units whose search failed are tried again"
    down = noop.Shape(tokens=60, failing_searches=1000)
    with _fleet(client, config, object_store.location, "searching-down", down) as fleet:
        units = _units(0, 3, 0)
        fleet.offer(units)
        message = r"unit train-0-\d failed on every try: tcp://.*: retriever no-op, told to fail"
        with pytest.raises(UnitFailed, match=message):
            fleet.collect(_ids(units))
    assert eventually(lambda: _loops(client) == 0, END_S), "the workers are free again"
