"""The flow's hold on its trainer gang: forms it, and calls every rank at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from distributed import Client, as_completed

from tasks.cluster import TRAINER, submit_to, workers_with
from tasks.errors import GangError, MismatchError
from tasks.rollout.trajectory import GroupSummary
from tasks.store import ObjectStore
from tasks.training import checkpoint, member
from tasks.training.gang import Gang, RankFailed, RankReady, WorkerJoined, advance
from tasks.training.group import GangCoordinator
from tasks.weights.commit import Published

T = TypeVar("T")
FORM_TIMEOUT_S = 120.0


class Trainers:
    """All N ranks of one epoch, or an error that says who is missing.

    Raises:
        GangError: there are fewer trainer workers than ranks, or a rank does not join.
    """

    def __init__(self, client: Client, spec: member.TrainerSpec, host: str) -> None:
        self._client = client
        self._spec = spec
        self._gang = Gang(spec.config.cluster.trainer_ranks)
        for address in workers_with(client, TRAINER):
            self._gang = advance(self._gang, WorkerJoined(address))
        if self._gang.missing:
            raise GangError(
                f"the run needs {self._gang.size} trainer workers and the cluster has "
                f"{len(self._gang.workers)} ({', '.join(self._gang.workers) or 'none'}); start "
                "more with --resources TRAINER=1, or lower cluster.trainer_ranks"
            )
        self._coordinator = GangCoordinator(host)
        self._epoch = self._coordinator.new_epoch()
        self.base_loads: int = sum(self._call("form", member.form, self._meeting))
        for rank in range(self._gang.size):
            self._gang = advance(self._gang, RankReady(self._gang.epoch, rank))

    def _meeting(self, rank: int) -> tuple[member.TrainerSpec, member.Meeting]:
        where = self._coordinator.address, self._coordinator.port
        return self._spec, member.Meeting(
            *where, self._epoch, rank, self._gang.size, FORM_TIMEOUT_S
        )

    def update(self, step: int, groups: Sequence[GroupSummary]) -> dict[str, float]:
        """One GRPO update on a batch; returns the gang's metrics."""
        return self._call(f"update-{step}", member.update, lambda _: (step, list(groups)))[0]

    def publish(self, step: int) -> Published:
        """Publishes the next version."""
        every = self._spec.config.weights.anchor_every
        return self._call(f"publish-{step}", member.publish, lambda _: (step, every))[0]

    def save_checkpoint(self, step: int, extra: dict[str, Any]) -> checkpoint.Checkpoint:
        """A checkpoint of the state after `step` steps: parts first, the manifest last."""
        parts = self._call(f"checkpoint-{step}", member.save_part, lambda _: (step,))
        return checkpoint.commit(ObjectStore(self._spec.store), self._spec.run, step, parts, extra)

    def restore(self, made: checkpoint.Checkpoint) -> None:
        """Puts every rank where the checkpoint was."""
        self._call(f"restore-{made.step}", member.restore, lambda _: (made,))

    def close(self) -> None:
        self._coordinator.close()

    def _call(
        self, stage: str, function: Callable[..., T], arguments: Callable[[int], tuple[Any, ...]]
    ) -> list[T]:
        """Runs a stage on every rank; the first failure ends the wait for all.

        The other ranks of a failed collective give up by themselves (their peer's connection is
        gone, or they were told); their errors would only hide the first. A mismatch alone breaks
        nothing: all ranks raise it alike, and stand where they stood.
        """
        if self._gang.state == "broken":
            raise GangError(f"the gang is broken: {self._gang.reason}; resume the run")
        key = f"{self._spec.run}-{self._epoch}-{stage}"
        futures = {
            submit_to(self._client, address, f"{key}-{rank}", function, *arguments(rank)): rank
            for rank, address in enumerate(self._gang.members)
        }
        done = as_completed(futures, loop=self._client.loop)
        for future in done:
            if future.status != "finished":
                if isinstance(future.exception(), MismatchError):
                    list(done)  # until the last rank has raised it
                    future.result()
                failed = RankFailed(self._gang.epoch, futures[future], f"in {stage}")
                self._gang = advance(self._gang, failed)
                future.result()
        return [future.result() for future in futures]
