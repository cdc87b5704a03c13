"""The retriever that a configuration asks for."""

from __future__ import annotations

from pathlib import Path

from tasks.config import RetrievalConfig
from tasks.retrieval.http_client import HttpRetriever
from tasks.retrieval.retriever import Bm25Retriever, Retriever
from tasks.retrieval.stored import Store, fetch_index


def open_retriever(
    retrieval: RetrievalConfig, store: Store, index_key: str | None, cache_dir: Path
) -> Retriever:
    """Opens it; close it.

    Args:
        index_key: of an index in the store; None where `retrieval.url` is to be asked.
        cache_dir: indexes are kept in its folder `indexes`.

    Raises:
        StoreError, IntegrityError: as `fetch_index`.
    """
    if index_key is None:
        return HttpRetriever(retrieval)
    return Bm25Retriever(fetch_index(store, index_key, cache_dir / "indexes"))
