"""Child processes of a service launcher: start, wait until ready, stop, leave none behind.

Every child gets its own session, a log file and the group's token in its environment. The token
finds every process of the group later, also those whose parent died: a nanny's worker, a server's
helper. An embedded group starts one reaper process, which kills the group if the launcher goes
without stopping it; services that are meant to outlive their launcher have none.
"""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias, TypeVar

import psutil

from tasks.errors import ServiceError

ROOT = Path(__file__).resolve().parent.parent
TOKEN_VARIABLE = "KINDLING_PROCESS_GROUP"
GRACE_S = 8.0
_TAIL_LINES = 25
T = TypeVar("T")
Leader: TypeAlias = tuple[int, float]  # pid and creation time


@dataclass(frozen=True)
class Child:
    """A started process; the creation time tells it from a later one with the same pid."""

    name: str
    pid: int
    created: float
    log: str
    drains: bool = True  # False: stopped by SIGKILL at once


def is_alive(pid: int, created: float) -> bool:
    """Whether this very process still runs (a zombie does not)."""
    try:
        process = psutil.Process(pid)
        # A clock step moves creation times a little between two readers.
        same = abs(process.create_time() - created) < 2.0
        return same and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def group_members(token: str, children: Iterable[Leader] = ()) -> list[psutil.Process]:
    """Living processes that carry the token, the group's children and all their descendants."""
    found: dict[int, psutil.Process] = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # gone meanwhile, or another user's
            if process.environ().get(TOKEN_VARIABLE) == token:
                found[process.pid] = process
    for pid, created in children:
        if is_alive(pid, created):
            with contextlib.suppress(psutil.NoSuchProcess):
                leader = psutil.Process(pid)
                found.update((p.pid, p) for p in [leader, *leader.children(recursive=True)])
    found.pop(os.getpid(), None)
    return [p for p in found.values() if _runs(p)]


def kill_group(token: str, children: Iterable[Leader] = ()) -> None:
    """SIGKILL everything of the group; looks again, since a nanny may start a worker meanwhile.

    Raises:
        ServiceError: something survives (a process stuck in the kernel).
    """
    known = list(children)
    members: list[psutil.Process] = []
    for _ in range(10):
        members = group_members(token, known)
        if not members:
            return
        for process in members:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        _wait_gone(members, 5.0)
    raise ServiceError(
        f"processes {[p.pid for p in members]} survive SIGKILL; look at them by hand"
    )


def stop_children(children: Sequence[Child], token: str, grace_s: float = GRACE_S) -> None:
    """SIGTERM to the children (SIGKILL where they do not drain), then SIGKILL to what is left."""
    waiting: list[psutil.Process] = []
    for child in children:
        if not is_alive(child.pid, child.created):
            continue
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(child.pid)
            process.send_signal(signal.SIGTERM if child.drains else signal.SIGKILL)
            waiting.append(process)
    _wait_gone(waiting, grace_s)
    kill_group(token, [(child.pid, child.created) for child in children])


def free_ports(count: int) -> list[int]:
    """Distinct loopback ports that nothing listens on now.

    They lie below the range from which the system serves outgoing connections, so that only
    another listener can take one before its server binds it.
    """
    ports: list[int] = []
    for port in random.SystemRandom().sample(range(15_000, 32_000), 2_000):
        if len(ports) == count:
            break
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            ports.append(port)
    if len(ports) < count:
        raise ServiceError(f"found {len(ports)} free ports in 15000-32000, not {count}; free some")
    return ports


def child_environment(changes: Mapping[str, str | None]) -> dict[str, str]:
    """This process's environment with the repository importable; None removes a variable."""
    # Programs that set their title (Dask, vLLM) would write it over the environment that others
    # can read, and with it over the group's token.
    merged: dict[str, str | None] = {**os.environ, "SPT_NOENV": "1", **changes}
    paths = [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    merged["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    return {key: value for key, value in merged.items() if value is not None}


class ProcessGroup:
    """The named children of one launcher; as a context manager it stops them all on exit.

    Args:
        logs: folder of the log files, one a child.
        outlive: the children are meant to outlive this process: no reaper, no stop on exit.
        keep_open: descriptors the reaper inherits (a lock held until the last child is gone).
    """

    def __init__(self, logs: Path, *, outlive: bool = False, keep_open: Sequence[int] = ()) -> None:
        self.logs = logs
        self.outlive = outlive
        self.token = secrets.token_hex(8)
        self.children: list[Child] = []
        self._handles: dict[str, subprocess.Popen[bytes]] = {}
        self._after: list[Callable[[], None]] = []
        self._wake = threading.Event()
        self._reaper: subprocess.Popen[bytes] | None = None
        logs.mkdir(parents=True, exist_ok=True)
        if not outlive:
            self._reaper = subprocess.Popen(
                [sys.executable, "-m", "infra.reaper", self.token],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                cwd=ROOT,
                env=child_environment({TOKEN_VARIABLE: None}),
                start_new_session=True,  # out of reach of the terminal's Ctrl-C
                pass_fds=tuple(keep_open),
            )

    def __enter__(self) -> ProcessGroup:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None or not self.outlive:
            self.stop()

    def start(
        self,
        name: str,
        command: Sequence[str],
        env: Mapping[str, str | None] | None = None,
        cwd: Path = ROOT,
        drains: bool = True,
    ) -> Child:
        """Start a child; `env` overrides this process's environment (None removes a variable)."""
        log = self.logs / f"{name}.log"
        with log.open("ab") as output:
            handle = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=cwd,
                env=child_environment({**(env or {}), TOKEN_VARIABLE: self.token}),
                start_new_session=True,
            )
        self._handles[name] = handle
        created = _created(handle.pid)
        if self._reaper is not None and self._reaper.stdin is not None:
            self._reaper.stdin.write(f"{handle.pid} {created}\n".encode())
            self._reaper.stdin.flush()
        child = Child(name, handle.pid, created, str(log), drains)
        self.children.append(child)
        return child

    def require_alive(self) -> None:
        """Raise ServiceError, with the end of its log, for a child that has ended."""
        for child in self.children:
            code = self._handles[child.name].poll()
            if code is not None:
                raise ServiceError(
                    f"{child.name} (pid {child.pid}) ended with code {code} when it should run; "
                    f"the end of {child.log}:\n{log_tail(child.log)}"
                )

    def wait_ready(self, child: Child, probe: Callable[[], T | None], timeout_s: float) -> T:
        """Poll until `probe` returns something true, and return it.

        Raises:
            ServiceError: a child of the group ended, or the time is over; with the log's end.
        """
        deadline = time.monotonic() + timeout_s
        pause = 0.05
        while True:
            self.require_alive()
            answer = probe()
            if answer:
                return answer
            if time.monotonic() >= deadline:
                raise ServiceError(
                    f"{child.name} (pid {child.pid}) is not ready after {timeout_s:g} s; the end "
                    f"of {child.log}:\n{log_tail(child.log)}"
                )
            self._wake.wait(pause)
            pause = min(pause * 1.5, 0.5)

    def discard(self, child: Child) -> None:
        """Kill one child and forget it, so that another may take its name."""
        handle = self._handles.pop(child.name)
        handle.kill()
        handle.wait()
        self.children.remove(child)

    def after_stop(self, action: Callable[[], None]) -> None:
        """Run this once everything is stopped."""
        self._after.append(action)

    def stop(self, grace_s: float = GRACE_S) -> None:
        """Stop every child and everything they started; may be called again."""
        stop_children(self.children, self.token, grace_s)
        for handle in self._handles.values():
            handle.wait()
        self.children.clear()
        self._handles.clear()
        while self._after:
            self._after.pop()()
        if self._reaper is not None and self._reaper.stdin is not None:
            self._reaper.stdin.close()
            self._reaper.wait()
            self._reaper = None


def log_tail(path: str | Path) -> str:
    """The last lines of a log."""
    lines = Path(path).read_text(errors="replace").splitlines()
    return "\n".join(lines[-_TAIL_LINES:])


def _created(pid: int) -> float:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).create_time()
    return 0.0


def _wait_gone(processes: Sequence[psutil.Process], timeout_s: float) -> None:
    """Wait until none runs. A zombie counts as gone: it is its parent's to collect, and psutil's
    own waiting takes it for alive where the machine's first process collects none."""
    deadline = time.monotonic() + timeout_s
    pause = threading.Event()
    while any(_runs(process) for process in processes) and time.monotonic() < deadline:
        pause.wait(0.02)


def _runs(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


@contextlib.contextmanager
def environment(changes: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables of this process for a while."""
    before = {key: os.environ.get(key) for key in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value
