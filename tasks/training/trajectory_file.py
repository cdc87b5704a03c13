"""Demonstrations from a file: trajectories that somebody else wrote or sampled, one JSON a line.

    {"question": "Who directed Crimson Station?", "turns": [
        {"role": "policy", "text": "<search> Crimson Station </search>"},
        {"role": "environment", "text": "<information>Doc 1(Title: ...) ...</information>"},
        {"role": "policy", "text": "<think> Hugo Novak. </think><answer> Hugo Novak </answer>"}]}

(on one line). The prompt is made of the question, as in a run. A policy's turn ends in its one
`<search>` or `<answer>`; before that it may think. The environment answers each search with
`<information>`; the last turn answers. Loss is on the policy's turns alone. Blanks around a turn's
text are dropped, except before a policy's. All of a file is checked before anything is started.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tasks.config import TrainConfig
from tasks.errors import DataError, PolicyError
from tasks.rollout.protocol import Answer, Search, SearchProtocol, parse
from tasks.training.demonstrations import Demonstration, Play

_TAG = re.compile(r"<(/?)([A-Za-z][\w.-]*)\s*/?>")
_INFORMATION = re.compile(r"<information>(.*)</information>", re.DOTALL)
_POLICY_TAGS = ("think", "search", "answer")


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class WrittenTurn(_Part):
    """What one side said."""

    role: Literal["policy", "environment"]
    text: str = Field(min_length=1)


class WrittenTrajectory(_Part):
    """One line of the file."""

    question: str = Field(min_length=1, pattern=r"\S")
    turns: tuple[WrittenTurn, ...] = Field(min_length=1)


class _Fault(Exception):
    """(field, what is wrong with it)."""


def read_file(path: str) -> bytes:
    """The file's bytes: what names a policy made of it, and what travels to the worker.

    Raises:
        DataError: there is no such file, or it cannot be read.
    """
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise DataError(
            f"model.warm_start.trajectories {path!r} cannot be read: {error.strerror}; name a "
            "JSONL file of trajectories"
        ) from error


def parse_trajectories(
    data: bytes, path: str, protocol: SearchProtocol, config: TrainConfig
) -> list[Demonstration]:
    """A file's trajectories in their order, in the policy's own tokens; blank lines are skipped.

    Args:
        path: names the file in errors.

    Raises:
        DataError: a line is no such trajectory, or longer than a run allows; names file, line and
            field. Or there is none.
    """
    made = []
    for number, line in _lines(data):
        try:
            written = WrittenTrajectory.model_validate_json(line)
            made.append(_demonstration(written, protocol, config))
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False)[0]
            field = ".".join(str(part) for part in first["loc"])
            problem = f"{first['msg']} in {_short(first['input'])}"
            raise _error(path, number, field, problem) from None
        except _Fault as fault:
            raise _error(path, number, *fault.args) from None
    if not made:
        raise DataError(f"{path} holds no trajectories; expected one a line")
    return made


def _lines(data: bytes) -> Iterator[tuple[int, bytes]]:
    # Not splitlines: only a line feed ends a line of JSON.
    for number, line in enumerate(data.split(b"\n"), 1):
        if line.strip():
            yield number, line


def _error(path: str, number: int, field: str, problem: str) -> DataError:
    where = f"{path} line {number}" + (f", field {field!r}" if field else "")
    return DataError(f"{where}: {problem}")


def _demonstration(
    written: WrittenTrajectory, protocol: SearchProtocol, config: TrainConfig
) -> Demonstration:
    _check_roles(written.turns, config.rollout.max_search_turns)
    try:
        play = Play(protocol, written.question)
    except PolicyError as error:
        raise _Fault("question", str(error)) from None
    rollout = config.rollout
    for number, turn in enumerate(written.turns):
        field = f"turns.{number}.text"
        if turn.role == "policy":
            last = number == len(written.turns) - 1
            size = play.act(_action(field, turn.text, last))
            limit, name = rollout.max_new_tokens, "rollout.max_new_tokens"
        else:
            size = play.observe(protocol.information(_observation(field, turn.text)))
            limit, name = rollout.max_observation_tokens, "rollout.max_observation_tokens"
        if size > limit:
            raise _Fault(field, f"has {size} tokens, more than {name} = {limit}")
    made = play.done(config.model.context)
    if made is None:
        raise _Fault(
            "turns",
            f"the trajectory has {play.size} tokens, more than model.context = "
            f"{config.model.context}",
        )
    return made


def _check_roles(turns: Sequence[WrittenTurn], max_searches: int) -> None:
    for number, turn in enumerate(turns):
        expected = "environment" if number % 2 else "policy"
        if turn.role != expected:
            raise _Fault(
                f"turns.{number}.role",
                f"is {turn.role!r}, expected {expected!r}: policy and environment take turns, and "
                "the policy begins",
            )
    if len(turns) % 2 == 0:
        raise _Fault("turns", "end with the environment's, expected the policy's answer")
    if len(turns) // 2 > max_searches:
        raise _Fault(
            "turns",
            f"search {len(turns) // 2} times, more than rollout.max_search_turns = {max_searches}",
        )


def _action(field: str, text: str, last: bool) -> str:
    """The text a policy would sample: up to the closing tag of its one action."""
    text = text.rstrip()
    opened: str | None = None
    actions = 0
    for tag in _TAG.finditer(text):
        closes, name = bool(tag[1]), tag[2]
        if name == "information":
            raise _Fault(field, "has <information>, which the environment says")
        if name not in _POLICY_TAGS:
            known = ", ".join(f"<{one}>" for one in _POLICY_TAGS)
            raise _Fault(field, f"has the unknown tag {tag[0]!r}, expected {known}")
        if closes != (opened is not None) or (closes and name != opened):
            inside = f" inside <{opened}>" if opened else ""
            raise _Fault(field, f"has an unbalanced tag: {tag[0]!r}{inside}")
        opened = None if closes else name
        actions += closes and name != "think"
    if opened is not None:
        raise _Fault(field, f"has an unbalanced tag: <{opened}> is not closed")
    wanted = "answer" if last else "search"
    if actions != 1 or not text.endswith(f"</{wanted}>"):
        place = "the last turn" if last else "a turn that is not the last"
        raise _Fault(
            field, f"is {_short(text)}; expected {place} to end in its only action, <{wanted}>"
        )
    if not isinstance(parse(text), Answer if last else Search):
        raise _Fault(field, f"has nothing between <{wanted}> and </{wanted}>")
    return text


def _observation(field: str, text: str) -> str:
    match = _INFORMATION.fullmatch(text.strip())
    if match is None or "<information>" in match[1] or "</information>" in match[1]:
        raise _Fault(
            field, f"is {_short(text)}; expected one <information>...</information> and no more"
        )
    return match[1]


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
