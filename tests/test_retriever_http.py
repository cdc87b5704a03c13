"""The HTTP retriever and the service: they agree with the index in process, and with no rubbish."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient
from hypothesis import given, settings
from hypothesis import strategies as st

from flows.serve_retriever import served_passages
from infra.processes import child_environment
from tasks.config import RetrievalConfig
from tasks.data.hotpotqa import load_questions
from tasks.data.questions import Passage, pool
from tasks.errors import ConfigError, RetrieverError, RetrieverUnreachable
from tasks.inputs import load_inputs
from tasks.presets import resolve
from tasks.retrieval import http_client
from tasks.retrieval.bm25 import build
from tasks.retrieval.http_client import HttpRetriever, check_retriever
from tasks.retrieval.retriever import Found, search_index
from tasks.retrieval.service import MAX_BODY_BYTES, make_app
from tasks.retrieval.wire import RetrieveResponse, contents_of, passage_of
from tests.proxy import Proxy
from tests.test_retrieval import PASSAGES, SMALL_TEXT

pytestmark = [pytest.mark.fast, pytest.mark.timeout(120)]

ROOT = Path(__file__).resolve().parents[1]
DEV = ROOT.parent / "shared" / "data" / "hotpotqa_dev.jsonl"


@pytest.fixture(scope="module")
def data() -> str:
    """Real questions where they are at hand."""
    return str(DEV) if DEV.exists() else "miniature:train"


@contextmanager
def served(data: str, home: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command, and the address that it says."""
    process = subprocess.Popen(
        [sys.executable, "-m", "flows.serve_retriever", "--data", data, "--port", "0"],
        cwd=ROOT,
        env=child_environment({"KINDLING_HOME": str(home)}),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        said = process.stdout.readline()
        assert "passages at http://127.0.0.1:" in said
        yield process, said.rsplit(" ", 1)[1].strip()
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def url(data: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with served(data, Path(tmp_path_factory.mktemp("home"))) as (process, address):
        yield address
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=20) == 0, "Ctrl-C is how it is stopped"


@pytest.fixture(autouse=True)
def no_long_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "_FIRST_WAIT_S", 0.01)


def settings_for(url: str, **more: Any) -> RetrievalConfig:
    return RetrievalConfig.model_validate({"url": url, "attempts": 3, **more})


def ask(url: str, queries: list[str], k: int = 3, **more: Any) -> list[list[Found]]:
    with closing(HttpRetriever(settings_for(url, **more))) as retriever:
        return retriever.search(queries, k).result(timeout=60)


def test_the_service_finds_what_the_index_finds(url: str, data: str) -> None:
    questions = load_questions(data)
    index = build(pool(questions), 1.2, 0.75)
    queries = [q.question for q in questions[:150]]
    queries += [title for q in questions[:150] for title in q.gold_titles]
    queries += ["", "?!", "\ud800 lone", "a" * 20_000, "东京", "</search>", "\x00"]
    assert ask(url, queries, 3) == search_index(index, queries, 3)
    assert ask(url, queries[::10], 100) == search_index(index, queries[::10], 100)
    assert ask(url, []) == []
    many = queries[:3] * 400  # more than one request takes
    assert ask(url, many, 1) == search_index(index, queries[:3], 1) * 400


@settings(deadline=None, max_examples=40)
@given(PASSAGES, st.lists(SMALL_TEXT, max_size=4), st.integers(1, 15))
def test_any_corpus_comes_through_the_protocol(
    passages: list[Passage], queries: list[str], k: int
) -> None:
    index = build(passages, 1.2, 0.75)
    request = {"queries": queries, "topk": k, "return_scores": True}
    answer = TestClient(make_app(index)).post("/retrieve", json=request)
    result = RetrieveResponse.model_validate_json(answer.content).result
    found = [[Found(passage_of(one.document.contents), one.score) for one in r] for r in result]
    assert found == search_index(index, queries, k)


@given(st.builds(Passage, st.text(st.characters(exclude_characters="\n")), st.text()))
def test_contents_bring_a_passage_back(passage: Passage) -> None:
    assert passage_of(contents_of(passage)) == passage


def test_contents_as_others_write_them() -> None:
    assert passage_of("Heroes\nA song.\nBy Bowie.") == Passage("Heroes", "A song.\nBy Bowie.")
    assert passage_of('"Heroes" (album)\nx') == Passage('"Heroes" (album)', "x")
    assert passage_of('"') == Passage('"', "")
    assert passage_of(contents_of(Passage("two\nlines", "x"))) == Passage("two lines", "x")


def test_what_search_r1_asks(url: str) -> None:
    """Its generation loop reads result[i][j]["document"]["contents"], of no queries too."""
    request = {"queries": ["film director", "song"], "topk": 2, "return_scores": True}
    result = httpx.post(url, json=request).json()["result"]
    assert [len(found) for found in result] == [2, 2]
    assert result[0][0]["document"]["contents"].startswith('"')
    assert result[0][0]["score"] >= result[0][1]["score"] > 0
    assert httpx.post(url, json={**request, "queries": []}).json() == {"result": []}
    plain = httpx.post(url, json={"queries": ["film"]}).json()["result"]
    assert len(plain[0]) == 3
    assert plain[0][0].keys() == {"contents"}
    health = httpx.get(url.replace("/retrieve", "/health")).json()
    assert health["passages"] > 1000


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 422),
        (b"{", 422),
        (b"[]", 422),
        (b"\xff\xfe", 422),
        (b"[" * 100_000, 400),
        (b'{"queries": "film"}', 422),
        (b'{"queries": [1]}', 422),
        (b'{"queries": [null]}', 422),
        (b'{"queries": ["\\ud800"]}', 422),
        (b'{"topk": 3}', 422),
        (b'{"queries": ["a"], "topk": 0}', 422),
        (b'{"queries": ["a"], "topk": 101}', 422),
        (b'{"queries": ["a"], "topk": -1}', 422),
        (b'{"queries": ["a"], "topk": true}', 422),
        (b'{"queries": ["a"], "topk": "3"}', 422),
        (b'{"queries": ["a"], "topk": NaN}', 422),
        (b'{"queries": ["a"], "topk": 1e999}', 422),
        (b'{"queries": ["a"], "topk": ' + b"9" * 5000 + b"}", 400),
        (b'{"queries": ["a"], "return_scores": 1}', 422),
        (json.dumps({"queries": ["a"] * 1025}).encode(), 422),
        (json.dumps({"queries": ["a" * 16_385]}).encode(), 422),
        (b" " * (MAX_BODY_BYTES + 1), 413),
    ],
)
def test_rubbish_is_refused_and_does_no_harm(url: str, body: bytes, status: int) -> None:
    answer = httpx.post(url, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == status
    assert answer.json()["detail"]
    assert ask(url, ["film"])[0]


def test_rubbish_that_is_not_even_http(url: str) -> None:
    port = httpx.URL(url).port
    for data in (b"\x16\x03\x01\x02\x00", b"GET / HTTP/9.9\r\n\r\n", b"POST /retrieve HTTP/1.1"):
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(data)
    assert httpx.get(url).status_code == 405
    assert httpx.get(f"{url}/x").status_code == 404
    assert ask(url, ["film"])[0]


def test_the_service_stops_when_told(tmp_path: Path) -> None:
    with served("miniature:held_out", tmp_path) as (process, address):
        with httpx.Client() as kept_open:
            assert kept_open.get(address.replace("/retrieve", "/health")).is_success
            process.terminate()
            assert process.wait(timeout=20) == 0
        assert process.stdout is not None
        assert process.stdout.read() == ""


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = subprocess.run(
            [sys.executable, "-m", "flows.serve_retriever", "--port", port],
            cwd=ROOT,
            env=child_environment({"KINDLING_HOME": str(tmp_path)}),
            capture_output=True,
            text=True,
            timeout=100,
        )
    assert done.returncode == 1
    assert f"cannot listen on 127.0.0.1 port {port}: " in done.stderr
    assert "Traceback" not in done.stderr


def test_the_preset_is_served_as_a_run_searches_it(tmp_path: Path) -> None:
    config = resolve("tiny", {"data": {"held_out_questions": 50}})
    assert served_passages(config, []) == load_inputs(config, tmp_path).passages
    split = resolve("tiny", {"data": {"held_out": "split", "held_out_questions": 50}})
    assert served_passages(split, []) == load_inputs(split, tmp_path).passages
    both = served_passages(config, ["miniature:held_out", "miniature:train"])
    assert set(both) >= set(served_passages(config, []))


# ---------------------------------------------------------------- a client of bad servers


class Scripted:
    """Answers requests one after the other from a script; the last entry goes on."""

    def __init__(self, *script: Callable[[BaseHTTPRequestHandler, dict], None]) -> None:
        self.requests: list[dict] = []
        requests = self.requests

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                size = int(self.headers["content-length"])
                request = json.loads(self.rfile.read(size))
                number = min(len(requests), len(script) - 1)
                requests.append(request)
                script[number](self, request)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}/retrieve"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))

    def __enter__(self) -> Scripted:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def says(body: bytes | str | dict, status: int = 200) -> Callable[..., None]:
    text = json.dumps(body) if isinstance(body, dict) else body
    data = text.encode() if isinstance(text, str) else text

    def answer(handler: BaseHTTPRequestHandler, _: dict) -> None:
        handler.send_response(status)
        handler.send_header("content-length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)

    return answer


def well(handler: BaseHTTPRequestHandler, request: dict) -> None:
    hit = {"document": {"id": "7", "contents": '"T"\nx'}, "score": 1, "more": None}
    says({"result": [[hit]] * len(request["queries"])})(handler, request)


def drops(handler: BaseHTTPRequestHandler, _: dict) -> None:
    handler.connection.shutdown(socket.SHUT_RDWR)


def cut_short(handler: BaseHTTPRequestHandler, _: dict) -> None:
    handler.send_response(200)
    handler.send_header("content-length", "1000")
    handler.end_headers()
    handler.wfile.write(b'{"result": [')
    handler.connection.shutdown(socket.SHUT_RDWR)


def drips(handler: BaseHTTPRequestHandler, _: dict) -> None:
    """A byte from time to time: no single read is slow."""
    handler.send_response(200)
    handler.end_headers()
    pause = threading.Event()
    try:
        while not pause.wait(0.05):
            handler.wfile.write(b" ")
    except OSError:
        pass


def scored(**document: Any) -> dict:
    return {"document": {"contents": "T\nx"}, "score": 1.0, **document}


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (says("<html>"), "its JSON: Invalid JSON"),
        (says(b"\xff"), "its JSON: Invalid JSON"),
        (says(""), "its JSON: Invalid JSON"),
        (says({"results": []}), "result: Field required"),
        (says({"result": None}), "result: Input should be a valid array"),
        (says({"result": [["x"], []]}), r"result\.0\.0: Input should be an object"),
        (says({"result": [[{"score": 1.0}], []]}), r"result\.0\.0\.document: Field required"),
        (says({"result": [[{"document": {}, "score": 1}], []]}), r"contents: Field required"),
        (says({"result": [[scored(score=None)], []]}), r"result\.0\.0\.score: "),
        (says('{"result": [[{"document": {"contents": "x"}, "score": NaN}], []]}'), "finite"),
        (says({"result": [[scored()]]}), "answered with 1 results, expected one a query"),
        (says({"result": [[]] * 3}), "answered with 3 results, expected one a query"),
        (says({"result": [[scored()] * 4, []]}), "answered with 4 passages, expected 3 at most"),
        (says({"detail": "Not Found"}, 404), "status 404.*is retrieval.url the whole address"),
        (says("", 307), "status 307"),
    ],
)
def test_an_answer_that_is_none_is_an_error_at_once(
    answer: Callable[..., None], message: str
) -> None:
    with Scripted(answer) as server, pytest.raises(RetrieverError, match=message) as caught:
        ask(server.url, ["first", "second"])
    assert len(server.requests) == 1
    assert str(caught.value).startswith(
        f"retriever {server.url}, 2 queries (the first is 'first'): "
    )


def test_what_may_pass_is_tried_again() -> None:
    troubles = [says("busy", 503), drops, cut_short, says("slow down", 429), well]
    with Scripted(*troubles) as server:
        (found,) = ask(server.url, ["q"], attempts=5)
        assert found == [Found(Passage("T", "x"), 1.0)]
        assert len(server.requests) == 5
        assert server.requests[0] == {"queries": ["q"], "topk": 3, "return_scores": True}


@pytest.mark.parametrize(
    ("answer", "reached", "message"),
    [
        (says("no", 500), True, r"failed 3 times: status 500: 'no'; see that it runs"),
        (says("no", 503), False, r"failed 3 times: status 503: 'no'; see that it runs"),
        (drops, False, r"failed 3 times: .*; see that it runs"),
        (drips, False, r"failed 3 times: no whole answer within 0\.3 s; see that it runs"),
    ],
)
def test_what_does_not_pass_is_an_error(
    answer: Callable[..., None], reached: bool, message: str
) -> None:
    """And says whether one of the queries may be to blame: then each is asked alone."""
    with Scripted(answer) as server:
        with pytest.raises(RetrieverError, match=message) as caught:
            ask(server.url, ["q"], time_limit_s=0.3)
        assert len(server.requests) == 3, "as often as it says"
    assert isinstance(caught.value, RetrieverUnreachable) != reached


def test_an_answer_without_end_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "MAX_RESPONSE_BYTES", 1000)
    with Scripted(says(b" " * 1001)) as server, pytest.raises(RetrieverError, match="1,000 bytes"):
        ask(server.url, ["q"])


def test_one_that_is_down_goes_on_when_it_is_back(url: str) -> None:
    up = ("127.0.0.1", int(httpx.URL(url).port or 0))
    with Proxy() as proxy:
        through = f"http://127.0.0.1:{proxy.port}/retrieve"
        with closing(HttpRetriever(settings_for(through))) as retriever:
            with pytest.raises(RetrieverError, match="failed 3 times"):
                retriever.search(["film"], 3).result(timeout=60)
            proxy.upstream = up
            first = retriever.search(["film"], 3).result(timeout=60)
            proxy.cut()  # the connection it keeps is gone
            assert retriever.search(["film"], 3).result(timeout=60) == first


def test_searches_go_side_by_side_and_are_given_up_at_the_end(url: str) -> None:
    up = ("127.0.0.1", int(httpx.URL(url).port or 0))
    with Proxy(up) as proxy:
        retriever = HttpRetriever(settings_for(f"http://127.0.0.1:{proxy.port}/retrieve"))
        assert retriever.search(["film"], 3).result(timeout=60)[0]
        proxy.flowing.clear()
        stuck = [retriever.search(["film"], 3) for _ in range(http_client.IN_FLIGHT + 3)]
        assert not any(future.done() for future in stuck)
        retriever.close()
        assert all(future.cancelled() for future in stuck)
        retriever.close()


# ---------------------------------------------------------------- runs


@pytest.mark.parametrize(
    "bad",
    ["", "host:8000", "ftp://host/x", "http://", "http://a b/", "http://u:p@host/", "http://[::1/x",
     "http://host:99999/x", "http://host/#x", "http://host:0/"],
)  # fmt: skip
def test_addresses_that_are_none(bad: str) -> None:
    with pytest.raises(ConfigError, match=r"retrieval\.url"):
        resolve("tiny", {"retrieval": {"url": bad}})


def test_a_run_asks_before_anything_starts(url: str, tmp_path: Path) -> None:
    inputs = load_inputs(resolve("tiny", {"retrieval": {"url": url}}), tmp_path)
    assert (inputs.index_key, inputs.passages) == (None, ())
    check_retriever(RetrievalConfig.model_validate({}))
    with socket.create_server(("127.0.0.1", 0)) as free:
        gone = f"http://127.0.0.1:{free.getsockname()[1]}/retrieve"
    with pytest.raises(RetrieverError, match=r"failed 1 times: .*retrieval\.url"):
        load_inputs(resolve("tiny", {"retrieval": {"url": gone}}), tmp_path)
