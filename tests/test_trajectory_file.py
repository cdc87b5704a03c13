"""Files of trajectories: what is learned of them; bad ones are refused by line and field."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.config import TrainConfig
from tasks.errors import ConfigError, DataError
from tasks.inputs import load_inputs
from tasks.presets import resolve
from tasks.rollout.protocol import SearchProtocol
from tasks.training.demonstrations import Demonstration
from tasks.training.policy import load_tokenizer
from tasks.training.trajectory_file import parse_trajectories

pytestmark = [pytest.mark.fast, pytest.mark.timeout(120)]

TINY = Path(__file__).resolve().parent.parent / "deployments" / "policies" / "tiny"
QWEN = Path(__file__).resolve().parents[2] / "shared" / "tokenizers" / "qwen2.5"
QUESTION = "Who directed Crimson Station?"
SEARCH = "<think> I look it up. </think><search> Crimson Station </search>"
SHOWN = "Doc 1(Title: Crimson Station) <b>Hugo</b> Novak. <answer> no </answer>\n"
ANSWER = "<answer> Hugo Novak </answer>"
Line = dict[str, Any]


def line(*texts: str, question: str = QUESTION) -> Line:
    roles = ("policy", "environment")
    turns = [{"role": roles[i % 2], "text": text} for i, text in enumerate(texts)]
    return {"question": question, "turns": turns}


GOOD = line(SEARCH, f"\n\n<information>{SHOWN}</information>\n\n", ANSWER)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(TINY, chat=True)


def config(**rollout: Any) -> TrainConfig:
    longer = {"max_new_tokens": 200, "max_observation_tokens": 200, **rollout}
    return resolve("tiny", {"rollout": longer})


def parse(tokenizer: Any, data: bytes | Line, made: TrainConfig | None = None) -> list:
    made = made or config()
    protocol = SearchProtocol(tokenizer, made.model, made.rollout)
    data = data if isinstance(data, bytes) else json.dumps(data).encode()
    return parse_trajectories(data, "some.jsonl", protocol, made)


def parts(tokenizer: Any, one: Demonstration) -> list[tuple[bool, str]]:
    """The runs of equal loss mask, as text."""
    edges = np.flatnonzero(np.diff(one.loss_mask)) + 1
    runs = np.split(np.arange(len(one.ids)), edges)
    return [(bool(one.loss_mask[run[0]]), tokenizer.decode(one.ids[run])) for run in runs]


def test_loss_falls_on_what_the_policy_says_and_nothing_else(tokenizer: Any) -> None:
    (one,) = parse(tokenizer, GOOD)
    prompt, search, observation, answer = parts(tokenizer, one)
    assert (prompt[0], search[0], observation[0], answer[0]) == (False, True, False, True)
    assert QUESTION in prompt[1]
    assert search[1] == SEARCH
    assert observation[1] == f"\n\n<information>{SHOWN}</information>\n\n"
    assert answer[1] == ANSWER


def test_a_tokenizer_without_tokens_for_the_tags(tmp_path: Path) -> None:
    if not QWEN.exists():
        pytest.skip(f"{QWEN} is absent")
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(QWEN / name, tmp_path)
    unpacked = gzip.decompress((QWEN / "tokenizer.json.gz").read_bytes())
    (tmp_path / "tokenizer.json").write_bytes(unpacked)
    qwen = load_tokenizer(tmp_path, chat=True)
    (one,) = parse(qwen, GOOD)
    assert parts(qwen, one)[1:] == [
        (True, SEARCH),
        (False, f"\n\n<information>{SHOWN}</information>\n\n"),
        (True, ANSWER),
    ]


def test_lines_that_are_blank_or_end_in_odd_ways(tokenizer: Any) -> None:
    text = json.dumps(GOOD, ensure_ascii=False).replace("look", "lo\u2028ok")
    found = parse(tokenizer, f"\r\n{text}\r\n\n \n{text}".encode())
    assert len(found) == 2
    assert "lo\u2028ok" in parts(tokenizer, found[0])[1][1]
    plain = line(f"{ANSWER}\n ")
    (one,) = parse(tokenizer, plain)
    assert parts(tokenizer, one)[1:] == [(True, ANSWER)], "nothing is sampled after the tag"


def changed(change: Callable[[Line], Any]) -> Line:
    made = json.loads(json.dumps(GOOD))
    change(made)
    return made


def said(number: int, text: str) -> Line:
    return changed(lambda one: one["turns"][number].update(text=text))


@pytest.mark.parametrize(
    ("bad", "field", "problem"),
    [
        (b"{", "", "Invalid JSON"),
        (b'"text"', "", "object"),
        (b'{"question": "\xff"}', "", "Invalid JSON"),
        (changed(lambda one: one.pop("question")), "question", "Field required"),
        (changed(lambda one: one.update(question=" ")), "question", "pattern"),
        (changed(lambda one: one.update(question="Ada " * 200)), "question", "max_prompt_tokens"),
        (changed(lambda one: one.pop("turns")), "turns", "Field required"),
        (changed(lambda one: one.update(turns=[])), "turns", "at least 1"),
        (changed(lambda one: one.update(answer="x")), "answer", "Extra"),
        (changed(lambda one: one["turns"][1].pop("role")), "turns.1.role", "Field required"),
        (changed(lambda one: one["turns"][1].update(role="tool")), "turns.1.role", "'policy'"),
        (changed(lambda one: one["turns"][2].update(text=7)), "turns.2.text", "valid string"),
        (changed(lambda one: one["turns"][2].update(text="")), "turns.2.text", "at least 1"),
        (changed(lambda one: one["turns"].pop(1)), "turns.1.role", "expected 'environment'"),
        (changed(lambda one: one["turns"].pop(0)), "turns.0.role", "expected 'policy'"),
        (changed(lambda one: one["turns"].pop()), "turns", "expected the policy's answer"),
        (line(*[SEARCH, "<information>x</information>"] * 4, ANSWER), "turns", "search 4 times"),
        (said(0, "<tool> x </tool>"), "turns.0.text", "unknown tag '<tool>'"),
        (said(0, "<Search> x </Search>"), "turns.0.text", "unknown tag '<Search>'"),
        (said(0, f"<information>x</information>{SEARCH}"), "turns.0.text", "environment says"),
        (said(0, "<think> a <search> b </search>"), "turns.0.text", "'<search>' inside <think>"),
        (said(0, "x </search>"), "turns.0.text", "unbalanced tag: '</search>'"),
        (said(0, "<search> x"), "turns.0.text", "<search> is not closed"),
        (said(0, "<search>x</search><search>y</search>"), "turns.0.text", "only action"),
        (said(0, f"{SEARCH} and more"), "turns.0.text", "only action"),
        (said(0, "<think> only </think>"), "turns.0.text", "only action"),
        (said(0, ANSWER), "turns.0.text", "not the last"),
        (said(2, SEARCH), "turns.2.text", "the last turn"),
        (said(0, "<search>  </search>"), "turns.0.text", "nothing between"),
        (said(1, "Doc 1"), "turns.1.text", "expected one <information>"),
        (said(1, "<information>a</information>b"), "turns.1.text", "expected one <information>"),
        (
            said(1, "<information>a<information>b</information>"),
            "turns.1.text",
            "expected one <information>",
        ),
    ],
)
def test_bad_lines_are_named(tokenizer: Any, bad: bytes | Line, field: str, problem: str) -> None:
    data = bad if isinstance(bad, bytes) else json.dumps(bad).encode()
    good = json.dumps(GOOD).encode()
    with pytest.raises(DataError) as caught:
        parse(tokenizer, good + b"\n\n" + data + b"\n" + good)
    message = str(caught.value)
    assert message.startswith("some.jsonl line 3")
    assert problem in message
    assert not field or f"field {field!r}" in message


def test_lengths_that_a_run_would_not_allow(tokenizer: Any) -> None:
    for limit, field in (
        ({"max_new_tokens": 5}, r"turns\.0\.text"),
        ({"max_observation_tokens": 16}, r"turns\.1\.text"),
    ):
        (name,) = limit
        with pytest.raises(DataError, match=rf"{field}.* tokens, more than rollout\.{name} = "):
            parse(tokenizer, GOOD, config(**limit))
    long = line(*[SEARCH, f"<information>{'a b ' * 90}</information>"] * 3, ANSWER)
    with pytest.raises(DataError, match=r"the trajectory has \d+ tokens, more than model\.context"):
        parse(tokenizer, long, config(max_observation_tokens=400))
    with pytest.raises(DataError, match="holds no trajectories"):
        parse(tokenizer, b"\n \n")


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.one_of(
            st.sampled_from(["<search>", "</search>", "<answer>", "</answer>", "<think>"]),
            st.sampled_from(["</think>", "<information>", "</information>", "<x>", " ", "a", "<"]),
        ),
        min_size=1,
        max_size=9,
    ).map("".join)
)
def test_a_turn_is_taken_as_it_is_or_refused_by_name(tokenizer: Any, text: str) -> None:
    """Whatever tags stand in whatever order: never learned in part, never an odd exception."""
    refused = ""
    try:
        (one,) = parse(tokenizer, said(0, text))
    except DataError as error:
        refused = str(error)
    if refused:
        assert "turns.0.text" in refused
        return
    assert parts(tokenizer, one)[1] == (True, text.rstrip())
    assert text.count("<search>") == text.count("</search>") == 1


def test_a_run_reads_the_file_before_anything_starts(tmp_path: Path) -> None:
    def inputs(path: Path, **more: Any) -> Any:
        warm = {"demonstrations": 3, "trajectories": str(path), **more}
        longer = {"max_new_tokens": 200, "max_observation_tokens": 200}
        changes = {"model": {"warm_start": warm}, "rollout": longer}
        return load_inputs(resolve("tiny", changes), tmp_path)

    path = tmp_path / "given.jsonl"
    with pytest.raises(DataError, match=r"given\.jsonl' cannot be read: No such file"):
        inputs(path)
    path.write_text(json.dumps(GOOD))
    assert inputs(path).trajectories == path.read_bytes()
    path.write_text(json.dumps(said(0, "<search> x")))
    with pytest.raises(DataError, match=r"given\.jsonl line 1, field 'turns\.0\.text'"):
        inputs(path)
    for both in ({"worlds": 2}, {"good_share": 0.5}, {"good_first": 1}, {"think": "always"}):
        with pytest.raises(ConfigError, match="worlds, good_first, good_share and think unset"):
            inputs(path, **both)
