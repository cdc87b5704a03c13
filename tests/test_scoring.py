"""Scores equal the official scorer's; intervals equal published values."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.config import SEARCH_R1_INSTRUCTION
from tasks.evaluation.intervals import wilson
from tasks.evaluation.scoring import (
    exact_match,
    extract_answer,
    f1,
    normalise,
    search_r1_answer,
    search_r1_exact_match,
)

REFERENCE = Path(__file__).resolve().parents[2] / "shared" / "reference" / "answer_scoring.json"

pytestmark = pytest.mark.fast


@pytest.fixture(scope="module")
def reference() -> dict[str, Any]:
    if not REFERENCE.exists():
        pytest.skip(f"{REFERENCE} is absent")
    return json.loads(REFERENCE.read_text())


def test_official_values(reference: dict[str, Any]) -> None:
    assert len(reference["normalisation"]) >= 20
    for case in reference["normalisation"]:
        prediction, gold, why = case["prediction"], case["gold"], case["why"]
        assert normalise(prediction) == case["norm_prediction"], why
        assert normalise(gold) == case["norm_gold"], why
        assert exact_match(prediction, [gold]) is bool(case["em"]), why
        assert f1(prediction, [gold]) == pytest.approx(case["f1"], abs=1e-6), why


def test_official_extraction(reference: dict[str, Any]) -> None:
    assert reference["extraction"]
    for case in reference["extraction"]:
        assert extract_answer(case["sampled_text"]) == case["expected"], case["case"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", None),
        ("</answer>", None),
        ("</answer><answer>", None),
        ("</answer> <answer>x", None),
        ("<answer></answer>", ""),
        ("<answer>Rome</answer> and more</answer>", "Rome"),
        ("<answer>Rome</answer> <answer>", "Rome"),
        ("<answer>Rome</answer> </answer> <answer>Paris", "Rome"),
    ],
)
def test_extraction_at_the_edges(text: str, expected: str | None) -> None:
    assert extract_answer(text) == expected


ONE = "Answer inside <answer> text </answer>. Question: Where?"
PROMPT = SEARCH_R1_INSTRUCTION  # holds two pairs


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # A single pair is taken for the prompt's example.
        ("", None),
        ("<answer>Rome</answer>", None),
        (ONE, None),
        (PROMPT, "Beijing"),
        (PROMPT + "<answer>Rome", "Beijing"),
        (ONE + "<answer>Rome", None),
        (ONE + "<ANSWER>Rome</ANSWER>", None),
        (ONE + "<answer>\n Rome \n</answer>", "Rome"),
        ("<answer>a</answer><answer></answer>", ""),
        # It reads observations, and of nested tags from the first one.
        (ONE + "<information><answer>Oslo</answer></information> I give up", "Oslo"),
        (ONE + "<answer>Rome</answer><information><answer>Oslo</answer>", "Oslo"),
        (ONE + "<answer>a <answer>Rome</answer>", "a <answer>Rome"),
        (ONE + "<answer> unclosed <information>x</information> <answer>Rome</answer>",
         "unclosed <information>x</information> <answer>Rome"),
        # Unclosed in the prompt, it takes everything up to the first closing tag.
        ("<answer> Question <answer>Rome</answer>", None),
    ],
)  # fmt: skip
def test_search_r1_reads_the_whole_text(text: str, expected: str | None) -> None:
    assert search_r1_answer(text) == expected


def test_search_r1_counts_any_gold_after_the_same_normalisation() -> None:
    text = PROMPT + "<search> x </search><information></information><answer> The Rome. </answer>"
    assert search_r1_exact_match(text, ["Paris", "rome"])
    assert not search_r1_exact_match(text, ["Rome, Italy"])
    assert search_r1_exact_match(PROMPT, ["Beijing"]), "as published: the example is an answer"
    assert not search_r1_exact_match(ONE, ["text"])
    with pytest.raises(ValueError, match="at least one"):
        search_r1_exact_match(PROMPT, [])


@given(st.text(alphabet="<>/answer x", max_size=60))
def test_search_r1_agrees_where_the_policy_writes_one_plain_answer(text: str) -> None:
    if "<answer>" in text or "</answer>" in text or "<" in text:
        return
    sampled = f"<answer>{text}</answer>"
    assert search_r1_answer(PROMPT + sampled) == extract_answer(sampled)


def test_the_best_of_several_golds_counts() -> None:
    assert exact_match("the Beatles", ["Stones", "Beatles"])
    assert f1("Paris, France", ["Rome", "Paris"]) == pytest.approx(2 / 3)
    assert f1("yes indeed", ["yes", "indeed"]) == pytest.approx(2 / 3)


def test_repeated_words_count_as_often_as_both_have_them() -> None:
    assert f1("no no paris paris", ["paris"]) == pytest.approx(2 * (1 / 4) * 1 / (5 / 4))


def test_golds_must_be_a_list_with_something_in_it() -> None:
    with pytest.raises(ValueError, match="at least one"):
        exact_match("x", [])
    with pytest.raises(ValueError, match="'abc'"):
        f1("x", "abc")


@given(st.text(), st.text())
def test_scores_agree_with_each_other(a: str, b: str) -> None:
    assert 0 <= f1(a, [b]) <= 1
    assert f1(a, [b]) == pytest.approx(f1(b, [a]))
    if exact_match(a, [b]):
        assert f1(a, [b]) == (1.0 if normalise(a) else 0.0)


@given(st.text(alphabet="<>/answer x", max_size=60))
def test_extraction_never_returns_a_tag(text: str) -> None:
    found = extract_answer(f"<answer>{text}</answer>")
    assert found is not None
    assert "<answer>" not in found
    assert "</answer>" not in found


def test_wilson_equals_published_values() -> None:
    # Newcombe, "Two-sided confidence intervals for the single proportion", Statistics in Medicine
    # 17 (1998) 857-872, table I, method 3.
    for successes, trials, low, high in [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ]:
        assert wilson(successes, trials) == pytest.approx((low, high), abs=5e-5)


@given(st.integers(1, 10_000), st.floats(0, 1), st.floats(0.5, 0.999))
def test_wilson_holds_the_share_and_is_symmetric(n: int, share: float, level: float) -> None:
    successes = round(share * n)
    low, high = wilson(successes, n, level)
    assert 0 <= low <= successes / n <= high <= 1
    assert wilson(n - successes, n, level) == pytest.approx((1 - high, 1 - low))


@pytest.mark.parametrize(
    ("successes", "trials", "confidence"), [(0, 0, 0.95), (-1, 5, 0.95), (6, 5, 0.95), (1, 5, 1.0)]
)
def test_wilson_refuses_nonsense(successes: int, trials: int, confidence: float) -> None:
    with pytest.raises(ValueError, match="expected"):
        wilson(successes, trials, confidence)
