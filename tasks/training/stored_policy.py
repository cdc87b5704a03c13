"""Warm-started policies in the store: made once for the same settings, then found.

policies/KEY/                     a Hugging Face checkpoint and provenance.json
policies/KEY.done                 the provenance again, written last: the policy is whole
policies/KEY.trajectories.jsonl   the file it was made of, if it was
runs/warm-start-KEY/checkpoints/  where an interrupted one goes on
"""

from __future__ import annotations

import json
import os
import secrets
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from distributed import Client, Future
from distributed.client import FutureCancelledError
from distributed.scheduler import KilledWorker

from tasks.cluster import TRAINER, Attached, restart, submit_to, workers_with
from tasks.config import TrainConfig
from tasks.data.questions import Question
from tasks.errors import ClusterError, GangError, RunClosed
from tasks.inputs import Inputs, ensure_index
from tasks.retrieval.opening import open_retriever
from tasks.rollout.board import FlowQueue, keep_open
from tasks.store import ObjectStore, StoreLocation
from tasks.training import provenance
from tasks.training.demonstrations import Corpus, Demonstration, chosen_questions
from tasks.training.policy import load_policy, load_tokenizer, resolve_model_dir
from tasks.training.progress import SAVE_EVERY_S, StoredProgress
from tasks.training.warm_start import (
    PROVENANCE,
    demonstrations_of,
    policy_key,
    save_policy,
    settings_of,
    warm_start,
)
from tasks.warm import this_worker
from tasks.weights.final import put_folder

TOPIC = "kindling-warm-start"
REPORT_EVERY = 4
LOOK_AGAIN_S = 1.0


def policy_prefix(inputs: Inputs) -> str:
    """Where in the store the policy of these inputs is, or will be."""
    config = inputs.config
    base = f"{config.model.path} {provenance.digest_of_model(inputs.model_dir)}"
    searched = inputs.index_key or config.retrieval.url or ""
    shown = inputs.trajectories or provenance.text_of_questions(_shown(inputs))
    return f"policies/{policy_key(config, base, searched, shown)}/"


def _shown(inputs: Inputs) -> list[Question]:
    """The questions that demonstrations are built from; none where they are read from a file."""
    if inputs.trajectories:
        return []
    return chosen_questions(inputs.train, settings_of(inputs.config), inputs.config.seed)


def is_made(store: ObjectStore, prefix: str) -> bool:
    """Whether the policy is there, whole: its completion mark is written last."""
    return store.exists(_beside(prefix, "done"))


def provenance_of(store: ObjectStore, prefix: str) -> dict[str, Any]:
    """Where a policy that is made comes from."""
    return json.loads(store.get(_beside(prefix, "done")))


def make_policy(cluster: Attached, inputs: Inputs, prefix: str) -> None:
    """Fine-tunes the policy on a trainer worker and stores it; goes on where that was interrupted.

    Where another flow is at it, waits until that one has made it, or has gone.

    Raises:
        ClusterError: there is no trainer worker, or all of them are in use, for cluster.wait_s.
        GangError: the worker died or froze; the next call goes on from the last state saved.
        SchedulerLost: the scheduler is gone, or does not answer.
        RunClosed: this flow stood still for longer than its lease; another may be at it by now.
        ConfigError, NotFiniteError, RetrieverError: as `demonstrations_of` and `warm_start`.
    """
    store = ObjectStore(cluster.store)
    ensure_index(inputs, store)
    with _alone(cluster, store, prefix) as queue:
        if queue is not None:
            worker = _claimed(queue, inputs.config.cluster.wait_s)
            _have_made(cluster, store, inputs, prefix, worker, queue)


@contextmanager
def _alone(cluster: Attached, store: ObjectStore, prefix: str) -> Iterator[FlowQueue | None]:
    """The right to make a policy, which one flow has at a time, and with it to claim a trainer;
    None where another flow has made the policy meanwhile."""
    queue, said, pause = None, False, threading.Event()
    while queue is None:
        try:
            queue = FlowQueue(cluster.client, progress_name(prefix))
        except RunClosed:
            if not said:
                cluster.log.info("another flow makes policy %s; waiting for it", prefix)
            said = True
            pause.wait(LOOK_AGAIN_S)
    over = threading.Event()
    lease = threading.Thread(target=keep_open, args=(queue, over), name="lease", daemon=True)
    lease.start()
    try:
        yield None if is_made(store, prefix) else queue
    finally:
        over.set()
        lease.join()
        queue.close()


def _claimed(queue: FlowQueue, wait_s: float) -> str:
    """A trainer worker that no run's gang has."""
    deadline, pause = time.monotonic() + wait_s, threading.Event()
    while not (made := queue.claim_trainers(1)).workers:
        if time.monotonic() > deadline:
            raise ClusterError(
                f"no trainer worker to warm-start on: {made.why()}, after {wait_s:g} s "
                "(cluster.wait_s); start one with --resources TRAINER=1"
            )
        pause.wait(LOOK_AGAIN_S)
    return made.workers[0]


def _have_made(
    cluster: Attached,
    store: ObjectStore,
    inputs: Inputs,
    prefix: str,
    worker: str,
    queue: FlowQueue,
) -> None:
    """Has the worker make the policy, and waits for it; one that freezes has its process started
    again.

    Raises:
        GangError: the worker died or froze.
    """
    if inputs.trajectories:
        store.put(_beside(prefix, "trajectories.jsonl"), inputs.trajectories)
    cache = str(cluster.cache_dir)
    order = Order(inputs.config, _shown(inputs), inputs.index_key, cache, prefix)

    def show(event: tuple[Any, dict[str, Any]]) -> None:
        said = event[1]
        line = "warm start: step %d of %d, loss %.3f"
        cluster.log.info(line, said["step"] + 1, said["steps"], said["loss"])

    cluster.client.subscribe_topic(TOPIC, show)
    try:
        # A key of this flow's own: the work of one that was cancelled may just be stopping.
        key = f"warm-start-{prefix}{secrets.token_hex(4)}"
        made = submit_to(cluster.client, worker, key, _make_here, order, cluster.store)
        _await(made, worker, cluster.client, queue)
    finally:
        cluster.client.unsubscribe_topic(TOPIC)


def _await(made: Future, worker: str, client: Client, queue: FlowQueue) -> None:
    """Waits for the worker's answer, with a look at the worker from time to time."""
    while True:
        try:
            return made.result(timeout=LOOK_AGAIN_S)
        except TimeoutError:
            if worker in queue.frozen(TRAINER):
                restart(client, [worker])
                raise GangError(f"trainer worker {worker} froze while it made a policy") from None
            if worker not in workers_with(client, TRAINER):
                raise GangError(f"trainer worker {worker} died while it made a policy") from None
        except (KilledWorker, FutureCancelledError, ClusterError) as error:
            # Dask has sent the work of one that is gone to another worker, which refused it.
            if isinstance(error, ClusterError) and worker in workers_with(client, TRAINER):
                raise
            raise GangError(f"trainer worker {worker} died while it made a policy") from error


@dataclass(frozen=True)
class Order:
    """What a worker is told of a policy to make.

    questions: to build demonstrations from; none where a file of trajectories is in the store.
    index_key: as `open_retriever` takes it.
    """

    config: TrainConfig
    questions: Sequence[Question]
    index_key: str | None
    cache_dir: str
    prefix: str


def _make_here(order: Order, location: StoreLocation) -> None:
    worker, store = this_worker(), ObjectStore(location)
    task = worker.state.tasks[worker.get_current_task()]

    def report(step: int, steps: int, loss: float) -> None:
        # Dask cannot stop a thread; where the flow has gone, it says so in the task's state.
        if task.state == "cancelled":
            raise RunClosed("the flow that asked for this warm start has gone")
        if step % REPORT_EVERY == 0 or step + 1 == steps:
            worker.log_event(TOPIC, {"step": step, "steps": steps, "loss": loss})

    make(order, store, StoredProgress(store, progress_name(order.prefix), SAVE_EVERY_S), report)


def progress_name(prefix: str) -> str:
    """Under what name a policy's progress is kept, see `StoredProgress`."""
    return f"warm-start-{prefix.strip('/').rsplit('/', 1)[-1]}"


def make(
    order: Order,
    store: ObjectStore,
    progress: StoredProgress,
    report: Callable[[int, int, float], None],
) -> None:
    """Makes the policy and stores it.

    Args:
        report: called with (step, steps, loss); what it raises ends the work, which the next call
            takes up from the last state saved.
    """
    config = order.config
    folder = resolve_model_dir(config.model.path, Path(order.cache_dir) / "models")
    tokenizer: Any = load_tokenizer(folder, config.model.chat)
    made = _demonstrations(order, store, tokenizer)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load_policy(folder).to(device)  # type: ignore[arg-type]
    with _all_threads():
        came = warm_start(config, model, made, len(tokenizer), report, progress)
    came |= _origin(order, folder, made)
    with tempfile.TemporaryDirectory(prefix="kindling-policy-") as scratch:
        save_policy(model, tokenizer, came, Path(scratch))
        put_folder(store, Path(scratch), order.prefix)
        store.put(_beside(order.prefix, "done"), (Path(scratch) / PROVENANCE).read_bytes())
    progress.forget()


def _demonstrations(order: Order, store: ObjectStore, tokenizer: Any) -> list[Demonstration]:
    if not order.questions:
        file = store.get(_beside(order.prefix, "trajectories.jsonl"))
        return demonstrations_of(order.config, tokenizer, file)
    cache = Path(order.cache_dir)
    retriever = open_retriever(order.config.retrieval, store, order.index_key, cache)
    with closing(retriever):
        return demonstrations_of(order.config, tokenizer, Corpus(order.questions, retriever))


def _origin(order: Order, folder: Path, made: Sequence[Demonstration]) -> dict[str, Any]:
    base = folder / PROVENANCE
    return {
        "base": order.config.model.path,
        "base_provenance": json.loads(base.read_text()) if base.is_file() else None,
        "config": order.config.model_dump(mode="json"),
        "digests": {
            "base": provenance.digest_of_model(folder),
            "demonstrations": provenance.digest_of_demonstrations(made),
            "index": order.index_key,
        },
        "versions": provenance.versions(),
        "commit": provenance.commit(),
    }


@contextmanager
def _all_threads() -> Iterator[None]:
    """The workers beside this one are idle meanwhile, so it may have the whole machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(os.cpu_count() or threads)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _beside(prefix: str, ending: str) -> str:
    return f"{prefix.rstrip('/')}.{ending}"
