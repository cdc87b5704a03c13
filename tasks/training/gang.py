"""The gang as a pure state machine: all N trainer ranks of an epoch, or none.

    waiting --enough workers--> forming --every rank ready--> running
       ^                           |                             |
       |                     a member lost or a rank failed      |
       +------epoch ended------ broken <-------------------------+

An epoch number belongs to one forming. Whoever speaks for an older one is refused, so that a rank
that was thought dead cannot mix its gradients into a younger gang.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from tasks.errors import GangError

State = Literal["waiting", "forming", "running", "broken"]


@dataclass(frozen=True, slots=True)
class WorkerJoined:
    worker: str


@dataclass(frozen=True, slots=True)
class WorkerLost:
    worker: str


@dataclass(frozen=True, slots=True)
class RankReady:
    """The rank of this epoch is in the process group."""

    epoch: int
    rank: int


@dataclass(frozen=True, slots=True)
class RankFailed:
    epoch: int
    rank: int
    reason: str


@dataclass(frozen=True, slots=True)
class EpochEnded:
    """No task of this epoch runs any more, so its workers are free for the next."""

    epoch: int


Event: TypeAlias = WorkerJoined | WorkerLost | RankReady | RankFailed | EpochEnded


@dataclass(frozen=True, slots=True)
class Gang:
    """`workers`: healthy trainer workers in order of arrival; `members`: the epoch's, by rank;
    `ready`: its ranks that have joined; `reason`: why it is broken; `former`: the members of the
    last epoch, whose survivors keep their ranks, since a rank's place decides what it has read."""

    size: int
    epoch: int = 0
    state: State = "waiting"
    workers: tuple[str, ...] = ()
    members: tuple[str, ...] = ()
    ready: frozenset[int] = frozenset()
    reason: str = ""
    former: tuple[str, ...] = ()

    @property
    def missing(self) -> int:
        """Workers still needed before an epoch can form."""
        return max(0, self.size - len(self.workers))


def advance(gang: Gang, event: Event) -> Gang:
    """The gang after an event; the same gang where the event changes nothing.

    Raises:
        GangError: a rank reports for an epoch that is over, or that never was.
    """
    match event:
        case WorkerJoined(worker):
            if worker in gang.workers:
                return gang
            return _form(replace(gang, workers=(*gang.workers, worker)))
        case WorkerLost(worker):
            left = replace(gang, workers=tuple(w for w in gang.workers if w != worker))
            if worker in gang.members and gang.state in ("forming", "running"):
                rank = gang.members.index(worker)
                return _break(left, f"rank {rank} was lost with worker {worker}")
            return left
        case RankReady(epoch, rank):
            _refuse_other_epochs(gang, epoch, rank)
            ready = gang.ready | {rank}
            state: State = "running" if len(ready) == gang.size else "forming"
            return replace(gang, ready=ready, state=state)
        case RankFailed(epoch, rank, reason):
            if epoch != gang.epoch or gang.state not in ("forming", "running"):
                return gang  # a straggler of an epoch that is given up already
            return _break(gang, f"rank {rank} on {gang.members[rank]} failed: {reason}")
        case EpochEnded(epoch):
            if epoch != gang.epoch or gang.state == "waiting":
                return gang
            ended = replace(gang, state="waiting", ready=frozenset(), reason="")
            return _form(replace(ended, members=(), former=gang.members))


def _form(gang: Gang) -> Gang:
    if gang.state != "waiting" or len(gang.workers) < gang.size:
        return gang
    kept = [worker if worker in gang.workers else None for worker in gang.former]
    kept = kept or [None] * gang.size
    fresh = iter([worker for worker in gang.workers if worker not in kept])
    members = tuple(next(fresh) if worker is None else worker for worker in kept)
    return replace(gang, state="forming", epoch=gang.epoch + 1, members=members)


def _break(gang: Gang, reason: str) -> Gang:
    return replace(gang, state="broken", reason=reason)


def _refuse_other_epochs(gang: Gang, epoch: int, rank: int) -> None:
    if epoch != gang.epoch or gang.state not in ("forming", "running"):
        raise GangError(
            f"rank {rank} reports for epoch {epoch}; the gang is {gang.state} in epoch "
            f"{gang.epoch}: let go of the old epoch and wait to be called"
        )
    if not 0 <= rank < gang.size:
        raise GangError(f"rank {rank} reports in a gang of {gang.size}")
