"""The whole flow through the real parts: Prefect, Dask, vLLM, torch, SeaweedFS, the miniature.

One standing stack for the module (what `infra.local up` starts), two runs on it: the second must
load nothing again. The first is long enough that reward must rise.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean
from typing import Any, cast
from uuid import UUID, uuid4

import httpx
import prefect
import pytest
from distributed import Client
from prefect.automations import Automation
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    FlowFilter,
    FlowFilterName,
    FlowRunFilter,
    FlowRunFilterId,
)
from typer.testing import CliRunner

from flows.evaluate import Scores, evaluate
from flows.sweep import sweep
from flows.train import Result, train
from flows.warm_start import warm_start
from infra.local import prefect_api
from infra.object_store import read_credentials
from infra.processes import child_environment, environment
from infra.state import read_record
from infra.zombies import NAME, mark_zombies
from tasks import stages
from tasks.cluster import ROLLOUT, TRAINER, submit_to, workers_with
from tasks.errors import (
    ConfigError,
    DataError,
    GangError,
    MismatchError,
    RunClosed,
    SeedFailed,
    UnitFailed,
)
from tasks.inputs import ensure_index, load_inputs
from tasks.predecessor import mark_crashed
from tasks.presets import Overrides, resolve
from tasks.rollout.worker import Warm
from tasks.run import Run
from tasks.store import ObjectStore, StoreLocation
from tasks.training import stored_policy
from tasks.warm import warm as warm_state
from tasks.weights.__main__ import app
from tasks.weights.commit import load_manifest, read_ref
from tasks.weights.digest import tensor_digest
from tasks.weights.final import fetch_checkpoint
from tasks.weights.transfer import EngineWeights
from tests import chaos
from tests.waiting import eventually

ROOT = Path(__file__).resolve().parent.parent
TINY = "deployments/policies/tiny"
STEPS = 8
FIRST: dict[str, Any] = {
    "training": {"steps": STEPS, "checkpoint_every": STEPS},
    "data": {"held_out_questions": 60},
    "evaluation": {"every": STEPS},
}
# Three steps, small: the mechanics alone.
SECOND = {
    "seed": 1,
    "training": {
        "steps": 3,
        "mini_batch_size": 12,
        "checkpoint_every": 2,
        "zero_variance": "refill",
    },
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
    weights = cast(EngineWeights, warm_state("rollout", Warm).weights)
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
    assert {"progress", "metrics", "exact-match", "trajectories", "weights", "report"} <= keys


def test_zombies_are_marked_by_one_automation(home: Path) -> None:
    assert not mark_zombies(), "`up` has created it"
    found = cast(Automation, Automation.read(name=NAME))
    assert found.enabled


def test_a_warm_start_that_lost_its_worker_is_tried_again(home: Path) -> None:
    tries: list[int] = []

    def make() -> None:
        tries.append(len(tries))
        if len(tries) == 1:
            raise GangError("its worker died")

    @prefect.flow(name="tried-again")
    def tried_again() -> None:
        stages.warm_start(make)

    tried_again()
    assert tries == [0, 1]


SLEEPER = """
import threading
from prefect import flow, task

@task(name="wait")
def wait():
    threading.Event().wait(600)

@flow(name="sleeper")
def sleeper():
    wait()

sleeper()
"""


def test_nothing_of_a_dead_flow_run_shows_as_running(home: Path, tmp_path: Path) -> None:
    (tmp_path / "sleeper.py").write_text(SLEEPER)
    flow = subprocess.Popen([sys.executable, str(tmp_path / "sleeper.py")])
    with get_client(sync_client=True) as api:

        def states() -> dict[str, str | None]:
            """Of the flow run and its task."""
            wanted = FlowFilter(name=FlowFilterName(any_=["sleeper"]))
            runs = api.read_flow_runs(flow_filter=wanted)
            tasks = api.read_task_runs(flow_filter=wanted)
            return {str(one.id): one.state_name for one in (*runs, *tasks)}

        running = ["Running", "Running"]
        try:
            assert eventually(lambda: list(states().values()) == running, 60)
        finally:
            flow.kill()
            flow.wait()
        assert list(states().values()) == running, "nobody has said otherwise"
        dead = next(iter(states()))
        mark_crashed(dead, "another", logging.getLogger("tests.flow"))
        assert list(states().values()) == ["Crashed", "Crashed"]
        mark_crashed(str(uuid4()), "another", logging.getLogger("tests.flow"))


def test_the_report_opens_from_the_run_s_page(
    second: Result, store: ObjectStore, home: Path
) -> None:
    """By its link, without credentials; and as a file, after the store has stopped."""

    async def links() -> list[str]:
        async with get_client() as api:
            found = await api.read_artifacts()
            return [str(a.data) for a in found if a.key == "report"]

    key = f"runs/{second.run}/evaluations/{second.version:06d}.html"
    (link,) = [found for found in asyncio.run(links()) if key in found]
    url = re.search(r"\((http[^)]*)\)", link)
    assert url is not None, link
    answer = httpx.get(url[1])
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.content == store.get(key)
    assert answer.content == (home / "reports" / second.run / Path(key).name).read_bytes()
    assert "Against version 0" in answer.text
    # Changed by a letter, it opens nothing.
    assert httpx.get(url[1].replace("000003.html", "000000.html")).status_code == 403


def test_uniform_groups_are_made_up_for(second: Result, store: ObjectStore) -> None:
    rows = [row["batch"] for row in history(store, second, "step")]
    for row in rows:
        assert row["groups"] == 6 + row["refilled_groups"]
        uniform = round(row["uniform_groups"] * row["groups"])
        assert 0 < row["trained_groups"] == min(6, row["groups"] - uniform)
    assert sum(row["refilled_groups"] for row in rows) > 0, "this policy is not that even"


def _seed(run: Any) -> int | None:
    return (run.parameters["overrides"] or {}).get("seed")


def test_a_run_is_resumed_from_its_checkpoint(
    second: Result, store: ObjectStore, client: Client
) -> None:
    longer = {**SECOND, "training": {**SECOND["training"], "steps": 4}}
    alarmed = {**longer, "training": {**longer["training"], "mismatch_alarm": 1e-15}}
    with pytest.raises(MismatchError, match=r"step 3: .*no optimizer step was taken"):
        train(preset="tiny", overrides=overrides(alarmed), resume=second.run)
    resumed = train(preset="tiny", overrides=overrides(longer), resume=second.run)
    assert resumed.run == second.run
    assert [row["step"] for row in history(store, resumed, "step")] == [0, 1, 2, 3]
    # What had been evaluated is not evaluated again.
    assert [row["step"] for row in history(store, resumed, "evaluation")] == [0, 3, 4]
    # The version that the checkpoint is of was there already, bit for bit.
    assert resumed.version == second.version + 1
    # The flow that was stopped had sampled step 3, and its groups were taken up.
    units = [name.rsplit("-", 1)[0] for name in _groups(store, second.run, 3)]
    assert len(units) == len(set(units)) >= 6
    assert len(workers_with(client, TRAINER)) == 2


def _groups(store: ObjectStore, run: str, step: int) -> list[str]:
    keys = store.list(f"runs/{run}/groups/train-{step:06d}-")
    return [key.removesuffix(".safetensors").rsplit("/", 1)[1] for key in keys]


# One question at a time on the engine: the same bits, however often the flow dies.
EXACT = chaos.settings(steps=3)


@pytest.fixture(scope="module")
def undisturbed(home: Path) -> Result:
    return train(preset="tiny", overrides=overrides(EXACT))


def _until(check: Callable[[], Any], within_s: float, process: subprocess.Popen[bytes]) -> Any:
    deadline, pause = time.monotonic() + within_s, threading.Event()
    while not (found := check()):
        assert process.poll() is None, "the flow ended by itself"
        assert time.monotonic() < deadline, "nothing happened in time"
        pause.wait(0.05)
    return found


def test_a_run_whose_flow_dies_twice_reaches_the_same_bits(
    home: Path, store: ObjectStore, client: Client, undisturbed: Result
) -> None:
    before = chaos.runs(store)
    flow = chaos.begin(EXACT)
    (run,) = _until(lambda: chaos.runs(store) - before, 60, flow)
    _until(lambda: store.list(f"runs/{run}/accepted/train-000001/"), 120, flow)
    flow.send_signal(signal.SIGTERM)  # as a cancellation does
    began = time.monotonic()
    assert flow.wait(10) != 0
    while _at_work(client) and time.monotonic() - began < 15:
        threading.Event().wait(0.2)
    assert _at_work(client) == [], "the workers are not free"
    assert time.monotonic() - began < 10

    flow = chaos.begin(EXACT, run)
    _until(lambda: _head_version(store, run) >= 2, 120, flow)
    flow.send_signal(signal.SIGSTOP)  # else it might be through before it is killed
    with pytest.raises(RunClosed, match="already open"):
        train(preset="tiny", overrides=overrides(EXACT), resume=run)
    flow.kill()
    flow.wait()
    resumed = train(preset="tiny", overrides=overrides(EXACT), resume=run)

    assert (resumed.run, resumed.version) == (run, undisturbed.version)
    ended = asyncio.run(_states(run, store))
    assert [flow for flow, _ in ended] == ["Crashed", "Crashed", "Completed"]
    unended = {"Running", "Pending", "Scheduled"}
    assert not [task for _, tasks in ended for task in tasks if task in unended]
    chaos.check(store, run, undisturbed.run, steps=3)
    assert resumed.last_em == undisturbed.last_em
    assert [row["step"] for row in history(store, resumed, "step")] == [0, 1, 2]
    assert [row["step"] for row in history(store, resumed, "evaluation")] == [0, 3]


async def _states(run: str, store: ObjectStore) -> list[tuple[str, list[str]]]:
    """The flow runs that had a run open, in order: their states, and those of their tasks."""
    found = []
    async with get_client() as api:
        for life in sorted(store.list(f"runs/{run}/lives/")):
            flow_run = await api.read_flow_run(UUID(json.loads(store.get(life))["flow_run"]))
            mine = FlowRunFilter(id=FlowRunFilterId(any_=[flow_run.id]))
            tasks = await api.read_task_runs(flow_run_filter=mine)
            found.append((str(flow_run.state_name), [str(t.state_name) for t in tasks]))
    return found


def _head_version(store: ObjectStore, run: str) -> int:
    ref = read_ref(store, run)
    return -1 if ref is None else ref.version


def _at_work(client: Client) -> list[str]:
    """Keys of what runs on any worker."""
    running = cast("dict[str, list[str]]", client.run(_running_here))
    return [key for keys in running.values() for key in keys]


def test_deaths_at_random_change_nothing(
    home: Path, store: ObjectStore, undisturbed: Result
) -> None:
    """Three of them; `python -m tests.chaos` makes more."""
    disturbed = chaos.Chaos(home, seed=1)
    longer = chaos.settings(steps=6)
    name = disturbed.run(longer, kills=3)
    other = train(preset="tiny", overrides=overrides(longer), resume=undisturbed.run)
    chaos.check(store, name, other.run, steps=6)
    for death in disturbed.deaths:
        assert death.stood_s < chaos.LIMIT_S, death


def test_a_retried_flow_run_goes_on_with_its_run(
    home: Path, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What Prefect does for a flow with retries, or a user with the UI's button."""
    good, tries = stages.record, []

    def record(run: Run, batch: Any, *rest: Any) -> Any:
        tries.append((run.name, batch.step))
        if tries == [(run.name, 0), (run.name, 1)]:
            raise UnitFailed("told to fail")
        return good(run, batch, *rest)

    monkeypatch.setattr(stages, "record", record)
    result = train.with_options(retries=1)(preset="tiny", overrides=overrides(EXACT))
    assert [step for _, step in tries] == [0, 1, 0, 1, 2]
    assert {run for run, _ in tries} == {result.run}
    assert result.version == 3


def test_resuming_with_other_settings_is_refused(second: Result) -> None:
    other = {**SECOND, "rollout": {**SECOND["rollout"], "temperature": 0.5}}
    with pytest.raises(ConfigError, match=r"rollout\.temperature was 1\.0 and is 0\.5"):
        train(preset="tiny", overrides=overrides(other), resume=second.run)
    with pytest.raises(ConfigError, match="does not exist"):
        train(preset="tiny", overrides=overrides(SECOND), resume="no-such-run")


def test_evaluate_any_version_or_checkpoint(second: Result, tmp_path: Path) -> None:
    few = overrides({"data": {"held_out_questions": 10}, "evaluation": {"samples": 2}})
    newest: Scores = evaluate(
        preset="tiny", run=second.run, against=f"{second.run}:0", overrides=few
    )
    base = newest.against
    assert base is not None
    same: Scores = evaluate(preset="tiny", checkpoint=TINY, overrides=few)
    assert newest.version > 0
    assert (base.version, base.of) == (0, second.run)
    for one in newest.compared:
        mine, other = (getattr(s, f"{one.mode}_{one.metric.lower()}") for s in (newest, base))
        assert (one.first, one.second) == pytest.approx((mine, other))
        assert one.interval[0] - 1e-9 <= one.difference <= one.interval[1] + 1e-9
        assert one.difference == pytest.approx(mine - other)
    assert len(newest.compared) == 4
    assert "bridge" in newest.line("evaluate", 1.0)
    assert base.questions == same.questions == 10
    assert (base.greedy_em, base.greedy_f1) == (same.greedy_em, same.greedy_f1)
    with pytest.raises(ConfigError, match="give either"):
        evaluate(preset="tiny", overrides=few)
    # Of another architecture, before an engine fails on it.
    alien = tmp_path / "alien"
    shutil.copytree(TINY, alien)
    layout = json.loads((alien / "config.json").read_text())
    (alien / "config.json").write_text(json.dumps(layout | {"num_attention_heads": 8}))
    with pytest.raises(ConfigError, match=r"another architecture.*num_attention_heads is 8"):
        evaluate(preset="tiny", overrides=few, checkpoint=str(alien))
    with pytest.raises(ConfigError, match=r"another architecture.*num_attention_heads is 8"):
        evaluate(preset="tiny", overrides=few, run=second.run, against=str(alien))
    # Named wrongly, the second is refused before the first is evaluated.
    for against, problem in ((f"{second.run}:99", "not 99"), ("a:b", "expected RUN")):
        with pytest.raises(ConfigError, match=problem):
            evaluate(preset="tiny", run=second.run, against=against, overrides=few)


def test_a_seed_that_fails_does_not_lose_the_others(
    second: Result,
    store: ObjectStore,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    good = stages.record

    def record(run: Run, *rest: Any) -> Any:
        if run.config.seed == 5:
            raise UnitFailed("unit 7 failed on every try")
        return good(run, *rest)

    monkeypatch.setattr(stages, "record", record)
    one = {**SECOND, "seed": 5, "training": {"steps": 1, "mini_batch_size": 12}}
    with pytest.raises(SeedFailed, match=r"1 of 2 runs failed.*default seed 5.*unit 7") as failure:
        sweep(preset="tiny", seeds=2, overrides=overrides({**one, "evaluation": {"every": 1}}))
    (key,) = re.findall(r"sweeps/[\w-]+\.json", str(failure.value))
    failed, done = json.loads(store.get(key))
    assert ("unit 7" in failed["error"], failed["evaluations"]) == (True, [])
    assert [e["step"] for e in done["evaluations"]] == [0, 1]
    assert done["seed"] == 6
    shown = capsys.readouterr().out
    assert "failed" in shown
    assert done["run"] in shown


def test_a_sweep_from_the_shell_prints_its_table_and_keeps_all(
    second: Result, store: ObjectStore
) -> None:
    settings = [
        "training.steps=1",
        "training.mini_batch_size=12",
        "rollout.questions_per_step=6",
        "rollout.group_size=4",
        "data.held_out_questions=60",
        "evaluation.every=1",
    ]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "flows.sweep", "--preset", "tiny", "--seeds", "2"),
            *("--variant", "f1:rollout.reward=f1"),
            *(part for one in settings for part in ("--set", one)),
        ],
        cwd=ROOT,
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    shown = done.stdout.splitlines()
    assert re.match(
        r"tiny: 2 seeds, after 1 steps sampled EM \S+ \[.+\], greedy EM \S+ \[.+\] \(95 % t over "
        r"seeds\), \d+ s a seed, \d+ s in all$",
        shown[-1],
    )
    (key,) = [one for one in store.list("sweeps/") if _runs_of(store, one) == 4]
    runs = json.loads(store.get(key))
    assert [(run["variant"], run["seed"]) for run in runs] == [
        (variant, seed) for seed in (0, 1) for variant in ("default", "f1")
    ]
    for run in runs:
        assert [e["step"] for e in run["evaluations"]] == [0, 1]
        assert any(run["run"] in line for line in shown), "a line a run"

    async def pages() -> list[str]:
        async with get_client() as api:
            return [str(a.data) for a in await api.read_artifacts() if a.key == "sweep"]

    # One after every run, so that a sweep that is stopped has shown what it had.
    of_this = [page for page in asyncio.run(pages()) if runs[0]["run"] in page]
    assert sorted(sum(run["run"] in page for run in runs) for page in of_this) == [1, 2, 3, 4]
    assert all("data:image/png;base64," in page for page in of_this)

    few = overrides({"data": {"held_out_questions": 10}})
    one: Scores = evaluate(preset="tiny", run=runs[0]["run"], against=runs[2]["run"], overrides=few)
    assert one.against is not None
    assert (one.of, one.against.of) == (runs[0]["run"], runs[2]["run"])
    assert len(one.compared) == 4


def _runs_of(store: ObjectStore, key: str) -> int:
    return len(json.loads(store.get(key)))


def test_an_evaluation_searches_over_http_what_it_finds_in_process(home: Path) -> None:
    few = {"data": {"held_out_questions": 10}}
    command = [sys.executable, "-m", "flows.serve_retriever", "--port", "0"]
    service = subprocess.Popen(
        [*command, "--set", "data.held_out_questions=10"],
        cwd=ROOT,
        env=child_environment({"KINDLING_HOME": os.environ["KINDLING_HOME"]}),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert service.stdout is not None
        url = service.stdout.readline().rsplit(" ", 1)[1].strip()
        changes = (few, {**few, "retrieval": {"url": url}})
        here, there = (
            evaluate(preset="tiny", checkpoint=TINY, overrides=overrides(one)) for one in changes
        )
    finally:
        service.kill()
        service.wait()
    assert (there.greedy_em, there.greedy_f1) == (here.greedy_em, here.greedy_f1)


def warm(demonstrations: int) -> dict[str, Any]:
    settings = {"demonstrations": demonstrations, "batch_size": 8}
    return {"model": {"path": "tiny-new", "warm_start": settings}, "data": FIRST["data"]}


def test_a_warm_started_policy_is_made_once(home: Path, store: ObjectStore, tmp_path: Path) -> None:
    folder = tmp_path / "policy"
    made = warm_start(preset="tiny", output=str(folder), overrides=overrides(warm(16)))
    assert made.provenance["steps"] == 2
    assert json.loads((folder / "provenance.json").read_text()) == made.provenance
    assert (folder / "model.safetensors").is_file()
    before = store.listing(made.prefix)
    assert before
    again = warm_start(preset="tiny", overrides=overrides(warm(16)))
    assert (again.prefix, again.provenance) == (made.prefix, made.provenance)
    after = store.listing(made.prefix)
    assert all(then.age_s <= now.age_s for then, now in zip(before, after, strict=True))
    with pytest.raises(ConfigError, match="exists; name a folder that does not"):
        warm_start(preset="tiny", output=str(folder), overrides=overrides(warm(16)))
    with pytest.raises(ConfigError, match="warm_start is not set"):
        warm_start(preset="tiny")

    seen = {"train": "miniature:held_out", "held_out": "miniature:train", "held_out_questions": 9}
    known = overrides({"model": {"path": str(folder)}, "data": seen})
    with pytest.raises(DataError, match=r"9 of 9 held-out questions.*also trained on .*policy"):
        evaluate(preset="tiny", checkpoint=str(folder), overrides=known)


def test_a_warm_start_whose_flow_has_gone_stops(
    home: Path, store: ObjectStore, client: Client
) -> None:
    """Dask itself cannot stop the thread, and the worker would be busy for the next run."""
    config = resolve("tiny", warm(4000))
    inputs = load_inputs(config, home / "cache")
    ensure_index(inputs, store)
    order = stored_policy.Order(
        config, list(inputs.train), inputs.index_key, str(home / "cache"), "policies/abandoned/"
    )
    address = workers_with(client, TRAINER)[0]
    begun = threading.Event()
    client.subscribe_topic(stored_policy.TOPIC, lambda _: begun.set())
    assert client.scheduler is not None
    with Client(client.scheduler.addr, set_as_default=False) as flow:
        arguments = (order, store.location)
        future = submit_to(flow, address, "abandoned", stored_policy._make_here, *arguments)
        assert begun.wait(60)
        assert future.status == "pending"
    deadline = time.monotonic() + 30
    while _busy(client, address) and time.monotonic() < deadline:
        threading.Event().wait(0.2)
    assert not _busy(client, address)
    assert not stored_policy.is_made(store, order.prefix)
    client.unsubscribe_topic(stored_policy.TOPIC)


def _busy(client: Client, address: str) -> bool:
    running: Any = client.run(_running_here, workers=[address])
    return "abandoned" in running[address]


def _running_here(dask_worker: Any) -> list[str]:
    return [str(key) for key in dask_worker.active_threads.values()]
