"""As much of a Kubernetes API server as worker pods need, for machines without one: pods are
processes of this machine, with no environment but their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from infra.processes import ROOT

SECRET = "store"
NAMESPACE = "kindling"
_PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"


class StandIn:
    """
    Attributes:
        refuse: status and message of every answer, if set.
        pods: pods by name, as they were created.
    """

    def __init__(self, secret: dict[str, str], logs: Path) -> None:
        self.refuse: tuple[int, str] | None = None
        self.pods: dict[str, dict[str, Any]] = {}
        self._processes: dict[str, subprocess.Popen] = {}
        self._secret = secret
        self._logs = logs

    def app(self) -> FastAPI:
        app = FastAPI()
        app.add_api_route("/version", lambda: {"gitVersion": "v1.33.0"})
        app.add_api_route(_PODS, self._create, methods=["POST"])
        app.add_api_route(_PODS, self._list)
        app.add_api_route(_PODS + "/{name}", self._delete, methods=["DELETE"])
        return app

    def stop(self) -> None:
        for name in list(self.pods):
            self._end(name)

    async def _create(self, request: Request) -> JSONResponse:
        if self.refuse:
            return _status(*self.refuse)
        pod = await request.json()
        (container,) = pod["spec"]["containers"]
        python, *arguments = container["command"]
        assert python == "python"
        (source,) = container["envFrom"]
        assert source == {"secretRef": {"name": SECRET}}
        own = {entry["name"]: entry["value"] for entry in container["env"]}
        name = pod["metadata"]["name"]
        with (self._logs / f"{name}.log").open("w") as log:
            self._processes[name] = subprocess.Popen(
                [sys.executable, *arguments],
                env={"PATH": os.environ["PATH"], "HOME": os.environ["HOME"], **self._secret, **own},
                cwd=ROOT,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.pods[name] = pod
        return JSONResponse(self._seen(name), 201)

    def _list(self, labelSelector: str = "") -> JSONResponse:
        if self.refuse:
            return _status(*self.refuse)
        key, _, value = labelSelector.partition("=")
        chosen = [n for n, pod in self.pods.items() if pod["metadata"]["labels"].get(key) == value]
        return JSONResponse({"items": [self._seen(name) for name in chosen]})

    def _delete(self, name: str) -> JSONResponse:
        if self.refuse:
            return _status(*self.refuse)
        if name not in self.pods:
            return _status(404, f'pods "{name}" not found')
        self._end(name)
        return JSONResponse({"kind": "Status", "status": "Success"})

    def _seen(self, name: str) -> dict[str, Any]:
        code = self._processes[name].poll()
        phase = "Running" if code is None else "Succeeded" if code == 0 else "Failed"
        return {**self.pods[name], "status": {"phase": phase}}

    def _end(self, name: str) -> None:
        process = self._processes.pop(name)
        del self.pods[name]
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
        process.wait(30)


def kubeconfig(url: str) -> str:
    """A kubeconfig whose current context is this server."""
    return yaml.safe_dump(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "stand-in",
            "contexts": [{"name": "stand-in", "context": {"cluster": "here", "user": "me"}}],
            "clusters": [{"name": "here", "cluster": {"server": url}}],
            "users": [{"name": "me", "user": {"token": "none"}}],
        }
    )


def _status(code: int, message: str) -> JSONResponse:
    body = {"kind": "Status", "status": "Failure", "message": message, "code": code}
    return JSONResponse(body, code)
