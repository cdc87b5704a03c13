"""Reward functions as users might write them, good and bad, importable by workers."""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np

from tasks.rollout.reward import Asked
from tasks.rollout.trajectory import Transcript

not_a_function = 3


def brief(trajectory: Transcript, question: Asked) -> float:
    """Exact match, less a little for every word written; counts the words of the whole text too."""
    assert question.answers
    written = sum(len(turn.sampled.split()) for turn in trajectory.turns)
    return trajectory.exact_match - written / 1024 + len(trajectory.text) * 0


def pid(trajectory: Transcript, question: Asked) -> int:
    return os.getpid()


def length(trajectory: Transcript, question: Asked) -> int:
    return len(trajectory.text)


def one_argument(trajectory: Transcript) -> float:
    return 0.0


def three_arguments(trajectory: Transcript, question: Asked, scale: float) -> float:
    return scale


def with_default(trajectory: Transcript, question: Asked, scale: float = 2.0) -> float:
    return scale


async def waits(trajectory: Transcript, question: Asked) -> float:
    return 0.0


def told(trajectory: Transcript, question: Asked) -> Any:
    """Does what the question says; else 1."""
    return TOLD.get(question.question, lambda: 1.0)()


def _raises() -> float:
    return {}["no such key"]


def _hangs() -> None:
    threading.Event().wait()


def _hangs_in_c() -> None:
    """Holds the interpreter's lock for ever: neither a thread nor a signal handler gets to run."""
    re.match(r"(a+)+$", "a" * 64 + "b")


def _leaves() -> None:
    sys.exit(0)


def _dies() -> None:
    os.kill(os.getpid(), 11)


def _prints() -> float:
    print("a reward function may print", flush=True)
    return 0.5


def _reads() -> float:
    return float(len(sys.stdin.read()))


def _tensor() -> Any:
    import torch

    return torch.tensor(1.0)


TOLD: dict[str, Callable[[], Any]] = {
    "raise": _raises,
    "hang": _hangs,
    "hang in C": _hangs_in_c,
    "leave": _leaves,
    "die": _dies,
    "print": _prints,
    "read": _reads,
    "tensor": _tensor,
    "array": lambda: np.ones(1),
    "nan": lambda: float("nan"),
    "inf": lambda: -float("inf"),
    "string": lambda: "0.5",
    "none": lambda: None,
    "complex": lambda: 1j,
    "decimal": lambda: Decimal("0.5"),
    "huge": lambda: 10**400,
    "large": lambda: 1e300,
    "true": lambda: True,
    "float32": lambda: np.float32(0.25),
    "int64": lambda: np.int64(3),
    "fraction": lambda: Fraction(1, 4),
}
