"""The trainer gang goes through the death of any rank at any place, and reaches the same bits.

Real Dask workers under nannies, a real store, a random tiny policy; no engine, so that the batches
are the tests' own.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast

import pytest
from distributed import Client

from infra.cluster import connect, start_scheduler, start_workers, wait_for_workers
from infra.processes import ProcessGroup
from tasks.cluster import TRAINER, workers_with
from tasks.config import TrainConfig
from tasks.errors import ClusterError, GangError, StageFailed, StoreConflict, StoreError
from tasks.rollout.trajectory import GroupSummary, group_to_bytes
from tasks.store import ObjectStore
from tasks.training import silence
from tasks.training import trainers as trainers_module
from tasks.training.checkpoint import Checkpoint
from tasks.training.claims import Claim, claim
from tasks.training.member import TrainerSpec
from tasks.training.trainers import Trainers
from tasks.weights.commit import lineage, load_manifest
from tests import faults
from tests.trainer_pool import config as trainer_config
from tests.training_helpers import make_batch, save_tiny_policy, summary_of
from tests.waiting import eventually

pytestmark = pytest.mark.timeout(240)
RANKS = 2
STEPS = 3
LOG = logging.getLogger("tests.recovery")
T = TypeVar("T")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    folder = save_tiny_policy(tmp_path_factory.mktemp("policy") / "model")
    made = trainer_config(kl_coefficient=0.01)
    model = made.model.model_copy(update={"path": str(folder)})
    cluster = made.cluster.model_copy(update={"trainer_ranks": RANKS, "rollout_workers": 1})
    return made.model_copy(update={"model": model, "cluster": cluster})


@pytest.fixture(scope="module")
def client(
    object_store: ObjectStore, tmp_path_factory: pytest.TempPathFactory, config: TrainConfig
) -> Iterator[Client]:
    folder = Path(tmp_path_factory.mktemp("cluster"))
    with ProcessGroup(folder / "logs") as group:
        scheduler = start_scheduler(group, folder)
        start_workers(group, scheduler, config.cluster, folder)
        with connect(scheduler, 20) as client:
            wait_for_workers(client, 1, RANKS, 60)
            yield client


@pytest.fixture(scope="module")
def batches(object_store: ObjectStore) -> list[list[GroupSummary]]:
    made: list[list[GroupSummary]] = []
    for step in range(STEPS):
        groups, _ = make_batch(4, 4, seed=step)
        made.append([])
        for group in groups:
            summary = replace(summary_of(group), key=f"recovery/{step}/{group.unit_id}")
            object_store.put(summary.key, group_to_bytes(group))
            made[-1].append(summary)
    return made


def _claims(client: Client) -> Callable[[int], Claim]:
    return lambda size: claim(size, workers_with(client, TRAINER), (), {})


def _opened(
    client: Client, config: TrainConfig, store: ObjectStore, run: str, life: int = 0
) -> Trainers:
    cache = str(Path(config.model.path).parent / "cache")
    spec = TrainerSpec(run, life, config, store.location, cache, None)
    return Trainers(client, spec, "127.0.0.1", _claims(client), LOG)


def _trained(
    trainers: Trainers,
    batches: list[list[GroupSummary]],
    before: Callable[[str], None],
    said: list[str],
) -> Checkpoint:
    """A run of three steps with a checkpoint in the middle, each stage tried again as Prefect does.

    Args:
        before: called with each stage's name ahead of it.
        said: takes what broken epochs said.
    """

    def stage(name: str, work: Callable[[], T]) -> T:
        before(name)
        for _ in range(2):
            try:
                return work()
            except GangError as error:
                LOG.warning("%s: %s", name, error)
                said.append(str(error))
        return work()

    try:
        stage("publish-0", lambda: trainers.publish(0))
        made: Checkpoint | None = None
        for step, batch in enumerate(batches):
            stage(f"update-{step}", lambda s=step, b=batch: trainers.update(s, b))
            stage(f"publish-{step + 1}", lambda s=step: trainers.publish(s + 1))
            if step != 1:
                made = stage(
                    f"checkpoint-{step + 1}", lambda s=step: trainers.save_checkpoint(s + 1, {})
                )
        assert made is not None
        return made
    finally:
        trainers.close()


@pytest.fixture(scope="module")
def undisturbed(
    client: Client,
    config: TrainConfig,
    object_store: ObjectStore,
    batches: list[list[GroupSummary]],
) -> Checkpoint:
    trainers = _opened(client, config, object_store, "undisturbed")
    return _trained(trainers, batches, lambda _: None, [])


def _versions(store: ObjectStore, run: str) -> dict[int, dict[str, str]]:
    """Trained steps -> digests of the version's tensors."""
    return {
        trained: {t.name: t.digest for t in load_manifest(store, run, ref).tensors}
        for trained, ref in lineage(store, run, 0).items()
    }


FAULTS = [
    ("publish-0", "join", 1, 1, "kill"),
    ("publish-0", "form", 1, 1, "freeze"),
    ("publish-0", "join", 0, 1, "freeze"),
    ("publish-0", "committed", 0, 1, "kill"),
    ("update-0", "forward", 1, 1, "kill"),
    ("update-1", "all_reduce", 0, 2, "kill"),
    ("update-2", "forward", 0, 2, "freeze"),
    ("update-2", "forward", 1, 2, "raise"),
    ("publish-2", "upload", 1, 1, "kill"),
    ("publish-3", "commit", 0, 1, "kill"),
    ("publish-3", "committed", 0, 1, "kill"),
    ("checkpoint-3", "save", 1, 1, "kill"),
]


@pytest.mark.parametrize(("stage", "place", "rank", "visit", "how"), FAULTS)
def test_a_rank_that_fails_changes_nothing(
    client: Client,
    config: TrainConfig,
    object_store: ObjectStore,
    batches: list[list[GroupSummary]],
    undisturbed: Checkpoint,
    monkeypatch: pytest.MonkeyPatch,
    stage: str,
    place: str,
    rank: int,
    visit: int,
    how: faults.How,
) -> None:
    monkeypatch.setattr(silence, "SILENT_S", 6.0)
    wait_for_workers(client, 1, RANKS, 60)
    run = f"{stage}-{place}-{rank}-{how}"
    struck: list[str] = []

    def strike(name: str) -> None:
        if name == stage:
            address = workers_with(client, TRAINER)[rank]
            client.run(faults.arm, place, visit, how, workers=[address])
            struck.append(address)

    trainers = _opened(client, config, object_store, run)
    said: list[str] = []
    made = _trained(trainers, batches, strike, said)
    assert struck
    why = {"kill": "died", "freeze": "gave no sign of life", "raise": "failed: InjectedError"}[how]
    assert f"trainer rank {rank} on {struck[0]} {why}" in said[0], "it names who it was, and why"
    if how != "raise":
        assert struck[0] not in workers_with(client, TRAINER), "the fault did not strike"
    assert made.records == undisturbed.records, "other bits than without the fault"
    assert made.optimizer_steps == undisturbed.optimizer_steps
    versions = _versions(object_store, run)
    assert sorted(versions) == [0, 1, 2, 3]
    assert versions == _versions(object_store, "undisturbed")
    refs = lineage(object_store, run, 0)
    assert {trained: ref.version for trained, ref in refs.items()} == {n: n for n in range(4)}
    kinds = {n: load_manifest(object_store, run, ref).kind for n, ref in refs.items()}
    assert kinds == {0: "anchor", 1: "delta", 2: "delta", 3: "delta"}, "nobody loads an anchor more"


def test_a_rank_that_dies_after_its_part_while_others_are_at_theirs(
    client: Client,
    config: TrainConfig,
    object_store: ObjectStore,
    batches: list[list[GroupSummary]],
    undisturbed: Checkpoint,
) -> None:
    """Dask then loses an answer that was there already, and would ask another worker for it."""
    wait_for_workers(client, 1, RANKS, 60)
    trainers = _opened(client, config, object_store, "early")
    deaths: list[threading.Thread] = []

    def strike(name: str) -> None:
        if name != "checkpoint-1":
            return
        first, second = workers_with(client, TRAINER)
        client.run(faults.arm, "save", 1, "linger", workers=[second])
        (pid,) = cast("dict[str, int]", client.run(os.getpid, workers=[first])).values()

        def kill_in_time() -> None:
            def states() -> tuple[bool, bool]:
                at = cast("dict[str, bool]", client.run(faults.at_work, workers=[first, second]))
                return at[first], at[second]

            assert eventually(lambda: states() == (False, True), 30)
            os.kill(pid, signal.SIGKILL)

        deaths.append(threading.Thread(target=kill_in_time))
        deaths[0].start()

    said: list[str] = []
    made = _trained(trainers, batches, strike, said)
    deaths[0].join()
    assert made.records == undisturbed.records
    assert _versions(object_store, "early") == _versions(object_store, "undisturbed")
    assert any("died" in one for one in said), said


def test_a_store_that_is_away_while_the_gang_forms(
    client: Client,
    config: TrainConfig,
    object_store: ObjectStore,
    batches: list[list[GroupSummary]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wait_for_workers(client, 1, RANKS, 60)
    good = trainers_module.fence_off
    answers: list[Exception | None] = [StoreError("away"), None]

    def fence_off(*arguments: Any) -> Any:
        if (error := answers.pop(0)) is not None:
            raise error
        return good(*arguments)

    monkeypatch.setattr(trainers_module, "fence_off", fence_off)
    trainers = _opened(client, config, object_store, "away")
    try:
        with pytest.raises(StoreError, match="away"):
            trainers.publish(0)
        assert trainers.publish(0).version == 0
    finally:
        trainers.close()


def test_an_error_that_comes_again_ends_the_run(
    client: Client,
    config: TrainConfig,
    object_store: ObjectStore,
    batches: list[list[GroupSummary]],
    undisturbed: Checkpoint,
) -> None:
    """A fault of the code or the data, not of a machine: no new gang gets past it."""

    def arm() -> None:
        wait_for_workers(client, 1, RANKS, 60)
        client.run(faults.arm, "forward", 1, "raise", workers=workers_with(client, TRAINER))

    trainers = _opened(client, config, object_store, "always")
    try:
        trainers.publish(0)
        arm()
        with pytest.raises(GangError, match="InjectedError: at forward; update-0 of epoch 1"):
            trainers.update(0, batches[0])
        assert trainers.publish(0).version == 0, "the gang forms anew meanwhile"
        arm()
        with pytest.raises(StageFailed, match=r"update-0 of epoch 2 .* as it was before; mend"):
            trainers.update(0, batches[0])
        trainers.update(0, batches[0])
        trainers.publish(1)
    finally:
        trainers.close()
    versions = _versions(object_store, "always")
    assert versions[1] == _versions(object_store, "undisturbed")[1]


def test_a_flow_that_was_thought_dead_can_do_nothing_to_its_successor(
    client: Client,
    config: TrainConfig,
    object_store: ObjectStore,
    batches: list[list[GroupSummary]],
    undisturbed: Checkpoint,
) -> None:
    wait_for_workers(client, 1, RANKS, 60)
    before = workers_with(client, TRAINER)
    old = _opened(client, config, object_store, "resumed")
    young = _opened(client, config, object_store, "resumed", life=1)
    try:
        old.publish(0)
        old.update(0, batches[0])
        assert young.publish(0).version == 0
        with pytest.raises(GangError, match="serves another gang by now"):
            old.publish(1)
        young.update(0, batches[0])
        with pytest.raises(StoreConflict, match="belongs to a younger flow"):
            old.publish(1)
        young.publish(1)
        young.save_checkpoint(1, {})
        assert workers_with(client, TRAINER) == before, "nobody was restarted"
    finally:
        old.close()
        young.close()
    versions = _versions(object_store, "resumed")
    assert versions[1] == _versions(object_store, "undisturbed")[1]


def test_a_gang_that_is_short_says_who_has_the_workers(
    client: Client, config: TrainConfig, object_store: ObjectStore
) -> None:
    wait_for_workers(client, 1, RANKS, 60)
    spec = TrainerSpec("short", 0, config, object_store.location, "/nowhere", None)
    short = config.cluster.model_copy(update={"wait_s": 1.0})
    spec = replace(spec, config=config.model_copy(update={"cluster": short}))
    held = {"other": workers_with(client, TRAINER)[:1]}

    def refused(size: int) -> Claim:
        return claim(size, workers_with(client, TRAINER), (), cast("dict", held))

    trainers = Trainers(client, spec, "127.0.0.1", refused, LOG)
    with pytest.raises(ClusterError, match=r"2 trainer workers.*has 2.*1 by run other.*after 1 s"):
        trainers.publish(0)
    trainers.close()
