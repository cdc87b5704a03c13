"""Questions and passages, and how a HotpotQA row becomes them.

The row layout is the one of `hotpotqa/hotpot_qa` on the hub (Yang et al. 2018): `id`, `question`,
`answer`, `type`, `level`, `supporting_facts {title, sent_id}` and `context {title, sentences}`,
where the two lists inside a field run in parallel. A row may also have `rationale`, a text of how
the answer follows from what the passages say.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, cast

from tasks.errors import DataError

Kind = Literal["bridge", "comparison"]
KINDS = ("bridge", "comparison")


@dataclass(frozen=True, slots=True)
class Passage:
    """A titled paragraph. Its identity is (title, text): titles repeat with other texts."""

    title: str
    text: str


@dataclass(frozen=True, slots=True)
class Question:
    """A question, the answers that count (HotpotQA has one), and the paragraphs it came with.

    gold_titles: the distinct titles of its supporting facts, in their order.
    rationale: how the answer follows; where the row does not say, its supporting sentences, title
        by title. "" where these are missing, too.
    """

    id: str
    question: str
    answers: tuple[str, ...]
    kind: Kind
    level: str
    context: tuple[Passage, ...]
    gold_titles: tuple[str, ...]
    rationale: str


def from_row(row: Mapping[str, Any], index: int) -> Question:
    """Reads one row; `index` (from 0) is only used to name the row in errors.

    Sentences are joined as they are: they carry their own leading spaces. A `sent_id` out of range
    is accepted, since five rows of the full collection have one.

    Raises:
        DataError: a field is missing, has another type, is empty where it must not be, or its
            parallel lists differ in length; names the row and the field.
    """
    identity = _text(row, "id", index)
    question = _text(row, "question", index)
    answer = _text(row, "answer", index)
    kind = _text(row, "type", index)
    if kind not in KINDS:
        _fail(index, "type", f"is {kind!r}, expected one of {list(KINDS)}")
    level = _text(row, "level", index)
    titles, sentences = _parallel(row, "context", "sentences", index)
    gold, sentence_ids = _parallel(row, "supporting_facts", "sent_id", index)
    if not titles:
        _fail(index, "context", f"has no passages (question {identity!r}); give it at least one")
    _all_are(titles, str, "context.title", index)
    _all_are(gold, str, "supporting_facts.title", index)
    _all_are(sentence_ids, int, "supporting_facts.sent_id", index)
    _all_are(sentences, list, "context.sentences", index)
    for number, paragraph in enumerate(sentences):
        _all_are(paragraph, str, f"context.sentences[{number}]", index)
    return Question(
        id=identity,
        question=question,
        answers=(answer,),
        kind=cast(Kind, kind),
        level=level,
        context=tuple(
            Passage(title, "".join(paragraph))
            for title, paragraph in zip(titles, sentences, strict=True)
        ),
        gold_titles=tuple(dict.fromkeys(gold)),
        rationale=_text(row, "rationale", index)
        if row.get("rationale") is not None
        else " ".join(_facts(dict(zip(titles, sentences, strict=True)), gold, sentence_ids)),
    )


def _facts(
    passages: Mapping[str, Sequence[str]], titles: Sequence[str], numbers: Sequence[int]
) -> Iterator[str]:
    for title in dict.fromkeys(titles):
        passage = passages.get(title, ())
        wanted = {n for other, n in zip(titles, numbers, strict=True) if other == title}
        text = " ".join(passage[n].strip() for n in sorted(wanted) if 0 <= n < len(passage))
        if text:
            yield text if title in text else f"{title}: {text}"


def pool(questions: Iterable[Question]) -> tuple[Passage, ...]:
    """The distinct passages of all questions in order of first appearance: a passage's position
    is its id."""
    return tuple(dict.fromkeys(passage for question in questions for passage in question.context))


def _text(row: Mapping[str, Any], field: str, index: int) -> str:
    value = _present(row, field, field, index)
    if not isinstance(value, str):
        _fail(index, field, f"expected text, found {_found(value)}")
    if not value.strip():
        _fail(index, field, "is empty")
    return value


def _parallel(
    row: Mapping[str, Any], field: str, other: str, index: int
) -> tuple[list[Any], list[Any]]:
    """The lists `title` and `other` of a nested field, equally long."""
    value = _present(row, field, field, index)
    if not isinstance(value, Mapping):
        _fail(index, field, f"expected an object of lists title and {other}, found {_found(value)}")
    lists: list[list[Any]] = []
    for name in ("title", other):
        inner = _present(value, name, f"{field}.{name}", index)
        if not isinstance(inner, list):
            _fail(index, f"{field}.{name}", f"expected a list, found {_found(inner)}")
        lists.append(inner)
    if len(lists[0]) != len(lists[1]):
        _fail(index, field, f"has {len(lists[0])} entries in title but {len(lists[1])} in {other}")
    return lists[0], lists[1]


def _present(row: Mapping[str, Any], key: str, field: str, index: int) -> Any:
    if key not in row:
        _fail(index, field, f"is missing; the fields there are {sorted(map(str, row))}")
    return row[key]


def _all_are(values: list[Any], kind: type, field: str, index: int) -> None:
    for position, value in enumerate(values):
        # bool is an int to Python, but not a sentence number.
        if not isinstance(value, kind) or isinstance(value, bool):
            expected = {str: "text", int: "an integer", list: "a list"}[kind]
            _fail(index, f"{field}[{position}]", f"expected {expected}, found {_found(value)}")


def _found(value: object) -> str:
    if value is None:
        return "nothing (null)"
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"


def _fail(index: int, field: str, problem: str) -> NoReturn:
    raise DataError(f"row {index} (counted from 0), field {field!r}: {problem}")
