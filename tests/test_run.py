"""What a resumed run must share with the run it goes on with."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, cast

import pytest
from safetensors.torch import load_file, save_file

from tasks.data import miniature
from tasks.errors import ConfigError
from tasks.inputs import Inputs, load_inputs
from tasks.presets import resolve
from tasks.run_record import (
    _as_now,
    _differences,
    check_resumable,
    played_otherwise,
    record_run,
)
from tasks.store import ObjectStore
from tests.weights_helpers import MemoryStore

pytestmark = [pytest.mark.fast, pytest.mark.timeout(60)]


def _recorded(**changes: dict[str, Any]) -> dict[str, Any]:
    return resolve("tiny", changes).model_dump(mode="json")


def test_a_run_recorded_before_a_field_existed_can_be_resumed() -> None:
    then = _recorded()
    for section, field in (("training", "advantage"), ("rollout", "reward_timeout_s")):
        del then[section][field]
    assert not _differences(_as_now(then), _recorded())


def test_what_differs_is_named_with_both_values() -> None:
    then, now = _recorded(), _recorded(training={"learning_rate": 0.5}, cluster={"drain_s": 7.0})
    was = then["training"]["learning_rate"]
    found = _differences(_as_now(then), now)
    assert found == [f"training.learning_rate was {was} and is 0.5"]


def test_a_field_that_is_no_more_does_not_hide_a_difference() -> None:
    then = _recorded()
    then["training"]["a_field_of_old"] = 1
    assert _differences(_as_now(then), _recorded()) == []
    found = _differences(_as_now(then), _recorded(training={"learning_rate": 0.5}))
    assert [one.split(" ")[0] for one in found] == ["training.learning_rate"]


def test_a_retriever_may_move_but_not_come_or_go() -> None:
    here, there, none = (
        _recorded(retrieval={"url": url})
        for url in ("http://a/retrieve", "http://b/retrieve", None)
    )
    assert not _differences(here, there)
    assert "retrieval.url" in _differences(here, none)[0]
    assert "retrieval.url" in _differences(none, here)[0]


def test_an_evaluation_that_plays_otherwise_than_its_run_says_in_what() -> None:
    then = _recorded(rollout={"max_search_turns": 1, "group_size": 4}, training={"steps": 3})
    found = played_otherwise(then, resolve("tiny", {"data": {"held_out_questions": 7}}))
    assert found == [
        "data.held_out_questions was 500 and is 7",
        "rollout.max_search_turns was 1 and is 3",
    ]
    assert not played_otherwise(_recorded(), resolve("tiny"))


class OneRun(MemoryStore):
    """What a run's record is kept in."""

    def create(self, key: str, data: bytes) -> None:
        assert self.create_if_absent(key, data)


@pytest.mark.parametrize(
    "changed", ["data.train", "data.held_out", "model.path", "the passages to search"]
)
def test_a_run_is_not_resumed_on_other_contents_of_the_same_name(
    tmp_path: Path, changed: str
) -> None:
    """A file was edited, or a folder written anew, between a run and its resumption."""
    train, held_out, policy = tmp_path / "t.jsonl", tmp_path / "h.jsonl", tmp_path / "policy"
    rows = {train: miniature.generate("train")[:30], held_out: miniature.generate("held_out")[:5]}
    shutil.copytree("deployments/policies/tiny", policy)

    def inputs() -> Inputs:
        for path, lines in rows.items():
            path.write_text("".join(json.dumps(row) + "\n" for row in lines))
        data = {"train": str(train), "held_out": str(held_out), "held_out_questions": 5}
        rollout = {"questions_per_step": 4, "group_size": 2}
        tree = {"data": data, "model": {"path": str(policy)}, "rollout": rollout}
        small = {"training": {"mini_batch_size": 8, "steps": 2}}
        return load_inputs(resolve("tiny", tree | small), tmp_path)

    store = cast(ObjectStore, OneRun())
    record_run(store, "run", inputs(), None)
    check_resumable(store, "run", inputs())
    if changed == "model.path":
        weights = load_file(policy / "model.safetensors")
        weights["model.norm.weight"] += 1
        save_file(weights, policy / "model.safetensors", {"format": "pt"})
    elif changed == "the passages to search":
        rows[train][-1]["context"]["sentences"][0][0] += "And more."
    else:
        rows[train if changed == "data.train" else held_out][-1]["answer"] = "another"
    with pytest.raises(ConfigError, match=f"{changed} had other contents"):
        check_resumable(store, "run", inputs())
