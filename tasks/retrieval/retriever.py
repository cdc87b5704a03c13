"""What an agent searches with: one protocol, whatever finds the passages."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from tasks.data.questions import Passage
from tasks.retrieval.bm25 import Index


@dataclass(frozen=True, slots=True)
class Found:
    """A passage and the score its retriever gave it; scores of two retrievers do not compare."""

    passage: Passage
    score: float


class Retriever(Protocol):
    """Searches in batches; `Bm25Retriever` and `tasks.retrieval.http_client.HttpRetriever`."""

    def search(self, queries: Sequence[str], k: int) -> Future[list[list[Found]]]:
        """Starts a search; its result is one list a query, of at most k passages, best first.

        It never waits: what takes long goes on elsewhere, and its failure is the future's
        exception, a `RetrieverError`.
        """
        ...

    def close(self) -> None:
        """Gives up what still runs; its futures fail or are cancelled."""
        ...


class Bm25Retriever:
    """An index in this process. Its futures are done when they are handed out: what comes of a
    search then depends on no other thread's pace."""

    def __init__(self, index: Index) -> None:
        self._index = index

    def search(self, queries: Sequence[str], k: int) -> Future[list[list[Found]]]:
        future: Future[list[list[Found]]] = Future()
        future.set_result(search_index(self._index, queries, k))
        return future

    def close(self) -> None:
        pass


def search_index(index: Index, queries: Sequence[str], k: int) -> list[list[Found]]:
    """`Index.search` with the passages in place of their ids."""
    return [
        [Found(index.passage(hit.passage_id), hit.score) for hit in hits]
        for hits in index.search(queries, k)
    ]
