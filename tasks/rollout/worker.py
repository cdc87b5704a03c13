"""The rollout worker: warm engine, index and tokenizer, and the resident loop that pulls units.

Warm state outlives runs: a second run on a standing worker finds the engine started, the index
mapped and the base anchor on disk. `Loads` counts what really was loaded, so this can be seen.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol

from distributed import Worker

from tasks.config import TrainConfig
from tasks.errors import RewardError, RunClosed
from tasks.retrieval.opening import open_retriever
from tasks.retrieval.retriever import Retriever
from tasks.rollout.agent import AgentLoop, Failed, Sampled, Unit
from tasks.rollout.batches import summary_to_wire, unit_from_wire
from tasks.rollout.board import WorkerQueue
from tasks.rollout.engine import VllmEngine
from tasks.rollout.protocol import SearchProtocol
from tasks.rollout.queue import Wire
from tasks.rollout.reward import is_own_function
from tasks.rollout.reward_process import RewardProcess
from tasks.rollout.trajectory import GroupSummary, group_to_bytes, summarise
from tasks.store import ObjectStore, StoreLocation
from tasks.training.policy import load_tokenizer, resolve_model_dir
from tasks.warm import this_worker, warm
from tasks.weights.transfer import Applied, EngineWeights

logger = logging.getLogger(__name__)

ASK_AGAIN_S = 0.2
"""A busy worker that found the queue empty asks again after this long, not at every engine step."""
ALIVE_S = 4.0
"""Seconds between two signs of life: several in `queue.WORKER_SILENT_S`."""
TURN_S = 600.0
"""Seconds that no turn of the loop takes, not even one that loads an anchor from a slow store."""
STILL_OPEN_S = 1.0
"""A full one asks this rarely."""


@dataclass(frozen=True, slots=True)
class RolloutSpec:
    """What a worker is told of a run; small, and without credentials.

    weights_run: whose versions the units name; another than `run` in an evaluation by itself.
    index_key: of the index to search; None where config.retrieval.url does.
    life: how often the run was opened before; a part of its groups' keys.
    token: of the run's queue, by which a loop of an earlier life is told from one of this.
    """

    run: str
    weights_run: str
    config: TrainConfig
    store: StoreLocation
    index_key: str | None
    cache_dir: str
    life: int = 0
    token: str = ""


@dataclass(slots=True)
class Loads:
    """What a worker process has loaded since it started; anchors are told of when applied."""

    engines: int = 0
    indexes: int = 0


class Weights(Protocol):
    """How an engine gets its version; `tasks.weights.transfer.EngineWeights` is one."""

    @property
    def anchor_loads(self) -> int: ...

    def holds(self, run: str, version: int) -> bool: ...

    def apply(self, run: str, version: int) -> Applied: ...


@dataclass(slots=True)
class Warm:
    """One worker's engine and index, kept for as long as they fit what runs ask for."""

    loads: Loads = field(default_factory=Loads)
    engine_key: str = ""
    engine: VllmEngine | None = None
    weights: Weights | None = None
    retriever_key: str = ""
    retriever: Retriever | None = None

    def serve(self, spec: RolloutSpec) -> tuple[AgentLoop, Weights]:
        """The agent loop for a run, over an engine that is started only where none fits."""
        config = spec.config
        model_dir = resolve_model_dir(config.model.path, Path(spec.cache_dir) / "models")
        key = _engine_key(model_dir, spec)
        if self.engine is None or self.weights is None or key != self.engine_key:
            self.engine, self.weights, self.engine_key = None, None, ""
            engine = VllmEngine(model_dir, config)
            anchors = Path(spec.cache_dir) / "anchors"
            self.engine = engine
            self.weights = EngineWeights(engine.llm, spec.store, anchors)
            self.engine_key = key
            self.loads.engines += 1
        tokenizer: Any = load_tokenizer(model_dir, config.model.chat)
        protocol = SearchProtocol(tokenizer, config.model, config.rollout)
        loop = AgentLoop(
            self.engine,
            protocol,
            self._searched_with(spec),
            config.rollout,
            config.model.context,
            config.retrieval.top_k,
        )
        return loop, self.weights

    def close(self) -> None:
        """Gives engine and retriever up; the next run would start them anew."""
        if self.retriever is not None:
            self.retriever.close()
        if self.engine is not None:
            self.engine.close()
        self.engine, self.weights, self.engine_key = None, None, ""
        self.retriever, self.retriever_key = None, ""

    def _searched_with(self, spec: RolloutSpec) -> Retriever:
        key = spec.index_key or spec.config.retrieval.model_dump_json()
        if self.retriever is None or key != self.retriever_key:
            if self.retriever is not None:
                self.retriever.close()
            self.retriever, self.retriever_key = None, ""
            store, cache = ObjectStore(spec.store), Path(spec.cache_dir)
            retrieval = spec.config.retrieval
            self.retriever = open_retriever(retrieval, store, spec.index_key, cache)
            self.retriever_key = key
            self.loads.indexes += spec.index_key is not None
        return self.retriever


def _engine_key(model_dir: Path, spec: RolloutSpec) -> str:
    """An engine fits another run when all of this is the same; weights do not matter."""
    rollout = spec.config.rollout
    wanted = {
        "model": str(model_dir),
        "architecture": (model_dir / "config.json").read_text(),
        "context": spec.config.model.context,
        "max_sequences": rollout.max_sequences,
        "kv_cache_gib": rollout.kv_cache_gib,
        "store": asdict(spec.store),
    }
    return json.dumps(wanted, sort_keys=True)


def serve_run(spec: RolloutSpec) -> None:
    """Serves a run until it is closed. A Dask task; one on each rollout worker.

    Raises:
        KindlingError: what stopped it, other than the run's end.
    """
    worker = this_worker()
    queue = WorkerQueue(worker, spec.run, spec.token)
    engine_free = warm("rollout-lock", threading.Lock)
    try:
        # One engine, one run: a second run on this worker waits here, as long as it is open.
        while not engine_free.acquire(timeout=STILL_OPEN_S):
            queue.alive()
    except RunClosed:
        return
    try:
        _serve_here(spec, worker, queue)
    finally:
        engine_free.release()


def _serve_here(spec: RolloutSpec, worker: Worker, queue: WorkerQueue) -> None:
    state = warm("rollout", Warm)
    before = asdict(state.loads)
    agent, weights = state.serve(spec)
    assert state.engine is not None
    forget = state.engine.reset_prefix_cache
    loads = {name: value - before[name] for name, value in asdict(state.loads).items()}
    queue.report({"kind": "ready", "loads": loads})
    resident = Resident(worker, queue, agent, weights, ObjectStore(spec.store), spec, forget)
    try:
        resident.run()
    except RunClosed:
        return
    finally:
        agent.abort()
        resident.close()
    state.close()  # retired: the process ends next


class Resident:
    """The loop: pull while there is room, bring the engine to the version, step, hand groups in.

    Raises:
        RewardError: the run's reward function cannot be used on this worker.
    """

    def __init__(
        self,
        worker: Worker,
        queue: WorkerQueue,
        agent: AgentLoop,
        weights: Weights,
        store: ObjectStore,
        spec: RolloutSpec,
        forget: Callable[[], None] = lambda: None,
    ) -> None:
        """`forget`: has the engine forget its prefix cache; called where the run is to be
        deterministic, before every unit."""
        self._forget = forget
        self._worker = worker
        self._queue = queue
        self._agent = agent
        self._weights = weights
        self._store = store
        self._spec = spec
        self._waiting: list[Unit] = []
        self._began: dict[str, float] = {}
        self._handing_in: list[Future[Any]] = []
        self._results: SimpleQueue[Wire] = SimpleQueue()
        self._ask_again = 0.0
        self._retired = False
        self._turned = time.monotonic()
        rollout = spec.config.rollout
        self._reward = (
            RewardProcess(rollout.reward, rollout.reward_timeout_s)
            if is_own_function(rollout.reward)
            else None
        )
        # Storing and reporting groups overlaps with the engine's next steps.
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="hand-in")
        self._reporter = ThreadPoolExecutor(1, thread_name_prefix="report")

    def run(self) -> None:
        """Until this worker is retired.

        Raises:
            RunClosed: the run is over.
        """
        over = threading.Event()
        alive = threading.Thread(target=self._keep_alive, args=(over,), daemon=True)
        alive.start()
        try:
            while not self._retired:
                self._turned = time.monotonic()
                self._turn()
        finally:
            over.set()
            alive.join()

    def _turn(self) -> None:
        self._pull()
        self._start()
        if self._agent.active:
            for outcome in self._agent.step():
                if isinstance(outcome, Failed):
                    self._fail(outcome.unit, outcome.error)
                else:
                    began = self._began.pop(outcome.unit.unit_id)
                    self._handing_in.append(self._pool.submit(self._hand_in, outcome, began))
        self._check_handed_in()

    def _keep_alive(self, over: threading.Event) -> None:
        """Calls the queue every few seconds, however long an engine step or the application of a
        version takes: without a call this worker's units go to others. One that takes far too long
        hangs, and is to be missed."""
        with suppress(RunClosed, OSError):  # the loop itself finds that out and says so
            while not over.wait(ALIVE_S):
                if time.monotonic() - self._turned < TURN_S:
                    self._queue.alive()

    def close(self) -> None:
        if self._reward is not None:
            self._reward.close()  # first: a thread may wait for it
        for pool in (self._pool, self._reporter):
            pool.shutdown(wait=True, cancel_futures=True)

    def _pull(self) -> None:
        """Asks for units when a whole group fits; waits only when there is nothing to do.

        A full engine asks for none from time to time, to learn whether the run is still open.
        """
        if self._waiting:
            return
        rollout = self._spec.config.rollout
        room = (rollout.max_sequences - self._agent.active) // rollout.group_size
        idle = self._agent.active == 0
        if rollout.deterministic:
            room = 0
        if idle or time.perf_counter() > self._ask_again:
            pulled = self._queue.pull(max(room, 1 if idle else 0), wait=idle)
            self._waiting = [unit_from_wire(unit) for unit in pulled.units]
            self._retired = pulled.retired
            self._agent.cancel(pulled.cancel)
            for unit_id in pulled.cancel:
                self._began.pop(unit_id, None)
            if not pulled.units:
                pause = ASK_AGAIN_S if room > 0 else STILL_OPEN_S
                self._ask_again = time.perf_counter() + pause

    def _start(self) -> None:
        """Starts the pulled units of the engine's version; another version waits until it idles."""
        while self._waiting:
            unit = self._waiting[0]
            if not self._weights.holds(self._spec.weights_run, unit.version):
                if self._agent.active:
                    return
                self._bring_to(unit.version)
            self._waiting.pop(0)
            if self._spec.config.rollout.deterministic:
                self._forget()
            self._began[unit.unit_id] = time.perf_counter()
            try:
                self._agent.submit(unit)
            except Exception as error:  # noqa: BLE001 (whatever it is, it costs this unit alone)
                self._fail(unit, error)

    def _fail(self, unit: Unit, error: Exception) -> None:
        """Gives a unit back as failed: it is tried again, some times."""
        del self._began[unit.unit_id]
        logger.error("unit %s failed", unit.unit_id, exc_info=error)
        message = f"{self._worker.address}: {type(error).__name__}: {error}"
        self._queue.fail(unit.unit_id, message)

    def _bring_to(self, version: int) -> None:
        anchors = self._weights.anchor_loads
        applied = self._weights.apply(self._spec.weights_run, version)
        self._queue.report(
            {
                "kind": "applied",
                "version": version,
                "update": applied.kind,
                "values": applied.values,
                "fetch_s": applied.fetch_s,
                "stopped_s": applied.stopped_s,
                "anchor_loads": self._weights.anchor_loads - anchors,
            }
        )

    def _hand_in(self, sampled: Sampled, began_at: float) -> Future[None]:
        """Stores a group, then has it reported: what the queue knows of can be read.

        A group whose reward failed is reported as dropped and not tried again: the same seeds
        would give the same trajectories.
        """
        unit, group = sampled.unit, sampled.group
        if self._reward is not None:
            try:
                group = self._reward.judge(sampled, self._spec.config.rollout.format_bonus)
            except RewardError as error:
                dropped = {"unit_id": unit.unit_id, "version": unit.version, "dropped": str(error)}
                self._results.put(dropped)
                return self._reporter.submit(self._report)
        # The attempt's own key: a second one of the same unit must not write over what the queue
        # has accepted of the first.
        attempt = f"{self._spec.life}.{unit.attempt}"
        key = f"runs/{self._spec.run}/groups/{group.unit_id}-{attempt}.safetensors"
        self._store.put(key, group_to_bytes(group))
        summary = GroupSummary(
            unit_id=group.unit_id,
            question_id=group.question_id,
            key=key,
            worker=self._worker.address,
            version=unit.version,
            seconds=time.perf_counter() - began_at,
            trajectories=tuple(summarise(t) for t in group.trajectories),
        )
        self._results.put(summary_to_wire(summary))
        return self._reporter.submit(self._report)

    def _report(self) -> None:
        """Reports all results by now in one call: what gathers while the last one runs."""
        results = [self._results.get() for _ in range(self._results.qsize())]
        if results:
            self._queue.complete(results)

    def _check_handed_in(self) -> None:
        """Raises what went wrong while storing or reporting."""
        still: list[Future[Any]] = []
        for future in self._handing_in:
            if not future.done():
                still.append(future)
            elif (report := future.result()) is not None:
                still.append(report)
        self._handing_in = still
