"""A whole training's weights, version by version; minutes, so not part of `make test`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from infra.local import store_alone
from infra.processes import environment
from tasks.weights.commit import load_manifest, read_ref
from tasks.weights.export import export
from tasks.weights.manifest import Manifest
from tasks.weights.transfer import BACKEND, EngineWeights, prepare_vllm
from tasks.weights.verify import verify
from tests.test_weights_engine import build_engine, digests, logprobs, shut_down

ROOT = Path(__file__).resolve().parent.parent
POLICY = ROOT / "deployments" / "policies" / "tiny"
STEPS, ANCHORS = 30, 8

pytestmark = [pytest.mark.long, pytest.mark.timeout(2400)]


def _train(home: Path) -> str:
    """A run of the tiny preset; its name."""
    subprocess.run(
        [
            *(sys.executable, "-m", "flows.train", "--preset", "tiny", "--steps", str(STEPS)),
            *("--set", f"weights.anchor_every={ANCHORS}", "--set", "data.held_out_questions=40"),
        ],
        cwd=ROOT,
        env=dict(os.environ),
        check=True,
    )
    with store_alone() as store:
        (run,) = {
            key.split("/")[1] for key in store.list("runs/") if key.endswith("/head.json")
        } - {key.split("/")[1] for key in store.list("runs/evaluation-")}
    return run


def _versions(store: Any, run: str) -> list[Manifest]:
    found: list[Manifest] = []
    ref = read_ref(store, run)
    while ref is not None:
        found.append(load_manifest(store, run, ref))
        ref = found[-1].parent
    return found[::-1]


def test_every_version_of_a_training_is_what_engines_hold(tmp_path: Path) -> None:
    """`verify` is clean; an engine that follows holds each version's digests, and answers as a
    fresh load of its export does."""
    with environment({"KINDLING_HOME": str(tmp_path / "home")}):
        run = _train(tmp_path / "home")
        with store_alone() as store:
            report = verify(store, run)
            assert not report.faults
            versions = _versions(store, run)
            assert len(versions) == STEPS + 1
            anchors = {manifest.version for manifest in versions if manifest.anchor}
            assert anchors >= set(range(0, STEPS + 1, ANCHORS))
            prepare_vllm()
            engine = build_engine(POLICY, "dummy", weight_transfer_config={"backend": BACKEND})
            client = EngineWeights(engine, store.location, tmp_path / "cache")
            answers: dict[int, Any] = {}
            for manifest in versions:
                client.apply(run, manifest.version)
                assert digests(client.gather()) == {t.name: t.digest for t in manifest.tensors}
                if manifest.version % 5 == 0 or manifest.version in anchors:
                    answers[manifest.version] = logprobs(engine)
            assert client.anchor_loads == 1  # the anchors on the way cost it nothing
            shut_down(engine)  # a process holds one engine's groups at a time
            for version, answer in answers.items():
                folder = tmp_path / f"export-{version}"
                export(store, run, version, folder, POLICY)
                fresh = build_engine(folder)
                assert logprobs(fresh) == answer
                shut_down(fresh)
