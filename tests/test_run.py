"""What a resumed run must share with the run it goes on with."""

from __future__ import annotations

from typing import Any

import pytest

from tasks.presets import resolve
from tasks.run import _as_now, _differences, played_otherwise

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
    found = played_otherwise(then, resolve("tiny"))
    assert found == ["rollout.max_search_turns was 1 and is 3"]
    assert not played_otherwise(_recorded(), resolve("tiny"))
