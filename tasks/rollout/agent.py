"""The agent loop: many trajectories at once, continuous batching across turns.

`AgentLoop` owns no thread and no clock: `submit` a unit, call `step` until its group comes back.
When one trajectory ends a turn its search runs at once and its next turn joins the engine's batch;
no trajectory waits for another.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from tasks.config import RolloutConfig
from tasks.data.questions import Passage
from tasks.retrieval.bm25 import Hit
from tasks.rollout.engine import Completion, Engine, Request, Sampling
from tasks.rollout.protocol import Answer, Invalid, Search, SearchProtocol, parse
from tasks.rollout.reward import score
from tasks.rollout.trajectory import End, Group, Trajectory, Turn


@dataclass(frozen=True, slots=True)
class Unit:
    """A group's worth of sampling: one question, `size` trajectories, one policy version."""

    unit_id: str
    question_id: str
    question: str
    answers: tuple[str, ...]
    version: int
    seed: int
    size: int
    sampling: Sampling


class Retriever(Protocol):
    """Batch search over the passages; `tasks.retrieval.bm25.Index` is one."""

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]: ...

    def passage(self, passage_id: int) -> Passage: ...


def stream_seed(seed: int, unit_id: str, trajectory: int, turn: int) -> int:
    """Seed of one turn's random stream: a hash of what it is, never of who samples it.

    `seed` is the run's and the unit id contains the step, so no two turns of a run share a stream.
    63 bits: torch generators take int64.
    """
    key = f"{seed}/{unit_id}/{trajectory}/{turn}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1


@dataclass(slots=True)
class _Attempt:
    """A trajectory being sampled. `ids` only ever grows."""

    unit: Unit
    number: int
    ids: list[int]
    prompt_tokens: int
    logprobs: list[float] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)

    def finish(self, end: End, answer: str | None, rollout: RolloutConfig) -> Trajectory:
        mask = np.zeros(len(self.ids), bool)
        for turn in self.turns:
            mask[turn.start : turn.sampled_end] = True
        logprobs = np.zeros(len(self.ids), np.float32)
        # `array` reads a list several times as fast as NumPy does.
        logprobs[mask] = array("f", self.logprobs)
        points = score(answer, self.unit.answers, rollout)
        return Trajectory(
            ids=np.array(array("i", self.ids), np.int32),
            loss_mask=mask,
            logprobs=logprobs,
            versions=np.where(mask, self.unit.version, -1).astype(np.int32),
            prompt_tokens=self.prompt_tokens,
            turns=tuple(self.turns),
            end=end,
            answer=answer,
            exact_match=points.exact_match,
            f1=points.f1,
            reward=points.reward,
        )


class AgentLoop:
    """Samples units with one engine.

    Args:
        context: longest trajectory in tokens, prompt included.
    """

    def __init__(
        self,
        engine: Engine,
        protocol: SearchProtocol,
        retriever: Retriever,
        rollout: RolloutConfig,
        context: int,
        top_k: int,
    ) -> None:
        self._engine = engine
        self._protocol = protocol
        self._retriever = retriever
        self._rollout = rollout
        self._context = context
        self._top_k = top_k
        self._running: dict[str, _Attempt] = {}
        self._finished: dict[str, dict[int, Trajectory]] = {}

    @property
    def active(self) -> int:
        """Trajectories that still sample."""
        return len(self._running)

    def submit(self, unit: Unit) -> None:
        """Starts a unit's trajectories.

        Raises:
            PolicyError: the prompt is longer than rollout.max_prompt_tokens.
        """
        prompt = self._protocol.prompt(unit.question)
        self._finished[unit.unit_id] = {}
        for number in range(unit.size):
            self._request(_Attempt(unit, number, list(prompt), len(prompt)))

    def step(self) -> list[Group]:
        """One engine step; returns the groups whose last trajectory ended in it."""
        completions = self._engine.step()
        ended = [
            (attempt, completion, parse(completion.text))
            for completion in completions
            if (attempt := self._running.pop(completion.request_id, None)) is not None
        ]
        queries = [a.query for t, _, a in ended if isinstance(a, Search) and not self._last(t)]
        found = iter(self._retriever.search(queries, self._top_k) if queries else [])
        groups = []
        for attempt, completion, action in ended:
            searched = isinstance(action, Search) and not self._last(attempt)
            group = self._end_turn(attempt, completion, action, next(found) if searched else [])
            if group is not None:
                groups.append(group)
        return groups

    def abort(self) -> None:
        """Drops everything that runs."""
        self._engine.abort(list(self._running))
        self._running.clear()
        self._finished.clear()

    def _last(self, attempt: _Attempt) -> bool:
        """Whether this is the turn in which only an answer counts."""
        return len(attempt.turns) == self._rollout.max_search_turns

    def _request(self, attempt: _Attempt) -> None:
        turn = len(attempt.turns)
        request = Request(
            request_id=f"{attempt.unit.unit_id}/{attempt.number}/{turn}",
            prompt_ids=list(attempt.ids),
            max_tokens=min(self._rollout.max_new_tokens, self._context - len(attempt.ids)),
            seed=stream_seed(attempt.unit.seed, attempt.unit.unit_id, attempt.number, turn),
            sampling=attempt.unit.sampling,
        )
        self._running[request.request_id] = attempt
        self._engine.add(request)

    def _end_turn(
        self,
        attempt: _Attempt,
        completion: Completion,
        action: Search | Answer | Invalid,
        hits: Sequence[Hit],
    ) -> Group | None:
        start = len(attempt.ids)
        attempt.ids.extend(completion.ids)
        attempt.logprobs.extend(completion.logprobs)
        sampled_end = len(attempt.ids)
        if isinstance(action, Answer):
            attempt.turns.append(Turn("answer", start, sampled_end, sampled_end))
            return self._end(attempt, "answered", action.text)
        is_search = isinstance(action, Search)
        last = self._last(attempt)
        observed: Sequence[int] = ()
        if is_search and not last:
            passages = [self._retriever.passage(hit.passage_id) for hit in hits]
            observed = self._protocol.observation(passages)
        elif not last:
            observed = self._protocol.corrective
        # One token must be left to sample after the observation.
        fits = len(attempt.ids) + len(observed) < self._context
        if fits:
            attempt.ids.extend(observed)
        attempt.turns.append(
            Turn(
                "search" if is_search else "invalid",
                start,
                sampled_end,
                len(attempt.ids),
                action.query if isinstance(action, Search) else None,
                tuple(hit.passage_id for hit in hits) if fits else (),
            )
        )
        if last or not fits:
            return self._end(attempt, "out_of_turns" if fits else "truncated", None)
        self._request(attempt)
        return None

    def _end(self, attempt: _Attempt, end: End, answer: str | None) -> Group | None:
        unit = attempt.unit
        done = self._finished[unit.unit_id]
        done[attempt.number] = attempt.finish(end, answer, self._rollout)
        if len(done) < unit.size:
            return None
        del self._finished[unit.unit_id]
        return Group(unit.unit_id, unit.question_id, tuple(done[i] for i in range(unit.size)))
