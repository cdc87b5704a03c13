"""What a trajectory earns: built-in scores, and a user's own function in its process."""

from __future__ import annotations

import math
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import psutil
import pytest

from infra.processes import ROOT, child_environment
from tasks.config import RolloutConfig, TrainConfig
from tasks.errors import ConfigError, RewardError
from tasks.metrics import batch_stats
from tasks.presets import resolve
from tasks.rollout.agent import Sampled, Unit
from tasks.rollout.engine import Sampling
from tasks.rollout.reward import Asked, check_reward, load_reward, score
from tasks.rollout.reward_process import RewardProcess
from tasks.rollout.trajectory import (
    Group,
    GroupSummary,
    Trajectory,
    Transcript,
    TranscriptTurn,
    Turn,
    summarise,
)

pytestmark = [pytest.mark.fast, pytest.mark.timeout(120)]
MINE = "tests.reward_functions"
TRANSCRIPT = Transcript(
    prompt="Question: where?",
    turns=(
        TranscriptTurn("search", "<search> Ada </search>", "<information>…</information>", "Ada"),
        TranscriptTurn("answer", "<answer> Rome </answer>", "", None),
    ),
    end="answered",
    answer="Rome",
    exact_match=True,
    f1=1.0,
    tokens=40,
    sampled_tokens=9,
)


def asked(question: str = "where?") -> Asked:
    return Asked("q7", question, ("Rome",))


def _config(**rollout: Any) -> TrainConfig:
    return resolve("tiny", {"rollout": rollout})


# Built in


@pytest.mark.parametrize(
    ("reward", "expected"), [("exact_match", 0.0), ("f1", 2 / 3), ("search_r1", 1.0)]
)
def test_built_in_rewards(reward: str, expected: float) -> None:
    rollout = RolloutConfig.model_validate({"reward": reward, "format_bonus": 0.125})
    text = "For example <answer> Beijing </answer>. <answer>Rome</answer>"
    made = score("in Rome", text, ("Rome",), rollout)
    assert (made.exact_match, made.search_r1) == (False, True)
    assert made.reward == pytest.approx(expected + 0.125)


def test_who_never_answers_earns_no_bonus() -> None:
    rollout = RolloutConfig.model_validate({"reward": "f1", "format_bonus": 0.125})
    made = score(None, "<answer>Rome</answer><answer>Rome</answer>", ("Rome",), rollout)
    assert (made.exact_match, made.f1, made.reward) == (False, 0.0, 0.0)
    assert made.search_r1, "reads the whole text, whoever wrote it"


def test_a_function_of_ones_own_is_not_scored_here() -> None:
    rollout = RolloutConfig.model_validate({"reward": f"{MINE}:brief"})
    assert math.isnan(score("Rome", "", ("Rome",), rollout).reward)


# Checked before anything starts


@pytest.mark.parametrize("name", ["brief", "with_default"])
def test_a_good_function_passes_the_check(name: str) -> None:
    check_reward(_config(reward=f"{MINE}:{name}"))


@pytest.mark.parametrize(
    "reward",
    ["", "accuracy", "module", "a:b:c", "a.b:", ":f", "a b:f", "os.path:join(1)", "a..b:f"],
)
def test_a_name_that_is_none(reward: str) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.reward: .*package\.module:function"):
        _config(reward=reward)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module_at_all:f", "importing no_such_module_at_all failed.*every rollout worker"),
        (f"{MINE}:absent", "has no function 'absent'"),
        (f"{MINE}:not_a_function", "has no function 'not_a_function' .found 3."),
        (f"{MINE}:one_argument", "has the signature .*can be called with a trajectory and its"),
        (f"{MINE}:three_arguments", "has the signature"),
        (f"{MINE}:waits", "is asynchronous"),
    ],
)
def test_a_function_that_cannot_work(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s)rollout.reward = '{name}'.*{message}"):
        check_reward(_config(reward=name))


def test_search_r1_needs_the_example_that_it_counts_on() -> None:
    with pytest.raises(ConfigError, match=r"has no <answer> \.\.\. </answer>"):
        check_reward(_config(reward="search_r1"))
    check_reward(resolve("qwen2.5-3b", {"rollout": {"reward": "search_r1"}}))
    check_reward(resolve("smollm2", {"rollout": {"reward": "search_r1"}}))


# In its process


@pytest.fixture(scope="module")
def told() -> Iterator[RewardProcess]:
    with closing(RewardProcess(f"{MINE}:told", 2.0)) as process:
        yield process


@pytest.mark.parametrize(
    ("question", "value"),
    [("print", 0.5), ("read", 0.0), ("true", 1.0), ("float32", 0.25), ("int64", 3.0),
     ("fraction", 0.25), ("anything else", 1.0)],
)  # fmt: skip
def test_a_number_is_a_number(told: RewardProcess, question: str, value: float) -> None:
    assert told.value(TRANSCRIPT, asked(question)) == value


@pytest.mark.parametrize(
    ("question", "message"),
    [
        ("raise", r"KeyError: 'no such key' \(.*reward_functions\.py:\d+\)"),
        ("hang", r"did not return within 2 s and was ended"),
        ("hang in C", r"did not return within 2 s and was ended"),
        ("leave", r"SystemExit: 0"),
        ("die", r"its process ended \(exit status -11\)"),
        ("nan", r"returned nan; expected a number within"),
        ("inf", r"returned -inf; expected a number within"),
        ("large", r"returned 1e\+300; expected a number within \+-1e\+09"),
        ("string", r"returned '0.5' of type builtins\.str; expected a number"),
        ("none", r"returned None of type builtins\.NoneType; expected a number"),
        ("complex", r"returned 1j of type builtins\.complex; expected a number"),
        ("decimal", r"of type decimal\.Decimal; expected a number: return a float"),
        ("array", r"of type numpy\.ndarray; expected a number: return a float"),
        ("huge", r"OverflowError"),
    ],
)
def test_what_goes_wrong_is_told_and_the_next_call_works(
    told: RewardProcess, question: str, message: str
) -> None:
    with pytest.raises(RewardError, match=message):
        told.value(TRANSCRIPT, asked(question))
    assert told.value(TRANSCRIPT, asked()) == 1.0


def test_a_tensor_is_no_number() -> None:
    with (  # the child imports torch, which takes longer than other calls may
        closing(RewardProcess(f"{MINE}:told", 60.0)) as process,
        pytest.raises(RewardError, match=r"tensor\(1\.\) of type torch\.Tensor; expected a number"),
    ):
        process.value(TRANSCRIPT, asked("tensor"))


def test_one_process_stays_warm_and_ends_with_its_owner() -> None:
    process = RewardProcess(f"{MINE}:pid", 10.0)
    with closing(process):
        pids = {process.value(TRANSCRIPT, asked()) for _ in range(3)}
        (pid,) = pids
        assert psutil.pid_exists(int(pid))
    assert not psutil.pid_exists(int(pid))
    with pytest.raises(RewardError, match=r"ended|closed"):
        process.value(TRANSCRIPT, asked())


def test_closing_ends_a_call_in_progress() -> None:
    process = RewardProcess(f"{MINE}:told", 600.0)
    errors: list[RewardError] = []

    def call() -> None:
        try:
            process.value(TRANSCRIPT, asked("hang"))
        except RewardError as error:
            errors.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    process.close()
    thread.join(60)
    assert not thread.is_alive()
    assert len(errors) == 1


ORPHANED = """
import threading
from tests import test_reward as t
idle, hanging = (t.RewardProcess(f"{t.MINE}:told", 0.5) for _ in range(2))
threading.Thread(target=hanging.value, args=(t.TRANSCRIPT, t.asked("hang in C"))).start()
print("hangs", flush=True)
threading.Event().wait()
"""


def test_no_process_outlives_a_worker_that_was_killed() -> None:
    worker = subprocess.Popen(
        [sys.executable, "-c", ORPHANED],
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env=child_environment({}),
    )
    try:
        assert worker.stdout is not None
        assert worker.stdout.readline() == b"hangs\n"
        children = psutil.Process(worker.pid).children()
        assert len(children) == 2
    finally:
        worker.kill()
        worker.wait()
    _, alive = psutil.wait_procs(children, timeout=60)
    assert not alive


def test_a_long_trajectory_gets_through() -> None:
    """Longer than a socket's buffer holds."""
    turn = TranscriptTurn("search", "é\ud7ff\U0001f600" * 500_000, "", None)
    long = replace(TRANSCRIPT, turns=(turn,))
    with closing(RewardProcess(f"{MINE}:length", 60.0)) as process:
        assert process.value(long, asked()) == len(long.text)


def test_a_function_that_a_worker_cannot_import() -> None:
    with pytest.raises(RewardError, match="importing no_such_module failed"):
        RewardProcess("no_such_module:f", 1.0)


# A group


def _sampled(questions: str = "where?") -> Sampled:
    def trajectory(answer: str | None) -> Trajectory:
        return Trajectory(
            ids=np.arange(4, dtype=np.int32),
            loss_mask=np.array([False, True, True, True]),
            logprobs=np.zeros(4, np.float32),
            versions=np.zeros(4, np.int32),
            prompt_tokens=1,
            turns=(Turn("invalid" if answer is None else "answer", 1, 4, 4),),
            end="answered",
            answer=answer,
            exact_match=answer == "Rome",
            f1=0.0,
            reward=math.nan,
        )

    unit = Unit("train-1", "q7", questions, ("Rome",), 0, 0, 3, Sampling(1.0, 1.0))
    group = Group("train-1", "q7", tuple(trajectory(a) for a in ("Rome", "Oslo", None)))
    transcripts = tuple(
        replace(TRANSCRIPT, answer=t.answer, exact_match=t.exact_match) for t in group.trajectories
    )
    return Sampled(unit, group, transcripts)


def test_a_group_is_judged_trajectory_by_trajectory() -> None:
    with closing(RewardProcess(f"{MINE}:brief", 10.0)) as process:
        group = process.judge(_sampled(), bonus=0.25)
    words = 6 / 1024
    rewards = [t.reward for t in group.trajectories]
    assert rewards == [1.25 - words, 0.25 - words, -words], "no bonus without an answer"
    assert [t.answer for t in group.trajectories] == ["Rome", "Oslo", None]


def test_what_a_batch_reports() -> None:
    """Search-R1's exact match stands beside ours, and groups that were left out are counted."""
    trajectories = _sampled().group.trajectories
    counted = tuple(
        summarise(replace(t, reward=1.0, search_r1=t.answer == "Oslo")) for t in trajectories
    )
    stats = batch_stats([GroupSummary("train-1", "q7", "key", "w", 0, 1.0, counted)], dropped=2)
    assert (stats.groups, stats.dropped) == (1, 2)
    assert stats.exact_match == stats.search_r1 == pytest.approx(1 / 3)


def test_a_failure_names_function_question_unit_and_trajectory(told: RewardProcess) -> None:
    message = (
        rf"reward '{MINE}:told' failed on question 'q7' \(trajectory 0 of unit train-1\): KeyError"
    )
    with pytest.raises(RewardError, match=message):
        told.judge(_sampled("raise"), 0.0)


def test_functions_are_found_by_name() -> None:
    assert load_reward(f"{MINE}:brief").__name__ == "brief"
