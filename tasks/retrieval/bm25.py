"""A BM25 index over passages (title + text): built once, saved as plain files, memory-mapped.

`bm25s` (Lù 2024, arXiv:2407.03618) computes, stores and sums the scores: Lucene's BM25 (Kamphuis et
al. 2020), the score of every (word, passage) pair computed when the index is built. Words and
ranking are ours: `bm25s` pads results with zero scores, orders ties by descending id and leaves the
choice among ties at the k-th place to argpartition.

Measured on a 2-core AMD EPYC machine, one thread, index memory-mapped, 50,000 passages (17,837 of
HotpotQA, the rest their words shuffled), top 3: a batch of 64 queries of five words takes 12 ms, 64
titles 7 ms, 64 whole questions 36 ms; building 6.5 s, loading 0.02 s, 57 MB of files. Pruning the
posting lists of common words (MaxScore) was tried and made it slower at this size.
"""

from __future__ import annotations

import json
import logging
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import blake3
import bm25s
import numpy as np
import pyarrow as pa

from tasks.data.questions import Passage
from tasks.errors import DataError, IntegrityError
from tasks.retrieval import tokenize

# On import bm25s sets its logger to DEBUG, and a line an index would reach every Prefect run log.
logging.getLogger("bm25s").setLevel(logging.WARNING)

FORMAT = 1
METHOD = "lucene"
META = "index.json"
PASSAGES = "passages.arrow"

# Passages are looked through in this many blocks for a score that k of them reach.
_BLOCKS = 256


@dataclass(frozen=True, slots=True)
class Hit:
    """A passage found and its BM25 score (> 0)."""

    passage_id: int
    score: float


class Index:
    """BM25 over passages whose ids are their positions. Made by `build` or `Index.load`.

    Searching changes nothing in it: threads and, through the page cache, processes may share it.
    """

    def __init__(self, key: str, k1: float, b: float, bm25: bm25s.BM25, table: pa.Table) -> None:
        self.key = key
        self.k1 = k1
        self.b = b
        self._bm25 = bm25
        self._vocabulary: dict[str, int] = bm25.vocab_dict
        self._table = table

    def __len__(self) -> int:
        """How many passages it holds."""
        return self._table.num_rows

    def passage(self, passage_id: int) -> Passage:
        """Raises IndexError where there is no such passage."""
        if not 0 <= passage_id < len(self):
            raise IndexError(f"passage {passage_id} of an index of {len(self)} passages")
        title, text = (self._table.column(name)[passage_id].as_py() for name in ("title", "text"))
        return Passage(title, text)

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """For each query its best passages: at most k, best first, equal scores by ascending id.

        A passage that shares no word with the query is never returned, so lists may be shorter
        than k, or empty. A word said twice counts twice; the order of words does not matter.

        Raises:
            ValueError: k < 1.
        """
        if k < 1:
            raise ValueError(f"k is {k}, expected at least 1")
        return [self._search(query, k) for query in queries]

    def save(self, folder: str | Path) -> None:
        """Writes npy, JSON and Arrow files into the folder, which is made if it does not exist."""
        folder = Path(folder)
        self._bm25.save(folder, show_progress=False, allow_pickle=False)
        path = str(folder / PASSAGES)
        with pa.OSFile(path, "wb") as sink, pa.ipc.new_file(sink, self._table.schema) as writer:
            writer.write_table(self._table)
        meta = {
            "format": FORMAT,
            "key": self.key,
            "k1": self.k1,
            "b": self.b,
            "passages": len(self),
            "words": len(self._vocabulary),
        }
        (folder / META).write_text(json.dumps(meta, indent=1, sort_keys=True) + "\n")

    @classmethod
    def load(cls, folder: str | Path, mmap: bool = True) -> Index:
        """Opens a saved index; with `mmap` only the vocabulary is read into memory.

        Nothing is unpickled.

        Raises:
            IntegrityError: a file is missing, unreadable or at odds with another.
        """
        folder = Path(folder)
        try:
            meta: dict[str, Any] = json.loads((folder / META).read_text())
            if meta["format"] != FORMAT:
                raise IntegrityError(f"its format is {meta['format']!r}, expected {FORMAT}")
            bm25 = bm25s.BM25.load(folder, mmap=mmap, allow_pickle=False, show_progress=False)
            source = (pa.memory_map if mmap else pa.OSFile)(str(folder / PASSAGES))
            table = pa.ipc.open_file(source).read_all()
            index = cls(meta["key"], meta["k1"], meta["b"], bm25, table)
            index._check(meta)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, EOFError) as error:
            raise IntegrityError(f"index {folder} cannot be read: {error}") from error
        return index

    def _check(self, meta: dict[str, Any]) -> None:
        scores, starts = self._bm25.scores, self._bm25.scores["indptr"]
        pairs = len(scores["data"])
        found = (len(self), scores["num_docs"], len(self._vocabulary), len(starts) - 1)
        expected = (meta["passages"], meta["passages"], meta["words"], meta["words"])
        if found != expected or not pairs == len(scores["indices"]) == starts[-1]:
            raise IntegrityError(
                f"its parts disagree: passages, scored passages, words, posting lists are {found}, "
                f"expected {expected}, and {pairs} scores have {len(scores['indices'])} passage ids"
            )

    def _search(self, query: str, k: int) -> list[Hit]:
        known = (self._vocabulary.get(word) for word in tokenize.words(query))
        # In one order for every query and passage, so that equal sums are equal to the bit.
        ids = sorted(word_id for word_id in known if word_id is not None)
        if not ids:
            return []
        # Every score is positive: zero means that the passage has none of the words.
        return _best(self._bm25.get_scores_from_ids(ids), k)


def build(passages: Sequence[Passage], k1: float, b: float) -> Index:
    """Indexes the passages; equal input gives equal files on every machine.

    Raises:
        DataError: no passages at all, or a passage that is not valid Unicode.
        ValueError: k1 or b out of range.
    """
    if not passages:
        raise DataError("an index needs at least one passage, found none")
    key = index_key(passages, k1, b)
    tokens = [tokenize.words(f"{passage.title}\n{passage.text}") for passage in passages]
    # Sorted: the order of a set of strings changes from process to process.
    vocabulary = {
        word: number for number, word in enumerate(sorted({w for t in tokens for w in t}))
    }
    bm25 = bm25s.BM25(k1=k1, b=b, method=METHOD)
    ids = [[vocabulary[word] for word in document] for document in tokens]
    with np.errstate(invalid="ignore"):  # a corpus of blanks divides its mean length, 0, by itself
        bm25.index((ids, vocabulary), create_empty_token=False, show_progress=False)
    table = pa.table(
        {
            "title": pa.array([passage.title for passage in passages], pa.large_string()),
            "text": pa.array([passage.text for passage in passages], pa.large_string()),
        }
    )
    return Index(key, k1, b, bm25, table)


def index_key(passages: Sequence[Passage], k1: float, b: float) -> str:
    """BLAKE3 hex digest of what an index is made of: passages in order, parameters, tokenisation.

    Raises:
        DataError: a passage that is not valid Unicode.
        ValueError: k1 or b out of range.
    """
    if not (0 < k1 < np.inf and 0 <= b <= 1):
        raise ValueError(f"k1 is {k1} and b is {b}, expected k1 > 0 and 0 <= b <= 1")
    recipe = [FORMAT, METHOD, float(k1), float(b), tokenize.VERSION, unicodedata.unidata_version]
    hasher = blake3.blake3(json.dumps(recipe).encode())
    for number, passage in enumerate(passages):
        for part in (passage.title, passage.text):
            try:
                data = part.encode()
            except UnicodeEncodeError as error:
                raise DataError(f"passage {number} ({passage.title!r}): {error}") from None
            hasher.update(len(data).to_bytes(8, "little"))
            hasher.update(data)
    return hasher.hexdigest()


def _best(scores: np.ndarray, k: int) -> list[Hit]:
    """The k best of the positive scores, ties by ascending id, at the k-th place too."""
    floor = _floor(scores, k)
    ids = np.flatnonzero(scores >= floor) if floor > 0 else np.flatnonzero(scores > 0)
    order = np.argsort(-scores[ids], kind="stable")[:k]
    return [Hit(int(number), float(scores[number])) for number in ids[order]]


def _floor(scores: np.ndarray, k: int) -> float:
    """A score that at least k passages reach, so that nothing below it need be sorted; or 0.

    It is the k-th best of the blocks' maxima: sixty times as fast as a partition of all the scores,
    most of which are zero or tied, where introselect is at its worst.
    """
    width = len(scores) // _BLOCKS
    if k > _BLOCKS or width < 2:
        return 0.0
    best = scores[: _BLOCKS * width].reshape(_BLOCKS, width).max(axis=1)
    return float(np.partition(best, _BLOCKS - k)[_BLOCKS - k])
