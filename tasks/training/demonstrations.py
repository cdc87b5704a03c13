"""Demonstration trajectories for the warm start, built from a dataset's supporting facts.

A good one searches the gold titles in turn and gives the answer. The others show the protocol
played badly (a guess, a vague query, a search led astray, an answer too early, a missing tag): they
leave the policy fluent in the protocol and poor at the task, which is what reinforcement learning
starts from. Before it answers, a good one may note in <think> how the answer follows, as the
instruction of Search-R1 asks for.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tasks.config import TrainConfig, WarmStartConfig
from tasks.data import miniature
from tasks.data.questions import Passage, Question, from_row, pool
from tasks.errors import ConfigError
from tasks.retrieval.bm25 import build
from tasks.retrieval.retriever import Bm25Retriever, Retriever
from tasks.rollout.protocol import SearchProtocol

FAULTS = ("guess", "early", "astray", "vague", "untagged")
# A comparison's second page has to be found by the question's own words: wrong queries shown there
# are learned as the way to copy a title ("Golden Castle" for "Golden Promise"), and since a guess
# is often right the reward hardly unteaches them.
_FAULTS_OF_COMPARISONS = ("guess", "early", "untagged")
_SEARCHES = {"early": 1, "astray": 2, "vague": 1}


@dataclass(frozen=True, slots=True)
class Demonstration:
    """ids int32 [T]; loss_mask bool [T], True on the tokens the policy is to learn.

    is_reading: see `Demonstrator.reading`.
    """

    ids: np.ndarray
    loss_mask: np.ndarray
    is_reading: bool = False


class Demonstrator:
    """Plays questions against the real retriever, in the policy's own tokens.

    What a run would not let a policy do is not shown: a demonstration is None where it outgrows
    the context, writes too much in a turn or searches too often, and of a question without
    supporting facts.
    """

    def __init__(self, protocol: SearchProtocol, retriever: Retriever, config: TrainConfig) -> None:
        self._protocol = protocol
        self._retriever = retriever
        self._top_k = config.retrieval.top_k
        self._context = config.model.context
        self._max_searches = config.rollout.max_search_turns
        self._max_action = config.rollout.max_new_tokens
        self._think = settings_of(config).think

    def good(self, question: Question) -> Demonstration | None:
        """Searches every gold title, then answers, with a note before it where one is asked for."""
        if not 0 < len(question.gold_titles) <= self._max_searches:
            return None
        play = Play(self._protocol, question.question)
        for title in question.gold_titles:
            play.act(f"<search> {title}</search>")
            play.observe(self._protocol.observation(self._search(title)))
        play.act(f"{self._note(question)}<answer> {question.answers[0]}</answer>")
        return self._done(play)

    def reading(self, question: Question) -> Demonstration | None:
        """Only the answer, the note before it given up to its last colon: what follows is
        concluded from it. None where there is no note."""
        note = self._note(question)
        if not note:
            return None
        given, colon, concluded = note.rpartition(":")
        if not colon:
            given, concluded = note, ""
        play = Play(self._protocol, question.question)
        play.observe(self._protocol.encode_action(given + colon))
        play.act(f"{concluded}<answer> {question.answers[0]}</answer>")
        made = self._done(play)
        return None if made is None else replace(made, is_reading=True)

    def _note(self, question: Question) -> str:
        noted = self._think in ("always", question.kind) and question.rationale
        return f"<think> {question.rationale}</think>" if noted else ""

    def bad(self, question: Question, rng: random.Random) -> Demonstration | None:
        """One fault, then a wrong title for an answer."""
        fault = rng.choice(_FAULTS_OF_COMPARISONS if question.kind == "comparison" else FAULTS)
        if not question.gold_titles or _SEARCHES.get(fault, 0) > self._max_searches:
            return None
        play = Play(self._protocol, question.question)
        seen: Sequence[Passage] = question.context
        if fault == "untagged":
            play.act(f" {question.gold_titles[0]}", end_of_turn=True)
            play.observe(self._protocol.corrective)
        if fault in ("early", "astray"):
            found = self._search(question.gold_titles[0])
            play.act(f"<search> {question.gold_titles[0]}</search>")
            play.observe(self._protocol.observation(found))
            seen = found or seen
        if fault in ("astray", "vague"):
            query = rng.choice(seen).title if fault == "astray" else _one_word(question, rng)
            play.act(f"<search> {query}</search>")
            found = self._search(query)
            play.observe(self._protocol.observation(found))
            seen = found or seen
        play.act(f"<answer> {rng.choice(seen).title}</answer>")
        return self._done(play)

    def _done(self, play: Play) -> Demonstration | None:
        return play.done(self._context) if play.longest_action <= self._max_action else None

    def _search(self, query: str) -> list[Passage]:
        (found,) = self._retriever.search([query], self._top_k).result()
        return [one.passage for one in found]


def _one_word(question: Question, rng: random.Random) -> str:
    title = question.gold_titles[0]
    return rng.choice(title.split() or [title])


class Play:
    """A trajectory as it is demonstrated, turn by turn; `act` and `observe` return their lengths.

    Attributes:
        longest_action: tokens of the longest turn of the policy's so far.

    Raises:
        PolicyError: the prompt is longer than rollout.max_prompt_tokens.
    """

    def __init__(self, protocol: SearchProtocol, question: str) -> None:
        self._protocol = protocol
        self._ids = list(protocol.prompt(question))
        self._mask = [False] * len(self._ids)
        self.longest_action = 0

    @property
    def size(self) -> int:
        return len(self._ids)

    def act(self, text: str, end_of_turn: bool = False) -> int:
        ids = self._protocol.encode_action(text, end_of_turn)
        self._ids.extend(ids)
        self._mask.extend([True] * len(ids))
        self.longest_action = max(self.longest_action, len(ids))
        return len(ids)

    def observe(self, ids: Sequence[int]) -> int:
        self._ids.extend(ids)
        self._mask.extend([False] * len(ids))
        return len(ids)

    def done(self, context: int) -> Demonstration | None:
        """None where it is longer than that."""
        if len(self._ids) > context:
            return None
        return Demonstration(np.array(self._ids, np.int32), np.array(self._mask, bool))


@dataclass(frozen=True)
class Corpus:
    """Questions to demonstrate, and what searches for their passages."""

    questions: Sequence[Question]
    retriever: Retriever


def settings_of(config: TrainConfig) -> WarmStartConfig:
    """The warm start a configuration asks for.

    Raises:
        ConfigError: it asks for none.
    """
    if config.model.warm_start is None:
        raise ConfigError(
            "model.warm_start is not set; give at least model.warm_start.demonstrations > 0"
        )
    return config.model.warm_start


def chosen_questions(
    questions: Sequence[Question], settings: WarmStartConfig, seed: int
) -> list[Question]:
    """The questions to demonstrate, as many as there are demonstrations or else all of them."""
    rng = random.Random(f"{seed}-questions")
    count = min(len(questions), settings.demonstrations)
    return [questions[i] for i in rng.sample(range(len(questions)), count)]


def miniature_worlds(config: TrainConfig, count: int) -> Iterator[Corpus]:
    """Worlds 1 to `count` of the miniature, each with its own index; 0 is the one runs use."""
    for number in range(1, count + 1):
        rows = miniature.generate("train", number)
        questions = [from_row(row, i) for i, row in enumerate(rows)]
        index = build(pool(questions), config.retrieval.k1, config.retrieval.b)
        random.Random(f"{config.seed}-{number}").shuffle(questions)
        yield Corpus(questions, Bm25Retriever(index))


def demonstrations(
    protocol: SearchProtocol, config: TrainConfig, settings: WarmStartConfig, given: Corpus
) -> list[Demonstration]:
    """The demonstrations asked for, less those that a run would not allow, in the order of use.

    Questions of a corpus are taken in turn, again from the first where there are too few.

    Args:
        given: the corpus to demonstrate, unless settings.worlds asks for others.
    """
    rng = random.Random(f"{config.seed}-demonstrations")
    corpora = miniature_worlds(config, settings.worlds) if settings.worlds else iter([given])
    each = -(-settings.demonstrations // max(1, settings.worlds))
    made: list[Demonstration | None] = []
    for corpus in corpora:
        play = Demonstrator(protocol, corpus.retriever, config)
        for number in range(min(each, settings.demonstrations - len(made))):
            question = corpus.questions[number % len(corpus.questions)]
            good = len(made) < settings.good_first or rng.random() < settings.good_share
            made.append(play.good(question) if good else play.bad(question, rng))
    return [demonstration for demonstration in made if demonstration is not None]


def readings(
    protocol: SearchProtocol, config: TrainConfig, settings: WarmStartConfig, given: Corpus
) -> list[Demonstration]:
    """As `demonstrations`, those that only read, each once; none where no question is fit."""
    made: list[Demonstration] = []
    corpora = miniature_worlds(config, settings.worlds) if settings.worlds else iter([given])
    for corpus in corpora if settings.readings else ():
        play = Demonstrator(protocol, corpus.retriever, config)
        made += filter(None, map(play.reading, corpus.questions))
    random.Random(f"{config.seed}-readings").shuffle(made)
    return made


def with_readings(
    made: Sequence[Demonstration], read: Sequence[Demonstration], settings: WarmStartConfig
) -> list[Demonstration]:
    """settings.readings of those that read first (whole batches of them), then two batches of the
    others and one of those that read in turn: what was learned from them is forgotten while nothing
    asks for it. Batches of their own, since theirs are few tokens and would not count among
    many."""
    if not read:
        return list(made)
    endless, size = itertools.cycle(read), settings.batch_size
    order = list(itertools.islice(endless, -(-settings.readings // size) * size))
    for start in range(0, len(made), 2 * size):
        order += made[start : start + 2 * size]
        if start + 2 * size < len(made):
            order += itertools.islice(endless, size)
    return order
