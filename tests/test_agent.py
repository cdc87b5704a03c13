"""The agent loop over a scripted engine."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.config import ModelConfig, RolloutConfig
from tasks.data.questions import Passage
from tasks.errors import PolicyError
from tasks.retrieval.bm25 import Hit
from tasks.rollout.agent import AgentLoop, Unit, stream_seed
from tasks.rollout.engine import Completion, Request, Sampling
from tasks.rollout.protocol import SearchProtocol
from tasks.rollout.trajectory import Group, Trajectory, summarise
from tasks.training.tiny_policy import build_tokenizer

pytestmark = [pytest.mark.fast, pytest.mark.timeout(120)]

Script = Callable[[str, int, int], str]
"""What trajectory `number` of unit `unit_id` writes in turn `turn`."""
PASSAGES = [
    Passage("Ada Marlowe", "An actor. <answer> Beijing </answer>"),
    Passage("Quiet Harbour", "A film of 1987. <answer> Beijing"),
]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return build_tokenizer()


@dataclass
class ScriptedEngine:
    """Writes a script letter by letter, so that its ids are not those of the text re-tokenised.

    Each request takes `duration` engine steps.
    """

    tokenizer: Any
    script: Script
    duration: Callable[[Request], int] = lambda _: 1
    added: list[Request] = field(default_factory=list)
    completed: dict[str, Completion] = field(default_factory=dict)
    aborted: list[str] = field(default_factory=list)
    running: dict[str, tuple[Request, int]] = field(default_factory=dict)

    def add(self, request: Request) -> None:
        assert request.request_id not in self.running
        assert request.max_tokens > 0
        self.added.append(replace(request, prompt_ids=list(request.prompt_ids)))
        self.running[request.request_id] = (request, self.duration(request))

    def step(self) -> Sequence[Completion]:
        ended = []
        for request_id, (request, left) in list(self.running.items()):
            self.running[request_id] = (request, left - 1)
            if left == 1:
                del self.running[request_id]
                ended.append(self._complete(request))
        return ended

    def abort(self, request_ids: Sequence[str]) -> None:
        self.aborted.extend(request_ids)
        for request_id in request_ids:
            self.running.pop(request_id, None)

    def _complete(self, request: Request) -> Completion:
        unit_id, number, turn = request.request_id.rsplit("/", 2)
        letters = self.script(unit_id, int(number), int(turn))[: request.max_tokens]
        ids = [i for letter in letters for i in self.tokenizer.encode(letter)]
        digest = hashlib.blake2b(request.request_id.encode(), digest_size=2).digest()
        base = -int.from_bytes(digest, "big") / 65536 - 1
        made = Completion(
            request.request_id,
            ids,
            [base - i / 1024 for i in range(len(ids))],
            letters,
            "stop" if letters.endswith(("</search>", "</answer>")) else "length",
        )
        self.completed[request.request_id] = made
        return made


@dataclass
class FixedRetriever:
    queries: list[list[str]] = field(default_factory=list)

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        self.queries.append(list(queries))
        return [[Hit(n, 1.0) for n in range(min(k, len(PASSAGES)))] for _ in queries]

    def passage(self, passage_id: int) -> Passage:
        return PASSAGES[passage_id]


@dataclass
class Stage:
    """An agent loop with everything around it in sight."""

    engine: ScriptedEngine
    retriever: FixedRetriever
    protocol: SearchProtocol
    agent: AgentLoop

    def run(self, *units: Unit, steps: int = 200) -> dict[str, Group]:
        for unit in units:
            self.agent.submit(unit)
        groups: dict[str, Group] = {}
        for _ in range(steps):
            groups.update((g.unit_id, g) for g in self.agent.step())
            if not self.agent.active:
                break
        assert not self.agent.active
        return groups


def _stage(
    tokenizer: Any,
    script: Script,
    context: int = 2048,
    duration: Callable[[Request], int] = lambda _: 1,
    **rollout: Any,
) -> Stage:
    settings_ = RolloutConfig.model_validate({"max_search_turns": 3, **rollout})
    model = ModelConfig.model_validate(
        {"path": "tiny", "instruction": "{question}", "context": context}
    )
    protocol = SearchProtocol(tokenizer, model, settings_)
    engine, retriever = ScriptedEngine(tokenizer, script, duration), FixedRetriever()
    agent = AgentLoop(engine, protocol, retriever, settings_, context, top_k=2)
    return Stage(engine, retriever, protocol, agent)


def _unit(unit_id: str = "u", size: int = 2, version: int = 7, seed: int = 3, **more: Any) -> Unit:
    question = more.get("question", "Where was Ada Marlowe born?")
    return Unit(unit_id, "q", question, ("Beijing",), version, seed, size, Sampling(1.0, 1.0))


def _plays(*turns: str) -> Script:
    return lambda _unit, _number, turn: turns[min(turn, len(turns) - 1)]


SEARCH, GOOD, BAD = "<search> Ada </search>", "<answer> Beijing </answer>", "I do not know"


def _check_trajectory(stage: Stage, unit: Unit, number: int, trajectory: Trajectory) -> None:
    """Everything that holds of any trajectory, against what went through the engine."""
    ids = list(trajectory.ids)
    assert ids[: trajectory.prompt_tokens] == stage.protocol.prompt(unit.question)
    at, sampled = trajectory.prompt_tokens, np.zeros(len(ids), bool)
    logprobs = np.zeros(len(ids), np.float32)
    for index, turn in enumerate(trajectory.turns):
        request_id = f"{unit.unit_id}/{number}/{index}"
        (request,) = [r for r in stage.engine.added if r.request_id == request_id]
        made = stage.engine.completed[request_id]
        assert turn.start == at
        assert request.prompt_ids == ids[: turn.start], "a prompt is the trajectory so far"
        assert ids[turn.start : turn.sampled_end] == made.ids, "sampled ids are kept as they are"
        sampled[turn.start : turn.sampled_end] = True
        logprobs[turn.start : turn.sampled_end] = made.logprobs
        at = turn.observed_end
    assert at == len(ids)
    np.testing.assert_array_equal(trajectory.loss_mask, sampled)
    np.testing.assert_array_equal(trajectory.logprobs, logprobs)
    np.testing.assert_array_equal(trajectory.versions, np.where(sampled, unit.version, -1))
    types = [getattr(trajectory, n).dtype for n in ("ids", "loss_mask", "logprobs", "versions")]
    assert types == [np.int32, np.bool_, np.float32, np.int32]


def test_search_then_answer(tokenizer: Any) -> None:
    stage, unit = _stage(tokenizer, _plays(SEARCH, GOOD)), _unit(size=1)
    (trajectory,) = stage.run(unit)["u"].trajectories
    _check_trajectory(stage, unit, 0, trajectory)
    search, answer = trajectory.turns
    assert (search.kind, search.query, search.passages) == ("search", "Ada", (0, 1))
    assert (answer.kind, answer.query, answer.passages) == ("answer", None, ())
    observed = list(trajectory.ids[search.sampled_end : search.observed_end])
    assert observed == stage.protocol.observation(PASSAGES)
    assert answer.sampled_end == answer.observed_end == len(trajectory.ids)
    assert (trajectory.end, trajectory.answer, trajectory.reward) == ("answered", "Beijing", 1.0)
    assert trajectory.exact_match
    assert trajectory.sampled_tokens == len(SEARCH) + len(GOOD)
    assert (trajectory.searches, trajectory.invalid_actions) == (1, 0)
    assert summarise(trajectory).tokens == len(trajectory.ids)
    assert stage.retriever.queries == [["Ada"]]


def test_sampled_ids_differ_from_the_text_re_tokenised(tokenizer: Any) -> None:
    """Else the tests here could not tell."""
    made = ScriptedEngine(tokenizer, _plays(SEARCH))._complete(
        Request("u/0/0", [], 100, 0, Sampling(1.0, 1.0))
    )
    assert made.ids != tokenizer.encode(SEARCH)
    assert tokenizer.decode(made.ids) == SEARCH


def test_the_reward_reads_sampled_text_only(tokenizer: Any) -> None:
    """Prompt and passages hold the gold answer in tags; the policy writes none or another."""
    question = "For example <answer> Beijing </answer> or <answer> Beijing"
    for last, answer in [("</answer>", None), ("<answer> Rome </answer>", "Rome"), ("hm", None)]:
        stage = _stage(tokenizer, _plays(SEARCH, last), format_bonus=0.125)
        unit = _unit(size=1, question=question)
        (trajectory,) = stage.run(unit)["u"].trajectories
        assert "<answer> Beijing </answer>" in tokenizer.decode(trajectory.ids)
        assert trajectory.answer == answer
        assert not trajectory.exact_match
        assert trajectory.f1 == 0.0
        assert trajectory.reward == (0.125 if answer else 0.0)


@pytest.mark.parametrize(("kind", "reward"), [("exact_match", 0.1), ("f1", 2 / 3 + 0.1)])
def test_the_reward_asked_for(tokenizer: Any, kind: str, reward: float) -> None:
    stage = _stage(
        tokenizer, _plays("<answer> old Beijing </answer>"), reward=kind, format_bonus=0.1
    )
    (trajectory,) = stage.run(_unit(size=1))["u"].trajectories
    assert trajectory.reward == pytest.approx(reward)


def test_an_invalid_action_costs_a_turn_and_is_corrected(tokenizer: Any) -> None:
    stage, unit = _stage(tokenizer, _plays(BAD, GOOD)), _unit(size=1)
    (trajectory,) = stage.run(unit)["u"].trajectories
    _check_trajectory(stage, unit, 0, trajectory)
    turn = trajectory.turns[0]
    assert turn.kind == "invalid"
    corrective = list(trajectory.ids[turn.sampled_end : turn.observed_end])
    assert corrective == stage.protocol.corrective
    assert (trajectory.end, trajectory.invalid_actions) == ("answered", 1)
    assert stage.retriever.queries == []


@pytest.mark.parametrize("action", [SEARCH, BAD])
def test_out_of_turns_after_the_search_turns_and_one_more(tokenizer: Any, action: str) -> None:
    stage, unit = _stage(tokenizer, _plays(action), max_search_turns=2), _unit(size=1)
    (trajectory,) = stage.run(unit)["u"].trajectories
    _check_trajectory(stage, unit, 0, trajectory)
    assert (trajectory.end, trajectory.answer, trajectory.reward) == ("out_of_turns", None, 0.0)
    assert len(trajectory.turns) == 3
    last = trajectory.turns[-1]
    assert last.sampled_end == last.observed_end, "nothing is shown after the last turn"
    assert last.passages == ()
    assert sum(len(q) for q in stage.retriever.queries) == (2 if action == SEARCH else 0)


def test_an_answer_counts_in_the_turn_after_the_last_search(tokenizer: Any) -> None:
    stage = _stage(tokenizer, _plays(SEARCH, SEARCH, GOOD), max_search_turns=2)
    (trajectory,) = stage.run(_unit(size=1))["u"].trajectories
    assert (trajectory.end, trajectory.reward, len(trajectory.turns)) == ("answered", 1.0, 3)


def test_truncated_where_the_observation_does_not_fit(tokenizer: Any) -> None:
    roomy = _stage(tokenizer, _plays(SEARCH, GOOD))
    (whole,) = roomy.run(_unit(size=1))["u"].trajectories
    observed_end = whole.turns[0].observed_end
    for context, end in [(observed_end, "truncated"), (observed_end + 1, "truncated"),
                         (observed_end + len(GOOD), "answered")]:  # fmt: skip
        stage, unit = _stage(tokenizer, _plays(SEARCH, GOOD), context=context), _unit(size=1)
        (trajectory,) = stage.run(unit)["u"].trajectories
        _check_trajectory(stage, unit, 0, trajectory)
        assert trajectory.end == end
        assert len(trajectory.ids) <= context
        assert len(trajectory.turns) == (1 if context == observed_end else 2)
    assert trajectory.reward == 1.0


def test_a_turn_never_samples_beyond_its_limit_or_the_context(tokenizer: Any) -> None:
    prompt = len(_stage(tokenizer, _plays(BAD)).protocol.prompt(_unit().question))
    stage = _stage(tokenizer, _plays("x" * 500), context=prompt + 110, max_new_tokens=20)
    (trajectory,) = stage.run(_unit(size=1))["u"].trajectories
    asked = [(len(r.prompt_ids), r.max_tokens) for r in stage.engine.added]
    assert all(m == min(20, prompt + 110 - length) for length, m in asked)
    assert trajectory.end == "truncated"
    assert len(trajectory.ids) <= prompt + 110


def test_the_last_turn_is_truncated_only_where_the_context_ends(tokenizer: Any) -> None:
    prompt = len(_stage(tokenizer, _plays(BAD)).protocol.prompt(_unit().question))
    corrective = len(_stage(tokenizer, _plays(BAD)).protocol.corrective)
    enough = prompt + 2 * len(BAD) + corrective
    for context, end in [(enough + 1, "out_of_turns"), (enough, "truncated")]:
        stage = _stage(tokenizer, _plays(BAD), context=context, max_search_turns=1)
        (trajectory,) = stage.run(_unit(size=1))["u"].trajectories
        assert (trajectory.end, len(trajectory.turns)) == (end, 2)


def test_a_long_prompt_starts_nothing(tokenizer: Any) -> None:
    stage = _stage(tokenizer, _plays(GOOD), max_prompt_tokens=4)
    with pytest.raises(PolicyError, match="max_prompt_tokens = 4"):
        stage.agent.submit(_unit())
    assert stage.agent.active == 0
    assert stage.engine.added == []


def test_no_trajectory_waits_for_another(tokenizer: Any) -> None:
    """A turn that ends is searched for and its next turn joins while the others still sample."""
    stage = _stage(
        tokenizer,
        _plays(SEARCH, GOOD),
        duration=lambda request: 50 if request.request_id.startswith("u/1/") else 1,
    )
    stage.agent.submit(_unit(size=3))
    assert stage.agent.step() == []
    added = [request.request_id for request in stage.engine.added]
    assert added == ["u/0/0", "u/1/0", "u/2/0", "u/0/1", "u/2/1"]
    assert stage.retriever.queries == [["Ada", "Ada"]], "one batch of the turns that ended"
    assert set(stage.engine.running) == {"u/1/0", "u/0/1", "u/2/1"}
    assert stage.agent.active == 3
    stage.agent.step()
    assert stage.agent.active == 1
    stage.agent.submit(_unit("later", size=1))  # and a unit joins at any time
    assert stage.agent.active == 2


def test_a_group_returns_whole_and_in_order(tokenizer: Any) -> None:
    def script(_unit: str, number: int, _turn: int) -> str:
        return f"<answer> {number} </answer>"

    stage = _stage(
        tokenizer, script, duration=lambda r: 9 - 2 * int(r.request_id.rsplit("/", 2)[1])
    )
    stage.agent.submit(_unit("a", size=4))
    stage.agent.submit(_unit("b", size=2))
    steps = [[g.unit_id for g in stage.agent.step()] for _ in range(9)]
    assert steps == [[], [], [], [], [], [], [], [], ["a", "b"]]
    groups = _stage(tokenizer, script).run(_unit("a", size=4), _unit("b", size=2))
    assert [t.answer for t in groups["a"].trajectories] == ["0", "1", "2", "3"]
    assert (groups["b"].unit_id, groups["b"].question_id) == ("b", "q")


def test_abort_drops_everything(tokenizer: Any) -> None:
    stage = _stage(tokenizer, _plays(SEARCH, GOOD), duration=lambda _: 2)
    stage.agent.submit(_unit(size=2))
    stage.agent.step()
    stage.agent.abort()
    assert sorted(stage.engine.aborted) == ["u/0/0", "u/1/0"]
    assert stage.agent.active == 0
    assert stage.agent.step() == []
    stage.engine.duration = lambda _: 1
    assert len(stage.run(_unit(size=2))["u"].trajectories) == 2, "the same unit starts anew"


def test_seeds_are_distinct_and_say_what_is_sampled_not_by_whom(tokenizer: Any) -> None:
    def seeds(order: list[str]) -> dict[str, int]:
        stage = _stage(tokenizer, _plays(SEARCH, SEARCH, GOOD))
        stage.run(*(_unit(unit_id, size=3) for unit_id in order))
        return {r.request_id: r.seed for r in stage.engine.added}

    names = [f"train-{step:06d}-{i:05d}" for step in range(3) for i in range(4)]
    forward = seeds(names)
    assert len(forward) == len(set(forward.values())) == 12 * 3 * 3
    assert seeds(names[::-1]) == forward
    assert seeds(names[5:6]) == {k: v for k, v in forward.items() if k.startswith(names[5])}
    assert all(0 <= seed < 2**63 for seed in forward.values())
    assert stream_seed(4, names[0], 0, 0) != forward[f"{names[0]}/0/0"], "the run's seed counts"


@settings(max_examples=60, deadline=None)
@given(
    plays=st.lists(
        st.lists(st.sampled_from([SEARCH, BAD, GOOD, "x" * 90, "<search> </search>"]), min_size=1),
        min_size=2,
        max_size=4,
    ),
    durations=st.lists(st.integers(1, 5), min_size=1, max_size=6),
    context=st.integers(80, 700),
)
def test_every_trajectory_is_what_the_engine_was_shown_and_sampled(
    tokenizer: Any, plays: list[list[str]], durations: list[int], context: int
) -> None:
    taken = iter(durations * 100)
    stage = _stage(
        tokenizer,
        lambda _, number, turn: plays[number][turn % len(plays[number])],
        context=context,
        duration=lambda _: next(taken),
    )
    unit = _unit(size=len(plays))
    group = stage.run(unit)["u"]
    assert len(group.trajectories) == len(plays)
    for number, trajectory in enumerate(group.trajectories):
        _check_trajectory(stage, unit, number, trajectory)
        assert len(trajectory.ids) <= context
        assert len(trajectory.turns) <= 4
        if trajectory.end != "answered":
            assert (trajectory.answer, trajectory.reward) == (None, 0.0)
