"""Our BM25 index behind Search-R1's HTTP protocol: the other end of `http_client`."""

from __future__ import annotations

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tasks.config import MAX_TOP_K
from tasks.retrieval.bm25 import Index
from tasks.retrieval.retriever import search_index
from tasks.retrieval.wire import (
    DEFAULT_TOP_K,
    MAX_QUERIES,
    MAX_QUERY_LENGTH,
    Document,
    PlainRetrieveResponse,
    RetrieveRequest,
    RetrieveResponse,
    ScoredDocument,
    contents_of,
)

PATH = "/retrieve"
MAX_BODY_BYTES = 32 * 2**20


def make_app(index: Index) -> FastAPI:
    """The service: POST /retrieve, and GET /health with the number of passages.

    What it does not accept it answers with 422 and the fields at fault, a body that is too large
    with 413. Its form is at /docs.
    """
    app = FastAPI(
        title="Kindling retriever",
        description=f"Search-R1's protocol over {len(index):,} passages, ranked by BM25. At most "
        f"{MAX_QUERIES} queries of {MAX_QUERY_LENGTH:,} characters, topk {MAX_TOP_K}.",
    )
    app.add_middleware(_BoundedBody)
    app.add_exception_handler(RequestValidationError, _refuse)

    # Not `async`: a search is work for a thread of the pool, not for the event loop.
    @app.post(PATH)
    def retrieve(request: RetrieveRequest) -> RetrieveResponse | PlainRetrieveResponse:
        results = search_index(index, request.queries, request.topk or DEFAULT_TOP_K)
        scored = [
            [
                ScoredDocument(document=Document(contents=contents_of(f.passage)), score=f.score)
                for f in found
            ]
            for found in results
        ]
        if request.return_scores:
            return RetrieveResponse(result=scored)
        return PlainRetrieveResponse(result=[[one.document for one in found] for found in scored])

    @app.get("/health")
    def health() -> dict[str, int]:
        return {"passages": len(index)}

    return app


def _refuse(request: Request, error: Exception) -> JSONResponse:
    """FastAPI's own answer repeats the input, which need not be valid JSON (NaN, surrogates)."""
    assert isinstance(error, RequestValidationError)
    detail = [
        {"loc": list(one["loc"]), "msg": one["msg"], "type": one["type"]} for one in error.errors()
    ]
    return JSONResponse({"detail": detail}, status_code=422)


class _BoundedBody:
    """Refuses a body before all of it is in memory."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        taken = 0

        async def bounded() -> Message:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > MAX_BODY_BYTES:
                raise HTTPException(413, f"the body has more than {MAX_BODY_BYTES:,} bytes")
            return message

        await self._app(scope, bounded, send)
