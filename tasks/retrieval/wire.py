"""Search-R1's retrieval protocol (Jin et al. 2025, arXiv:2503.09516): JSON over HTTP.

    POST /retrieve {"queries": ["...", ...], "topk": 3, "return_scores": true}
    200 {"result": [[{"document": {"contents": "\\"Title\\"\\ntext"}, "score": 7.1}, ...], ...]}

One inner list a query, best first. The first line of a document's contents is its title in double
quotes; the rest is its text. Without `return_scores` an inner list holds the documents themselves.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from tasks.config import MAX_TOP_K
from tasks.data.questions import Passage

MAX_QUERIES = 1024
"""Queries of one request that our server takes, and that our client sends."""
MAX_QUERY_LENGTH = 16_384
"""Characters of a query that our server takes, and that our client sends."""
DEFAULT_TOP_K = 3

Query = Annotated[str, Field(max_length=MAX_QUERY_LENGTH)]


class _Message(BaseModel):
    # Not strict about what else is there: Search-R1's own documents hold ids, titles and more.
    model_config = ConfigDict(frozen=True, strict=True)


class RetrieveRequest(_Message):
    """`topk` null asks for the server's own number. Search-R1 also asks for no queries at all."""

    queries: list[Query] = Field(max_length=MAX_QUERIES)
    topk: int | None = Field(None, ge=1, le=MAX_TOP_K)
    return_scores: bool = False


class Document(_Message):
    contents: str = Field(min_length=1)


class ScoredDocument(_Message):
    document: Document
    score: float = Field(allow_inf_nan=False)


class RetrieveResponse(_Message):
    """What a server answers where scores were asked for."""

    result: list[list[ScoredDocument]]


class PlainRetrieveResponse(_Message):
    """What a server answers where they were not."""

    result: list[list[Document]]


def contents_of(passage: Passage) -> str:
    """A passage as a document's contents. A title's line breaks become blanks: the first one in
    the contents ends the title."""
    title = " ".join(passage.title.split("\n"))
    return f'"{title}"\n{passage.text}'


def passage_of(contents: str) -> Passage:
    """A document's contents as a passage; one pair of quotes around the title is not the title's.

    Without a line break all of it is the title, as Search-R1 reads it.
    """
    title, _, text = contents.partition("\n")
    if len(title) >= 2 and title[0] == title[-1] == '"':
        title = title[1:-1]
    return Passage(title, text)
