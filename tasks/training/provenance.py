"""Where a policy comes from, as plain values for the file beside it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import numpy as np
from blake3 import blake3

from tasks.data.questions import Question
from tasks.training.demonstrations import Demonstration

_LIBRARIES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "bm25s")
_ROOT = Path(__file__).resolve().parents[2]


def versions() -> dict[str, str]:
    """Python's and the libraries' versions that what is learned depends on."""
    python = ".".join(map(str, sys.version_info[:3]))
    return {"python": python, **{name: version(name) for name in _LIBRARIES}}


def commit() -> str | None:
    """The checkout's commit, marked where tracked files differ from it; None outside of one."""
    try:
        done = subprocess.run(
            ["git", "-C", str(_ROOT), "describe", "--always", "--dirty", "--abbrev=40"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def digest_of_model(folder: Path) -> str:
    """BLAKE3 of a model folder: names and contents of its weights, tokenizer and configuration."""
    hasher = blake3()
    wanted = (".safetensors", ".json", ".jinja", ".txt", ".model")
    for path in sorted(path for path in folder.iterdir() if path.suffix in wanted):
        hasher.update(blake3(path.name.encode()).digest())
        hasher.update(blake3(max_threads=blake3.AUTO).update_mmap(path).digest())
    return hasher.hexdigest()


def text_of_questions(questions: Sequence[Question]) -> bytes:
    """Of questions, all that a demonstration shows, one JSON line each; their passages aside."""
    lines = [
        [q.id, q.question, list(q.answers), list(q.gold_titles), q.rationale] for q in questions
    ]
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


def digest_of_demonstrations(made: Sequence[Demonstration]) -> str:
    """BLAKE3 of all ids and loss masks in the order of use: what was learned, to the token."""
    hasher = blake3()
    for one in made:
        hasher.update(len(one.ids).to_bytes(8, "little"))
        hasher.update(one.ids.astype("<i4").tobytes())
        hasher.update(np.asarray(one.loss_mask, np.uint8).tobytes())
    return hasher.hexdigest()
