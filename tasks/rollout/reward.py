"""What a trajectory earns: a built-in score, or a function of the user's own.

Built-in rewards read the answer extracted from sampled text, never prompt or observations;
`search_r1` alone reads the whole text, as the scorer it is named after does.

A reward function of the user's own is named in the configuration as `package.module:function`. It
is a plain function from a trajectory and its question to a number:

    def brief(trajectory: Transcript, question: Asked) -> float:
        return trajectory.f1 - 0.001 * trajectory.sampled_tokens

It must be importable on the rollout workers, where `tasks.rollout.reward_process` calls it.
"""

from __future__ import annotations

import importlib
import inspect
import math
import numbers
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from tasks.config import BUILT_IN_REWARDS, RolloutConfig, TrainConfig
from tasks.errors import ConfigError, RewardError
from tasks.evaluation.scoring import (
    exact_match,
    f1,
    search_r1_answer,
    search_r1_exact_match,
)
from tasks.rollout.trajectory import Transcript

# Rewards of one group that differ by less are equal up to rounding: such a group counts as uniform,
# and its advantages are not blown up (0.1 + 0.2 and 0.3 in float32 would be near one apart).
ROUNDING = 1e-4


@dataclass(frozen=True, slots=True)
class Asked:
    """A question as a reward function sees it; `answers` are those that count."""

    id: str
    question: str
    answers: tuple[str, ...]


RewardFunction = Callable[[Transcript, Asked], float]


@dataclass(frozen=True, slots=True)
class Score:
    """reward: NaN until the function that the configuration names has given it."""

    exact_match: bool
    f1: float
    search_r1: bool
    reward: float


def score(
    answer: str | None, whole_text: str, golds: Sequence[str], rollout: RolloutConfig
) -> Score:
    """Scores an answer; None (the trajectory never answered) has no exact match and no F1."""
    em = answer is not None and exact_match(answer, golds)
    overlap = 0.0 if answer is None else f1(answer, golds)
    compatible = search_r1_exact_match(whole_text, golds)
    values = {"exact_match": float(em), "f1": overlap, "search_r1": float(compatible)}
    base = values.get(rollout.reward, math.nan)
    return Score(em, overlap, compatible, base + format_bonus(answer, rollout.format_bonus))


def format_bonus(answer: str | None, bonus: float) -> float:
    """What a well-formed answer earns by itself, whatever it says."""
    return 0.0 if answer is None else bonus


def is_own_function(reward: str) -> bool:
    """Whether a reward is a function of the user's own, and none that is built in."""
    return reward not in BUILT_IN_REWARDS


def check_reward(config: TrainConfig) -> None:
    """Refuses a reward that cannot work, before anything is started.

    Raises:
        ConfigError: the function cannot be imported or called with a trajectory and a question, or
            `search_r1` is asked for with an instruction that lacks the example it counts on.
    """
    reward = config.rollout.reward
    if is_own_function(reward):
        load_reward(reward)
    elif (
        reward == "search_r1"
        and search_r1_answer(config.model.instruction + "<answer></answer>") is None
    ):
        raise ConfigError(
            "rollout.reward = 'search_r1' finds an answer only after an example in the prompt, and "
            f"model.instruction {config.model.instruction[:80]!r} has no <answer> ... </answer>; "
            "use Search-R1's instruction, or rollout.reward = 'exact_match'"
        )


def load_reward(name: str) -> RewardFunction:
    """The function a name of the form `package.module:function` stands for.

    Raises:
        ConfigError: it cannot be imported, is not callable, or does not take two arguments.
    """
    where = f"rollout.reward = {name!r}"
    module_name, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever a module may raise
        raise ConfigError(
            f"{where}: importing {module_name} failed ({type(error).__name__}: {error}); it must "
            "be importable here and on every rollout worker"
        ) from error
    function = getattr(module, attribute, None)
    if not callable(function):
        raise ConfigError(
            f"{where}: {module_name} has no function {attribute!r} (found {function!r}); expected "
            "a function from a trajectory and its question to a number"
        )
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        raise ConfigError(f"{where} is asynchronous or a generator; expected a plain function")
    _check_signature(where, function)
    return cast(RewardFunction, function)


def _check_signature(where: str, function: Callable[..., Any]) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:  # one written in C may not tell
        return
    try:
        signature.bind(None, None)
    except TypeError as error:
        raise ConfigError(
            f"{where} has the signature {signature}; expected one that can be called with a "
            f"trajectory and its question ({error})"
        ) from None


LARGEST = 1e9
"""Of a reward. Advantages take differences and squares of them, in float32."""


def as_number(value: object) -> float:
    """A reward function's value as a float; True is 1.

    Raises:
        RewardError: it is not a number (a tensor or an array is none), not finite, or beyond
            LARGEST.
    """
    if not isinstance(value, numbers.Real):
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        raise RewardError(
            f"it returned {_short(value)} of type {kind}; expected a number: return a float"
        )
    number = float(value)
    # Differences of two and their squares must be finite, and exact enough to tell them apart.
    if not abs(number) <= LARGEST:
        raise RewardError(f"it returned {number:g}; expected a number within +-{LARGEST:g}")
    return number


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
