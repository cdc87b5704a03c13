"""An interrupted warm start goes on to the same bits; what it stores says where it comes from."""

from __future__ import annotations

import itertools
import json
import logging
import os
import re
import secrets
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from blake3 import blake3
from safetensors.torch import load_file

from infra.cluster import connect, start_scheduler, start_worker, wait_for_workers
from infra.processes import ProcessGroup
from tasks.cluster import TRAINER, Attached, workers_with
from tasks.config import TrainConfig
from tasks.data.hotpotqa import load_questions
from tasks.data.questions import pool
from tasks.errors import ClusterError, GangError, IntegrityError
from tasks.inputs import load_inputs
from tasks.presets import resolve
from tasks.retrieval.bm25 import build
from tasks.retrieval.stored import store_index
from tasks.rollout import board
from tasks.rollout.board import FlowQueue
from tasks.store import ObjectStore
from tasks.training import stored_policy
from tasks.training.policy import load_tokenizer, resolve_model_dir
from tasks.training.progress import StoredProgress
from tasks.training.stored_policy import Order
from tasks.weights.final import fetch_checkpoint
from tests import noop
from tests.waiting import eventually

pytestmark = pytest.mark.timeout(180)

STEPS = 1 + 6


class Interrupted(Exception):
    pass


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def config() -> TrainConfig:
    warm = {"demonstrations": 12, "batch_size": 2, "induction_steps": 1, "good_share": 0.5}
    return resolve("tiny", {"model": {"path": "tiny-new", "warm_start": warm}})


def order(config: TrainConfig, store: ObjectStore, cache: Path) -> Order:
    questions = load_questions("miniature:held_out")[:30]
    key = store_index(store, build(pool(questions), 1.2, 0.75))
    return Order(config, list(questions), key, str(cache), f"policies/{secrets.token_hex(8)}/")


def progress(store: ObjectStore, made: Order, save_every: int = 2) -> StoredProgress:
    """Its clock strikes at each look, so a state is saved after every second step."""
    clock = itertools.count()
    name = stored_policy.progress_name(made.prefix)
    return StoredProgress(store, name, save_every, lambda: float(next(clock)))


def until(last: int) -> Callable[[int, int, float], None]:
    def report(step: int, steps: int, loss: float) -> None:
        assert steps == STEPS
        seen.append((step, loss))
        if step == last:
            raise Interrupted

    seen: list[tuple[int, float]] = []
    report.seen = seen  # type: ignore[attr-defined]
    return report


def tensors(store: ObjectStore, made: Order, folder: Path) -> dict[str, torch.Tensor]:
    return load_file(fetch_checkpoint(store, made.prefix, folder) / "model.safetensors")


def test_interrupted_twice_it_ends_with_the_same_bits_and_provenance(
    object_store: ObjectStore, config: TrainConfig, cache: Path, tmp_path: Path
) -> None:
    whole, broken = (order(config, object_store, cache) for _ in range(2))
    report = until(-1)
    stored_policy.make(whole, object_store, progress(object_store, whole), report)
    expected: list[tuple[int, float]] = report.seen  # type: ignore[attr-defined]
    assert [step for step, _ in expected] == list(range(STEPS))

    went: list[list[tuple[int, float]]] = []
    for last in (2, 5):
        report = until(last)
        with pytest.raises(Interrupted):
            stored_policy.make(broken, object_store, progress(object_store, broken), report)
        assert not stored_policy.is_made(object_store, broken.prefix)
        name = stored_policy.progress_name(broken.prefix)
        assert len(object_store.list(f"runs/{name}/checkpoints/")) == 1, "the newest alone"
        went.append(report.seen)  # type: ignore[attr-defined]
    report = until(-1)
    stored_policy.make(broken, object_store, progress(object_store, broken), report)
    went.append(report.seen)  # type: ignore[attr-defined]

    starts = [part[0][0] for part in went]
    assert starts[0] == 0
    assert 0 < starts[1] <= 3, "it goes on from what was saved"
    assert starts[1] < starts[2] <= 6
    for part in went:
        assert part == expected[part[0][0] : part[-1][0] + 1], "the same losses, to the bit"
    one, other = tensors(object_store, whole, tmp_path), tensors(object_store, broken, tmp_path)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert not object_store.list(f"runs/{name}/"), "nothing is kept of a policy that is made"

    folder = fetch_checkpoint(object_store, broken.prefix, tmp_path)
    assert resolve_model_dir(str(folder), tmp_path) == folder, "a whole Hugging Face checkpoint"
    assert load_tokenizer(folder, chat=True).encode("Ada Marlowe")
    written = json.loads((folder / "provenance.json").read_text())
    assert written == stored_policy.provenance_of(object_store, broken.prefix)
    assert written == stored_policy.provenance_of(object_store, whole.prefix)
    assert TrainConfig.model_validate(written["config"]) == config
    assert (written["steps"], written["demonstrations"]) == (STEPS, 12)
    assert (written["first_loss"], written["final_loss"]) == (expected[0][1], expected[-1][1])
    assert written["digests"]["index"] == broken.index_key
    assert {"base", "demonstrations"} <= set(written["digests"])
    assert {"python", "torch", "transformers"} <= set(written["versions"])


def test_a_state_that_is_damaged_is_refused(
    object_store: ObjectStore, config: TrainConfig, cache: Path
) -> None:
    made = order(config, object_store, cache)
    with pytest.raises(Interrupted):
        stored_policy.make(made, object_store, progress(object_store, made), until(4))
    name = stored_policy.progress_name(made.prefix)
    (key,) = object_store.list(f"runs/{name}/checkpoints/")
    object_store.put(key, object_store.get(key)[:-40])
    with pytest.raises(IntegrityError, match="no checkpoint manifest"):
        stored_policy.make(made, object_store, progress(object_store, made), until(-1))
    assert not stored_policy.is_made(object_store, made.prefix)


def test_demonstrations_from_a_file_in_the_store(
    object_store: ObjectStore, cache: Path, tmp_path: Path
) -> None:
    turns: list[dict[str, Any]] = [
        {"role": "policy", "text": "<search> Ada Marlowe </search>"},
        {"role": "environment", "text": "<information>Doc 1(Title: Ada) Born.</information>"},
        {"role": "policy", "text": "<answer> Ada </answer>"},
    ]
    data = json.dumps({"question": "Who?", "turns": turns}).encode()
    warm = {"demonstrations": 6, "batch_size": 2, "trajectories": "x.jsonl", "learning_rate": 3e-3}
    config = resolve("tiny", {"model": {"path": "tiny-new", "warm_start": warm}})
    made = Order(config, [], None, str(cache), f"policies/{blake3(data).hexdigest(length=8)}/")
    object_store.put(made.prefix.rstrip("/") + ".trajectories.jsonl", data)
    stored_policy.make(made, object_store, progress(object_store, made), lambda *_: None)
    came = stored_policy.provenance_of(object_store, made.prefix)
    assert (came["demonstrations"], came["steps"]) == (6, 3)
    assert came["final_loss"] < came["first_loss"]


@pytest.fixture(scope="module")
def scheduler(
    object_store: ObjectStore, config: TrainConfig, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """Of a cluster with one trainer worker."""
    folder = Path(tmp_path_factory.mktemp("cluster"))
    with ProcessGroup(folder / "logs") as group:
        address = start_scheduler(group, folder)
        start_worker(group, address, config.cluster, folder, TRAINER, 0, {})
        with connect(address, 20) as client:
            wait_for_workers(client, rollout=0, trainer=1, wait_s=60)
        yield address


def test_two_flows_make_a_policy_once_and_on_a_worker_that_no_gang_has(
    object_store: ObjectStore,
    config: TrainConfig,
    cache: Path,
    scheduler: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    cluster = config.cluster.model_copy(update={"wait_s": 2.0})
    inputs = load_inputs(config.model_copy(update={"cluster": cluster}), cache)
    prefix = f"policies/{secrets.token_hex(8)}/"

    def make() -> None:
        with connect(scheduler, 20) as client:
            log = logging.getLogger("tests.policy")
            stored_policy.make_policy(
                Attached(client, object_store.location, cache, log), inputs, prefix
            )

    with connect(scheduler, 20) as client:
        training = FlowQueue(client, "a-gang")
        assert training.claim_trainers(1).workers
        with pytest.raises(ClusterError, match="has 1, of which 1 by run a-gang are in use"):
            make()
        training.close()
    with ThreadPoolExecutor(2) as flows:
        for done in [flows.submit(make), flows.submit(make)]:
            done.result(120)
    assert stored_policy.is_made(object_store, prefix)
    said = [record.getMessage() for record in caplog.records]
    assert sum(line.startswith(f"another flow makes policy {prefix}") for line in said) == 1
    assert sum(line.startswith(f"warm start: step {STEPS} of {STEPS}") for line in said) == 1


@pytest.mark.parametrize(("fault", "how"), [(signal.SIGKILL, "died"), (signal.SIGSTOP, "froze")])
def test_a_worker_that_is_lost_costs_the_work_since_the_last_state(
    object_store: ObjectStore,
    config: TrainConfig,
    cache: Path,
    scheduler: str,
    fault: signal.Signals,
    how: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its nanny starts another, on which the next try goes on."""
    assert config.model.warm_start is not None
    longer = {"demonstrations": 1200, "induction_steps": 0}
    warm = config.model.warm_start.model_copy(update=longer)
    model = config.model.model_copy(update={"warm_start": warm})
    inputs = load_inputs(config.model_copy(update={"model": model}), cache)
    prefix = f"policies/{secrets.token_hex(8)}/"
    states = f"runs/{stored_policy.progress_name(prefix)}/checkpoints/"
    caplog.set_level(logging.INFO)
    with connect(scheduler, 20) as client:
        attached = Attached(client, object_store.location, cache, logging.getLogger("tests.policy"))
        (worker,) = workers_with(client, TRAINER)
        (pid,) = cast("dict[str, int]", client.run(os.getpid)).values()
        client.run(noop.set_save_every, 0.5)
        try:
            with ThreadPoolExecutor(1) as flow:
                made = flow.submit(stored_policy.make_policy, attached, inputs, prefix)
                assert eventually(lambda: made.done() or bool(object_store.list(states)), 60)
                # Only now: importing torch may keep a worker from its heartbeats for as long.
                client.run_on_scheduler(noop.set_frozen, 4.0)
                os.kill(pid, fault)
                with pytest.raises(GangError, match=how):
                    made.result(60)
        finally:
            client.run_on_scheduler(noop.set_frozen, board.FROZEN_S)
        assert eventually(lambda: workers_with(client, TRAINER) not in ([], [worker]), 60)
        assert not stored_policy.is_made(object_store, prefix)
        caplog.clear()
        stored_policy.make_policy(attached, inputs, prefix)
    assert stored_policy.provenance_of(object_store, prefix)["steps"] == 600
    first = re.search(r"warm start: step (\d+) of 600", caplog.text)
    assert first is not None
    assert int(first[1]) > stored_policy.REPORT_EVERY, "it goes on from what was saved"
