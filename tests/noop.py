"""No-op parts of a run, importable by Dask workers: engine, weights, retriever and trainer ranks.

Everything around them is the product's: the agent loop, the resident loop, the queue, the fleet,
the way to the trainer ranks. Groups are made of random but valid ids and log-probabilities.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
from distributed import Client

from tasks.cluster import TRAINER, workers_with
from tasks.data.questions import Passage
from tasks.errors import RetrieverUnreachable, RunClosed, UnitFailed
from tasks.retrieval.retriever import Found
from tasks.rollout import board, queue
from tasks.rollout.agent import AgentLoop, Unit
from tasks.rollout.board import WorkerQueue
from tasks.rollout.engine import Completion, Request
from tasks.rollout.protocol import SearchProtocol
from tasks.rollout.trajectory import (
    Group,
    GroupSummary,
    Trajectory,
    group_from_bytes,
    group_to_bytes,
)
from tasks.rollout.worker import Resident, RolloutSpec
from tasks.store import ObjectStore
from tasks.training import stored_policy
from tasks.training.batching import plan_update
from tasks.training.claims import Claim, claim
from tasks.training.member import Meeting, TrainerSpec
from tasks.training.policy import load_tokenizer
from tasks.training.trainers import Trainers
from tasks.warm import this_worker, warm
from tasks.weights.commit import Published
from tasks.weights.manifest import ManifestRef
from tasks.weights.transfer import Applied

VOCABULARY = 2000
FAILS, FAILS_ONCE = "this unit always fails", "this unit fails once"
FAILS_LATER = "fails-later"
"""Begins the ids of units whose second turn the engine refuses."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What the no-op engine returns, and how long it takes.

    tokens: of a whole trajectory, about. turns: the last one answers, the others search.
    slow: name of a worker whose steps take slow_s instead of pause_s.
    failing_searches: this many of a worker's requests to the retriever fail, then no more.
    breaks: name of a worker whose loop raises what the product does not know, or "all".
    join_s, apply_s: how long a loop takes to be ready, and a version to be applied.
    """

    tokens: int = 2000
    turns: int = 2
    pause_s: float = 0.0
    stored: bool = True
    slow: str = ""
    slow_s: float = 0.0
    failing_searches: int = 0
    breaks: str = ""
    join_s: float = 0.0
    apply_s: float = 0.0


class NoopEngine:
    """Completes every running request at each step, with slices of ids made beforehand."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._running: dict[str, Request] = {}
        rng = np.random.default_rng(0)
        self._ids = rng.integers(4, VOCABULARY, 2 * shape.tokens + 2).tolist()
        self._logprobs = (-rng.random(2 * shape.tokens + 2)).tolist()

    def add(self, request: Request) -> None:
        if request.request_id.startswith(FAILS_LATER) and request.request_id.endswith("/1"):
            raise ValueError("the engine was told to refuse this")
        self._running[request.request_id] = request

    def step(self) -> list[Completion]:
        if self._shape.pause_s:
            time.sleep(self._shape.pause_s)
        running, self._running = self._running, {}
        return [self._complete(request) for request in running.values()]

    def abort(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._running.pop(request_id, None)

    def _complete(self, request: Request) -> Completion:
        left = self._shape.turns - int(request.request_id.rsplit("/", 1)[1])
        count = (self._shape.tokens - len(request.prompt_ids)) // left
        count = max(1, min(count, request.max_tokens))
        start = request.seed % (self._shape.tokens + 1)
        return Completion(
            request.request_id,
            self._ids[start : start + count],
            self._logprobs[start : start + count],
            "<answer> no-op </answer>" if left == 1 else "<search> no-op </search>",
        )


class NoopWeights:
    """Holds whatever version was asked for last."""

    anchor_loads = 0

    def __init__(self, apply_s: float = 0.0) -> None:
        self._held: tuple[str, int] | None = None
        self._apply_s = apply_s

    def holds(self, run: str, version: int) -> bool:
        return self._held == (run, version)

    def apply(self, run: str, version: int) -> Applied:
        if self._apply_s:
            with _at("applying"):
                threading.Event().wait(self._apply_s)
        self._held = (run, version)
        return Applied(run, version, "delta", 0, 0.0, 0.0)


class NoopRetriever:
    """Answers from another thread, as one that is asked over a network does."""

    def __init__(self, failing: int = 0) -> None:
        self._failing = failing
        self._pool = ThreadPoolExecutor(2)

    def search(self, queries: Sequence[str], k: int) -> Future[list[list[Found]]]:
        fails, self._failing = self._failing > 0, self._failing - 1
        return self._pool.submit(self._search, len(queries), fails)

    def _search(self, count: int, fails: bool) -> list[list[Found]]:
        if fails:
            raise RetrieverUnreachable("retriever no-op, told to fail")
        return [[Found(Passage("No-op", "A passage."), 1.0)]] * count

    def close(self) -> None:
        self._pool.shutdown()


class NoopStore:
    """In place of the store's calls in a Resident and a trainer rank: nothing is sent or read.

    What is read is one group, made once; so bytes are made and taken apart as with a real store.
    """

    def __init__(self, shape: Shape, group_size: int) -> None:
        trajectories = (_trajectory(shape.tokens),) * group_size
        self._group = group_to_bytes(Group("unit", "question", trajectories))

    def put(self, key: str, data: bytes) -> None:
        pass

    def get_many(self, keys: Iterable[str]) -> list[bytes]:
        return [self._group for _ in keys]


class TimedStore(ObjectStore):
    """The real store; adds up the seconds its callers spend in it (overlapping ones each)."""

    seconds = 0.0
    _adding = threading.Lock()

    def put(self, key: str, data: Any) -> None:
        began = time.perf_counter()
        super().put(key, data)
        self._add(began)

    def get_many(self, keys: Iterable[str], concurrency: int = 16) -> list[bytes]:
        began = time.perf_counter()
        found = super().get_many(keys, concurrency)
        self._add(began)
        return found

    @classmethod
    def _add(cls, began: float) -> None:
        with cls._adding:
            TimedStore.seconds += time.perf_counter() - began


def store_seconds() -> float:
    """Seconds this process has spent in the store; for `Client.run`."""
    return TimedStore.seconds


def _trajectory(tokens: int) -> Trajectory:
    mask = np.arange(tokens) >= min(20, tokens - 1)
    return Trajectory(
        ids=np.arange(tokens, dtype=np.int32) % VOCABULARY,
        loss_mask=mask,
        logprobs=np.where(mask, -0.5, 0.0).astype(np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        prompt_tokens=int((~mask).sum()),
        turns=(),
        end="answered",
        answer="no-op",
        exact_match=False,
        f1=0.0,
        reward=0.0,
    )


class FragileAgent(AgentLoop):
    """Fails on units whose question says so."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._failed: Counter[str] = Counter()

    def submit(self, unit: Unit) -> None:
        if FAILS in unit.question or (
            FAILS_ONCE in unit.question and not self._failed[unit.unit_id]
        ):
            self._failed[unit.unit_id] += 1
            raise UnitFailed(f"{unit.unit_id} was told to fail")
        super().submit(unit)


@dataclass(slots=True)
class _Serving:
    """Warm state of a worker: what it keeps, and how many loops run on it now."""

    tokenizer: Any = None
    loops: int = 0
    places: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)


def _state() -> _Serving:
    return warm("noop", _Serving)


@contextmanager
def _at(place: str) -> Iterator[None]:
    """Says where a loop of this worker is, for `is_at`."""
    places = _state().places
    places[place] += 1
    try:
        yield
    finally:
        places[place] -= 1


def is_at(place: str, dask_worker: Any = None) -> bool:
    """Whether a loop here is joining or applying a version; for `Client.run`."""
    state = vars(dask_worker).get("kindling", {}).get("noop")
    return bool(state and state.places[place])


def loops_here(dask_worker: Any = None) -> int:
    """How many resident loops run here and have said that they are ready; for `Client.run`."""
    state = vars(dask_worker).get("kindling", {}).get("noop")
    return state.loops if state else 0


def serve(spec: RolloutSpec, shape: Shape = Shape()) -> None:
    """In place of `tasks.rollout.worker.serve_run`; bind `shape` by functools.partial."""
    worker, state = this_worker(), _state()
    with state.lock:
        if state.tokenizer is None:
            model = spec.config.model
            state.tokenizer = load_tokenizer(Path(model.path), model.chat)
    if shape.breaks in (worker.name, "all"):
        raise RuntimeError("a lost accelerator")
    if shape.join_s:
        with _at("joining"):
            threading.Event().wait(shape.join_s)
    config = spec.config
    units = WorkerQueue(worker, spec.run, spec.token)
    retriever = NoopRetriever(shape.failing_searches)
    agent = FragileAgent(
        NoopEngine(replace(shape, pause_s=shape.slow_s) if worker.name == shape.slow else shape),
        SearchProtocol(state.tokenizer, config.model, config.rollout),
        retriever,
        config.rollout,
        config.model.context,
        1,
    )
    store = TimedStore(spec.store) if shape.stored else NoopStore(shape, 1)
    try:
        units.report({"kind": "ready", "loads": {"engines": 1, "indexes": 1, "anchors": 0}})
    except RunClosed:
        return
    with state.lock:
        state.loops += 1
    try:
        resident = Resident(
            worker, units, agent, NoopWeights(shape.apply_s), cast("ObjectStore", store), spec
        )
        try:
            resident.run()
        finally:
            agent.abort()
            resident.close()
            retriever.close()
    except RunClosed:
        return
    finally:
        with state.lock:
            state.loops -= 1


def set_lease(seconds: float) -> float:
    """Changes the lease where it is kept, on the scheduler (`Client.run_on_scheduler`); returns
    the old one."""
    before, board.LEASE_S = board.LEASE_S, seconds
    return before


def set_silent(seconds: float) -> float:
    """The same of how long a worker may be silent."""
    before, queue.WORKER_SILENT_S = queue.WORKER_SILENT_S, seconds
    return before


def set_frozen(seconds: float) -> float:
    """The same of how long Dask may not have heard of one."""
    before, board.FROZEN_S = board.FROZEN_S, seconds
    return before


def set_save_every(seconds: float) -> None:
    """Has the warm starts of this worker save their state as often as that."""
    stored_policy.SAVE_EVERY_S = seconds


class NoopTrainers(Trainers):
    """Calls its ranks as `Trainers` does; they read and take apart their groups, and no more."""

    def __init__(self, client: Client, spec: TrainerSpec, shape: Shape) -> None:
        def all_there_are(size: int) -> Claim:
            return claim(size, workers_with(client, TRAINER), (), {})

        super().__init__(client, spec, "127.0.0.1", all_there_are, logging.getLogger(__name__))
        self._shape = shape
        self._version = -1

    def _stand(self) -> None:
        if not self._epochs.running:
            self._epochs.gather()
            self._epochs.meet(noop_form)

    def update(self, step: int, groups: Sequence[GroupSummary]) -> dict[str, float]:
        self._stand()
        return self._epochs.call(
            f"update-{step}", noop_update, self._spec, self._shape, step, list(groups)
        )[0]

    def publish(self, trained: int) -> Published:
        self._stand()
        self._version += 1
        return self._epochs.call(f"publish-{trained}", noop_publish, self._version)[0]


def noop_form(spec: TrainerSpec, meeting: Meeting) -> None:
    """Has nobody to meet."""


def noop_update(
    run: str,
    epoch: int,
    spec: TrainerSpec,
    shape: Shape,
    step: int,
    groups: Sequence[GroupSummary],
) -> dict[str, float]:
    """A rank's part of `tasks.training.member.update` without the training."""
    rank = int(str(this_worker().name).rsplit("-", 1)[1])
    training = spec.config.training
    plan = plan_update(
        groups,
        mini_batch_size=training.mini_batch_size,
        ranks=spec.config.cluster.trainer_ranks,
        tokens_per_micro_batch=training.tokens_per_micro_batch,
        seed=spec.config.seed,
        step=step,
    )
    store = warm(
        f"noop-store-{shape}",
        lambda: (
            TimedStore(spec.store)
            if shape.stored
            else NoopStore(shape, spec.config.rollout.group_size)
        ),
    )
    tokens = 0
    for data in store.get_many([groups[i].key for i in plan.groups_of(rank)]):
        tokens += sum(len(t.ids) for t in group_from_bytes(data).trajectories)
    return {"loss": 0.0, "grad_norm": 0.0, "mismatch_kl": 0.0, "tokens": float(tokens)}


def noop_publish(run: str, epoch: int, version: int) -> Published:
    ref = ManifestRef(version=version, manifest="0" * 64)
    return Published(
        run=run,
        version=version,
        kind="delta",
        codec="none",
        ref=ref,
        delta_bytes=0,
        anchor_bytes=0,
        manifest_bytes=0,
        bytes_uploaded=0,
        objects_created=0,
        full_bytes=1,
        changed=0,
        total=1,
        created="",
    )
