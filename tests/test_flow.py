"""The whole flow through the real parts: Prefect, Dask, vLLM, torch, SeaweedFS, the miniature.

One standing stack for the module (what `infra.local up` starts), two runs on it: the second must
load nothing again. The first is long enough that reward must rise.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any, cast

import pytest
from distributed import Client
from prefect.client.orchestration import get_client
from typer.testing import CliRunner

from flows.evaluate import Scores, evaluate
from flows.train import Result, train
from infra.local import prefect_api
from infra.object_store import read_credentials
from infra.processes import environment
from infra.state import read_record
from tasks.cluster import ROLLOUT, TRAINER, submit_to, workers_with
from tasks.config import Overrides
from tasks.errors import ConfigError
from tasks.rollout.worker import Warm
from tasks.store import ObjectStore, StoreLocation
from tasks.warm import warm
from tasks.weights.__main__ import app
from tasks.weights.commit import load_manifest, read_ref
from tasks.weights.digest import tensor_digest
from tasks.weights.final import fetch_checkpoint
from tasks.weights.transfer import EngineWeights

ROOT = Path(__file__).resolve().parent.parent
STEPS = 8
FIRST: dict[str, Any] = {
    "training": {"steps": STEPS, "checkpoint_every": STEPS},
    "data": {"held_out_questions": 60},
    "evaluation": {"every": STEPS},
}
# Three steps, small: the mechanics alone.
SECOND = {
    "seed": 1,
    "training": {"steps": 3, "mini_batch_size": 12, "checkpoint_every": 2},
    "rollout": {"questions_per_step": 6, "group_size": 4},
    "data": FIRST["data"],  # another corpus would be another index
    "evaluation": {"every": 3},
}

pytestmark = pytest.mark.timeout(600)


def overrides(tree: dict[str, Any]) -> Any:
    return Overrides.model_validate(tree)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A standing stack in a folder of its own, with the environment a user would set."""
    folder = tmp_path_factory.mktemp("standing")
    with environment({"KINDLING_HOME": str(folder)}):
        _local("up")
        try:
            with prefect_api(folder):
                yield folder
        finally:
            _local("down")


def _local(command: str) -> None:
    subprocess.run(
        [sys.executable, "-m", "infra.local", command],
        cwd=ROOT,
        env=dict(os.environ),
        check=True,
        timeout=120,
    )


@pytest.fixture(scope="module")
def first(home: Path) -> Result:
    return train(preset="tiny", overrides=overrides(FIRST))


@pytest.fixture(scope="module")
def second(home: Path, first: Result) -> Result:
    return train(preset="tiny", overrides=overrides(SECOND))


@pytest.fixture(scope="module")
def store(home: Path) -> Iterator[ObjectStore]:
    record = read_record(home)
    assert record is not None
    with environment(read_credentials(home / "store").environment()):
        yield ObjectStore(StoreLocation(record.store_endpoint, record.store_bucket))


@pytest.fixture(scope="module")
def client(home: Path) -> Iterator[Client]:
    record = read_record(home)
    assert record is not None
    with Client(record.scheduler, set_as_default=False) as made:
        yield made


def history(store: ObjectStore, result: Result, kind: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in store.get(result.metrics).decode().splitlines()]
    return [row for row in rows if row["kind"] == kind]


def test_reward_rises(first: Result, store: ObjectStore) -> None:
    rewards = [row["batch"]["reward"] for row in history(store, first, "step")]
    assert len(rewards) == STEPS
    assert fmean(rewards[-2:]) > fmean(rewards[:2]) + 0.1, rewards


def test_every_step_is_recorded_whole(first: Result, store: ObjectStore) -> None:
    for number, row in enumerate(history(store, first, "step")):
        assert (row["step"], row["version"]) == (number, number + 1)
        assert row["batch"]["groups"] == 24
        assert row["batch"]["trajectories"] == 192
        assert 0 < row["delta_bytes"] < 10 * row["full_bytes"]
        assert row["update"]["optimizer_steps"] == 2
        assert abs(row["update"]["mismatch_kl"]) < 1e-2, "sampler and trainer see the same weights"
        assert set(row["seconds"]) == {"rollout", "update", "publish"}
    assert len(history(store, first, "evaluation")) == 2


def test_the_second_run_loads_nothing_again(
    first: Result, second: Result, store: ObjectStore
) -> None:
    nothing = {"engines": 0, "indexes": 0, "anchors": 0, "trainer_bases": 0}
    (loads,) = history(store, second, "loads")
    assert {name: loads[name] for name in nothing} == nothing
    (loads,) = history(store, first, "loads")
    assert {name: loads[name] for name in nothing} == {
        "engines": 1,
        "indexes": 1,
        "anchors": 1,
        "trainer_bases": 2,
    }


def test_two_runs_store_the_base_anchor_once(
    first: Result, second: Result, store: ObjectStore
) -> None:
    anchors = []
    for result in (first, second):
        ref = read_ref(store, result.run)
        while ref is not None:
            manifest = load_manifest(store, result.run, ref)
            ref = manifest.parent
        anchors.append([file.digest for file in manifest.anchor])
    assert anchors[0] == anchors[1]


def _engine_digests() -> dict[str, str]:
    """On a rollout worker: the digest of every checkpoint tensor as its engine holds it."""
    weights = cast(EngineWeights, warm("rollout", Warm).weights)
    return {name: tensor_digest(bits) for name, bits in weights.gather().items()}


def test_engines_hold_what_the_trainers_published(
    second: Result, store: ObjectStore, client: Client
) -> None:
    ref = read_ref(store, second.run)
    assert ref is not None
    assert ref.version == 3
    wanted = {t.name: t.digest for t in load_manifest(store, second.run, ref).tensors}
    for address in workers_with(client, ROLLOUT):
        found = submit_to(client, address, f"digests-{address}", _engine_digests).result()
        assert found == wanted


def test_a_run_s_versions_are_all_right(second: Result) -> None:
    """As a user looks at them: in the store of the standing services."""
    found = CliRunner().invoke(app, ["verify", second.run, "--json"])
    assert found.exit_code == 0, found.output
    rows = json.loads(found.stdout)["versions"]
    assert [row["check"] for row in rows] == ["ok"] * 4
    assert all(row["limit_bits"] > 0 for row in rows[1:])


def test_the_final_checkpoint_loads_in_transformers(
    second: Result, store: ObjectStore, tmp_path: Path
) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = fetch_checkpoint(store, second.checkpoint, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("<search>", return_tensors="pt").input_ids
    assert torch.isfinite(model(input_ids=ids).logits).all()


def test_prefect_shows_the_run(second: Result) -> None:
    async def look() -> tuple[list[str], set[str | None]]:
        async with get_client() as api:
            flows = await api.read_flow_runs(limit=10)
            run = next(r for r in flows if r.parameters.get("overrides") and _seed(r) == 1)
            tasks = await api.read_task_runs()
            names = [t.name for t in tasks if t.flow_run_id == run.id]
            artifacts = await api.read_artifacts()
            return names, {a.key for a in artifacts if a.flow_run_id == run.id}

    names, keys = asyncio.run(look())
    for step in range(3):
        assert {f"rollout-{step}", f"update-{step}", f"publish-{step}"} <= set(names)
    assert "evaluate-2" in names
    assert {"progress", "metrics", "exact-match", "trajectories", "weights"} <= keys


def _seed(run: Any) -> int | None:
    return (run.parameters["overrides"] or {}).get("seed")


def test_a_run_is_resumed_from_its_checkpoint(
    second: Result, store: ObjectStore, client: Client
) -> None:
    longer = {**SECOND, "training": {**SECOND["training"], "steps": 4}}
    resumed = train(preset="tiny", overrides=overrides(longer), resume=second.run)
    assert resumed.run == second.run
    # The checkpoint after step 2 (the last) is published anew, then step 3 is trained.
    assert [row["step"] for row in history(store, resumed, "step")] == [0, 1, 2, 3]
    assert resumed.version == second.version + 2
    assert len(workers_with(client, TRAINER)) == 2


def test_resuming_with_other_settings_is_refused(second: Result) -> None:
    other = {**SECOND, "rollout": {**SECOND["rollout"], "temperature": 0.5}}
    with pytest.raises(ConfigError, match=r"rollout\.temperature was 1\.0 and is 0\.5"):
        train(preset="tiny", overrides=overrides(other), resume=second.run)
    with pytest.raises(ConfigError, match="does not exist"):
        train(preset="tiny", overrides=overrides(SECOND), resume="no-such-run")


def test_evaluate_any_version_or_checkpoint(second: Result) -> None:
    few = overrides({"data": {"held_out_questions": 10}})
    newest: Scores = evaluate(preset="tiny", run=second.run, overrides=few)
    base: Scores = evaluate(preset="tiny", run=second.run, version=0, overrides=few)
    same: Scores = evaluate(preset="tiny", checkpoint="deployments/policies/tiny", overrides=few)
    assert newest.version > 0
    assert base.questions == same.questions == 10
    assert (base.greedy_em, base.greedy_f1) == (same.greedy_em, same.greedy_f1)
    with pytest.raises(ConfigError, match="give either"):
        evaluate(preset="tiny", overrides=few)
