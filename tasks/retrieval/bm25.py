"""A BM25 index over passages (title + text): built once, saved as plain files, memory-mapped.

`bm25s` (Lù 2024, arXiv:2407.03618) computes and stores the scores: Lucene's BM25 (Kamphuis et al.
2020), the score of every (word, passage) pair computed when the index is built. Ranking is done
here, because `bm25s` pads results with zero scores, orders ties by descending id, lets argpartition
choose among ties at the k-th place and walks the whole posting list of "the" for every query.
Instead the words of a query are added from rare to common, and as soon as the k-th best partial
score exceeds all that the remaining words could still add, only the passages that can still make it
are completed (MaxScore, Turtle & Flood 1995). The result is exact, to the bit.

Measured on 2 cores of an AMD EPYC machine, one thread, index mapped, real HotpotQA passages repeated
with shuffled words up to 50,000 of them: see `SPEED` below.
"""

from __future__ import annotations

import json
import unicodedata
from collections import Counter
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

FORMAT = 1
METHOD = "lucene"
META = "index.json"
BOUNDS = "bounds.npy"
PASSAGES = "passages.arrow"

# A posting list shorter than this is added outright: cheaper than asking whether it is needed.
_SHORT = 512


@dataclass(frozen=True, slots=True)
class Hit:
    """A passage found and its BM25 score (> 0)."""

    passage_id: int
    score: float


class Index:
    """BM25 over passages whose ids are their positions. Made by `build` or `Index.load`.

    Searching changes nothing in it: threads and, through the page cache, processes may share it.
    """

    def __init__(
        self, key: str, k1: float, b: float, bm25: bm25s.BM25, bounds: np.ndarray, table: pa.Table
    ) -> None:
        self.key = key
        self.k1 = k1
        self.b = b
        self._bm25 = bm25
        self._vocabulary: dict[str, int] = bm25.vocab_dict
        self._scores: np.ndarray = bm25.scores["data"]
        self._postings: np.ndarray = bm25.scores["indices"]
        self._starts: np.ndarray = np.asarray(bm25.scores["indptr"])
        self._bounds = bounds
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
        np.save(folder / BOUNDS, self._bounds, allow_pickle=False)
        with pa.OSFile(str(folder / PASSAGES), "wb") as sink:
            with pa.ipc.new_file(sink, self._table.schema) as writer:
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
            if meta.get("format") != FORMAT:
                raise IntegrityError(
                    f"index {folder} has format {meta.get('format')!r}, this version reads {FORMAT}"
                )
            bm25 = bm25s.BM25.load(folder, mmap=mmap, allow_pickle=False, show_progress=False)
            bounds = np.load(folder / BOUNDS, allow_pickle=False)
            source = (pa.memory_map if mmap else pa.OSFile)(str(folder / PASSAGES))
            table = pa.ipc.open_file(source).read_all()
            index = cls(meta["key"], meta["k1"], meta["b"], bm25, bounds, table)
            index._check(meta)
        except (OSError, ValueError, KeyError, TypeError, EOFError) as error:
            if isinstance(error, IntegrityError):
                raise
            raise IntegrityError(f"index {folder} cannot be read: {error}") from error
        return index

    def _check(self, meta: dict[str, Any]) -> None:
        words, pairs = len(self._vocabulary), len(self._postings)
        found = {
            "passages": len(self),
            "words": words,
            "starts": len(self._starts),
            "bounds": len(self._bounds),
            "scores": len(self._scores),
            "last start": int(self._starts[-1]),
            "scored passages": self._bm25.scores["num_docs"],
        }
        expected = {
            "passages": meta["passages"],
            "words": meta["words"],
            "starts": words + 1,
            "bounds": words,
            "scores": pairs,
            "last start": pairs,
            "scored passages": meta["passages"],
        }
        if found != expected:
            raise IntegrityError(f"index {meta['key']}: found {found}, expected {expected}")

    def _search(self, query: str, k: int) -> list[Hit]:
        terms = self._terms(query)
        if not terms:
            return []
        # What the terms from each position on can add at most, with room for float32 rounding.
        ahead = np.array([self._bounds[term] * count for term, count in terms], np.float64)
        ahead = np.cumsum(ahead[::-1])[::-1] * (1 + 1e-5)
        totals = np.zeros(len(self), np.float32)
        for done, (term, count) in enumerate(terms):
            ids, values = self._posting(term)
            if done and len(ids) > _SHORT:
                touched = np.flatnonzero(totals)
                if len(touched) >= k:
                    partial = totals[touched]
                    threshold = np.partition(partial, len(touched) - k)[len(touched) - k]
                    if threshold > ahead[done]:
                        alive = touched[partial + ahead[done] >= threshold]
                        self._complete(totals, alive, terms[done:])
                        return _best(alive, totals[alive], k)
            totals[ids] += values if count == 1 else values * np.float32(count)
        found = np.flatnonzero(totals)
        return _best(found, totals[found], k)

    def _terms(self, query: str) -> list[tuple[int, int]]:
        """The known words of a query as (word id, count), rarest first.

        The order is one for all passages, so equal sums are equal to the bit.
        """
        counts = Counter(
            self._vocabulary[word] for word in tokenize.words(query) if word in self._vocabulary
        )
        return sorted(
            counts.items(),
            key=lambda item: (self._starts[item[0] + 1] - self._starts[item[0]], item[0]),
        )

    def _posting(self, term: int) -> tuple[np.ndarray, np.ndarray]:
        """Ascending passage ids with the word, each once, and their scores for it."""
        span = slice(self._starts[term], self._starts[term + 1])
        return self._postings[span], self._scores[span]

    def _complete(
        self, totals: np.ndarray, alive: np.ndarray, terms: Sequence[tuple[int, int]]
    ) -> None:
        """Adds the remaining terms to the totals of the passages `alive` (ascending) alone."""
        # Of the postings' type, or searchsorted would convert all of the postings instead.
        wanted = alive.astype(self._postings.dtype)
        for term, count in terms:
            ids, values = self._posting(term)
            places = np.minimum(np.searchsorted(ids, wanted), len(ids) - 1)
            has = ids[places] == wanted
            totals[alive[has]] += values[places[has]] * np.float32(count)


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
    starts = bm25.scores["indptr"][:-1]
    bounds = np.maximum.reduceat(bm25.scores["data"], starts) if len(starts) else np.zeros(0, "f4")
    table = pa.table(
        {
            "title": pa.array([passage.title for passage in passages], pa.large_string()),
            "text": pa.array([passage.text for passage in passages], pa.large_string()),
        }
    )
    return Index(key, k1, b, bm25, bounds, table)


def index_key(passages: Sequence[Passage], k1: float, b: float) -> str:
    """What an index is made of, as a BLAKE3 hex digest: passages in order, parameters, tokenisation.

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


def _best(ids: np.ndarray, scores: np.ndarray, k: int) -> list[Hit]:
    """The k best of passages in ascending order of id, ties by id, at the k-th place too."""
    if len(ids) > k:
        threshold = np.partition(scores, len(scores) - k)[len(scores) - k]
        enough = scores >= threshold
        ids, scores = ids[enough], scores[enough]
    order = np.argsort(-scores, kind="stable")[:k]
    return [Hit(int(ids[place]), float(scores[place])) for place in order]
