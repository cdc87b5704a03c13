"""Calls a user's reward function in a process of its own, which a time limit can really end.

A thread cannot be stopped, and a signal does not reach a function that hangs inside C code. So the
function lives in a child process, one a rollout worker and run, started once and killed when a call
runs out of time; the next call starts it again. Both sides talk over a socket pair in frames of
JSON: nothing is unpickled, and what the function prints goes to the worker's log.

The child is `python -m tasks.rollout.reward_process FUNCTION DESCRIPTOR LIMIT`.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from tasks.errors import ConfigError, RewardError
from tasks.rollout.reward import Asked, RewardFunction, as_number, format_bonus, load_reward
from tasks.rollout.trajectory import Group, Transcript, TranscriptTurn

if TYPE_CHECKING:  # the child needs none of what that imports
    from tasks.rollout.agent import Sampled

START_S = 120.0
"""Seconds a child has to start and import the function's module; not counted as a call."""
ORPHAN_S = 2.0
"""Seconds beyond the limit after which a child that nobody killed ends itself."""
_Frame = dict[str, Any]


class RewardProcess:
    """A reward function in a child process.

    Args:
        name: `package.module:function`.
        limit_s: seconds one call may take.

    Raises:
        RewardError: the function cannot be used on this worker.
    """

    def __init__(self, name: str, limit_s: float) -> None:
        self._name = name
        self._limit_s = limit_s
        self._lock = threading.Lock()
        self._closed = False
        self._child: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        with self._lock:
            self._start()

    def judge(self, sampled: Sampled, bonus: float) -> Group:
        """The group with the function's rewards, each with `bonus` for a well-formed answer.

        Raises:
            RewardError: the function failed on one of its trajectories; names the function, the
                question, the unit and the trajectory.
        """
        unit = sampled.unit
        asked = Asked(unit.question_id, unit.question, unit.answers)
        trajectories = []
        for number, transcript in enumerate(sampled.transcripts):
            trajectory = sampled.group.trajectories[number]
            try:
                value = self.value(transcript, asked)
            except RewardError as error:
                raise RewardError(
                    f"reward {self._name!r} failed on question {asked.id!r} (trajectory {number} "
                    f"of unit {unit.unit_id}): {error}"
                ) from error
            reward = value + format_bonus(trajectory.answer, bonus)
            trajectories.append(replace(trajectory, reward=reward))
        return replace(sampled.group, trajectories=tuple(trajectories))

    def value(self, transcript: Transcript, asked: Asked) -> float:
        """The function's value, a finite number.

        Raises:
            RewardError: it raised, did not return in time, ended its process, or returned
                something else; or this was closed.
        """
        with self._lock:
            if self._socket is None:
                self._start()
            reply = self._exchange(
                {"trajectory": asdict(transcript), "question": asdict(asked)}, self._limit_s
            )
        if "error" in reply:
            raise RewardError(reply["error"])
        return reply["value"]

    def close(self) -> None:
        """Ends the child; a call in progress on another thread fails."""
        self._closed = True
        child = self._child
        if child is not None:
            _kill(child)

    def _start(self) -> None:
        if self._closed:
            raise RewardError("its process was closed: the run is over")
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "tasks.rollout.reward_process", self._name]
        command += [str(theirs.fileno()), str(self._limit_s)]
        with theirs:
            self._child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                # What this worker can import, the child can.
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                # A group of its own: what the function starts is killed with it.
                start_new_session=True,
            )
        self._socket = ours
        if self._closed:  # meanwhile
            _kill(self._child)
        reply = self._exchange(None, START_S)
        if "error" in reply:
            self._drop()
            raise RewardError(reply["error"])

    def _exchange(self, frame: _Frame | None, limit_s: float) -> _Frame:
        assert self._socket is not None
        assert self._child is not None
        deadline = time.monotonic() + limit_s
        try:
            if frame is not None:
                self._socket.settimeout(limit_s)
                _send(self._socket, frame)
            return _receive(self._socket, deadline)
        except TimeoutError:
            self._drop()
            what = "did not return" if frame is not None else "did not start"
            raise RewardError(
                f"it {what} within {limit_s:g} s and was ended (rollout.reward_timeout_s bounds a "
                "call)"
            ) from None
        except (EOFError, OSError):
            child = self._child
            self._drop()
            raise RewardError(f"its process ended (exit status {child.returncode})") from None

    def _drop(self) -> None:
        """Ends the child; the next call starts another."""
        assert self._socket is not None
        assert self._child is not None
        _kill(self._child)
        self._socket.close()
        self._socket = None


def _kill(child: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:  # it has ended and was waited for
        return
    child.wait()


def _send(connection: socket.socket, frame: _Frame) -> None:
    data = json.dumps(frame).encode()
    connection.sendall(len(data).to_bytes(4, "big") + data)


def _receive(connection: socket.socket, deadline: float | None = None) -> _Frame:
    size = int.from_bytes(_exactly(connection, 4, deadline), "big")
    return json.loads(_exactly(connection, size, deadline))


def _exactly(connection: socket.socket, count: int, deadline: float | None) -> bytes:
    data = bytearray()
    while len(data) < count:
        if deadline is not None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            connection.settimeout(left)
        part = connection.recv(count - len(data))
        if not part:
            raise EOFError
        data += part
    return bytes(data)


def _transcript(fields: dict[str, Any]) -> Transcript:
    turns = tuple(TranscriptTurn(**turn) for turn in fields["turns"])
    return Transcript(**{**fields, "turns": turns})


def _asked(fields: dict[str, Any]) -> Asked:
    return Asked(**{**fields, "answers": tuple(fields["answers"])})


def _call(function: RewardFunction, frame: _Frame) -> _Frame:
    try:
        value = function(_transcript(frame["trajectory"]), _asked(frame["question"]))
        return {"value": as_number(value)}
    except RewardError as error:
        return {"error": str(error)}
    except BaseException as error:  # noqa: BLE001 (a user's function may even call sys.exit)
        traceback.print_exc()
        last = traceback.extract_tb(error.__traceback__)[-1]
        what = f"{type(error).__name__}: {error}"[:500]
        return {"error": f"{what} ({last.filename}:{last.lineno})"}


def main() -> None:
    name, descriptor, limit = sys.argv[1:]
    # If the worker dies, nobody is left to end a call that hangs.
    faulthandler.dump_traceback_later(START_S + ORPHAN_S, exit=True)
    with socket.socket(fileno=int(descriptor)) as connection:
        try:
            function = load_reward(name)
        except ConfigError as error:
            _send(connection, {"error": str(error)})
            return
        faulthandler.cancel_dump_traceback_later()
        _send(connection, {"ready": True})
        while True:
            try:
                frame = _receive(connection)
            except EOFError:
                return
            faulthandler.dump_traceback_later(float(limit) + ORPHAN_S, exit=True)
            reply = _call(function, frame)
            faulthandler.cancel_dump_traceback_later()
            _send(connection, reply)


if __name__ == "__main__":
    main()
