"""What sampling produces: trajectories, groups, and their form in the store.

A group travels as one safetensors object (flat arrays over all its trajectories, token by token)
with the rest as JSON in the header: no pickle, and a trainer rank can map it without copying.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from tasks.errors import IntegrityError

End = Literal["answered", "truncated", "out_of_turns"]
TurnKind = Literal["search", "answer", "invalid"]


@dataclass(frozen=True, slots=True)
class Turn:
    """One action of the policy and what came back, as half-open token ranges of the trajectory.

    passages: titles of those that the observation showed.
    """

    kind: TurnKind
    start: int
    sampled_end: int
    observed_end: int
    query: str | None = None
    passages: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One attempt at a question. All arrays have length T, the trajectory's tokens.

    ids: int32, prompt + sampled + observed ids, concatenated and never re-tokenised.
    loss_mask: bool, True exactly where the policy sampled the token.
    logprobs: float32, the sampler's log-probability at the sampling temperature; 0 where masked.
    versions: int32, the policy version that sampled the token; -1 where masked.
    exact_match, f1: HotpotQA's, of the answer the policy wrote. search_r1: exact match as
    Search-R1 counts it (`tasks.evaluation.scoring.search_r1_answer`).
    gold_titles, gold_found: titles of the question's supporting facts, and those of them that an
        observation showed.
    """

    ids: np.ndarray
    loss_mask: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    prompt_tokens: int
    turns: tuple[Turn, ...]
    end: End
    answer: str | None
    exact_match: bool
    f1: float
    reward: float
    search_r1: bool = False
    gold_titles: tuple[str, ...] = ()
    gold_found: tuple[str, ...] = ()

    @property
    def gold_recall(self) -> float | None:
        """Share of the gold titles that were found; None for a question without any."""
        return len(self.gold_found) / len(self.gold_titles) if self.gold_titles else None

    @property
    def sampled_tokens(self) -> int:
        return int(self.loss_mask.sum())

    @property
    def searches(self) -> int:
        """Well-formed ones, as Search-R1 counts: also one in the last turn, which is not run."""
        return sum(turn.kind == "search" for turn in self.turns)

    @property
    def invalid_actions(self) -> int:
        return sum(turn.kind == "invalid" for turn in self.turns)


@dataclass(frozen=True, slots=True)
class TranscriptTurn:
    """One action and what came back, as text; `observed` is empty after the last turn."""

    kind: TurnKind
    sampled: str
    observed: str
    query: str | None


@dataclass(frozen=True, slots=True)
class Transcript:
    """A trajectory as text, taken apart by who wrote it: what a reward function reads.

    answer: what the policy answered; None where it did not. tokens: of the whole trajectory.
    exact_match, f1: of the answer, by HotpotQA's definitions.
    """

    prompt: str
    turns: tuple[TranscriptTurn, ...]
    end: End
    answer: str | None
    exact_match: bool
    f1: float
    tokens: int
    sampled_tokens: int

    @property
    def text(self) -> str:
        """All of it in order, prompt first."""
        return self.prompt + "".join(turn.sampled + turn.observed for turn in self.turns)


@dataclass(frozen=True, slots=True)
class Group:
    """The G trajectories of one prompt instance."""

    unit_id: str
    question_id: str
    trajectories: tuple[Trajectory, ...]


class _QuickPickle:
    """Thousands of summaries go to every trainer rank each step; a frozen dataclass with slots
    pickles four times slower than this."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), tuple(getattr(self, name) for name in self.__slots__)


@dataclass(frozen=True, slots=True)
class TrajectorySummary(_QuickPickle):
    """What the flow needs to know of a trajectory without its tokens."""

    tokens: int
    sampled_tokens: int
    reward: float
    exact_match: bool
    f1: float
    end: End
    searches: int
    invalid_actions: int
    search_r1: bool = False
    gold_recall: float | None = None


@dataclass(frozen=True, slots=True)
class GroupSummary(_QuickPickle):
    """A finished group by reference: `key` is its object in the store."""

    unit_id: str
    question_id: str
    key: str
    worker: str
    version: int
    seconds: float
    trajectories: tuple[TrajectorySummary, ...]


def summarise(trajectory: Trajectory) -> TrajectorySummary:
    return TrajectorySummary(
        tokens=len(trajectory.ids),
        sampled_tokens=trajectory.sampled_tokens,
        reward=trajectory.reward,
        exact_match=trajectory.exact_match,
        f1=trajectory.f1,
        end=trajectory.end,
        searches=trajectory.searches,
        invalid_actions=trajectory.invalid_actions,
        search_r1=trajectory.search_r1,
        gold_recall=trajectory.gold_recall,
    )


_ARRAYS: dict[str, np.dtype] = {
    "ids": np.dtype(np.int32),
    "loss_mask": np.dtype(np.bool_),
    "logprobs": np.dtype(np.float32),
    "versions": np.dtype(np.int32),
}


_REST = [field.name for field in fields(Trajectory) if field.name not in _ARRAYS]


def plain(record: Turn | TrajectorySummary | GroupSummary) -> dict[str, Any]:
    """A record's fields as a dict; `asdict` copies every value, at ten times the cost."""
    return {name: getattr(record, name) for name in record.__slots__}


def group_to_bytes(group: Group) -> bytes:
    arrays = {
        name: np.concatenate([getattr(t, name) for t in group.trajectories]).astype(dtype)
        for name, dtype in _ARRAYS.items()
    }
    arrays["lengths"] = np.array([len(t.ids) for t in group.trajectories], np.int64)
    rest = [
        {**{name: getattr(t, name) for name in _REST}, "turns": [plain(turn) for turn in t.turns]}
        for t in group.trajectories
    ]
    header = {"unit_id": group.unit_id, "question_id": group.question_id, "rest": json.dumps(rest)}
    return save(arrays, metadata=header)


def group_from_bytes(data: bytes) -> Group:
    """Inverse of `group_to_bytes`.

    Raises:
        IntegrityError: the object is not a group.
    """
    try:
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
        arrays = load(data)
        _check_shapes(arrays)
        ends = np.cumsum(arrays["lengths"])
        trajectories = [
            _trajectory({name: arrays[name][end - n : end] for name in _ARRAYS}, rest)
            for n, end, rest in zip(
                arrays["lengths"], ends, json.loads(header["rest"]), strict=True
            )
        ]
        return Group(header["unit_id"], header["question_id"], tuple(trajectories))
    except (KeyError, ValueError, TypeError, AttributeError, SafetensorError) as error:
        raise IntegrityError(
            f"{len(data)} bytes that should hold a group do not: {error!r}"
        ) from None


def _check_shapes(arrays: dict[str, np.ndarray]) -> None:
    lengths = arrays["lengths"]
    if lengths.dtype != np.int64 or lengths.ndim != 1 or (lengths < 0).any():
        raise ValueError(f"lengths are {lengths}")
    for name, dtype in _ARRAYS.items():
        found = arrays[name]
        if found.dtype != dtype or found.shape != (lengths.sum(),):
            raise ValueError(
                f"{name} is {found.dtype}{found.shape}, expected {dtype}({lengths.sum()},)"
            )


def _trajectory(arrays: dict[str, np.ndarray], rest: dict) -> Trajectory:
    turns = tuple(Turn(**{**t, "passages": tuple(t["passages"])}) for t in rest.pop("turns"))
    for name in ("gold_titles", "gold_found"):
        rest[name] = tuple(rest[name])
    return Trajectory(**arrays, turns=turns, **rest)
