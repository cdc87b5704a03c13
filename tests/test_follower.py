"""A plain vLLM server tracks the head of a run: a real server, store and follower."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
import torch
from safetensors import safe_open

from infra.processes import ROOT, Child, ProcessGroup, child_environment, free_ports, log_tail
from tasks.errors import ServiceError
from tasks.store import ObjectStore, StoreLocation
from tasks.weights.bits import to_bits
from tasks.weights.export import export
from tasks.weights.vllm_server import Served, VllmServer
from tests.vllm_fake import eventually
from tests.weights_helpers import Gang, Weights

pytestmark = pytest.mark.timeout(300)

TINY = ROOT / "deployments" / "policies" / "tiny"
# Longer than a block of vLLM's prefix cache: a cache that was not reset gives stale answers.
PROMPT = [(at * 37 + 11) % 900 + 2 for at in range(200)]
SAMPLED = 8
LONG = 300  # tokens of the requests that run while the weights change


def tiny_weights() -> Weights:
    weights: Weights = {}
    with safe_open(TINY / "model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118 - it is no dictionary
            tensor = file.get_tensor(name)
            weights[name] = (tuple(tensor.shape), "bfloat16", to_bits(tensor))
    return weights


def moved(weights: Weights, seed: int) -> Weights:
    """A copy that answers differently: a twentieth of the values moved by some per cent."""
    rng = np.random.default_rng(seed)
    return {
        name: (shape, dtype, bits ^ ((rng.random(bits.size) < 0.05).astype(bits.dtype) << 4))
        for name, (shape, dtype, bits) in weights.items()
    }


def start_server(group: ProcessGroup, model: Path, port: int, name: str) -> Child:
    """As the README has it, on few resources. It takes a while until it is `healthy`."""
    options = {
        "model": str(model),
        "served-model-name": "policy",
        "host": "127.0.0.1",
        "port": str(port),
        "dtype": "float32",
        "max-model-len": "512",
        "kv-cache-memory-bytes": str(32 << 20),
        "weight-transfer-config": '{"backend": "kindling"}',
    }
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"]
    command += ["--no-enable-chunked-prefill"]
    command += [part for key, value in options.items() for part in (f"--{key}", value)]
    env = {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_WAIT_POLICY": "passive",
        "OMP_NUM_THREADS": "1",
    }
    return group.start(name, command, env=env, cwd=group.logs)


def healthy(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health", timeout=5).is_success
    except httpx.TransportError:
        return False


def kill(group: ProcessGroup, child: Child) -> None:
    """SIGKILL to a server and its engine processes."""
    for process in psutil.Process(child.pid).children(recursive=True):
        process.kill()
    group.discard(child)


@contextmanager
def following(
    location: StoreLocation, url: str, run: str, cache: Path, log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """The follower as a process; killed at the end where the test did not end it."""
    command = [sys.executable, "-m", "tasks.weights.follower", "--server", url, "--run", run]
    command += ["--store", location.endpoint, "--bucket", location.bucket]
    command += ["--cache-dir", str(cache), "--poll-s", "0.1"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=output, stderr=output, env=child_environment({})
        )
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def complete(url: str, tokens: int, **extra: Any) -> dict[str, Any]:
    request = {
        "model": "policy",
        "prompt": PROMPT,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **extra,
    }
    answer = httpx.post(f"{url}/v1/completions", json=request, timeout=60)
    answer.raise_for_status()
    return answer.json()["choices"][0]


class Traffic:
    """Long completions one after the other in a thread, while the weights change.

    Attributes:
        lengths: tokens of each; 0 for one that failed.
    """

    def __init__(self, url: str) -> None:
        self.lengths: list[int] = []
        self._url, self._stop = url, threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Traffic:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                length = len(complete(self._url, LONG)["token_ids"])
            except httpx.HTTPError:
                length = 0
            self.lengths.append(length)


def check_answers(url: str, exported: Path) -> list[float]:
    """The server's greedy tokens and log-probabilities are those of transformers' fresh load."""
    from transformers import AutoModelForCausalLM

    choice = complete(url, SAMPLED, logprobs=1)
    ids: list[int] = choice["token_ids"]
    found: list[float] = choice["logprobs"]["token_logprobs"]
    model = AutoModelForCausalLM.from_pretrained(exported).float()
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT + ids])).logits[0, len(PROMPT) - 1 : -1]
    expected = logits.log_softmax(-1)
    assert ids == expected.argmax(-1).tolist()
    chosen = expected.gather(1, torch.tensor(ids)[:, None])[:, 0].tolist()
    assert found == pytest.approx(chosen, abs=1e-4)
    return found


def test_a_plain_server_tracks_the_head(object_store: ObjectStore, tmp_path: Path) -> None:
    names = [point.name for point in entry_points(group="vllm.general_plugins")]
    assert "kindling" in names, "the plug-in is not installed in this environment: run `make setup`"
    run, cache = f"followed-{tmp_path.name}", tmp_path / "cache"
    log = tmp_path / "follower.log"
    source = Gang(object_store, f"{run}-before")
    weights = tiny_weights()
    source.publish(weights, "anchor")
    start = export(object_store, f"{run}-before", 0, tmp_path / "start", TINY)
    gang = Gang(object_store, run)
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    answers: list[list[float]] = []  # of the start, then of every version

    def at(version: int) -> bool:
        assert follower.poll() is None, log.read_text()
        try:
            return client.look() == Served(f"{run}/{version}", paused=False)
        except ServiceError:  # it starts
            return False

    def why() -> str:
        return f"{log.read_text()}\n{log_tail(server.log)}"

    with ProcessGroup(tmp_path / "logs") as group, closing(VllmServer(url)) as client:
        server = start_server(group, start, port, "server")
        import transformers  # noqa: F401 - takes as long as the server

        group.wait_ready(server, lambda: healthy(port), 150)
        answers.append(check_answers(url, start))
        with following(object_store.location, url, run, cache, log) as follower:
            eventually(lambda: "has published nothing" in log.read_text(), why)
            for version in range(3):
                weights = moved(weights, version)
                with Traffic(url) as traffic:
                    gang.publish(weights, "delta" if version else "anchor")
                    eventually(lambda v=version: at(v), why)
                assert traffic.lengths
                assert set(traffic.lengths) == {LONG}
                exported = export(object_store, run, version, tmp_path / f"v{version}", TINY)
                answers.append(check_answers(url, exported))
            assert len({tuple(np.round(found, 2)) for found in answers}) == 4  # they do differ
            kill(group, server)
            server = start_server(group, start, port, "restarted")
            eventually(lambda: at(2), why, within_s=150)
            assert check_answers(url, exported) == pytest.approx(answers[-1], abs=1e-5)
            follower.send_signal(signal.SIGTERM)
            assert follower.wait(20) == 0, log.read_text()
    lines = [line for line in log.read_text().splitlines() if "generation stopped for" in line]
    assert [int(line.split(" version ")[1].split(":")[0]) for line in lines] == [0, 1, 2, 2]
    assert " 0 bytes fetched" in lines[-1]  # the restarted server found all in the host's shadow
    assert "does not answer" in log.read_text()
