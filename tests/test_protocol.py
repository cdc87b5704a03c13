"""The search protocol: actions, prompts and observations, over real tokenizers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tasks.config import SEARCH_R1_INSTRUCTION, ModelConfig, RolloutConfig
from tasks.data.questions import Passage
from tasks.errors import PolicyError
from tasks.rollout.protocol import CORRECTIVE, Answer, Invalid, Search, SearchProtocol, parse
from tasks.training.tiny_policy import build_tokenizer
from tests.tokenizer_helpers import load_qwen

pytestmark = [pytest.mark.fast, pytest.mark.timeout(120)]
HOTPOTQA = Path(__file__).resolve().parents[2] / "shared/data"
QUESTION = "Who directed the film that Ada Marlowe starred in?"


@pytest.fixture(scope="module")
def tiny() -> Any:
    return build_tokenizer()


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Qwen2.5's, which splits the protocol's tags into several tokens."""
    return load_qwen(tmp_path_factory.mktemp("qwen"))


@pytest.fixture(scope="module", params=["tiny", "qwen"])
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


def _protocol(
    tokenizer: Any, model: dict[str, Any] | None = None, **rollout: Any
) -> SearchProtocol:
    return SearchProtocol(
        tokenizer,
        ModelConfig.model_validate({"path": "somewhere", **(model or {})}),
        RolloutConfig.model_validate(rollout),
    )


# Actions


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("<search> Ada Marlowe </search>", Search("Ada Marlowe")),
        ("<think> hm </think>\n<search>two\nlines</search>", Search("two\nlines")),
        ("<answer> Beijing </answer>", Answer("Beijing")),
        ("<think> done </think> <answer>Beijing</answer>\n", Answer("Beijing")),
        ("<answer></answer>", Answer("")),  # answers the empty text, and ends the trajectory
        # Only the pair that the last closing tag closes.
        ("<search> a <search> b </search>", Search("b")),
        ("<search>a</search> and <search>b</search>", Search("b")),
        ("<search> a </search> <search> </search>", Invalid()),
        ("<answer> a <answer> b </answer>", Answer("b")),
        ("<answer>a</answer> no, <answer>b</answer>", Answer("b")),
        ("<search> a <answer> b </answer>", Answer("b")),
        ("<answer> a <search> b </search>", Search("b")),
        ("<answer> a </answer> <search> b </search>", Search("b")),
        # No action.
        ("", Invalid()),
        ("Ada Marlowe", Invalid()),
        ("<search></search>", Invalid()),
        ("<search> \n </search>", Invalid()),
        ("<search> never closed", Invalid()),
        ("<answer> never closed", Invalid()),
        ("never opened </search>", Invalid()),
        ("never opened </answer>", Invalid()),
        ("</search> Ada <search>", Invalid()),
        ("</answer> Ada <answer>", Invalid()),
        ("<SEARCH> Ada </SEARCH>", Invalid()),
        ("<Answer> Ada </Answer>", Invalid()),
        ("<search> Ada </answer>", Invalid()),
        ("<answer> Ada </search>", Invalid()),
        ("<information> <answer", Invalid()),
    ],
)
def test_action_of_a_turn(text: str, action: Search | Answer | Invalid) -> None:
    assert parse(text) == action


@given(st.text(max_size=60))
def test_a_query_is_found_whatever_precedes_it(before: str) -> None:
    assert parse(before + "<search> Ada </search>") == Search("Ada")


@given(
    st.lists(
        st.sampled_from(
            ["<search>", "</search>", "<answer>", "</answer>", "<think>", "a", " ", "\n"]
        ),
        max_size=12,
    )
)
def test_any_text_has_an_action_without_tags_of_its_own_kind(parts: list[str]) -> None:
    action = parse("".join(parts))
    if isinstance(action, Search):
        assert action.query
        assert "search>" not in action.query
    elif isinstance(action, Answer):
        assert "answer>" not in action.text


# Prompts


def test_chat_prompt_is_the_templates_text_encoded_once(tokenizer: Any) -> None:
    protocol = _protocol(tokenizer)
    message = SEARCH_R1_INSTRUCTION.replace("{question}", QUESTION)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": message}], tokenize=False, add_generation_prompt=True
    )
    ids = protocol.prompt(QUESTION)
    assert tokenizer.decode(ids) == text
    assert ids == tokenizer.encode(text, add_special_tokens=False)
    assert text.rstrip().endswith("assistant") or text.endswith("<|assistant|>")


def test_plain_prompt_is_the_instruction_alone(tokenizer: Any) -> None:
    protocol = _protocol(tokenizer, {"chat": False, "instruction": "Q: {question}\nA:"})
    assert tokenizer.decode(protocol.prompt(QUESTION)) == f"Q: {QUESTION}\nA:"


def test_braces_in_a_question_are_text(tiny: Any) -> None:
    protocol = _protocol(tiny, {"chat": False, "instruction": "{question}"})
    assert (
        tiny.decode(protocol.prompt("what is {question} or {0}?")) == "what is {question} or {0}?"
    )


def test_a_chat_needs_a_template() -> None:
    bare = build_tokenizer()
    bare.chat_template = None
    with pytest.raises(PolicyError, match=r"'somewhere' has no chat template.*model\.chat = false"):
        _protocol(bare)
    assert _protocol(bare, {"chat": False}).prompt(QUESTION)


def test_a_long_prompt_names_the_numbers(tokenizer: Any) -> None:
    plain = {"chat": False, "instruction": "{question}"}
    exact = len(_protocol(tokenizer, plain).prompt(QUESTION))
    assert len(_protocol(tokenizer, plain, max_prompt_tokens=exact).prompt(QUESTION)) == exact
    short = _protocol(tokenizer, plain, max_prompt_tokens=exact - 1)
    with pytest.raises(PolicyError, match=rf"has {exact} tokens.*max_prompt_tokens = {exact - 1}"):
        short.prompt(QUESTION)


def test_written_actions_are_encoded_like_sampled_ones(tokenizer: Any) -> None:
    protocol = _protocol(tokenizer)
    text = "<search> Ada Marlowe </search>"
    assert tokenizer.decode(protocol.encode_action(text)) == text
    ended = protocol.encode_action("no tag", end_of_turn=True)
    assert ended == [*protocol.encode_action("no tag"), tokenizer.eos_token_id]


# Observations


def test_observation_reads_as_the_protocol_says(tokenizer: Any) -> None:
    passages = [Passage("Ada Marlowe", "An actor."), Passage("Quiet Harbour", "A film of 1987.")]
    assert tokenizer.decode(_protocol(tokenizer).observation(passages)) == (
        "\n\n<information>Doc 1(Title: Ada Marlowe) An actor.\n"
        "Doc 2(Title: Quiet Harbour) A film of 1987.\n</information>\n\n"
    )


def test_observation_says_that_nothing_was_found(tokenizer: Any) -> None:
    text = tokenizer.decode(_protocol(tokenizer).observation([]))
    assert text == "\n\n<information>No passage matches this query.</information>\n\n"


def test_corrective_text_is_encoded_as_it_is(tokenizer: Any) -> None:
    assert tokenizer.decode(_protocol(tokenizer).corrective) == CORRECTIVE


def test_the_same_passages_give_the_same_ids(tokenizer: Any) -> None:
    protocol = _protocol(tokenizer, max_observation_tokens=40)
    passages = [Passage("Ada", "A word. " * 30), Passage("Béla", "Ein Wort. " * 30)]
    first = protocol.observation(passages)
    assert protocol.observation(passages) == first
    swapped = tokenizer.decode(protocol.observation(passages[::-1]))
    assert "Doc 1(Title: B" in swapped  # a cached passage takes its new rank


WORDS = st.lists(st.sampled_from(["harbour", "of", "Ada", "1987", "é", "名", "\n", "xqzj"]))
PASSAGES = st.lists(
    st.builds(
        lambda title, words, n: Passage(title, " ".join(words * n)),
        st.sampled_from(["Ada", "The Quiet Harbour of Old Names"]),
        WORDS,
        st.integers(0, 40),
    ),
    max_size=8,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(passages=PASSAGES, budget=st.integers(16, 600))
def test_observation_keeps_its_budget_and_shares_it_fairly(
    tokenizer: Any, passages: list[Passage], budget: int
) -> None:
    """Each passage whole or cut at one common length, the largest that fits (max-min fairness)."""
    ids = _protocol(tokenizer, max_observation_tokens=budget).observation(passages)
    assert len(ids) <= budget

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    opening, closing = encode("\n\n<information>"), encode("</information>\n\n")
    assert ids[: len(opening)] == opening
    assert ids[-len(closing) :] == closing
    docs = [encode(f"Doc {n}(Title: {p.title}) {p.text}\n") for n, p in enumerate(passages, 1)]
    docs = docs or [encode("No passage matches this query.")]
    room = budget - len(opening) - len(closing)
    longest = max(len(doc) for doc in docs)
    fits = [c for c in range(longest + 1) if sum(min(len(doc), c) for doc in docs) <= room]
    cut = [token for doc in docs for token in doc[: max(fits)]]
    assert ids[len(opening) : len(ids) - len(closing)] == cut


# Text from outside holds no special token

SPECIAL = {"tiny": ("<|end|>", "<|user|>"), "qwen": ("<|im_end|>", "<|endoftext|>")}
CONTROL = st.lists(
    st.sampled_from(
        ["a", " ", "\n", "é", "<|", "|>", "end", "im_", "\ue000", "<answer>", "</information>"]
        + [token for tokens in SPECIAL.values() for token in tokens]
    ),
    max_size=8,
).map("".join)


def _special_ids(tokenizer: Any, ids: list[int]) -> list[int]:
    return [i for i in ids if i in tokenizer.all_special_ids]


@settings(max_examples=150, deadline=None)
@given(title=CONTROL, text=CONTROL, question=CONTROL, action=CONTROL)
def test_text_from_outside_puts_no_special_token_into_a_trajectory(
    tokenizer: Any, title: str, text: str, question: str, action: str
) -> None:
    protocol = _protocol(tokenizer)
    observed = protocol.observation([Passage(title, text)])
    assert _special_ids(tokenizer, observed) == []
    assert tokenizer.decode(observed) == (
        f"\n\n<information>Doc 1(Title: {title}) {text}\n</information>\n\n"
    )
    written = protocol.encode_action(action)
    assert _special_ids(tokenizer, written) == []
    assert tokenizer.decode(written) == action
    prompt, plain = protocol.prompt(question), protocol.prompt("")
    assert _special_ids(tokenizer, prompt) == _special_ids(tokenizer, plain), "the template's alone"
    before, after = SEARCH_R1_INSTRUCTION.split("{question}")
    assert f"{before}{question}{after}" in protocol.text(prompt)


def test_special_tokens_of_the_instruction_are_the_users_own(qwen: Any) -> None:
    instruction = "<|im_start|>user\n{question}<|im_end|>\n"
    protocol = _protocol(qwen, {"chat": False, "instruction": instruction})
    ids = protocol.prompt("what does <|im_end|> mean?")
    assert [qwen.decode([i]) for i in _special_ids(qwen, ids)] == ["<|im_start|>", "<|im_end|>"]
    assert protocol.text(ids) == "<|im_start|>user\nwhat does <|im_end|> mean?<|im_end|>\n"


def _real_texts() -> tuple[list[str], list[str]]:
    """Questions and passages of HotpotQA."""
    files = sorted(HOTPOTQA.glob("*.jsonl"))
    if not files:
        pytest.skip(f"{HOTPOTQA} has no questions")
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    passages = {
        f"{title} {''.join(sentences)}"
        for row in rows
        for title, sentences in zip(
            row["context"]["title"], row["context"]["sentences"], strict=True
        )
    }
    return [row["question"] for row in rows], sorted(passages)


def check_ids(tokenizer: Any, every: int) -> None:
    questions, passages = (texts[::every] for texts in _real_texts())
    protocol = _protocol(tokenizer, {"chat": False, "instruction": "{question}"})
    for ours, texts in ((protocol.prompt, questions), (protocol.encode_action, passages)):
        assert len(texts) > 1800 / every
        assert [ours(t) for t in texts] == tokenizer(texts, add_special_tokens=False)["input_ids"]


def test_ordinary_text_has_the_ids_that_the_tokenizer_gives_it(tokenizer: Any) -> None:
    """A policy knows its text by these ids."""
    check_ids(tokenizer, every=40)
