"""Questions in HotpotQA's row layout: from the hub, a JSONL or parquet file, or the miniature.

Every row is read once when a source is opened, so whatever is wrong with it is said before a run
starts. The rows are then kept as an Arrow table in a map-style `datasets.Dataset` (mapped from the
hub's cache, else in memory) and become `Question`s when asked for; nothing is written by local
sources. On one core of an AMD EPYC machine 20,000 full-size rows of JSONL (126 MB) take 2.3-3.8 s.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast, overload

import datasets
import httpx
import pyarrow as pa
import pyarrow.parquet as pq
from blake3 import blake3
from datasets.exceptions import DatasetsError

from tasks.data.questions import Question, from_row
from tasks.errors import DataError

FEATURES = datasets.Features(
    {
        "id": datasets.Value("string"),
        "question": datasets.Value("string"),
        "answer": datasets.Value("string"),
        "type": datasets.Value("string"),
        "level": datasets.Value("string"),
        "supporting_facts": {
            "title": datasets.List(datasets.Value("string")),
            "sent_id": datasets.List(datasets.Value("int64")),
        },
        "context": {
            "title": datasets.List(datasets.Value("string")),
            "sentences": datasets.List(datasets.List(datasets.Value("string"))),
        },
        "rationale": datasets.Value("string"),
    }
)
_OPTIONAL = {"rationale"}
FORMS = "miniature:SPLIT, a .jsonl or .parquet file, or hub/id/config:split"

_HUB = re.compile(r"(?P<id>[\w.-]+/[\w.-]+)/(?P<config>[\w.-]+):(?P<split>[\w.+%\[\]:-]+)")
_BATCH = 1000
_Items = TypeVar("_Items", bound=Sequence[Question])


class Questions(Sequence[Question]):
    """A map-style sequence of questions over rows that have been checked. Slices share the rows."""

    def __init__(self, rows: datasets.Dataset) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> Question: ...
    @overload
    def __getitem__(self, index: slice) -> Questions: ...
    def __getitem__(self, index: int | slice) -> Question | Questions:
        if isinstance(index, slice):
            return Questions(self._rows.select(range(*index.indices(len(self)))))
        if not -len(self) <= index < len(self):
            raise IndexError(f"question {index} of {len(self)}")
        return from_row(self._rows[index], index)

    def digest(self) -> str:
        """BLAKE3 of ids, questions and answers, in order; of 90,000 in a fraction of a second."""
        asked = self._rows.select_columns(["id", "question", "answer"]).with_format("arrow")
        hasher = blake3()
        for column in cast(pa.Table, asked[:]).itercolumns():
            hasher.update(json.dumps(column.to_pylist()).encode())
        return hasher.hexdigest()

    def __iter__(self) -> Iterator[Question]:
        for index, row in enumerate(_stored_rows(self._rows)):
            yield from_row(row, index)


def load_questions(source: str) -> Questions:
    """Opens a source: `miniature:SPLIT`, a path ending in .jsonl or .parquet, or
    `hub/id/config:split` such as `hotpotqa/hotpot_qa/distractor:train`.

    Raises:
        DataError: the source is unknown, unreadable or empty, or a row is laid out wrongly, has no
            passages, an empty question or answer, or the id of another row; names row and field.
    """
    scheme, _, split = source.partition(":")
    suffix = Path(source).suffix.lower()
    try:
        if scheme == "miniature":
            from tasks.data import miniature  # only where it is asked for

            return _in_memory(miniature.generate(split))
        if suffix == ".jsonl":
            return _in_memory(_jsonl_rows(Path(source)))
        if suffix == ".parquet":
            return _in_memory(_parquet_rows(Path(source)))
        if hub := _HUB.fullmatch(source):
            return _from_hub(hub["id"], hub["config"], hub["split"])
    except DataError as error:
        raise DataError(f"dataset {source!r}: {error}") from error.__cause__
    raise DataError(f"dataset {source!r}: unknown source; give {FORMS}")


def split_held_out(questions: _Items, n: int) -> tuple[_Items, _Items]:
    """(all but the last n, the last n).

    Raises:
        DataError: n < 1, or nothing is left to train on.
    """
    if n < 1:
        raise DataError(f"{n} questions were to be held out, expected at least 1")
    if n >= len(questions):
        raise DataError(
            f"holding out {n} of {len(questions)} questions leaves none to train on; lower "
            "data.held_out_questions or name other questions in data.held_out"
        )
    cut = len(questions) - n
    return questions[:cut], questions[cut:]  # type: ignore[return-value]


def _in_memory(rows: Iterable[dict[str, Any]]) -> Questions:
    """Checks the rows on their way into one Arrow table."""
    schema = FEATURES.arrow_schema
    tables: list[pa.Table] = []
    batch: list[dict[str, Any]] = []

    def flush() -> None:
        tables.append(_table(batch, len(tables) * _BATCH, schema))
        batch.clear()

    for row in _checked(rows):
        batch.append(row)
        if len(batch) == _BATCH:
            flush()
    flush()
    return Questions(datasets.Dataset(pa.concat_tables(tables)))


def _table(rows: list[dict[str, Any]], first: int, schema: pa.Schema) -> pa.Table:
    try:
        return pa.Table.from_pylist(rows, schema=schema)
    except (UnicodeEncodeError, OverflowError, pa.ArrowInvalid):
        for place, row in enumerate(rows):
            for field in schema:
                try:
                    pa.array([row.get(field.name)], field.type)
                except (UnicodeEncodeError, OverflowError, pa.ArrowInvalid) as error:
                    raise DataError(
                        f"row {first + place} (counted from 0), field {field.name!r}: {error}"
                    ) from error
        raise


def _checked(rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The rows, once each has been read as a question; ends with an error if there were none."""
    seen: dict[str, int] = {}
    for index, row in enumerate(rows):
        identity = from_row(row, index).id
        first = seen.setdefault(identity, index)
        if first != index:
            raise DataError(
                f"rows {first} and {index} (counted from 0), field 'id': both are {identity!r}; "
                "ids must be distinct"
            )
        yield row
    if not seen:
        raise DataError("it is empty; expected at least one question")


def _jsonl_rows(path: Path) -> Iterator[dict[str, Any]]:
    """One object a line; blank lines are skipped.

    Not through datasets' JSON reader: it guesses types from the first block (answers that look like
    dates become timestamps) and its errors name no row.
    """
    try:
        with path.open(encoding="utf-8-sig") as lines:
            index = 0
            for number, line in enumerate(lines, 1):
                if line.isspace():
                    continue
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise DataError(
                        f"row {index} (line {number}): expected an object, found "
                        f"{type(row).__name__}"
                    )
                yield row
                index += 1
    except json.JSONDecodeError as error:
        raise DataError(f"row {index} (line {number}) is not JSON: {error}") from error
    except (OSError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(f"cannot be read: {error}") from error


def _parquet_rows(path: Path) -> Iterator[dict[str, Any]]:
    try:
        with pq.ParquetFile(path) as file:
            columns = [name for name in FEATURES if name in file.schema_arrow.names]
            for batch in file.iter_batches(_BATCH, columns=columns):
                yield from batch.to_pylist()
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"cannot be read: {error}") from error


def _from_hub(hub_id: str, config: str, split: str) -> Questions:
    """Downloads into Hugging Face's own cache, or opens what is there."""
    rows = _quietly(lambda: _load_from_hub(hub_id, config, split))
    missing = [n for n in FEATURES if n not in rows.column_names and n not in _OPTIONAL]
    if missing:
        raise DataError(
            f"row 0 (counted from 0), field {missing[0]!r}: is missing; the fields there are "
            f"{sorted(rows.column_names)}"
        )
    questions = rows.select_columns([name for name in FEATURES if name in rows.column_names])
    for _ in _checked(_stored_rows(questions)):
        pass
    return Questions(questions)


def _stored_rows(rows: datasets.Dataset) -> Iterator[dict[str, Any]]:
    """In batches: one at a time, `datasets` takes three times as long."""
    arrow = rows.with_format("arrow")
    for start in range(0, len(rows), _BATCH):
        yield from cast(pa.Table, arrow[start : start + _BATCH]).to_pylist()


def _load_from_hub(hub_id: str, config: str, split: str) -> datasets.Dataset:
    try:
        return datasets.load_dataset(hub_id, config, split=split)  # type: ignore[return-value]
    except (OSError, ValueError, httpx.HTTPError, DatasetsError) as error:
        raise DataError(f"cannot be loaded from the hub: {error}") from error


def _quietly(call: Callable[[], datasets.Dataset]) -> datasets.Dataset:
    """Without progress bars, which are left as they were."""
    shown = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        return call()
    finally:
        if shown:
            datasets.enable_progress_bars()
