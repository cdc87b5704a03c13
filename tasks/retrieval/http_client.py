"""A retriever that is served elsewhere, by Search-R1's protocol (`tasks.retrieval.wire`).

Requests run on an event loop of their own, in one thread: a search never stops the engine, each
trajectory waits for its own, and one that hangs can be given up.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import Future

import httpx
from pydantic import ValidationError
from tenacity import (
    AsyncRetrying,
    retry_if_exception_type,
    stop_after_attempt,
    wait_random_exponential,
)

from tasks.config import RetrievalConfig
from tasks.errors import RetrieverError, RetrieverUnreachable
from tasks.retrieval.retriever import Found
from tasks.retrieval.wire import (
    MAX_QUERIES,
    MAX_QUERY_LENGTH,
    RetrieveRequest,
    RetrieveResponse,
    passage_of,
)

IN_FLIGHT = 8
"""Requests of one worker at once; more wait here, and not in the server's queue."""
MAX_RESPONSE_BYTES = 256 * 2**20
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.5, 10.0
# Too many requests, or a server (or what stands before it) in trouble: both may pass.
_BUSY = {408, 425, 429, 500, 502, 503, 504}


class _Transient(Exception):
    """A try failed in a way that a later one may not; its text is the cause.

    answered: the server did, and had trouble with what it was asked.
    """

    def __init__(self, cause: str, answered: bool = False) -> None:
        super().__init__(cause)
        self.answered = answered


class HttpRetriever:
    """Searches with the server at `retrieval.url`; close it.

    Args:
        attempts: tries of a request, in place of `retrieval.attempts`.
    """

    def __init__(self, retrieval: RetrievalConfig, attempts: int | None = None) -> None:
        assert retrieval.url is not None
        self._url = retrieval.url
        self._limit_s = retrieval.time_limit_s
        self._attempts = attempts or retrieval.attempts
        self._loop = asyncio.new_event_loop()
        # Without time limits of its own: those are for each read, and a server may drip.
        self._http = httpx.AsyncClient(timeout=None)
        self._slots = asyncio.Semaphore(IN_FLIGHT)
        self._thread = threading.Thread(target=self._loop.run_forever, name="search", daemon=True)
        self._thread.start()

    def search(self, queries: Sequence[str], k: int) -> Future[list[list[Found]]]:
        """As `Retriever.search`. The queries go in one request (or as few as the limit allows).

        Code points that are no characters go as "?", and an endless query goes cut.
        """
        # A lone surrogate has no UTF-8.
        sendable = [q[:MAX_QUERY_LENGTH].encode(errors="replace").decode() for q in queries]
        return asyncio.run_coroutine_threadsafe(self._search(sendable, k), self._loop)

    def close(self) -> None:
        if not self._loop.is_closed():
            asyncio.run_coroutine_threadsafe(self._give_up(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    async def _give_up(self) -> None:
        running = asyncio.all_tasks() - {asyncio.current_task()}
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await self._http.aclose()

    async def _search(self, queries: list[str], k: int) -> list[list[Found]]:
        parts = [queries[i : i + MAX_QUERIES] for i in range(0, len(queries), MAX_QUERIES)]
        found = await asyncio.gather(*(self._retried(part, k) for part in parts))
        return [one for part in found for one in part]

    async def _retried(self, queries: list[str], k: int) -> list[list[Found]]:
        tries = AsyncRetrying(
            stop=stop_after_attempt(self._attempts),
            wait=wait_random_exponential(_FIRST_WAIT_S, _LONGEST_WAIT_S),
            retry=retry_if_exception_type(_Transient),
            reraise=True,
        )
        try:
            answer = await tries(self._try, queries, k)
        except _Transient as error:
            raise self._error(
                queries,
                f"failed {self._attempts} times: {error}; see that it runs and can be reached "
                "from here (retrieval.url, retrieval.time_limit_s), then start or resume the run",
                RetrieverError if error.answered else RetrieverUnreachable,
            ) from None
        return self._read(queries, k, answer)

    async def _try(self, queries: list[str], k: int) -> bytes:
        request = RetrieveRequest(queries=queries, topk=k, return_scores=True)
        body = request.model_dump_json().encode()
        async with self._slots:
            try:
                async with asyncio.timeout(self._limit_s):
                    return await self._post(queries, body)
            except TimeoutError:
                raise _Transient(f"no whole answer within {self._limit_s:g} s") from None
            except httpx.TransportError as error:
                raise _Transient(str(error) or type(error).__name__) from error
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                raise self._error(queries, f"cannot be asked: {error}") from error

    async def _post(self, queries: list[str], body: bytes) -> bytes:
        sent = self._http.stream(
            "POST", self._url, content=body, headers={"content-type": "application/json"}
        )
        async with sent as response:
            answer = bytearray()
            async for piece in response.aiter_bytes():
                answer += piece
                if len(answer) > MAX_RESPONSE_BYTES:
                    raise self._error(queries, f"answered more than {MAX_RESPONSE_BYTES:,} bytes")
        if response.status_code in _BUSY:
            cause = f"status {response.status_code}: {_short(answer)}"
            raise _Transient(cause, answered=response.status_code == 500)
        if response.status_code != 200:
            raise self._error(
                queries,
                f"answered with status {response.status_code}: {_short(answer)}; expected what "
                "Search-R1's POST /retrieve answers: is retrieval.url the whole address?",
            )
        return bytes(answer)

    def _read(self, queries: list[str], k: int, answer: bytes) -> list[list[Found]]:
        try:
            result = RetrieveResponse.model_validate_json(answer).result
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False)[0]
            where = ".".join(str(part) for part in first["loc"]) or "its JSON"
            raise self._error(
                queries,
                f"does not answer as Search-R1's POST /retrieve: {where}: {first['msg']}, in "
                f"{_short(answer)}",
            ) from None
        if len(result) != len(queries):
            raise self._error(queries, f"answered with {len(result)} results, expected one a query")
        most = max(map(len, result), default=0)
        if most > k:
            raise self._error(queries, f"answered with {most} passages, expected {k} at most")
        return [
            [Found(passage_of(one.document.contents), one.score) for one in found]
            for found in result
        ]

    def _error(
        self, queries: list[str], problem: str, kind: type[RetrieverError] = RetrieverError
    ) -> RetrieverError:
        first = f" (the first is {queries[0][:80]!r})" if queries else ""
        return kind(f"retriever {self._url}, {len(queries)} queries{first}: {problem}")


def check_retriever(retrieval: RetrievalConfig) -> None:
    """Asks once, as a run will ask; does nothing where `retrieval.url` is unset.

    Raises:
        RetrieverError: no answer, or not one of Search-R1's protocol.
    """
    if retrieval.url is None:
        return
    retriever = HttpRetriever(retrieval, attempts=1)
    try:
        # Two, so that a server that answers one list in all is found out.
        retriever.search(["Who was the first?", "Where is the second?"], retrieval.top_k).result()
    finally:
        retriever.close()


def _short(data: bytes | bytearray) -> str:
    text = data[:200].decode(errors="replace")
    return repr(text if len(data) <= 200 else text + "...")
