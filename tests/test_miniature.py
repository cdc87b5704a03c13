"""The miniature: deterministic, HotpotQA-shaped, disjoint between splits, and not to be guessed."""

from __future__ import annotations

import pytest

from tasks.data import miniature
from tasks.data.hotpotqa import load_questions
from tasks.data.questions import pool
from tasks.errors import DataError
from tasks.retrieval.bm25 import build

pytestmark = [pytest.mark.fast, pytest.mark.timeout(60)]


@pytest.fixture(scope="module")
def train() -> list[dict]:
    return miniature.generate("train")


@pytest.fixture(scope="module")
def held_out() -> list[dict]:
    return miniature.generate("held_out")


def test_the_same_rows_every_time(held_out: list[dict]) -> None:
    assert miniature.generate("held_out") == held_out


def test_sizes_and_shape(train: list[dict], held_out: list[dict]) -> None:
    assert len(train) == miniature.QUESTIONS["train"]
    assert len(held_out) >= 500
    for row in held_out:
        titles = row["context"]["title"]
        assert len(titles) == len(set(titles)) == miniature.CONTEXT_PASSAGES
        assert set(row["supporting_facts"]["title"]) <= set(titles)
        assert len(set(row["supporting_facts"]["title"])) == 2


def test_splits_share_no_entity(train: list[dict], held_out: list[dict]) -> None:
    def entities(rows: list[dict]) -> set[str]:
        return {title for row in rows for title in row["context"]["title"]}

    assert not entities(train) & entities(held_out)
    assert not {row["question"] for row in train} & {row["question"] for row in held_out}


@pytest.mark.parametrize("split", ["train", "held_out"])
def test_few_questions_can_be_guessed_at_even_odds(split: str) -> None:
    rows = miniature.generate(split)
    even = [row for row in rows if row["type"] == "comparison"]
    assert 0.1 < len(even) / len(rows) <= 0.30
    for row in even:
        assert row["answer"] in ("yes", "no") or row["answer"] in row["question"]
    yes_no = [row["answer"] for row in even if row["answer"] in ("yes", "no")]
    assert 0.35 < yes_no.count("yes") / len(yes_no) < 0.65


def test_bridge_answers_are_in_the_second_gold_passage_alone(held_out: list[dict]) -> None:
    for row in held_out:
        if row["type"] != "bridge":
            continue
        text = dict(zip(row["context"]["title"], row["context"]["sentences"], strict=True))
        first, second = row["supporting_facts"]["title"]
        assert row["answer"] in "".join(text[second])
        assert row["answer"] not in "".join(text[first])
        assert second in "".join(text[first])


def test_one_search_is_not_enough_and_retrieval_can_go_wrong() -> None:
    """Asking BM25 the question itself finds both gold passages of few bridge questions."""
    questions = list(load_questions("miniature:held_out"))
    index = build(pool(questions), 1.2, 0.75)
    bridges = [question for question in questions if question.kind == "bridge"]
    found = index.search([question.question for question in bridges], 3)
    both = sum(
        set(question.gold_titles) <= {index.passage(hit.passage_id).title for hit in hits}
        for question, hits in zip(bridges, found, strict=True)
    )
    assert both / len(bridges) < 0.2


def test_another_world_has_the_same_names_and_other_facts(train: list[dict]) -> None:
    other = miniature.World("train", 1)
    world = miniature.World("train")
    assert [film.name for film in other.films] == [film.name for film in world.films]
    moved = [
        a.director.name != b.director.name for a, b in zip(world.films, other.films, strict=True)
    ]
    assert sum(moved) / len(moved) > 0.9


def test_worlds_to_learn_from_compare_more(train: list[dict]) -> None:
    def compares(rows: list[dict]) -> float:
        return sum(row["type"] == "comparison" for row in rows) / len(rows)

    assert compares(train) == pytest.approx(0.24)
    assert compares(miniature.generate("train", 1)) == pytest.approx(2 / 3, abs=5e-3)


def test_a_comparisons_rationale_leads_to_its_answer(train: list[dict]) -> None:
    for row in train:
        if row["type"] == "bridge":
            assert row["rationale"] is None
            continue
        passages = dict(zip(row["context"]["title"], row["context"]["sentences"], strict=True))
        facts = ["".join(passages[title]) for title in row["supporting_facts"]["title"]]
        compared, _, first = row["rationale"].partition(": ")
        sides = compared.split(", ")
        if row["answer"] in ("yes", "no"):
            assert [side in fact for side, fact in zip(sides, facts, strict=True)] == [True, True]
            assert row["answer"] == ("yes" if sides[0] == sides[1] else "no")
        else:
            years = [side.split(" ", 1) for side in sides]
            assert all(
                year in fact and name in fact
                for (year, name), fact in zip(years, facts, strict=True)
            )
            assert min(years) == first.split(" ", 1)
            assert row["answer"] == min(years)[1]


def test_an_unknown_split_is_refused() -> None:
    with pytest.raises(DataError, match="train, held_out"):
        miniature.generate("test")
