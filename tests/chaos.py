"""Random deaths over one run: what dies, how long the run stands still, and whether it is right.

    python -m tests.chaos --kills 50 --seed 0 [--json FILE]

A `tiny` run on standing services (its own, in a temporary folder), one question at a time, while a
rollout worker, a trainer rank or the flow itself is killed (SIGKILL), or one of the workers frozen
(SIGSTOP), at random moments. A killed flow is resumed by the command a user would give. Afterwards
the same run is made undisturbed, and compared: checkpoint, every version's tensors, the groups
accepted. Also that `verify` finds no fault, and that no process is left.

Measured on 2 cores of an Intel Xeon (2026-12-01), 50 deaths with seed 0 in 16 minutes: 11 rollout
workers killed and 10 frozen, 14 ranks killed and 3 frozen, 12 flows. The same bits, nothing left
running; it stood still for 7.4 s in the median and 57 s at most, where a frozen rollout worker's
successor was frozen as it started.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, cast

import psutil
import typer
from distributed import Client

from infra.object_store import read_credentials
from infra.processes import ROOT, environment
from infra.state import read_record
from tasks.cluster import ROLLOUT, TRAINER, workers_with
from tasks.store import ObjectStore, StoreLocation
from tasks.training import checkpoint
from tasks.weights.commit import lineage, load_manifest, read_ref
from tasks.weights.verify import verify
from tests.bench import report

QUESTIONS = 6
STEP_S = 2.0
"""About what a step of `settings` takes on two cores, to spread the kills."""
LIMIT_S = 60.0
"""Seconds within which a run must go on after a death."""
KINDS = ("rollout", "rollout frozen", "trainer", "trainer frozen", "flow")


def settings(steps: int, seed: int = 3) -> dict[str, Any]:
    """Overrides of the tiny preset: small steps that give the same bits every time."""
    return {
        "seed": seed,
        "data": {"held_out_questions": 6},
        "rollout": {"questions_per_step": QUESTIONS, "group_size": 4, "deterministic": True},
        "training": {"steps": steps, "mini_batch_size": 8, "checkpoint_every": 2},
        "evaluation": {"every": steps},
    }


@dataclass(frozen=True, slots=True)
class Death:
    """One kill. `stood_s`: seconds until the run's next sign of progress in the store."""

    kind: str
    at_s: float
    progress: str
    stood_s: float


@contextmanager
def standing(home: Path) -> Iterator[None]:
    """Services in a folder of their own."""
    with environment({"KINDLING_HOME": str(home)}):
        local = [sys.executable, "-m", "infra.local"]
        subprocess.run([*local, "up"], cwd=ROOT, check=True, timeout=180)
        try:
            with environment(read_credentials(home / "store").environment()):
                yield
        finally:
            subprocess.run([*local, "down"], cwd=ROOT, check=True, timeout=120)


def begin(tree: dict[str, Any], resume: str | None = None) -> subprocess.Popen[bytes]:
    """`python -m flows.train` with these overrides, in a process of its own."""
    command = [sys.executable, "-m", "flows.train", *(["--resume", resume] if resume else [])]
    for section, value in tree.items():
        fields = value.items() if isinstance(value, dict) else [("", value)]
        for field, one in fields:
            path = f"{section}.{field}".rstrip(".")
            command += ["--set", f"{path}={json.dumps(one)}"]
    return subprocess.Popen(command, cwd=ROOT, env=dict(os.environ))


def runs(store: ObjectStore) -> set[str]:
    """Names of the training runs in the store."""
    return {key.split("/")[1] for key in store.list("runs/") if key.endswith("/run.json")}


def progress(store: ObjectStore, run: str) -> tuple[int, int, int]:
    """Grows while a run goes on: version, accepted logs, checkpoints ever made."""
    ref = read_ref(store, run)
    made = checkpoint.latest(store, run)
    return (
        -1 if ref is None else ref.version,
        len(store.list(f"runs/{run}/accepted/")),
        -1 if made is None else made.step,
    )


def accepted(store: ObjectStore, run: str) -> Counter[str]:
    """How often each training unit of a run was accepted."""
    return Counter(
        json.loads(line)["unit_id"]
        for key in store.list(f"runs/{run}/accepted/train-")
        for line in store.get(key).decode().splitlines()
    )


def tensors(store: ObjectStore, run: str) -> dict[int, dict[str, str]]:
    """Trained steps -> digest of every tensor, of the run's present line."""
    return {
        trained: {t.name: t.digest for t in load_manifest(store, run, ref).tensors}
        for trained, ref in lineage(store, run, 0).items()
    }


class Chaos:
    """One disturbed run on standing services."""

    def __init__(self, home: Path, seed: int) -> None:
        record = read_record(home)
        assert record is not None
        self.store = ObjectStore(StoreLocation(record.store_endpoint, record.store_bucket))
        self._scheduler = record.scheduler
        self._random = random.Random(seed)
        self._pause = threading.Event()
        self.deaths: list[Death] = []

    def run(self, tree: dict[str, Any], kills: int) -> str:
        """Carries the run through all kills to its end; returns its name.

        Raises:
            AssertionError: it stood still for too long, ended by itself, or ended in an error.
        """
        before = runs(self.store)
        began = time.monotonic()
        flow = begin(tree)
        try:
            self._wait(lambda: len(runs(self.store) - before) == 1, flow)
            (name,) = runs(self.store) - before
            with Client(self._scheduler, set_as_default=False) as client:
                for number in range(kills):
                    then = progress(self.store, name)
                    # First it must have gone on from the last death.
                    self._wait(lambda p=then: progress(self.store, name) != p, flow)
                    self._pause.wait(self._random.uniform(0, 2 * STEP_S))
                    kind = self._random.choice(KINDS)
                    if flow.poll() is not None:
                        raise AssertionError(f"the run ended after {number} of {kills} kills")
                    then = progress(self.store, name)
                    flow = self._kill(kind, client, flow, tree, name)
                    at = time.monotonic()  # now: the victim may have been waited for
                    self._wait(lambda p=then: progress(self.store, name) != p, flow)
                    stood = time.monotonic() - at
                    self.deaths.append(Death(kind, at - began, str(then), stood))
            code = flow.wait(600)
            assert code == 0, f"the flow ended with {code}"
            return name
        finally:
            if flow.poll() is None:
                flow.kill()
                flow.wait()

    def _kill(
        self,
        kind: str,
        client: Client,
        flow: subprocess.Popen[bytes],
        tree: dict[str, Any],
        name: str,
    ) -> subprocess.Popen[bytes]:
        if kind == "flow":
            flow.kill()
            flow.wait()
            return begin(tree, name)
        pid = self._victim(client, ROLLOUT if kind.startswith("rollout") else TRAINER)
        os.kill(pid, signal.SIGSTOP if "frozen" in kind else signal.SIGKILL)
        return flow

    def _victim(self, client: Client, resource: str) -> int:
        """The process of a worker; waits for one where the last one killed is not back yet."""
        deadline = time.monotonic() + 2 * LIMIT_S
        while True:
            assert time.monotonic() < deadline, f"no {resource} worker for {2 * LIMIT_S:g} s"
            present = workers_with(client, resource)
            with suppress(OSError):  # it is the one that was killed, and is just being missed
                if present:
                    victim = self._random.choice(present)
                    return cast("dict[str, int]", client.run(os.getpid, workers=[victim]))[victim]
            self._pause.wait(0.2)

    def _wait(self, check: Any, flow: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + 2 * LIMIT_S
        while not check():
            assert flow.poll() in (None, 0), f"the flow ended with {flow.returncode}"
            if flow.poll() == 0:
                return
            assert time.monotonic() < deadline, f"nothing happened for {2 * LIMIT_S:g} s"
            self._pause.wait(0.2)


def check(store: ObjectStore, disturbed: str, undisturbed: str, steps: int) -> None:
    """That a run is what it would have been without the deaths.

    Raises:
        AssertionError: it is not.
    """
    ours, theirs = (checkpoint.latest(store, run) for run in (disturbed, undisturbed))
    assert ours is not None
    assert theirs is not None
    assert ours.step == theirs.step == steps
    assert ours.records == theirs.records, "the checkpoint has other bits"
    assert tensors(store, disturbed) == tensors(store, undisturbed)
    units = accepted(store, disturbed)
    wanted = {f"train-{step:06d}-{i:05d}" for step in range(steps) for i in range(QUESTIONS)}
    assert set(units) == wanted
    assert set(units.values()) == {1}, "a group was accepted twice"
    faults = verify(store, disturbed).faults
    assert not faults, faults


def _is_of(process: psutil.Process, home: Path) -> bool:
    """Whether a process was started with these services, or by one that was."""
    environ = process.info["environ"] or {}
    return process.pid != os.getpid() and environ.get("KINDLING_HOME") == str(home)


def main(
    kills: Annotated[int, typer.Option(help="How many deaths.")] = 50,
    seed: Annotated[int, typer.Option(help="Which deaths, and when.")] = 0,
    json_path: Annotated[Path | None, typer.Option("--json", help="Figures as a file.")] = None,
) -> None:
    """Prints every death, then one JSON line."""
    # A death comes after the run has gone on from the last one and two steps' time at most; a run
    # of 50 steps was over after 30 of them.
    steps = max(4, 2 * kills)
    with tempfile.TemporaryDirectory(prefix="kindling-chaos-") as folder:
        home = Path(folder)
        with standing(home):
            chaos = Chaos(home, seed)
            name = chaos.run(settings(steps), kills)
            disturbed = runs(chaos.store)
            flow = begin(settings(steps))
            assert flow.wait(3600) == 0
            (undisturbed,) = runs(chaos.store) - disturbed
            check(chaos.store, name, undisturbed, steps)
        left = [p.info["pid"] for p in psutil.process_iter(["pid", "environ"]) if _is_of(p, home)]
        assert not left, f"processes are left: {left}"
    rows = [[d.kind, d.at_s, d.progress, d.stood_s] for d in chaos.deaths]
    report.show(f"{kills} deaths", ["killed", "at s", "version, logs, checkpoint", "stood s"], rows)
    stood = sorted(death.stood_s for death in chaos.deaths)
    report.finish(
        {
            "kills": len(stood),
            "stood_median_s": stood[len(stood) // 2],
            "stood_max_s": stood[-1],
            "over_limit": sum(seconds > LIMIT_S for seconds in stood),
            "same_bits": True,
        },
        json_path,
    )


if __name__ == "__main__":
    typer.run(main)
