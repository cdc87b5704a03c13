"""The log of accepted results in the store: what a resumed run need not sample again.

A run appends what its queue has accepted, a few results at a time, under the batch they belong to
(`train-000012`, `evaluation-000004`): JSON lines in `runs/RUN/accepted/BATCH/LIFE-NUMBER.jsonl`,
each object created once. A resumed run reads a batch's log when it comes to that batch. The groups
themselves are objects of their own, which a result names.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Protocol

from tasks.errors import IntegrityError
from tasks.rollout.queue import Wire


class Store(Protocol):
    """What the log needs of `tasks.store.ObjectStore`."""

    def create(self, key: str, data: bytes) -> None: ...
    def get_many(self, keys: Sequence[str]) -> list[bytes]: ...
    def list(self, prefix: str = "") -> list[str]: ...


def batch_of(unit_id: str) -> str:
    """The batch a unit belongs to: `train-000012` of `train-000012-refill-00003`."""
    return "-".join(unit_id.split("-")[:2])


class AcceptedLog:
    """One run's log. Not thread-safe.

    Args:
        life: how often the run was opened before; 0: there is nothing to read.
    """

    def __init__(self, store: Store, run: str, life: int) -> None:
        self._store = store
        self._prefix = f"runs/{run}/accepted"
        self._life = life
        self._numbers: Counter[str] = Counter()

    def append(self, results: Sequence[Wire]) -> None:
        """Writes results down, in the order they were accepted.

        Raises:
            StoreError: the store does not take them.
            StoreConflict: another flow writes this run.
        """
        batches: dict[str, list[Wire]] = defaultdict(list)
        for result in results:
            batches[batch_of(result["unit_id"])].append(result)
        for batch, ours in batches.items():
            number = self._numbers[batch]
            lines = "".join(json.dumps(result) + "\n" for result in ours)
            self._store.create(
                f"{self._prefix}/{batch}/{self._life:04d}-{number:06d}.jsonl", lines.encode()
            )
            self._numbers[batch] += 1

    def read(self, batch: str) -> dict[str, Wire]:
        """Unit id -> result of a batch, as earlier lives accepted them; of two, the younger.

        Raises:
            IntegrityError: the log is damaged.
        """
        if self._life == 0:
            return {}
        keys = sorted(self._store.list(f"{self._prefix}/{batch}/"))
        found: dict[str, Wire] = {}
        for key, data in zip(keys, self._store.get_many(keys), strict=True):
            try:
                rows = [json.loads(line) for line in data.decode().splitlines()]
                found |= {row["unit_id"]: row for row in rows}
            except (ValueError, KeyError, TypeError) as error:
                raise IntegrityError(f"{key} is no log of accepted results: {error}") from error
        return found
