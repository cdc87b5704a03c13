"""A server that answers like vLLM's control endpoints and fails where told to."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class FakeVllm:
    """What one server knows, and the calls it got.

    Attributes:
        failures: path -> how many of the next calls of it answer 500.
        half: the next failing update leaves the weights half written.
        lacks: paths that answer 404.
    """

    def __init__(self) -> None:
        self.label, self.paused, self.open, self.half_written = "default", False, False, False
        self.version: int | None = None
        self.calls: list[str] = []
        self.failures: dict[str, int] = {}
        self.half = False
        self.lacks: set[str] = set()
        self.resets = True
        self.url = ""

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Status and JSON, by the rules of vLLM 0.32's worker."""
        path, _, query = path.partition("?")
        self.calls.append(path)
        if path in self.lacks:
            return 404, {"detail": "Not Found"}
        failing = self.failures.get(path, 0) > 0
        if failing:
            self.failures[path] -= 1
        error = f"injected into {path}" if failing else self._apply(path, query, body)
        if failing and path == "/update_weights":
            self.open, self.half_written = False, self.half
        if error:
            return 500, {"error": {"message": error}}
        return 200, {
            "weight_version": self.label,
            "is_paused": self.paused,
            "success": self.resets,
        }

    def _apply(self, path: str, query: str, body: dict[str, Any]) -> str:
        if path == "/pause":
            assert query == "mode=keep&clear_cache=false"
            self.paused = True
        elif path == "/resume":
            self.paused = False
        elif path == "/start_weight_update":
            if self.open:
                return "a weight update is already active"
            self.open = True
        elif path == "/update_weights":
            if not self.open:
                return "start_weight_update must be called before update_weights"
            assert self.paused
            self.version, self.half_written = body["update_info"]["version"], False
        elif path == "/reset_prefix_cache":
            assert query == "reset_running_requests=true"
        elif path == "/finish_weight_update":
            if not self.open:
                return "finish_weight_update called without a matching start_weight_update"
            if self.half_written:
                return "the update did not finish"  # and the session stays open
            self.open = False
            self.label = body.get("weight_version", self.label)
        return ""


@contextmanager
def fake_vllm() -> Iterator[FakeVllm]:
    """A fake on a free loopback port."""
    fake = FakeVllm()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.do_POST()

        def do_POST(self) -> None:
            size = int(self.headers.get("Content-Length", 0))
            body = json.loads(self.rfile.read(size) or b"{}")
            status, answer = fake.answer(self.path, body)
            data = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    fake.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield fake
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def eventually(check: Callable[[], bool], what: Callable[[], str], within_s: float = 60) -> None:
    """Polls until `check` holds; fails with `what()` when the time is over."""
    deadline = time.monotonic() + within_s
    pause = threading.Event()
    while not check():
        assert time.monotonic() < deadline, what()
        pause.wait(0.05)
