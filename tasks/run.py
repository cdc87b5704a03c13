"""A training run as the flow holds it: services attached, workers warm, history kept.

`open_run` is where everything starts and, whatever happens, ends: a closed run leaves its workers
warm and free for the next.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from distributed import Client

from tasks.cluster import Attached, Log
from tasks.config import TrainConfig
from tasks.errors import ConfigError, RunClosed, StoreConflict
from tasks.inputs import Inputs, ensure_index
from tasks.metrics import History
from tasks.predecessor import mark_crashed
from tasks.rollout.accepted import AcceptedLog
from tasks.rollout.batches import Producer
from tasks.rollout.board import FlowQueue
from tasks.rollout.fleet import Fleet
from tasks.rollout.worker import RolloutSpec
from tasks.run_record import check_resumable, record_run
from tasks.store import ObjectStore
from tasks.training import checkpoint
from tasks.training.member import TrainerSpec
from tasks.training.policy import resolve_model_dir
from tasks.training.trainers import Trainers
from tasks.weights.checkpoint import heads_in, publish_checkpoint, shapes_in
from tasks.weights.commit import Published, existing_ref, load_manifest

STALENESS_BOUND = 0


class Run:
    """Everything the stages of one run share.

    Not a dataclass: Prefect searches every field of those that it is handed for futures, several
    times a task, down to the last passage of the corpus (seconds a step).

    Attributes:
        version: published last, and what is sampled next.
        published: the versions this process saw published, oldest first; the first is an anchor.
        next_step: the first step that this flow has not trained. A resumed one begins after the
            last checkpoint, and repeats what the run had done since.
    """

    def __init__(
        self,
        name: str,
        inputs: Inputs,
        store: ObjectStore,
        fleet: Fleet,
        trainers: Trainers,
        producer: Producer,
        log: Log,
        next_step: int = 0,
        history: History | None = None,
    ) -> None:
        self.name = name
        self.inputs = inputs
        self.store = store
        self.fleet = fleet
        self.trainers = trainers
        self.producer = producer
        self.log = log
        self.next_step = next_step
        self.version = -1
        self.published: list[Published] = []
        self.history = history or History()
        self.progress_id: Any = None

    @property
    def config(self) -> TrainConfig:
        return self.inputs.config

    @property
    def remaining_steps(self) -> range:
        return range(self.next_step, self.config.training.steps)

    @property
    def evaluation_due(self) -> bool:
        """Whether the policy as it stands is to be evaluated: not where a resumed run's was."""
        found = self.history.evaluation_at(self.next_step)
        done = found is not None and found.version == self.version
        return self._due(self.config.evaluation.every) and not done

    @property
    def checkpoint_due(self) -> bool:
        """Whether a checkpoint is, after the step just trained."""
        return self._due(self.config.training.checkpoint_every)

    def _due(self, every: int) -> bool:
        return self.next_step == self.config.training.steps or self.next_step % every == 0

    def note(self, published: Published) -> None:
        """Takes notice of a version just published."""
        self.version = published.version
        self.published.append(published)

    def save_history(self) -> None:
        """Writes `metrics.jsonl` beside the run's other objects."""
        self.history.loads = {**self.fleet.loads, "trainer_bases": self.trainers.base_loads}
        self.store.put(metrics_key(self.name), self.history.to_jsonl())


def new_name(preset: str) -> str:
    """A run's name: preset, UTC time, and four random hex digits."""
    return f"{preset}-{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def metrics_key(run: str) -> str:
    return f"runs/{run}/metrics.jsonl"


@contextmanager
def open_run(
    preset: str,
    inputs: Inputs,
    cluster: Attached,
    policy: str | None,
    resume: str | None,
    flow_run: str | None = None,
) -> Iterator[Run]:
    """Opens a new run, or goes on with `resume`; closes it at the end, whatever the end is.

    Args:
        policy: prefix in the store of the warm-started policy to begin with; None: model.path.
        resume: name of the run to go on with; None: a new one.
        flow_run: id of the Prefect flow run, which a retry of it has too: see `begun_by`.

    Raises:
        ConfigError: `resume` names no run, or one with other settings or inputs.
        RunClosed: that run is open in another flow.
        ClusterError: the cluster lacks workers.
    """
    store = ObjectStore(cluster.store)
    config, log, cache = inputs.config, cluster.log, str(cluster.cache_dir)
    name = resume or new_name(preset)
    if resume:
        check_resumable(store, name, inputs)
    else:
        record_run(store, name, inputs, policy)
    if flow_run is not None:
        store.put(_flow_run_key(flow_run), name.encode())
    if ensure_index(inputs, store):
        log.info("built the BM25 index over %d passages", len(inputs.passages))
    # First of all: it refuses a run that another flow has open.
    with closing(FlowQueue(cluster.client, name)) as queue:
        life, before = _begin_life(store, name, flow_run)
        if before is not None and flow_run is not None:
            mark_crashed(before, flow_run, log)
        made = checkpoint.latest(store, name)
        start = made.step if made else 0
        spec = RolloutSpec(name, name, config, cluster.store, inputs.index_key, cache, life)
        fleet = Fleet(
            cluster.client,
            spec,
            log,
            cluster.pool,
            accepted=AcceptedLog(store, name, life),
            queue=queue,
        )
        try:
            trainers = Trainers(
                cluster.client,
                TrainerSpec(name, life, config, cluster.store, cache, policy),
                _this_host(cluster.client),
                queue.claim_trainers,
                log,
                made,
            )
            try:
                yield Run(
                    name,
                    inputs,
                    store,
                    fleet,
                    trainers,
                    Producer(config.training.steps, STALENESS_BOUND, start),
                    log,
                    start,
                    history=history_of(store, name),
                )
            finally:
                trainers.close()
        finally:
            fleet.close()


@dataclass(frozen=True, slots=True)
class OpenEvaluation:
    """A fleet that serves one version, and nothing that trains."""

    name: str
    fleet: Fleet
    store: ObjectStore
    version: int


@contextmanager
def open_evaluation(
    inputs: Inputs,
    cluster: Attached,
    run: str | None,
    version: int | None,
    checkpoint_path: str | None,
) -> Iterator[OpenEvaluation]:
    """Serves one version for evaluation.

    Args:
        run, version: a run's version; None: its newest.
        checkpoint_path: in place of a run, a folder or hub id, published as version 0 of a run of
            its own first.

    Raises:
        ConfigError: the run has no such version.
    """
    store = ObjectStore(cluster.store)
    name = new_name("evaluation")
    if run is None:
        if checkpoint_path is None:
            raise ConfigError("nothing to evaluate: give a run or a checkpoint")
        folder = resolve_model_dir(checkpoint_path, cluster.cache_dir / "models")
        run, version = name, publish_checkpoint(store, name, folder)
    else:
        version = existing_version(store, run, version)
    ensure_index(inputs, store)
    cache = str(cluster.cache_dir)
    spec = RolloutSpec(name, run, inputs.config, cluster.store, inputs.index_key, cache)
    fleet = Fleet(cluster.client, spec, cluster.log, cluster.pool)
    try:
        yield OpenEvaluation(name, fleet, store, version)
    finally:
        fleet.close()


def check_playable(
    inputs: Inputs,
    cluster: Attached,
    run: str | None,
    version: int | None,
    checkpoint_path: str | None,
) -> None:
    """Whether `open_evaluation` could serve this, found without an engine.

    Raises:
        ConfigError: there is no such run or version, or it is of another architecture than
            model.path, whose engines would play it.
        PolicyError: there is no such checkpoint.
    """
    known: dict[str, Any] = dict(shapes_in(inputs.model_dir))
    found: dict[str, Any]
    if run is None:
        assert checkpoint_path is not None
        folder = resolve_model_dir(checkpoint_path, cluster.cache_dir / "models")
        known |= heads_in(inputs.model_dir)
        found = shapes_in(folder) | heads_in(folder)
    else:
        store = ObjectStore(cluster.store)
        existing_version(store, run, version)
        manifest = load_manifest(store, run, existing_ref(store, run))
        found = {tensor.name: tensor.shape for tensor in manifest.tensors}
    # Where it is tied to the embedding, some files hold it all the same.
    names = (known.keys() | found.keys()) - {"lm_head.weight"}
    differ = sorted(name for name in names if known.get(name) != found.get(name))
    if differ:
        first = differ[0]
        raise ConfigError(
            f"{run or checkpoint_path} is of another architecture than model.path = "
            f"{inputs.config.model.path!r}, whose engines would play it: {first} is "
            f"{found.get(first)} there and {known.get(first)} here ({len(differ)} differ); give "
            "its own preset, or set model.path to a model like it"
        )


def existing_version(store: ObjectStore, run: str, version: int | None) -> int:
    """The version of the run, its newest for None.

    Raises:
        ConfigError: there is no such run or version.
    """
    head = existing_ref(store, run)
    if version is None:
        return head.version
    if not 0 <= version <= head.version:
        raise ConfigError(f"run {run!r} has versions 0 to {head.version}, not {version}")
    return version


def history_of(store: ObjectStore, run: str) -> History:
    """A run's history as its metrics have it; empty where it has none."""
    if not store.exists(metrics_key(run)):
        return History()
    return History.from_jsonl(store.get(metrics_key(run)))


def _this_host(client: Client) -> str:
    """The address of this machine as the cluster sees it: where the trainer ranks meet."""
    scheduler = client.scheduler
    assert scheduler is not None
    host = scheduler.addr.split("://")[-1].rsplit(":", 1)[0]
    if host in ("127.0.0.1", "localhost"):
        return "127.0.0.1"
    from distributed.utils import get_ip

    return str(get_ip(host))


def _flow_run_key(flow_run: str) -> str:
    return f"flow-runs/{flow_run}"


def begun_by(store: ObjectStore, flow_run: str | None) -> str | None:
    """The run that this Prefect flow run began before it was retried; None where it is new."""
    if flow_run is None or not store.exists(_flow_run_key(flow_run)):
        return None
    return store.get(_flow_run_key(flow_run)).decode()


def _begin_life(store: ObjectStore, name: str, flow_run: str | None) -> tuple[int, str | None]:
    """Notes that the run is opened once more; how often it was before, and by which flow run last.

    Raises:
        RunClosed: another flow opens it at the same moment.
    """
    lives = sorted(store.list(f"runs/{name}/lives/"))
    life = len(lives)
    before = json.loads(store.get(lives[-1])).get("flow_run") if lives else None
    about = {"opened": datetime.now(UTC).isoformat(timespec="seconds"), "flow_run": flow_run}
    try:
        store.create(f"runs/{name}/lives/{life:04d}.json", json.dumps(about).encode())
    except StoreConflict as error:
        raise RunClosed(f"run {name!r} is being opened by another flow; cancel one") from error
    return life, before
