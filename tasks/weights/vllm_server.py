"""A plain vLLM API server as the follower sees it: the control endpoints it has by itself.

They exist where the server was started with `VLLM_SERVER_DEV_MODE=1` (vLLM 0.32). None of them can
download while generation goes on: the engine answers calls between two of its steps. So whoever
calls `bring_to` has the version in the host's shadow before (`tasks.weights.shadow`), and the
server, which maps the same files, reads two small objects and writes values.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tasks.errors import ConfigError, ServiceError
from tasks.store_location import StoreLocation

logger = logging.getLogger(__name__)

_CONNECT_S = 5.0
_LOOK_S = 30.0  # the engine answers between two steps
_CHANGE_S = 600.0  # the first update of a large model learns its map and writes all of it
_EXCERPT = 500


@dataclass(frozen=True)
class Served:
    """What a server says of itself.

    Attributes:
        label: the weight version it was last told, "default" after a start.
        paused: whether it generates nothing.
    """

    label: str
    paused: bool


def label_of(run: str, version: int) -> str:
    """How a version is called in the server's `/weight_info`."""
    return f"{run}/{version}"


class VllmServer:
    """One server, by its URL. Every method raises:

    ServiceError: it does not answer, or answers with an error; a later call may succeed.
    ConfigError: it lacks the endpoints.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        # A request through a proxy could not reach a server on loopback.
        self._http = httpx.Client(base_url=self.url, trust_env=False)

    def close(self) -> None:
        self._http.close()

    def look(self) -> Served:
        """What it serves now."""
        label = self._call("GET", "/weight_info")["weight_version"]
        return Served(str(label), bool(self._call("GET", "/is_paused")["is_paused"]))

    def bring_to(self, location: StoreLocation, cache_dir: Path, run: str, version: int) -> float:
        """Brings it to a version; the seconds for which it generated nothing.

        Requests that run meanwhile go on afterwards: what they had sampled stays, its keys and
        values are computed anew. After a failure the server generates again with the weights it
        had, unless they are half written: then it stays paused, and another call mends it.
        """
        init = {
            "endpoint": location.endpoint,
            "bucket": location.bucket,
            "cache_dir": str(cache_dir.resolve()),  # the server may run in another folder
        }
        # Each time: it may have been restarted since, and one that knows the store does nothing.
        self._call("POST", "/init_weight_transfer_engine", {"init_info": init})
        began = time.perf_counter()
        self._call("POST", "/pause?mode=keep&clear_cache=false")
        try:
            self._update(run, version)
        except ServiceError:
            self._go_on_if_whole()
            raise
        self.resume()
        return time.perf_counter() - began

    def resume(self) -> None:
        """Lets it generate again."""
        self._call("POST", "/resume")

    def _update(self, run: str, version: int) -> None:
        refusal: ServiceError | None = None
        try:
            self._call("POST", "/start_weight_update")
        except ServiceError as error:
            # vLLM refuses while a session is open: one of a follower that was killed, or whose
            # update was half written. That session serves as well.
            refusal = error
        try:
            info = {"run": run, "version": version}
            self._call("POST", "/update_weights", {"update_info": info})
        except ServiceError as error:
            if refusal is None:
                raise
            raise ServiceError(f"{error}; before that: {refusal}") from error
        # Under the pause: nothing may be computed from keys and values of the old weights. The
        # running requests hold some, too; they are computed anew.
        answer = self._call("POST", "/reset_prefix_cache?reset_running_requests=true")
        if not answer["success"]:
            raise ServiceError(
                f"vLLM server {self.url} did not reset its prefix cache; it stays paused, since it "
                "would go on from keys and values of older weights; it is tried again"
            )
        label = label_of(run, version)
        self._call("POST", "/finish_weight_update", {"weight_version": label})

    def _go_on_if_whole(self) -> None:
        """Resumes unless the weights are half written: an empty update ends well if they are not.

        An update session that is still open (the cache was not reset, say) refuses another one,
        and the server stays paused.
        """
        try:
            self._call("POST", "/start_weight_update")
            self._call("POST", "/finish_weight_update", {})
            self.resume()
        except ServiceError as error:
            logger.warning("the server stays paused until an update succeeds: %s", error)

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        timeout = httpx.Timeout(_LOOK_S if method == "GET" else _CHANGE_S, connect=_CONNECT_S)
        try:
            answer = self._http.request(method, path, json=body, timeout=timeout)
        except httpx.HTTPError as error:
            raise ServiceError(
                f"vLLM server {self.url} does not answer {method} {path} "
                f"({error or type(error).__name__}); start it there, or correct --server"
            ) from error
        if answer.status_code == 404:
            raise ConfigError(
                f"vLLM server {self.url} has no {path.partition('?')[0]}; start it with "
                "VLLM_SERVER_DEV_MODE=1 in its environment"
            )
        try:
            if answer.is_success:
                return answer.json()
        except ValueError:
            pass  # another kind of server: its answer is shown
        raise ServiceError(
            f"vLLM server {self.url} answered {method} {path} with status {answer.status_code}: "
            f"{_reason(answer)}; see its log"
        )


def _reason(answer: httpx.Response) -> str:
    """The error's text out of vLLM's JSON, else the start of the body."""
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return answer.text[:_EXCERPT]
