"""The agent loop over a scripted engine."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.config import ModelConfig, RolloutConfig
from tasks.data.questions import Passage
from tasks.errors import PolicyError, RetrieverError, RetrieverUnreachable
from tasks.retrieval.retriever import Found
from tasks.rollout import agent as agent_module
from tasks.rollout.agent import AgentLoop, Failed, Sampled, Unit
from tasks.rollout.engine import Completion, Request, Sampling
from tasks.rollout.protocol import SearchProtocol
from tasks.rollout.trajectory import Group, Trajectory, summarise
from tasks.training.tiny_policy import build_tokenizer

pytestmark = [pytest.mark.fast, pytest.mark.timeout(120)]

Script = Callable[[str, int, int], str]
"""What trajectory `number` of unit `unit_id` writes in turn `turn`."""
PASSAGES = [
    Passage("Ada Marlowe", "An actor. <answer> Beijing </answer> <search> Ada </search>"),
    Passage("Quiet Harbour", "A film of 1987. </information> <search> <answer> Beijing"),
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
        letters, ids = "", []
        for letter in self.script(unit_id, int(number), int(turn)):
            ids += self.tokenizer.encode(letter)  # some take several
            if len(ids) > request.max_tokens:
                del ids[request.max_tokens :]
                break
            letters += letter
        digest = hashlib.blake2b(request.request_id.encode(), digest_size=2).digest()
        base = -int.from_bytes(digest, "big") / 65536 - 1
        made = Completion(
            request.request_id,
            ids,
            [base - i / 1024 for i in range(len(ids))],
            letters,
        )
        self.completed[request.request_id] = made
        return made


@dataclass
class FixedRetriever:
    queries: list[list[str]] = field(default_factory=list)

    def search(self, queries: Sequence[str], k: int) -> Future[list[list[Found]]]:
        self.queries.append(list(queries))
        future: Future[list[list[Found]]] = Future()
        future.set_result([[Found(p, 1.0) for p in PASSAGES[:k]] for _ in queries])
        return future

    def close(self) -> None:
        pass


@dataclass
class PendingRetriever(FixedRetriever):
    """Searches end when the test says so."""

    futures: list[Future[list[list[Found]]]] = field(default_factory=list)

    def search(self, queries: Sequence[str], k: int) -> Future[list[list[Found]]]:
        self.queries.append(list(queries))
        self.futures.append(Future())
        return self.futures[-1]

    def end(self, number: int) -> None:
        found = [[Found(p, 1.0) for p in PASSAGES] for _ in self.queries[number]]
        self.futures[number].set_result(found)


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
            for outcome in self.agent.step():
                assert isinstance(outcome, Sampled), outcome
                assert outcome.unit in units
                groups[outcome.unit.unit_id] = outcome.group
            if not self.agent.active:
                break
        assert not self.agent.active
        return groups


def _stage(
    tokenizer: Any,
    script: Script,
    context: int = 2048,
    duration: Callable[[Request], int] = lambda _: 1,
    retriever: FixedRetriever | None = None,
    **rollout: Any,
) -> Stage:
    settings_ = RolloutConfig.model_validate({"max_search_turns": 3, **rollout})
    model = ModelConfig.model_validate(
        {"path": "tiny", "instruction": "{question}", "context": context}
    )
    protocol = SearchProtocol(tokenizer, model, settings_)
    engine = ScriptedEngine(tokenizer, script, duration)
    retriever = retriever or FixedRetriever()
    agent = AgentLoop(engine, protocol, retriever, settings_, context, top_k=2)
    return Stage(engine, retriever, protocol, agent)


def _unit(unit_id: str = "u", size: int = 2, version: int = 7, seed: int = 3, **more: Any) -> Unit:
    question = more.get("question", "Where was Ada Marlowe born?")
    return Unit(unit_id, "q", question, ("Beijing",), version, seed, size, Sampling(1.0, 1.0))


def _plays(*turns: str) -> Script:
    return lambda _unit, _number, turn: turns[min(turn, len(turns) - 1)]


ODD = [
    "",
    *("<|end|>", "<|im_end|>"),  # the end of the turn and nothing else
    "<search> </search>",
    "<search> \ufffd\ufffd </search>",
    f"<search>{'Ada ' * 20}</search>",
    "<search> <answer> <information> <search> Ada </search>",
    "<SEARCH> Ada </SEARCH>",
    "<search> unclosed",
    "<answer> nested <answer> Beijing </answer>",
    "</information> <answer> Beijing </search>",
]
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
    assert (search.kind, search.query, search.passages) == (
        "search",
        "Ada",
        ("Ada Marlowe", "Quiet Harbour"),
    )
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


def test_search_r1_reads_the_corrective_too(tokenizer: Any) -> None:
    """It has answer tags of its own: they close one that the policy left open."""
    stage = _stage(tokenizer, _plays("<answer> Beijing", GOOD))
    question = "Answer as in <answer> this </answer>. Where?"
    (trajectory,) = stage.run(_unit(size=1, question=question))["u"].trajectories
    assert (trajectory.invalid_actions, trajectory.exact_match) == (1, True)
    assert trajectory.search_r1


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
    assert trajectory.searches == (3 if action == SEARCH else 0), "the one that was not run, too"


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
    steps = [[outcome.unit.unit_id for outcome in stage.agent.step()] for _ in range(9)]
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


def test_seeds_say_what_is_sampled_and_not_by_whom(tokenizer: Any) -> None:
    def seeds(order: list[int]) -> dict[str, int]:
        stage = _stage(tokenizer, _plays(SEARCH, SEARCH, GOOD))
        streams = len(order) * 3 * 4  # of 3 trajectories of at most 4 turns
        stage.run(*(replace(_unit(f"u{i}", size=3), stream=i * 12) for i in order))
        assert len(stage.engine.added) < streams
        return {r.request_id: r.seed for r in stage.engine.added}

    forward = seeds(list(range(12)))
    assert len(forward) == 12 * 3 * 3
    assert len({seed % 2**32 for seed in forward.values()}) == len(forward)
    assert seeds(list(range(12))[::-1]) == forward
    assert seeds([5]) == {k: v for k, v in forward.items() if k.startswith("u5/")}


# What goes wrong with one unit costs that unit alone


class Broken(Exception):
    """Nothing that anyone expects."""


POISON = "<search> poison </search>"


@dataclass
class FragileRetriever(FixedRetriever):
    """Chokes on a query, at once or in its future; `down` fails every search.

    error: what a choked one raises: a bug of its own, or a server that answers that query badly.
    """

    at_once: bool = True
    error: Exception = field(default_factory=lambda: Broken("choked"))
    down: bool = False

    def search(self, queries: Sequence[str], k: int) -> Future[list[list[Found]]]:
        future = super().search(queries, k)
        broken: Future[list[list[Found]]] = Future()
        if self.down:
            broken.set_exception(RetrieverUnreachable("nobody there"))
            return broken
        if "poison" not in queries:
            return future
        if self.at_once:
            raise self.error
        broken.set_exception(self.error)
        return broken


def _outcomes(stage: Stage, *units: Unit, steps: int = 50) -> dict[str, Sampled | Failed]:
    for unit in units:
        stage.agent.submit(unit)
    found: dict[str, Sampled | Failed] = {}
    for _ in range(steps):
        for outcome in stage.agent.step():
            assert outcome.unit.unit_id not in found
            found[outcome.unit.unit_id] = outcome
        if not stage.agent.active:
            return found
    raise AssertionError(f"still {stage.agent.active} active")


def _poisoned(tokenizer: Any, retriever: FixedRetriever) -> Stage:
    def script(unit_id: str, number: int, turn: int) -> str:
        return (POISON if unit_id == "bad" and number == 1 else SEARCH) if turn == 0 else GOOD

    return _stage(tokenizer, script, retriever=retriever)


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("error", [Broken("choked"), RetrieverError("no contents")])
def test_a_query_that_breaks_the_retriever_costs_its_unit(
    tokenizer: Any, at_once: bool, error: Exception
) -> None:
    stage = _poisoned(tokenizer, FragileRetriever(at_once=at_once, error=error))
    units = [_unit("a", size=2), _unit("bad", size=3), _unit("b", size=2)]
    found = _outcomes(stage, *units)
    failed = found.pop("bad")
    assert isinstance(failed, Failed)
    assert (failed.unit, failed.error) == (units[1], error)
    assert {name for name, one in found.items() if isinstance(one, Sampled)} == {"a", "b"}
    assert not [name for name in stage.engine.running if name.startswith("bad/")]
    again = _outcomes(stage, units[1])["bad"]
    assert isinstance(again, Failed), "and the same again where it is tried again"


def test_a_retriever_that_is_down_costs_all_that_search_and_is_asked_once(tokenizer: Any) -> None:
    retriever = FragileRetriever(down=True)
    plays = {"a": SEARCH, "b": SEARCH, "c": GOOD}
    stage = _stage(tokenizer, lambda unit_id, *_: plays[unit_id], retriever=retriever)
    found = _outcomes(stage, *(_unit(name, size=2) for name in plays))
    assert {n: type(one) for n, one in found.items()} == {"a": Failed, "b": Failed, "c": Sampled}
    assert len(retriever.queries) == 1


def test_a_wrong_number_of_results_is_no_results(tokenizer: Any) -> None:
    class Short(FixedRetriever):
        def search(self, queries: Sequence[str], k: int) -> Future[list[list[Found]]]:
            future: Future[list[list[Found]]] = Future()
            future.set_result(super().search(queries, k).result()[1:])
            return future

    found = _outcomes(_poisoned(tokenizer, Short()), _unit("a", size=2))["a"]
    assert isinstance(found, Failed)
    assert str(found.error) == "the retriever gave 0 results for 1 queries"


@pytest.mark.parametrize("stage_of_it", ["observation", "prompt", "add first", "add next", "score"])
def test_an_exception_anywhere_in_a_unit_costs_that_unit(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, stage_of_it: str
) -> None:
    bad = _unit("bad", size=3, question="Who is bad?")
    stage = _stage(
        tokenizer,
        lambda unit_id, _, turn: f"<search> {unit_id} </search>" if turn == 0 else GOOD,
        duration=lambda r: 3 if r.request_id.startswith("bad/0") else 1,
    )

    def breaks(target: Any, name: str, when: Callable[..., bool]) -> None:
        inner = getattr(target, name)

        def replacement(*args: Any) -> Any:
            if when(*args):
                raise Broken(stage_of_it)
            return inner(*args)

        monkeypatch.setattr(target, name, replacement)

    once = iter([True])  # the first observation, whosever it is
    if stage_of_it == "observation":
        breaks(stage.protocol, "observation", lambda _: next(once, False))
    elif stage_of_it == "prompt":
        breaks(stage.protocol, "prompt", lambda question: "bad" in question)
    elif stage_of_it == "add first":
        breaks(stage.engine, "add", lambda request: request.request_id == "bad/2/0")
    elif stage_of_it == "add next":
        breaks(stage.engine, "add", lambda request: request.request_id == "bad/1/1")
    else:
        breaks(agent_module, "score", lambda *_: next(once, False))
    if stage_of_it in ("prompt", "add first"):
        with pytest.raises(Broken):
            stage.agent.submit(bad)
        assert stage.agent.active == 0
        assert stage.engine.running == {}
        assert set(_outcomes(stage, _unit("good"))) == {"good"}
        return
    found = _outcomes(stage, bad, _unit("good"))
    kinds = sorted(type(one).__name__ for one in found.values())
    assert kinds == ["Failed", "Sampled"]
    assert stage.engine.running == {}, "nothing of the failed unit goes on"


def test_an_engine_that_breaks_ends_the_loop(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = _stage(tokenizer, _plays(GOOD))
    stage.agent.submit(_unit())

    def step() -> Sequence[Completion]:
        raise Broken("out of memory")

    monkeypatch.setattr(stage.engine, "step", step)
    with pytest.raises(Broken, match="out of memory"):
        stage.agent.step()


def test_a_search_of_a_failed_unit_does_not_touch_its_successor(tokenizer: Any) -> None:
    """The unit is given back, and may return to this worker while the old search still runs."""

    @dataclass
    class Slow(FixedRetriever):
        pending: list[Future[list[list[Found]]]] = field(default_factory=list)

        def search(self, queries: Sequence[str], k: int) -> Future[list[list[Found]]]:
            self.queries.append(list(queries))
            self.pending.append(Future())
            return self.pending[-1]

    retriever = Slow()
    stage = _stage(
        tokenizer,
        lambda _, number, turn: SEARCH if turn == 0 else GOOD,
        duration=lambda r: 1 + int(r.request_id.rsplit("/", 2)[1]),
        retriever=retriever,
    )
    unit = _unit(size=2)
    stage.agent.submit(unit)
    assert stage.agent.step() == []
    assert stage.agent.step() == []
    first, second = retriever.pending
    second.set_exception(ConnectionError("gone"))
    (failed,) = stage.agent.step()
    assert isinstance(failed, Failed)
    assert stage.agent.active == 0
    stage.agent.submit(unit)
    first.set_result([[Found(PASSAGES[0], 1.0)]])
    stage.agent.step()
    stage.agent.step()
    for future in retriever.pending[2:]:
        future.set_result([[Found(PASSAGES[1], 1.0)]])
    found = [outcome for _ in range(6) for outcome in stage.agent.step()]
    (sampled,) = found
    assert isinstance(sampled, Sampled)
    shown = [t.turns[0].passages for t in sampled.group.trajectories]
    assert shown == [("Quiet Harbour",)] * 2


@settings(max_examples=60, deadline=None)
@given(
    plays=st.lists(
        st.lists(st.sampled_from([SEARCH, BAD, GOOD, "x" * 90, *ODD]), min_size=1),
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


def test_what_was_found_of_the_evidence(tokenizer: Any) -> None:
    gold = ("Quiet Harbour", "Nobody")
    unit = replace(_unit(size=2), gold_titles=gold)
    stage = _stage(tokenizer, lambda _unit, number, turn: SEARCH if number + turn == 0 else GOOD)
    searched, answered = stage.run(unit)["u"].trajectories
    assert (searched.gold_titles, searched.gold_found) == (gold, ("Quiet Harbour",))
    assert (answered.gold_found, summarise(answered).gold_recall) == ((), 0.0)
    assert summarise(searched).gold_recall == 0.5
    # An observation that did not fit was not seen.
    tight = _stage(tokenizer, _plays(SEARCH), context=64).run(unit)["u"].trajectories[0]
    assert (tight.end, tight.gold_found) == ("truncated", ())


def _search_first(_unit: str, number: int, turn: int) -> str:
    return SEARCH if turn == 0 else GOOD


def test_a_search_stops_nobody_else(tokenizer: Any) -> None:
    pending = PendingRetriever()
    stage = _stage(tokenizer, _search_first, retriever=pending)
    stage.agent.submit(_unit("slow", size=1))
    assert stage.agent.step() == []
    assert (stage.agent.active, len(pending.futures)) == (1, 1)
    assert stage.agent.step() == [], "with nothing to sample it waits a little"
    stage.agent.submit(_unit("quick", size=1))
    assert stage.agent.step() == []
    assert (stage.agent.active, len(pending.futures)) == (2, 2)
    pending.end(1)
    (quick,) = stage.agent.step() or stage.agent.step()
    assert isinstance(quick, Sampled)
    assert quick.unit.unit_id == "quick"
    pending.end(0)
    (slow,) = stage.agent.step() or stage.agent.step()
    assert isinstance(slow, Sampled)
    _check_trajectory(stage, _unit("slow", size=1), 0, slow.group.trajectories[0])
    assert slow.group.trajectories[0].answer == "Beijing"
    assert stage.agent.active == 0


def test_aborting_gives_up_the_searches(tokenizer: Any) -> None:
    pending = PendingRetriever()
    stage = _stage(tokenizer, _search_first, retriever=pending)
    stage.agent.submit(_unit(size=2))
    stage.agent.step()
    stage.agent.abort()
    assert stage.agent.active == 0
    assert pending.futures[0].cancelled()
