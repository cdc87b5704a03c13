"""The order of questions: a pure function of (seed, epoch), so a run resumes from a step number.

Permutations are argsorts of raw PCG64 output. NumPy promises the streams of its bit generators and
`SeedSequence` across versions, but not those of `Generator.permutation` (NEP 19).
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np


def order(n: int, seed: int, epoch: int) -> np.ndarray:
    """A permutation of range(n), int64 of shape [n], read-only.

    Raises:
        ValueError: n, seed or epoch is negative.
    """
    for name, value in (("n", n), ("seed", seed), ("epoch", epoch)):
        if value < 0:
            raise ValueError(f"{name} is {value}, expected at least 0")
    return _order(n, seed, epoch)


def batch(n: int, seed: int, step: int, size: int) -> list[int]:
    """The rows of global step `step` (from 0) out of n: positions [step * size, (step + 1) * size)
    of epoch 0's order, epoch 1's, and so on, end to end.

    No row is left out or repeated where epochs meet: every epoch holds each row once. A size above
    n walks several epochs in one step.

    Raises:
        ValueError: n or size below 1, or a negative seed or step.
    """
    for name, value, least in (
        ("n", n, 1),
        ("seed", seed, 0),
        ("step", step, 0),
        ("size", size, 1),
    ):
        if value < least:
            raise ValueError(f"{name} is {value}, expected at least {least}")
    rows: list[int] = []
    while len(rows) < size:
        epoch, start = divmod(step * size + len(rows), n)
        rows.extend(_order(n, seed, epoch)[start : start + size - len(rows)].tolist())
    return rows


@lru_cache(maxsize=4)  # a step asks for one epoch or two, and the next step for the same
def _order(n: int, seed: int, epoch: int) -> np.ndarray:
    keys = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(n)
    permutation = np.argsort(np.asarray(keys, np.uint64), kind="stable").astype(np.int64)
    permutation.flags.writeable = False
    return permutation
