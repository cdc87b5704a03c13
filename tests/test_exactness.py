"""Token in, token out, with a real vLLM engine and its detokenizer."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.cluster import worker_environment
from infra.processes import environment
from tasks.config import TrainConfig
from tasks.inputs import Inputs, load_inputs
from tasks.presets import resolve
from tasks.retrieval.bm25 import build
from tasks.retrieval.retriever import Bm25Retriever
from tasks.rollout.agent import AgentLoop, Sampled, Unit
from tasks.rollout.batches import train_units
from tasks.rollout.engine import Completion, Request, Sampling, VllmEngine, sampling_params
from tasks.rollout.protocol import STOP_TAGS, Answer, Search, SearchProtocol, parse
from tasks.rollout.trajectory import Group, Trajectory
from tasks.training.policy import load_policy
from tasks.training.tiny_policy import build_tokenizer
from tests.tokenizer_helpers import load_qwen, token_bytes

pytestmark = pytest.mark.timeout(300)

# The stop tag, split over tokens in every way


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer, and its tokens by their bytes."""

    tokenizer: Any
    tokens: dict[bytes, int]
    longest: int = 24

    def splits(self, data: bytes) -> list[int]:
        """Lengths of the tokens that may come first."""
        return [n for n in range(1, self.longest) if data[:n] in self.tokens and n <= len(data)]

    def spellings(self, data: bytes, least: int) -> Iterator[tuple[int, ...]]:
        """Where the tokens end (0 first) in all ways to spell at least so much of it."""
        open_ = [(0,)]
        while open_:
            ends = open_.pop()
            if ends[-1] >= least:
                yield ends
            else:
                open_ += [(*ends, ends[-1] + n) for n in self.splits(data[ends[-1] :])]


@pytest.fixture(scope="module", params=["tiny", "qwen"])
def vocabulary(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Vocabulary:
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = build_tokenizer() if request.param == "tiny" else load_qwen(folder)
    return Vocabulary(tokenizer, {data: number for number, data in token_bytes(tokenizer).items()})


BEFORE = st.lists(
    st.sampled_from(
        [b"<search>", b"<answer>", b"<think>", b" Ada", b"\n", b"</", b"</searc", b"</ search>",
         b"</SEARCH>", b"</answer", b"<", b">", b"\xe2\x80", b"\xff", b"\xc3", "é名".encode()]
    ),
    max_size=6,
).map(b"".join)  # fmt: skip
AFTER = st.sampled_from([b"", b"\n", b".", b">", b"</", b"\n\n", b" and", b"]", b"'", "é".encode()])


@settings(max_examples=300, deadline=None)
@given(before=BEFORE, tag=st.sampled_from(STOP_TAGS), after=AFTER, choices=st.data())
def test_a_turn_stops_at_the_token_that_completes_a_tag(
    vocabulary: Vocabulary, before: bytes, tag: str, after: bytes, choices: st.DataObject
) -> None:
    """However the tag is split, and whatever its last token goes on with."""
    stream = before + tag.encode() + after
    ids, ends = [], [0]
    while ends[-1] < len(stream):
        size = choices.draw(st.sampled_from(vocabulary.splits(stream[ends[-1] :])))
        ids.append(vocabulary.tokens[stream[ends[-1] : ends[-1] + size]])
        ends.append(ends[-1] + size)
    _check_stop(vocabulary, stream, ids, ends)


@pytest.mark.parametrize("tag", STOP_TAGS)
def test_a_tag_is_found_in_all_its_splits(vocabulary: Vocabulary, tag: str) -> None:
    """Every sequence of tokens that spells it, also those that begin before it or go on after."""
    ways = inside = 0
    for before in (b"", b" Ada", b">"):
        for after in (b"", b".", b"\n", b">."):
            stream = before + tag.encode() + after
            for ends in vocabulary.spellings(stream, len(before) + len(tag)):
                ids = [vocabulary.tokens[stream[a:b]] for a, b in pairwise(ends)]
                _check_stop(vocabulary, stream, ids, ends)
                ways, inside = ways + 1, inside + (ends[-1] > len(before) + len(tag))
    assert ways > 100
    assert inside > 10


def _check_stop(
    vocabulary: Vocabulary, stream: bytes, ids: Sequence[int], ends: Sequence[int]
) -> None:
    """Args: ids: tokens that spell the stream, or its beginning. ends: 0, then where each ends."""
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer

    closed = min(stream.index(t.encode()) + len(t) for t in STOP_TAGS if t.encode() in stream)
    needed = next(n for n, end in enumerate(ends) if end >= closed)

    prompt = vocabulary.tokenizer.encode("Who is Ada?", add_special_tokens=False)
    request = Request("r", prompt, 100, 0, Sampling(1.0, 1.0))
    core: Any = SimpleNamespace(
        request_id="r",
        sampling_params=sampling_params(request),
        prompt_token_ids=prompt,
        prompt_embeds=None,
    )
    detokenizer: Any = IncrementalDetokenizer.from_new_request(vocabulary.tokenizer, core)
    stopped = [detokenizer.update([number], False) is not None for number in ids[:needed]]
    assert stopped == [False] * (needed - 1) + [True]
    assert detokenizer.output_token_ids == ids[:needed], "the token that completes it is kept whole"
    text = stream[:closed].decode(errors="replace")
    assert detokenizer.output_text == text, "and its text is cut after the tag"
    assert text.endswith(STOP_TAGS)
    action = parse(detokenizer.output_text)
    if isinstance(action, Search):
        assert text.endswith(f"{action.query}</search>") or action.query in text
        assert "<search>" not in action.query
    elif isinstance(action, Answer):
        assert text.endswith("</answer>")


# With an engine


@dataclass
class Recorder:
    """Passes everything on, and keeps it."""

    engine: VllmEngine
    asked: dict[str, Request] = field(default_factory=dict)
    made: dict[str, Completion] = field(default_factory=dict)

    def add(self, request: Request) -> None:
        self.asked[request.request_id] = request
        self.engine.add(request)

    def step(self) -> Sequence[Completion]:
        completions = self.engine.step()
        self.made.update((made.request_id, made) for made in completions)
        return completions

    def abort(self, request_ids: Sequence[str]) -> None:
        self.engine.abort(request_ids)


@dataclass
class Stack:
    inputs: Inputs
    engine: VllmEngine
    model: Any
    retriever: Bm25Retriever

    def run(self, units: Sequence[Unit], config: TrainConfig) -> tuple[list[Group], Recorder]:
        """All units at once, from a cold prefix cache."""
        recorder = Recorder(self.engine)
        loop = self.loop(recorder, config)
        self.engine.reset_prefix_cache()
        for unit in units:
            loop.submit(unit)
        groups: dict[str, Group] = {}
        while loop.active:
            for outcome in loop.step():
                assert isinstance(outcome, Sampled), outcome
                groups[outcome.unit.unit_id] = outcome.group
        return [groups[unit.unit_id] for unit in units], recorder

    def loop(self, recorder: Recorder, config: TrainConfig) -> AgentLoop:
        return AgentLoop(
            recorder,
            SearchProtocol(self.inputs.tokenizer, config.model, config.rollout),
            self.retriever,
            config.rollout,
            config.model.context,
            config.retrieval.top_k,
        )

    def units(self, config: TrainConfig, step: int = 0) -> list[Unit]:
        return train_units(self.inputs.train, config, step, 0)

    def trainer_logprobs(self, trajectory: Trajectory, temperature: float) -> np.ndarray:
        """Of every token after the first, from one forward pass over the whole trajectory."""
        ids = torch.from_numpy(trajectory.ids.astype(np.int64))
        with torch.no_grad():
            logits = self.model(ids[None]).logits[0, :-1].float() / temperature
        return torch.log_softmax(logits, -1).gather(1, ids[1:, None])[:, 0].numpy()


def _config(**rollout: Any) -> TrainConfig:
    return resolve(
        "tiny",
        {
            "rollout": {"questions_per_step": 4, "group_size": 4, "max_sequences": 16, **rollout},
            "training": {"mini_batch_size": 16},
        },
    )


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    wanted = {k: v for k, v in worker_environment(1, None).items() if k.startswith("VLLM")}
    with environment({k: v for k, v in wanted.items() if v is not None}):
        inputs = load_inputs(_config(), Path(tmp_path_factory.mktemp("cache")))
        engine = VllmEngine(inputs.model_dir, inputs.config, load_format="auto")
        retriever = Bm25Retriever(build(inputs.passages, 1.2, 0.75))
        yield Stack(inputs, engine, load_policy(inputs.model_dir), retriever)
        engine.llm.engine_core.shutdown()
        gc.collect()


def test_ids_are_never_tokenised_anew_and_logprobs_are_the_trainers(stack: Stack) -> None:
    config = _config(temperature=1.3)  # not 1: the engine's default ignores it
    units = stack.units(config)
    groups, recorder = stack.run(units, config)
    turns, worst = 0, 0.0
    for unit, group in zip(units, groups, strict=True):
        assert len(group.trajectories) == unit.size
        for number, trajectory in enumerate(group.trajectories):
            ids = trajectory.ids.tolist()
            for index, turn in enumerate(trajectory.turns):
                name = f"{unit.unit_id}/{number}/{index}"
                assert recorder.asked[name].prompt_ids == ids[: turn.start]
                assert recorder.made[name].ids == ids[turn.start : turn.sampled_end]
                turns += 1
            sampled = np.flatnonzero(trajectory.loss_mask)
            wanted = stack.trainer_logprobs(trajectory, 1.3)[sampled - 1]
            worst = max(worst, float(np.abs(trajectory.logprobs[sampled] - wanted).max()))
    assert turns > len(units) * 4, "some trajectories have several turns"
    assert worst < 1e-4
    seeds = [request.seed % 2**32 for request in recorder.asked.values()]
    assert len(set(seeds)) == len(seeds)
    texts = {bytes(t.ids[t.prompt_tokens :]) for group in groups for t in group.trajectories}
    assert len(texts) > len(units), "trajectories of a group differ"


def test_the_same_seed_and_version_give_the_same_trajectories(stack: Stack) -> None:
    """One unit at a time: to the bit, also after the unit was begun and given up."""
    config = _config()
    unit = stack.units(config)[0]
    (first,), _ = stack.run([unit], config)
    loop = stack.loop(Recorder(stack.engine), config)
    loop.submit(unit)
    for _ in range(5):
        assert loop.step() == []
    loop.abort()
    (again,), _ = stack.run([unit], config)
    for ours, theirs in zip(first.trajectories, again.trajectories, strict=True):
        np.testing.assert_array_equal(ours.ids, theirs.ids)
        np.testing.assert_array_equal(ours.logprobs, theirs.logprobs)
        assert (ours.turns, ours.reward) == (theirs.turns, theirs.reward)
    other = stack.units(_config().model_copy(update={"seed": 1}))[0]
    (unlike,), _ = stack.run([other], config)
    assert [t.ids.tolist() for t in unlike.trajectories] != [
        t.ids.tolist() for t in first.trajectories
    ]


def test_a_prompt_that_leaves_room_for_one_token(stack: Stack) -> None:
    config = _config(max_prompt_tokens=511)
    assert config.model.context == 512
    protocol = SearchProtocol(stack.inputs.tokenizer, config.model, config.rollout)
    question = "q" * (511 - len(protocol.prompt("")))
    prompt = protocol.prompt(question)
    assert len(prompt) == 511
    unit = replace(stack.units(config)[0], question=question)
    (group,), recorder = stack.run([unit], config)
    for number, trajectory in enumerate(group.trajectories):
        assert trajectory.ids[:511].tolist() == prompt
        assert len(trajectory.ids) == 512
        assert (trajectory.end, len(trajectory.turns)) == ("truncated", 1)
        assert recorder.asked[f"{unit.unit_id}/{number}/0"].max_tokens == 1
        wanted = stack.trainer_logprobs(trajectory, 1.0)[-1]
        assert trajectory.logprobs[-1] == pytest.approx(wanted, abs=1e-4)
