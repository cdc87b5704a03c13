"""Warm-started policies in the store: made once for the same settings, then found."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tasks.cluster import TRAINER, Attached, submit_to, workers_with
from tasks.config import TrainConfig
from tasks.data.questions import Question
from tasks.errors import ClusterError
from tasks.inputs import Inputs, ensure_index
from tasks.retrieval.stored import fetch_index
from tasks.store import ObjectStore, StoreLocation
from tasks.training.demonstrations import Corpus, chosen_questions
from tasks.training.policy import load_policy, load_tokenizer, resolve_model_dir
from tasks.training.warm_start import PROVENANCE, policy_key, save_policy, settings_of, warm_start
from tasks.warm import this_worker
from tasks.weights.final import put_folder

TOPIC = "kindling-warm-start"
REPORT_EVERY = 4


def policy_prefix(inputs: Inputs) -> str:
    """Where in the store the policy of these inputs is, or will be."""
    config = inputs.config
    return f"policies/{policy_key(config, config.model.path, inputs.index_key)}/"


def is_made(store: ObjectStore, prefix: str) -> bool:
    """Whether the policy is there, whole: its completion mark is written last."""
    return store.exists(prefix.rstrip("/") + ".done")


def make_policy(cluster: Attached, inputs: Inputs, prefix: str) -> None:
    """Fine-tunes the policy on a trainer worker and stores it.

    Raises:
        ClusterError: there is no trainer worker.
    """
    ensure_index(inputs, ObjectStore(cluster.store))
    workers = workers_with(cluster.client, TRAINER)
    if not workers:
        raise ClusterError("no trainer worker to warm-start on; start one with TRAINER=1")
    config = inputs.config
    chosen = chosen_questions(inputs.train, settings_of(config), config.seed)
    arguments = (config, cluster.store, chosen, inputs.index_key, str(cluster.cache_dir), prefix)

    def show(event: tuple[Any, dict[str, Any]]) -> None:
        said = event[1]
        line = "warm start: step %d of %d, loss %.3f"
        cluster.log.info(line, said["step"] + 1, said["steps"], said["loss"])

    cluster.client.subscribe_topic(TOPIC, show)
    try:
        key = f"warm-start-{prefix}"
        submit_to(cluster.client, workers[0], key, _make_here, *arguments).result()
    finally:
        cluster.client.unsubscribe_topic(TOPIC)


def _make_here(
    config: TrainConfig,
    location: StoreLocation,
    questions: Sequence[Question],
    index_key: str,
    cache_dir: str,
    prefix: str,
) -> None:
    """The work, on the worker. The others are idle meanwhile, so it takes the whole machine."""
    worker, store, cache = this_worker(), ObjectStore(location), Path(cache_dir)

    def report(step: int, steps: int, loss: float) -> None:
        if step % REPORT_EVERY == 0 or step + 1 == steps:
            worker.log_event(TOPIC, {"step": step, "steps": steps, "loss": loss})

    threads = torch.get_num_threads()
    torch.set_num_threads(os.cpu_count() or threads)
    try:
        folder = resolve_model_dir(config.model.path, cache / "models")
        model, tokenizer = load_policy(folder), load_tokenizer(folder, config.model.chat)
        index = fetch_index(store, index_key, cache / "indexes")
        provenance = warm_start(config, model, tokenizer, Corpus(questions, index), report)
    finally:
        torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory(prefix="kindling-policy-") as scratch:
        save_policy(model, tokenizer, provenance, Path(scratch))
        put_folder(store, Path(scratch), prefix)
        store.put(prefix.rstrip("/") + ".done", (Path(scratch) / PROVENANCE).read_bytes())
