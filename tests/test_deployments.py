"""The deployments name flows and presets that exist, and the scheduled ones cannot pile up."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect import Flow

from infra.zombies import HEARTBEAT_S
from tasks.presets import preset_names, resolve

pytestmark = [pytest.mark.fast, pytest.mark.timeout(60)]

FOLDER = Path(__file__).resolve().parent.parent / "deployments"


@pytest.fixture(scope="module")
def deployments() -> dict[str, dict[str, Any]]:
    content = yaml.safe_load((FOLDER / "prefect.yaml").read_text())
    return {f"{_flow_of(entry).name}/{entry['name']}": entry for entry in content["deployments"]}


def _flow_of(entry: dict[str, Any]) -> Flow[Any, Any]:
    path, name = entry["entrypoint"].split(":")
    found = getattr(importlib.import_module(path.removesuffix(".py").replace("/", ".")), name)
    assert isinstance(found, Flow)
    return found


def test_what_is_deployed(deployments: dict[str, dict[str, Any]]) -> None:
    assert set(deployments) == {
        "train/tiny",
        "train/nightly",
        "evaluate/evaluate",
        "sweep/tiny",
        "warm-start/warm-start",
        "collect-garbage/collect-garbage",
    }


def test_entrypoints_and_parameters_are_real(deployments: dict[str, dict[str, Any]]) -> None:
    for entry in deployments.values():
        assert set(entry["parameters"]) <= set(_flow_of(entry).parameters.properties)
        resolve(entry["parameters"]["preset"])


def test_the_nightly_run_is_skipped_while_one_runs(
    deployments: dict[str, dict[str, Any]],
) -> None:
    nightly = deployments["train/nightly"]
    (schedule,) = nightly["schedules"]
    assert schedule["timezone"]
    assert nightly["concurrency_limit"] == {"limit": 1, "collision_strategy": "CANCEL_NEW"}


def test_garbage_is_collected_weekly_and_only_once_at_a_time(
    deployments: dict[str, dict[str, Any]],
) -> None:
    weekly = deployments["collect-garbage/collect-garbage"]
    (schedule,) = weekly["schedules"]
    assert schedule["cron"].split()[2:4] == ["*", "*"]
    assert schedule["cron"].split()[4] == "0"  # Sundays
    assert schedule["timezone"]
    assert weekly["concurrency_limit"] == {"limit": 1, "collision_strategy": "CANCEL_NEW"}
    # The schedule collects; a run by hand shows first, and cannot ask for less than is safe.
    assert weekly["parameters"]["dry_run"] is False
    form = importlib.import_module("flows.collect_garbage").collect_garbage.parameters.properties
    assert form["dry_run"]["default"] is True
    assert (form["grace_hours"]["default"], form["grace_hours"]["minimum"]) == (24.0, 1)
    assert form["keep_versions"]["minimum"] == 0


def test_runs_send_the_heartbeats_that_zombies_lack(
    deployments: dict[str, dict[str, Any]],
) -> None:
    for entry in deployments.values():
        environment = entry["work_pool"]["job_variables"]["env"]
        assert environment == {"PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(HEARTBEAT_S)}


def test_the_form_has_bounds_and_help() -> None:
    flow: Flow = importlib.import_module("flows.train").train
    schema = flow.parameters.model_dump()
    group = schema["definitions"]["RolloutOverrides"]["properties"]["group_size"]
    assert group["description"]
    assert any(choice.get("minimum") == 2 for choice in group["anyOf"])


def test_every_preset_resolves() -> None:
    assert preset_names() == ["qwen2.5-3b", "smollm2", "tiny"]
    for name in preset_names():
        resolve(name)
    recipe = resolve("qwen2.5-3b")
    assert (recipe.cluster.rollout_workers, recipe.cluster.trainer_ranks) == (14, 2)
    assert recipe.rollout.questions_per_step * recipe.rollout.group_size == 2560


def test_flow_modules_import_without_torch_or_vllm() -> None:
    """Prefect imports them for hooks and forms, on machines that have neither."""
    import subprocess
    import sys

    code = (
        "import sys, flows.train, flows.evaluate, flows.sweep, flows.warm_start; "
        "import flows.collect_garbage, flows.serve_retriever; "
        "heavy = {'torch', 'vllm', 'transformers'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], cwd=FOLDER.parent, check=True, timeout=60)
