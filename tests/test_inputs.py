"""Bad input is refused before anything starts: no service, no folder, no run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tasks.config import TrainConfig
from tasks.errors import ConfigError, DataError, PolicyError
from tasks.inputs import load_inputs
from tasks.presets import resolve
from tasks.run_record import _differences

pytestmark = [pytest.mark.fast, pytest.mark.timeout(120)]

ROOT = Path(__file__).resolve().parent.parent
TINY = ROOT / "deployments" / "policies" / "tiny"


def tiny(**sections: dict) -> TrainConfig:
    return resolve("tiny", sections)


def test_the_tiny_preset_is_whole(tmp_path: Path) -> None:
    inputs = load_inputs(tiny(), tmp_path)
    assert len(inputs.held_out) == 500
    assert inputs.model_dir == TINY


def test_a_prompt_that_is_too_long(tmp_path: Path) -> None:
    config = tiny(rollout={"max_prompt_tokens": 8})
    with pytest.raises(PolicyError, match="max_prompt_tokens = 8"):
        load_inputs(config, tmp_path)


def test_no_room_in_the_context() -> None:
    with pytest.raises(ConfigError, match=r"model\.context"):
        tiny(model={"context": 96})


def test_a_model_without_safetensors(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(TINY, folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(PolicyError, match=r"no \*\.safetensors"):
        load_inputs(tiny(model={"path": str(folder)}), tmp_path)


def test_a_tokenizer_without_a_chat_template(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(TINY, folder)
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(PolicyError, match="chat template"):
        load_inputs(tiny(model={"path": str(folder)}), tmp_path)
    load_inputs(tiny(model={"path": str(folder), "chat": False}), tmp_path)


def test_held_out_questions_that_are_trained_on(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"500 of 500 held-out .*trained on \(data\.train\)"):
        load_inputs(tiny(data={"held_out": "miniature:train"}), tmp_path)


def test_a_resumed_run_may_not_change_what_it_learns() -> None:
    then = tiny().model_dump(mode="json")
    longer = tiny(training={"steps": 99}, evaluation={"every": 3}, cluster={"trainer_ranks": 1})
    assert not _differences(then, longer.model_dump(mode="json"))
    other = tiny(training={"learning_rate": 1e-5}, data={"train": "x.jsonl"})
    assert len(_differences(then, other.model_dump(mode="json"))) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--preset", "tyni"], "preset 'tyni' does not exist; choose one of"),
        (["--set", "rollout.group_size=1"], "rollout.group_size"),
        (["--set", "rollout.grup_size=4"], "rollout.grup_size: Extra inputs"),
        (["--set", "seed"], "expected section.field=value"),
        (["--set", "model.warm_start=null"], "null cannot be set"),
        (["--set", "data.train=nowhere.jsonl"], "nowhere.jsonl"),
        (["--set", "model.path=nowhere/at/all"], "model path 'nowhere/at/all'"),
    ],
)
def test_the_command_line_says_what_is_wrong(
    arguments: list[str], message: str, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    done = subprocess.run(
        [sys.executable, "-m", "flows.train", *arguments],
        cwd=ROOT,
        env={**os.environ, "KINDLING_HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not home.exists(), "nothing is started or written for a run that cannot be"


def test_a_duplicate_question_is_named(tmp_path: Path) -> None:
    from tasks.data.miniature import generate

    row = json.dumps(generate("held_out")[0])
    path = tmp_path / "twice.jsonl"
    path.write_text(row + "\n" + row + "\n")
    with pytest.raises(DataError, match="mini-held_out-00000"):
        load_inputs(tiny(data={"train": str(path)}), tmp_path)
