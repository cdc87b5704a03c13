"""Trajectories for a reader: which ones, and their text by who wrote it.

Passages are untrusted and so is what a policy writes: every text goes through `escape`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from markupsafe import Markup, escape

from tasks.config import RolloutConfig
from tasks.data.questions import Question
from tasks.evaluation.breakdown import MODES, Mode
from tasks.evaluation.scoring import normalise
from tasks.rollout.trajectory import Group, GroupSummary, Trajectory, Turn

SHOWN = 32
"""Trajectories in a report at most."""
SHADES = (0.9, 0.5, 0.2, 0.05, 0.01)
"""A sampled token is shaded by how many of these its probability falls short of."""

_TURNS = {"search": "searched", "answer": "answered", "invalid": "invalid action"}


@dataclass(frozen=True, slots=True)
class Choice:
    """One trajectory of an evaluation."""

    mode: Mode
    group: GroupSummary
    number: int


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of tokens by one writer; `html` is escaped."""

    writer: Literal["prompt", "sampled", "observed"]
    label: str
    tokens: int
    html: Markup


@dataclass(frozen=True, slots=True)
class Reading:
    """What the reader shows of one trajectory."""

    mode: Mode
    question: Question
    trajectory: Trajectory
    segments: tuple[Segment, ...]
    why: str
    versions: tuple[int, ...]

    @property
    def size(self) -> int:
        return sum(len(segment.html) for segment in self.segments)


def choose(groups: Mapping[Mode, Sequence[GroupSummary]], limit: int = SHOWN) -> list[Choice]:
    """At most `limit` trajectories: greedy and sampled, right and wrong in equal parts as far as
    there are any, each part spread over the held-out questions. No chance in it."""
    parts = [
        [
            Choice(mode, group, number)
            for group in groups[mode]
            if (number := _first(group, right)) is not None
        ]
        for mode in MODES
        for right in (False, True)
    ]
    chosen: list[Choice] = []
    left = limit
    for place, part in enumerate(sorted(parts, key=len)):
        share = min(len(part), left // (len(parts) - place))
        chosen += [part[i * len(part) // share] for i in range(share)]
        left -= share
    order = {id(group): place for mode in MODES for place, group in enumerate(groups[mode])}
    return sorted(chosen, key=lambda c: (MODES.index(c.mode), order[id(c.group)], c.number))


def _first(group: GroupSummary, right: bool) -> int | None:
    return next((i for i, t in enumerate(group.trajectories) if t.exact_match == right), None)


def reading(
    mode: Mode,
    question: Question,
    group: Group,
    number: int,
    tokenizer: Any,
    rollout: RolloutConfig,
) -> Reading:
    """Takes a trajectory apart for the reader."""
    trajectory = group.trajectories[number]
    versions = np.unique(trajectory.versions[trajectory.loss_mask])
    return Reading(
        mode,
        question,
        trajectory,
        tuple(_segments(trajectory, tokenizer)),
        f"{why(trajectory, question.answers)} {of_the_reward(trajectory, rollout)}",
        tuple(int(version) for version in versions),
    )


def why(trajectory: Trajectory, golds: Sequence[str]) -> str:
    """Why exact match and F1 are what they are, in a sentence or two."""
    if trajectory.answer is None:
        reason = {
            "truncated": "the trajectory ran out of room (model.context)",
            "out_of_turns": "the trajectory used up its turns (rollout.max_search_turns)",
        }.get(trajectory.end, f"the trajectory ended as {trajectory.end}")
        return f"No answer to score: {reason}."
    answer = normalise(trajectory.answer)
    gold = [normalise(one) for one in golds]
    wanted = " or ".join(f"“{one}”" for one in gold)
    if trajectory.exact_match:
        return f"The last closed answer reads “{answer}” once normalised, and so does a gold one."
    shared = max((sorted(set(answer.split()) & set(one.split())) for one in gold), key=len)
    words = f"the words they share: {', '.join(shared)}" if shared else "they share no word"
    return f"The last closed answer reads “{answer}” once normalised, not {wanted}; {words}."


def of_the_reward(trajectory: Trajectory, rollout: RolloutConfig) -> str:
    """What the reward was given for."""
    by = {
        "exact_match": "for exact match",
        "f1": "for F1",
        "search_r1": "by Search-R1's scorer, which takes the last answer of the whole text, the "
        f"prompt's included, and calls it {'right' if trajectory.search_r1 else 'wrong'}",
    }.get(rollout.reward, f"by {rollout.reward}")
    bonus = rollout.format_bonus if trajectory.answer is not None else 0.0
    added = f", {bonus:g} of it for an answer that is well formed" if bonus else ""
    return f"The reward is {trajectory.reward:.3g}, {by}{added}."


def _segments(trajectory: Trajectory, tokenizer: Any) -> Iterator[Segment]:
    start = trajectory.prompt_tokens
    yield Segment("prompt", "prompt", start, escape(tokenizer.decode(trajectory.ids[:start])))
    for turn in trajectory.turns:
        yield Segment(
            "sampled",
            _TURNS.get(turn.kind, turn.kind),
            turn.sampled_end - turn.start,
            _shaded(trajectory, turn, tokenizer),
        )
        if turn.observed_end > turn.sampled_end:
            text = tokenizer.decode(trajectory.ids[turn.sampled_end : turn.observed_end])
            label = "search result" if turn.kind == "search" else "correction"
            yield Segment(
                "observed", label, turn.observed_end - turn.sampled_end, escape(text.strip("\n"))
            )


def _shaded(trajectory: Trajectory, turn: Turn, tokenizer: Any) -> Markup:
    """The sampled tokens of a turn, each with its log-probability and a shade for it."""
    made = Markup("").join(
        Markup('<i class="p{}" data-l="{}">{}</i>').format(
            shade(trajectory.logprobs[start]),
            " ".join(f"{value:.2f}" for value in trajectory.logprobs[start:end]),
            text,
        )
        for start, end, text in _pieces(trajectory.ids, turn.start, turn.sampled_end, tokenizer)
    )
    return made or Markup('<i class="empty">(nothing)</i>')


def shade(logprob: float) -> int:
    """0 for a token that was nearly certain, up to 5 for one below 1 %."""
    probability = math.exp(min(float(logprob), 0.0))
    return sum(probability < bound for bound in SHADES)


def _pieces(
    ids: np.ndarray, start: int, end: int, tokenizer: Any
) -> Iterator[tuple[int, int, str]]:
    """(start, end, text) of each token; of several together where a character spans them.

    Decoded after the token before, since some tokenizers drop the space at the start of a text.
    """
    first = start
    for place in range(start, end):
        before = tokenizer.decode(ids[max(first - 1, 0) : first]) if first else ""
        text = tokenizer.decode(ids[max(first - 1, 0) : place + 1])
        text = (
            text[len(before) :]
            if text.startswith(before)
            else tokenizer.decode(ids[first : place + 1])
        )
        # The replacement character ends a text whose last character is not complete yet.
        if text.endswith("�") and place + 1 < end and place - first < 3:
            continue
        yield first, place + 1, text
        first = place + 1
