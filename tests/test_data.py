"""HotpotQA rows, every way they can be wrong, and the order they are used in."""

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.data import hotpotqa
from tasks.data.hotpotqa import load_questions, split_held_out
from tasks.data.order import batch, order
from tasks.data.questions import Passage, Question, from_row, pool
from tasks.errors import DataError

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"

pytestmark = pytest.mark.fast


def row(number: int = 0, **changes: Any) -> dict[str, Any]:
    made = {
        "id": f"q{number}",
        "question": "Where was the director of Film A born?",
        "answer": "Paris",
        "type": "bridge",
        "level": "hard",
        "supporting_facts": {"title": ["Film A", "Ann", "Film A"], "sent_id": [0, 900, 1]},
        "context": {
            "title": ["Film A", "Ann"],
            "sentences": [["Film A is by Ann.", " It is long."], [f"Ann {number} is from Paris."]],
        },
    }
    return made | copy.deepcopy(changes)


def write(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(item) + "\n" for item in rows))
    return str(path)


def test_a_row_becomes_a_question() -> None:
    assert from_row(row(), 0) == Question(
        id="q0",
        question="Where was the director of Film A born?",
        answers=("Paris",),
        kind="bridge",
        level="hard",
        context=(
            Passage("Film A", "Film A is by Ann. It is long."),
            Passage("Ann", "Ann 0 is from Paris."),
        ),
        gold_titles=("Film A", "Ann"),
        rationale="Film A is by Ann. It is long.",
    )


def test_a_row_may_say_how_its_answer_follows() -> None:
    assert from_row(row(rationale="Ann is the director."), 0).rationale == "Ann is the director."
    neither = row(supporting_facts={"title": ["Ann", "Elsewhere"], "sent_id": [7, 0]})
    assert from_row(neither, 0).rationale == ""


def test_what_a_row_says_of_its_answer_reaches_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From every kind of source, beside rows that say nothing."""
    rows = [row(0, rationale="Ann directs."), row(1, rationale=None)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "data.parquet")
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: datasets.Dataset.from_list(rows))
    named = write(tmp_path / "data.jsonl", [rows[0], row(1)])
    for source in (named, str(tmp_path / "data.parquet"), "some/questions/all:train"):
        found = load_questions(source)
        assert [q.rationale for q in found] == ["Ann directs.", "Film A is by Ann. It is long."]
        assert found[0].rationale == "Ann directs."


def test_pool_keeps_first_appearances_and_tells_texts_apart() -> None:
    questions = [from_row(row(i % 2), i) for i in range(4)]
    assert pool(questions) == (
        Passage("Film A", "Film A is by Ann. It is long."),
        Passage("Ann", "Ann 0 is from Paris."),
        Passage("Ann", "Ann 1 is from Paris."),
    )
    assert pool([]) == ()


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"answer": 7}, "answer", "expected text, found int 7"),
    ({"rationale": ["a"]}, "rationale", "expected text, found list"),
    ({"answer": None}, "answer", "null"),
    ({"answer": " "}, "answer", "is empty"),
    ({"question": ""}, "question", "is empty"),
    ({"id": 3}, "id", "expected text, found int 3"),
    ({"type": "trivia"}, "type", "'trivia', expected one of"),
    ({"level": []}, "level", "found list"),
    ({"context": {"title": [], "sentences": []}}, "context", "no passages"),
    ({"context": []}, "context", "expected an object"),
    ({"context": {"title": ["a"]}}, "context.sentences", "is missing"),
    ({"context": {"title": ["a"], "sentences": []}}, "context", "1 entries in title but 0"),
    ({"context": {"title": ["a"], "sentences": ["b"]}}, "context.sentences[0]", "found str"),
    ({"context": {"title": [1], "sentences": [[]]}}, "context.title[0]", "found int"),
    ({"context": {"title": ["a"], "sentences": [["b", None]]}}, "context.sentences[0][1]", "null"),
    ({"supporting_facts": None}, "supporting_facts", "null"),
    ({"supporting_facts": {"title": ["a"], "sent_id": ["0"]}}, "supporting_facts.sent_id[0]", "st"),
    ({"supporting_facts": {"title": ["a"], "sent_id": [True]}}, "supporting_facts.sent_id[0]", "b"),
    ({"supporting_facts": {"title": "a", "sent_id": [0]}}, "supporting_facts.title", "found str"),
]


@pytest.mark.parametrize(("changes", "field", "problem"), WRONG)
def test_a_wrong_row_is_named(
    tmp_path: Path, changes: dict[str, Any], field: str, problem: str
) -> None:
    source = write(tmp_path / "data.jsonl", [row(0), row(1), row(2, **changes), row(3)])
    with pytest.raises(DataError) as caught:
        load_questions(source)
    for part in (source, "row 2 ", f"field '{field}'", problem):
        assert part in str(caught.value)
    assert isinstance(pickle.loads(pickle.dumps(caught.value)), DataError)  # noqa: S301


@pytest.mark.parametrize("field", list(row()))
def test_a_missing_field_is_named(tmp_path: Path, field: str) -> None:
    rows = [row(0), row(1)]
    del rows[1][field]
    with pytest.raises(DataError, match=rf"row 1 .*field '{field}': is missing"):
        load_questions(write(tmp_path / "data.jsonl", rows))


def test_values_arrow_cannot_hold_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"row 1 .*field 'answer'.*surrogates"):
        load_questions(write(tmp_path / "a.jsonl", [row(0), row(1, answer="\ud800")]))
    huge = {"title": ["Ann"], "sent_id": [2**70]}
    with pytest.raises(DataError, match=r"row 0 .*field 'supporting_facts'"):
        load_questions(write(tmp_path / "b.jsonl", [row(0, supporting_facts=huge)]))


def test_duplicate_ids_name_both_rows(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"rows 1 and 3 .*'id'.*'q1'"):
        load_questions(write(tmp_path / "d.jsonl", [row(0), row(1), row(2), row(1)]))


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "is empty"),
        (b"\n \n", "is empty"),
        (b"[1]\n", r"row 0 \(line 1\): expected an object, found list"),
        (b"\n{]\n", r"row 0 \(line 2\) is not JSON"),
        (b'{"id": "\xff"}\n', "cannot be read"),
        (b"[" * 100_000, "row 0|cannot be read"),
    ],
)
def test_files_that_are_not_jsonl(tmp_path: Path, content: bytes, problem: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError, match=problem):
        load_questions(str(path))


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("nowhere.jsonl", "cannot be read"),
        ("nowhere.parquet", "cannot be read"),
        ("data.csv", "unknown source; give miniature:SPLIT"),
        ("", "unknown source"),
        ("hub/id:train", "unknown source"),
        ("miniature:nope", "nope"),
        ("miniature:", "miniature"),
    ],
)
def test_sources_that_do_not_exist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, problem: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=problem):
        load_questions(source)


def test_a_folder_and_a_broken_parquet_file(tmp_path: Path) -> None:
    (tmp_path / "folder.jsonl").mkdir()
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 nothing PAR1")
    for name in ("folder.jsonl", "bad.parquet"):
        with pytest.raises(DataError, match="cannot be read"):
            load_questions(str(tmp_path / name))


def test_jsonl_and_parquet_hold_the_same_questions(tmp_path: Path) -> None:
    # Dates stay text, other fields are ignored, and so is a byte order mark.
    rows = [row(i, answer="2001-02-03", extra={"a": i}) for i in range(5)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "d.parquet")
    text = "".join(json.dumps(item) + "\n\n" for item in rows)
    (tmp_path / "d.jsonl").write_text(text, encoding="utf-8-sig")
    expected = [from_row(item, i) for i, item in enumerate(rows)]
    for name in ("d.jsonl", "d.parquet"):
        questions = load_questions(str(tmp_path / name))
        assert list(questions) == expected
        assert [questions[i] for i in range(-5, 5)] == expected * 2
        assert list(questions[1:4]) == expected[1:4]
        assert list(pickle.loads(pickle.dumps(questions))) == expected  # noqa: S301
        with pytest.raises(IndexError):
            questions[5]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d.jsonl", "d.parquet"]


def test_a_parquet_column_of_another_type_is_named(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist([row(0, answer=5)]), tmp_path / "d.parquet")
    with pytest.raises(DataError, match=r"row 0 .*field 'answer': expected text, found int 5"):
        load_questions(str(tmp_path / "d.parquet"))
    pq.write_table(pa.Table.from_pylist([row(0)]).slice(0, 0), tmp_path / "e.parquet")
    with pytest.raises(DataError, match="is empty"):
        load_questions(str(tmp_path / "e.parquet"))


def test_rows_beyond_one_batch_keep_their_numbers(tmp_path: Path) -> None:
    rows = [row(i) for i in range(2300)]
    questions = load_questions(write(tmp_path / "a.jsonl", rows))
    assert [question.id for question in questions] == [f"q{i}" for i in range(2300)]
    rows[2200]["level"] = None
    with pytest.raises(DataError, match="row 2200 "):
        load_questions(write(tmp_path / "b.jsonl", rows))
    rows[2200]["level"] = "\ud800"
    with pytest.raises(DataError, match="row 2200 "):
        load_questions(write(tmp_path / "c.jsonl", rows))


def test_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    rows = [row(0), row(1)]

    def load(*args: Any, **kwargs: Any) -> datasets.Dataset:
        asked.append((args, kwargs, datasets.is_progress_bar_enabled()))
        return datasets.Dataset.from_list(rows)

    monkeypatch.setattr(datasets, "load_dataset", load)
    questions = load_questions("hotpotqa/hotpot_qa/distractor:train")
    assert [question.id for question in questions] == ["q0", "q1"]
    assert asked == [(("hotpotqa/hotpot_qa", "distractor"), {"split": "train"}, False)]
    rows[1]["id"] = "q0"
    with pytest.raises(DataError, match="rows 0 and 1"):
        load_questions("hotpotqa/hotpot_qa/distractor:train")
    rows[:] = [{"id": "x", "question": "y"}]
    with pytest.raises(DataError, match="field 'answer': is missing"):
        load_questions("hotpotqa/hotpot_qa/distractor:train")

    def unreachable(*args: Any, **kwargs: Any) -> datasets.Dataset:
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(DataError, match="cannot be loaded from the hub: no route"):
        load_questions("hotpotqa/hotpot_qa/distractor:train[:50%]")


def test_the_miniature_is_a_source(monkeypatch: pytest.MonkeyPatch) -> None:
    from tasks.data import miniature

    monkeypatch.setattr(miniature, "generate", lambda split: [row(0, answer=split)])
    assert load_questions("miniature:train")[0].answers == ("train",)


def test_held_out_questions_are_the_last() -> None:
    questions = [from_row(row(i), i) for i in range(5)]
    assert split_held_out(questions, 2) == (questions[:3], questions[3:])
    for n in (5, 6):
        with pytest.raises(DataError, match=f"holding out {n} of 5"):
            split_held_out(questions, n)
    with pytest.raises(DataError, match="at least 1"):
        split_held_out(questions, 0)


@pytest.mark.parametrize(("name", "count"), [("train", 1313), ("dev", 529)])
def test_real_questions(name: str, count: int) -> None:
    path = SHARED / f"hotpotqa_{name}.jsonl"
    if not path.exists():
        pytest.skip(f"{path} is absent")
    questions = load_questions(str(path))
    assert len(questions) == count
    lines = path.read_text().splitlines()
    for index in (0, 7, count - 1):
        raw = json.loads(lines[index])
        question = questions[index]
        assert (question.id, question.answers) == (raw["id"], (raw["answer"],))
        joined = ["".join(paragraph) for paragraph in raw["context"]["sentences"]]
        assert [passage.text for passage in question.context] == joined
        assert set(question.gold_titles) <= {passage.title for passage in question.context}
    passages = pool(questions)
    titles = {passage.title for passage in passages}
    assert len(passages) == len(set(passages))
    assert len(titles) <= len(passages)
    train, held_out = split_held_out(questions, 100)
    assert isinstance(held_out, hotpotqa.Questions)
    assert (len(train), len(held_out)) == (count - 100, 100)
    assert held_out[0].id == questions[count - 100].id


@given(st.integers(0, 200), st.integers(0, 2**31), st.integers(0, 50))
def test_order_is_a_permutation_and_pure(n: int, seed: int, epoch: int) -> None:
    permutation = order(n, seed, epoch)
    assert sorted(permutation.tolist()) == list(range(n))
    assert order(n, seed, epoch).tolist() == permutation.tolist()


def test_order_is_the_same_for_ever() -> None:
    assert order(10, 0, 0).tolist() == [3, 2, 1, 8, 6, 0, 7, 4, 5, 9]
    assert order(10, 0, 1).tolist() == [7, 4, 5, 1, 9, 8, 6, 2, 0, 3]
    assert order(10, 1, 0).tolist() == [9, 2, 4, 7, 5, 0, 8, 6, 3, 1]


def test_order_cannot_be_changed_by_a_caller() -> None:
    with pytest.raises(ValueError, match="read-only"):
        order(5, 0, 0)[0] = 1


@given(st.integers(1, 30), st.integers(0, 5), st.integers(1, 70), st.integers(1, 12))
def test_batches_are_the_epochs_end_to_end(n: int, seed: int, size: int, steps: int) -> None:
    rows = [index for step in range(steps) for index in batch(n, seed, step, size)]
    assert len(rows) == steps * size
    for start in range(0, len(rows), n):
        epoch = rows[start : start + n]
        assert epoch == order(n, seed, start // n).tolist()[: len(epoch)]
    # Any step alone, as after a resume.
    assert batch(n, seed, steps - 1, size) == rows[-size:]


@pytest.mark.parametrize("wrong", [(0, 0, 0, 1), (5, -1, 0, 1), (5, 0, -1, 1), (5, 0, 0, 0)])
def test_batch_refuses_nonsense(wrong: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match="expected at least"):
        batch(*wrong)
    with pytest.raises(ValueError, match="expected at least 0"):
        order(-1, 0, 0)
