"""The agent loop: many trajectories at once, continuous batching across turns.

`AgentLoop` owns no thread and no clock: `submit` a unit, call `step` until its group comes back.
When one trajectory ends a turn its search begins at once, and its next turn joins the engine's
batch when the search is done; no trajectory waits for another.

What goes wrong with one unit (its query breaks the retriever, its prompt is refused) costs that
unit alone; only an engine that cannot step ends the loop.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field

import numpy as np

from tasks.config import RolloutConfig
from tasks.data.questions import Passage
from tasks.errors import RetrieverUnreachable
from tasks.retrieval.retriever import Found, Retriever
from tasks.rollout.engine import Completion, Engine, Request, Sampling
from tasks.rollout.protocol import Action, Answer, Search, SearchProtocol, parse
from tasks.rollout.reward import is_own_function, score
from tasks.rollout.streams import stream_seed, turns_at_most
from tasks.rollout.trajectory import End, Group, Trajectory, Transcript, TranscriptTurn, Turn

SEARCH_WAIT_S = 0.2
"""A step that has nothing to sample waits this long for a search; its caller has other duties."""


@dataclass(frozen=True, slots=True)
class Unit:
    """A group's worth of sampling: one question, `size` trajectories, one policy version.

    seed: of the run. stream: number of the first of the unit's random streams, one a turn; no two
    units of a run have streams in common (`tasks.rollout.batches`). attempt: numbered by the queue;
    attempts of one unit differ in nothing else.
    gold_titles: what its search should find; for the record, the policy never sees them.
    """

    unit_id: str
    question_id: str
    question: str
    answers: tuple[str, ...]
    version: int
    seed: int
    size: int
    sampling: Sampling
    stream: int = 0
    attempt: int = 0
    gold_titles: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Sampled:
    """A unit's group. transcripts: its trajectories as text, where a function reads them."""

    unit: Unit
    group: Group
    transcripts: tuple[Transcript, ...]


@dataclass(frozen=True, slots=True)
class Failed:
    """A unit that could not be sampled, and why; nothing of it runs any more."""

    unit: Unit
    error: Exception


@dataclass(slots=True)
class _Open:
    """A unit some of whose trajectories still sample."""

    unit: Unit
    finished: dict[int, Trajectory] = field(default_factory=dict)
    transcripts: dict[int, Transcript] = field(default_factory=dict)


@dataclass(slots=True)
class _Attempt:
    """A trajectory being sampled. `ids` only ever grows; `texts` is what Search-R1's scorer would
    read of it so far."""

    group: _Open
    number: int
    ids: list[int]
    prompt_tokens: int
    texts: list[str]
    logprobs: list[float] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    shown: set[str] = field(default_factory=set)

    @property
    def unit(self) -> Unit:
        return self.group.unit

    def finish(self, end: End, answer: str | None, rollout: RolloutConfig) -> Trajectory:
        mask = np.zeros(len(self.ids), bool)
        for turn in self.turns:
            mask[turn.start : turn.sampled_end] = True
        logprobs = np.zeros(len(self.ids), np.float32)
        # `array` reads a list several times as fast as NumPy does.
        logprobs[mask] = array("f", self.logprobs)
        points = score(answer, "".join(self.texts), self.unit.answers, rollout)
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
            search_r1=points.search_r1,
            gold_titles=self.unit.gold_titles,
            gold_found=tuple(title for title in self.unit.gold_titles if title in self.shown),
        )


@dataclass(frozen=True, slots=True)
class _Ended:
    """A turn that was sampled."""

    attempt: _Attempt
    completion: Completion
    action: Action


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
        self._transcribes = is_own_function(rollout.reward)
        self._running: dict[str, _Attempt] = {}
        self._searches: dict[Future[list[list[Found]]], list[_Ended]] = {}
        self._open: dict[str, _Open] = {}

    @property
    def active(self) -> int:
        """Trajectories that still sample or search."""
        searching = sum(self._goes_on(turn) for batch in self._searches.values() for turn in batch)
        return len(self._running) + searching

    def submit(self, unit: Unit) -> None:
        """Starts a unit's trajectories, all of them or none.

        Raises:
            PolicyError: the prompt is longer than rollout.max_prompt_tokens.
        """
        self.cancel([unit.unit_id])  # an earlier attempt, believed lost, is done with
        prompt = self._protocol.prompt(unit.question)
        text = self._protocol.text(prompt)
        group = self._open[unit.unit_id] = _Open(unit)
        try:
            for number in range(unit.size):
                self._request(_Attempt(group, number, list(prompt), len(prompt), [text]))
        except BaseException:
            self._drop(group)
            raise

    def step(self) -> list[Sampled | Failed]:
        """One engine step; returns the units that ended in it.

        Searches run meanwhile. Where none can sample before a search is done, it waits for one,
        for a short time.

        Raises:
            Exception: whatever the engine raises when it cannot step.
        """
        if not self._running:
            wait(self._searches, SEARCH_WAIT_S, FIRST_COMPLETED)
        outcomes: list[Sampled | Failed | None] = []
        to_search: list[_Ended] = []
        for completion in self._engine.step() if self._running else ():
            attempt = self._running.pop(completion.request_id, None)
            if attempt is None:
                continue
            turn = _Ended(attempt, completion, parse(completion.text))
            if isinstance(turn.action, Search) and not self._last(attempt):
                to_search.append(turn)
            else:
                outcomes.append(self._end_turn(turn, ()))
        self._search(to_search)
        for future in [one for one in self._searches if one.done()]:
            outcomes += self._end_searches(future, self._searches.pop(future))
        return [outcome for outcome in outcomes if outcome is not None]

    def cancel(self, unit_ids: Iterable[str]) -> None:
        """Stops those of these units that run; they come to no outcome."""
        for group in [self._open[name] for name in unit_ids if name in self._open]:
            self._drop(group)

    def abort(self) -> None:
        """Drops everything that runs."""
        self._engine.abort(list(self._running))
        for future in self._searches:
            future.cancel()
        self._running.clear()
        self._searches.clear()
        self._open.clear()

    def _goes_on(self, turn: _Ended) -> bool:
        """Whether the turn's unit has not failed meanwhile (nor been started anew)."""
        return self._open.get(turn.attempt.unit.unit_id) is turn.attempt.group

    def _drop(self, group: _Open) -> None:
        """Stops whatever of a unit still runs: a group without one of its trajectories is none."""
        running = [name for name, attempt in self._running.items() if attempt.group is group]
        for name in running:
            del self._running[name]
        del self._open[group.unit.unit_id]
        self._engine.abort(running)

    def _search(self, turns: Sequence[_Ended]) -> None:
        """Begins one search for all these turns."""
        turns = [turn for turn in turns if self._goes_on(turn)]
        if not turns:
            return
        queries = [turn.action.query for turn in turns if isinstance(turn.action, Search)]
        try:
            future = self._retriever.search(queries, self._top_k)
        except Exception as error:  # noqa: BLE001 (whatever a query did to it, its unit pays)
            future = Future()
            future.set_exception(error)
        self._searches[future] = turns

    def _end_searches(
        self, future: Future[list[list[Found]]], turns: list[_Ended]
    ) -> list[Sampled | Failed | None]:
        """The next turn of those whose search this was, or the end of their units.

        A search that failed over one of its queries is done again for each, to tell whose it was;
        not where the retriever cannot be reached, which is nobody's fault.
        """
        error = future.exception()
        if error is None and len(future.result()) != len(turns):
            error = ValueError(
                f"the retriever gave {len(future.result())} results for {len(turns)} queries"
            )
        if error is None:
            return [self._end_turn(*pair) for pair in zip(turns, future.result(), strict=True)]
        if not isinstance(error, Exception):
            raise error
        if isinstance(error, RetrieverUnreachable) or len(turns) == 1:
            return [self._fail(turn, error) for turn in turns]
        for turn in turns:
            self._search([turn])
        return []

    def _fail(self, turn: _Ended, error: Exception) -> Failed | None:
        if not self._goes_on(turn):
            return None
        self._drop(turn.attempt.group)
        return Failed(turn.attempt.unit, error)

    def _last(self, attempt: _Attempt) -> bool:
        """Whether this is the turn in which only an answer counts."""
        return len(attempt.turns) == self._rollout.max_search_turns

    def _request(self, attempt: _Attempt) -> None:
        unit, turn = attempt.unit, len(attempt.turns)
        stream = unit.stream + attempt.number * turns_at_most(self._rollout) + turn
        request = Request(
            request_id=f"{unit.unit_id}/{attempt.number}/{turn}",
            prompt_ids=list(attempt.ids),
            max_tokens=min(self._rollout.max_new_tokens, self._context - len(attempt.ids)),
            seed=stream_seed(unit.seed, stream),
            sampling=unit.sampling,
        )
        self._engine.add(request)
        self._running[request.request_id] = attempt

    def _end_turn(self, turn: _Ended, found: Sequence[Found]) -> Sampled | Failed | None:
        """Appends a turn and begins the next; the unit's outcome if it was its last one."""
        if not self._goes_on(turn):
            return None
        try:
            return self._append(turn.attempt, turn.completion, turn.action, found)
        except Exception as error:  # noqa: BLE001 (whatever it is, it costs this unit alone)
            return self._fail(turn, error)

    def _append(
        self, attempt: _Attempt, completion: Completion, action: Action, found: Sequence[Found]
    ) -> Sampled | None:
        start = len(attempt.ids)
        attempt.ids.extend(completion.ids)
        attempt.logprobs.extend(completion.logprobs)
        attempt.texts.append(completion.text)
        sampled_end = len(attempt.ids)
        if isinstance(action, Answer):
            attempt.turns.append(Turn("answer", start, sampled_end, sampled_end))
            return self._end(attempt, "answered", action.text)
        is_search = isinstance(action, Search)
        last = self._last(attempt)
        passages = [one.passage for one in found]
        observed: Sequence[int] = ()
        if is_search and not last:
            observed = self._protocol.observation(passages)
        elif not last:
            observed = self._protocol.corrective
        # One token must be left to sample after the observation.
        fits = len(attempt.ids) + len(observed) < self._context
        if fits:
            attempt.ids.extend(observed)
            attempt.texts.append(self._scored_text(observed, is_search, passages))
            attempt.shown.update(passage.title for passage in passages)
        attempt.turns.append(
            Turn(
                "search" if is_search else "invalid",
                start,
                sampled_end,
                len(attempt.ids),
                action.query if isinstance(action, Search) else None,
                tuple(passage.title for passage in passages) if fits else (),
            )
        )
        if last or not fits:
            return self._end(attempt, "out_of_turns" if fits else "truncated", None)
        self._request(attempt)
        return None

    def _scored_text(
        self, observed: Sequence[int], is_search: bool, passages: Sequence[Passage]
    ) -> str:
        """An observation as Search-R1's scorer reads it, which looks for answer tags alone: the
        corrective has some; without one in its passages there is nothing to decode."""
        tagged = any("answer>" in passage.title + passage.text for passage in passages)
        whole = tagged or not is_search
        return self._protocol.text(observed) if whole else "<information></information>"

    def _end(self, attempt: _Attempt, end: End, answer: str | None) -> Sampled | None:
        unit, group = attempt.unit, attempt.group
        trajectory = attempt.finish(end, answer, self._rollout)
        group.finished[attempt.number] = trajectory
        if self._transcribes:
            group.transcripts[attempt.number] = self._transcript(trajectory)
        if len(group.finished) < unit.size:
            return None
        del self._open[unit.unit_id]
        trajectories = tuple(group.finished[i] for i in range(unit.size))
        transcripts = tuple(text for _, text in sorted(group.transcripts.items()))
        return Sampled(unit, Group(unit.unit_id, unit.question_id, trajectories), transcripts)

    def _transcript(self, trajectory: Trajectory) -> Transcript:
        """Of its ids, so that it shows what is trained on."""
        ids: list[int] = trajectory.ids.tolist()
        text = self._protocol.text
        return Transcript(
            prompt=text(ids[: trajectory.prompt_tokens]),
            turns=tuple(
                TranscriptTurn(
                    turn.kind,
                    text(ids[turn.start : turn.sampled_end]),
                    text(ids[turn.sampled_end : turn.observed_end]),
                    turn.query,
                )
                for turn in trajectory.turns
            ),
            end=trajectory.end,
            answer=trajectory.answer,
            exact_match=trajectory.exact_match,
            f1=trajectory.f1,
            tokens=len(ids),
            sampled_tokens=trajectory.sampled_tokens,
        )
