"""The search protocol of Search-R1 (Jin et al. 2025, arXiv:2503.09516).

The policy writes `<search>query</search>` or `<answer>text</answer>`; a search is answered with
`<information>...</information>`. Anything else is an invalid action, which costs a turn and gets a
corrective observation. Everything here is token in, token out: pieces are encoded once and
concatenated, never re-tokenised.

Questions, passages and demonstrated actions come from outside, and may contain the text of a
special token (`<|im_end|>`). They are encoded as the text they are; only the instruction and the
chat template can put special tokens into a trajectory.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from tasks.config import ModelConfig, RolloutConfig
from tasks.data.questions import Passage
from tasks.errors import PolicyError
from tasks.evaluation.scoring import extract_answer

STOP_TAGS = ("</search>", "</answer>")
CORRECTIVE = (
    "\nMy previous action is invalid. If I want to search, I should put the query between <search> "
    "and </search>. If I want to give the final answer, I should put the answer between <answer> "
    "and </answer>. Let me try again.\n"
)
_SEARCH = re.compile(r"<search>((?:(?!<search>).)*?)</search>", re.DOTALL)


class Tokenizer(Protocol):
    """What the protocol needs of a Hugging Face tokenizer."""

    chat_template: str | None
    eos_token_id: int | None
    all_special_tokens: list[str]

    def encode(
        self, text: str, *, add_special_tokens: bool, split_special_tokens: bool
    ) -> list[int]: ...

    def decode(
        self,
        token_ids: Sequence[int],
        skip_special_tokens: bool,
        *,
        clean_up_tokenization_spaces: bool,
    ) -> str: ...

    def convert_tokens_to_ids(self, tokens: str) -> int: ...

    def apply_chat_template(
        self, conversation: list[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool
    ) -> str: ...


@dataclass(frozen=True, slots=True)
class Search:
    query: str


@dataclass(frozen=True, slots=True)
class Answer:
    text: str


@dataclass(frozen=True, slots=True)
class Invalid:
    pass


Action = Search | Answer | Invalid


def parse(sampled_text: str) -> Action:
    """The action a turn's sampled text ends in.

    Generation stops at the first closing tag, so the text ends there; tags before it count only
    when they close the same pair (`<search> a <answer> b </answer>` is an answer). Tags are
    lower-case, a pair that is not closed is no action, and nothing outside the pair matters.

    Search-R1 samples on to the limit, cuts the text at its first closing tag and encodes it anew.
    Its actions differ in two cases: of nested opening tags it takes the first where this takes the
    nearest (`<search> a <search> b </search>` asks for "b", not "a <search> b"), and it sends an
    empty query to its search engine where this is an invalid action.
    """
    if sampled_text.rstrip().endswith("</answer>"):
        answer = extract_answer(sampled_text)
        return Invalid() if answer is None else Answer(answer)
    searches = _SEARCH.findall(sampled_text)
    query = searches[-1].strip() if searches else ""
    return Search(query) if query else Invalid()


class SearchProtocol:
    """Prompts and observations as token ids, for one tokenizer and one configuration.

    Raises:
        PolicyError: a chat is asked for and the tokenizer has no chat template.
    """

    def __init__(self, tokenizer: Tokenizer, model: ModelConfig, rollout: RolloutConfig) -> None:
        if model.chat and not tokenizer.chat_template:
            raise PolicyError(
                f"the tokenizer of {model.path!r} has no chat template, which model.chat = true "
                "needs; set model.chat = false to send the instruction as plain text"
            )
        self._tokenizer = tokenizer
        self._model = model
        self._budget = rollout.max_observation_tokens
        self._max_prompt = rollout.max_prompt_tokens
        # Longest first, as tokenizers match them.
        special = sorted(tokenizer.all_special_tokens, key=len, reverse=True)
        self._special = re.compile(f"({'|'.join(map(re.escape, special)) or '(?!)'})")
        self.corrective: list[int] = self._encode(CORRECTIVE)
        self._open = self._encode("\n\n<information>")
        self._close = self._encode("</information>\n\n")
        self._nothing = self._encode("No passage matches this query.")
        self._passage_ids = lru_cache(maxsize=16_384)(self._encode_passage)

    def _encode(self, text: str) -> list[int]:
        """Ids of text that no special token is recognised in."""
        return self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)

    def text(self, ids: Sequence[int]) -> str:
        """What ids read as; bytes that are no UTF-8 read as U+FFFD."""
        return self._tokenizer.decode(ids, False, clean_up_tokenization_spaces=False)

    def prompt(self, question: str) -> list[int]:
        """Prompt ids of a question.

        Raises:
            PolicyError: longer than rollout.max_prompt_tokens.
        """
        if self._special.search(question) is None:
            ids = self._tokenizer.encode(
                self._message(question), add_special_tokens=False, split_special_tokens=False
            )
        else:
            ids = self._prompt_around(question)
        if len(ids) > self._max_prompt:
            raise PolicyError(
                f"the prompt of question {question[:80]!r} has {len(ids)} tokens, more than "
                f"rollout.max_prompt_tokens = {self._max_prompt}; raise it (and model.context) or "
                "shorten model.instruction"
            )
        return ids

    def _message(self, question: str) -> str:
        text = self._model.instruction.replace("{question}", question)
        if not self._model.chat:
            return text
        return self._tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
        )

    def _prompt_around(self, question: str) -> list[int]:
        """The prompt of a question that contains the text of special tokens.

        That text is veiled, so that the special tokens found are the template's and the
        instruction's own. A tokenizer encodes what lies between special tokens by itself, as here.
        """
        known = self._message("") + question
        veil = next(sign for sign in map(chr, range(0xE000, 0xF900)) if sign not in known)
        veiled = iter(self._special.findall(question))
        message = self._message(self._special.sub(veil, question))
        ids: list[int] = []
        for number, piece in enumerate(self._special.split(message)):
            if number % 2:
                ids.append(self._tokenizer.convert_tokens_to_ids(piece))
            elif piece:
                ids += self._encode(re.sub(veil, lambda _: next(veiled), piece))
        return ids

    def encode_action(self, text: str, end_of_turn: bool = False) -> list[int]:
        """Ids of an action written by someone else (a demonstration), as a policy would sample it.

        No special token is recognised in it. `end_of_turn` adds the end-of-sequence token: how a
        turn without a closing tag ends.
        """
        eos = self._tokenizer.eos_token_id
        return self._encode(text) + ([eos] if end_of_turn and eos is not None else [])

    def _encode_passage(self, rank: int, passage: Passage) -> list[int]:
        return self._encode(f"Doc {rank}(Title: {passage.title}) {passage.text}\n")

    def observation(self, passages: Sequence[Passage]) -> list[int]:
        """`<information>` with the passages, within rollout.max_observation_tokens ids.

        A long one is cut passage by passage (none gives up tokens that another does not need), and
        always keeps its closing tag.
        """
        docs = [self._passage_ids(rank, p) for rank, p in enumerate(passages, 1)]
        docs = docs or [self._nothing]
        room = max(self._budget - len(self._open) - len(self._close), 0)
        cap = _fair_cap([len(d) for d in docs], room)
        body = [token for doc in docs for token in doc[:cap]]
        return [*self._open, *body[:room], *self._close]

    def information(self, text: str) -> list[int]:
        """An observation written by someone else: `<information>` around a text, of any length."""
        return [*self._open, *self._encode(text), *self._close]


def _fair_cap(lengths: Sequence[int], room: int) -> int:
    """Largest cap c such that sum(min(length, c)) <= room (max-min fairness)."""
    if sum(lengths) <= room:
        return max(lengths)
    left = room
    for position, length in enumerate(sorted(lengths)):
        share = left // (len(lengths) - position)
        if length > share:
            return share
        left -= length
    raise AssertionError("the sum exceeds the room, so one length exceeds its share")
