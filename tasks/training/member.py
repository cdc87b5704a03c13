"""What a trainer worker does for its gang, one function a stage. Dask tasks; no flow in sight.

The rank, its model and its process group are warm state of the worker: they outlive steps and
runs. Every function here runs on all ranks of an epoch at once, since all of them are collective.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from tasks.config import TrainConfig
from tasks.errors import GangError, KindlingError, MismatchError, NotFiniteError, WorkerBusy
from tasks.rollout.trajectory import Group, GroupSummary, group_from_bytes
from tasks.store import ObjectStore, StoreLocation
from tasks.training import checkpoint
from tasks.training.batching import plan_update
from tasks.training.group import gang_failures, join, leave
from tasks.training.heartbeat import Heartbeat
from tasks.training.policy import resolve_model_dir
from tasks.training.rank import TrainerRank
from tasks.warm import warm
from tasks.weights.commit import TRAINED, Published, commit, differing, load_manifest, read_ref
from tasks.weights.final import fetch_checkpoint
from tasks.weights.manifest import ManifestRef
from tasks.weights.parts import DeviceShard, LocalShard, PreparedPart
from tasks.weights.publisher import RankPublisher, survey

T = TypeVar("T")
LET_GO_S = 15.0
"""Seconds a worker has to end what it does for an earlier gang. Nobody wants that any more, and a
rank that waits in a collective for a peer that has left would never end it: its process is started
again, which takes less than a minute's patience did."""


@dataclass(frozen=True, slots=True)
class TrainerSpec:
    """What a rank is told of a run; small, and without credentials.

    life: how often the run was opened before. policy: prefix in the store of the warm-started
    policy to begin with; None takes model.path.
    """

    run: str
    life: int
    config: TrainConfig
    store: StoreLocation
    cache_dir: str
    policy: str | None

    def fence(self, epoch: int) -> str:
        """What an epoch's commits carry, and the run's head only while it is the current one."""
        return f"{self.life}.{epoch}"


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where and as whom a rank joins its gang."""

    address: str
    port: int
    epoch: int
    rank: int
    world: int
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Place:
    """A rank in its epoch, with all that belongs to it."""

    rank: TrainerRank
    publisher: RankPublisher
    store: ObjectStore
    spec: TrainerSpec
    meeting: Meeting
    heartbeat: Heartbeat

    @property
    def fence(self) -> str:
        return self.spec.fence(self.meeting.epoch)


class Member:
    """A trainer worker's warm state: the rank, and its place in the epoch it serves.

    Attributes:
        at_work: held while a stage runs here.
    """

    def __init__(self) -> None:
        self.rank: TrainerRank | None = None
        self.place: Place | None = None
        self.at_work = threading.Lock()

    def stop(self, why: str) -> None:
        """Has a stage that runs here end before its next micro-batch."""
        place = self.place
        if place is not None:
            place.heartbeat.stop(why)

    def form(self, spec: TrainerSpec, meeting: Meeting) -> int:
        """Joins the epoch and stands at the base weights; returns how often they were loaded."""
        self.place = None
        heartbeat = Heartbeat(meeting.address, meeting.port, meeting.epoch, meeting.rank)
        store = ObjectStore(spec.store)
        models = Path(spec.cache_dir) / "models"
        model_dir = (
            fetch_checkpoint(store, spec.policy, models)
            if spec.policy
            else resolve_model_dir(spec.config.model.path, models)
        )
        cuda = torch.cuda.is_available()
        join(
            meeting.address,
            meeting.port,
            meeting.epoch,
            meeting.rank,
            meeting.world,
            meeting.timeout_s,
            cuda=cuda,
        )
        loads = 0
        if self.rank is None or self.rank.model_dir != model_dir:
            self.rank = TrainerRank(spec.config, model_dir, meeting.rank, meeting.world)
        else:
            loads -= self.rank.base_loads
            self.rank.reset(spec.config, meeting.rank, meeting.world)
        loads += self.rank.base_loads
        # A run goes on from its head; only one that has none yet begins with version 0.
        begun = read_ref(store, spec.run) is not None
        publisher = RankPublisher(store, spec.run, meeting.rank, resume=begun)
        self.place = Place(self.rank, publisher, store, spec, meeting, heartbeat)
        return loads

    def leave(self) -> None:
        """Out of the process group: peers that wait for this rank in a collective learn of it."""
        self.stop("this worker has left its gang")
        self.place = None
        leave()


@contextmanager
def _in_epoch(run: str, fence: str, stage: str) -> Iterator[Place]:
    """The worker's place in this epoch of the run, for one stage.

    What only this rank raises must not leave the others waiting: it leaves the group. What all
    raise alike (`MismatchError`, `NotFiniteError`) breaks nothing.

    Raises:
        GangError: this process holds no place in that epoch; or a peer is gone.
    """
    member = warm("trainer", Member)
    with member.at_work:
        place = member.place
        if place is None or (place.spec.run, place.fence) != (run, fence):
            held = "none" if place is None else f"epoch {place.fence} of {place.spec.run!r}"
            raise GangError(
                f"called to {stage} in epoch {fence} of run {run!r}, and this worker's place is "
                f"{held}: it was restarted, or serves another gang by now"
            )
        try:
            place.heartbeat.check()
            with gang_failures(f"rank {place.rank.rank}, epoch {fence}, {stage}"):
                yield place
        except (MismatchError, NotFiniteError):
            raise
        except BaseException:
            member.leave()
            raise


def form(spec: TrainerSpec, meeting: Meeting) -> int:
    """See `Member.form`."""
    member = warm("trainer", Member)
    member.stop(f"this worker is called to epoch {spec.fence(meeting.epoch)} of {spec.run!r}")
    # The other thread's call may be of a flow that was killed: it must not find, in the middle of
    # its work, the process group of the new gang.
    if not member.at_work.acquire(timeout=LET_GO_S):
        raise WorkerBusy(
            f"rank {meeting.rank}: this worker still works for an earlier gang after {LET_GO_S:g} s"
        )
    try:
        with gang_failures(f"rank {meeting.rank}, forming epoch {meeting.epoch}"):
            return member.form(spec, meeting)
    except BaseException:
        member.leave()
        raise
    finally:
        member.at_work.release()


def update(run: str, fence: str, step: int, groups: Sequence[GroupSummary]) -> dict[str, float]:
    """One GRPO update on a batch; the rank reads from the store only the groups it trains on."""
    with _in_epoch(run, fence, f"update {step}") as place:
        return _update(place, step, groups)


def _update(place: Place, step: int, groups: Sequence[GroupSummary]) -> dict[str, float]:
    rank, training = place.rank, place.spec.config.training
    plan = plan_update(
        groups,
        mini_batch_size=training.mini_batch_size,
        ranks=rank.world,
        tokens_per_micro_batch=training.tokens_per_micro_batch,
        seed=place.spec.config.seed,
        step=step,
    )

    def read(index: int) -> Group:
        """Called by the rank, which tells the others when it fails."""
        return group_from_bytes(prefetched.result()[index])

    wanted = plan.groups_of(rank.rank)
    with ThreadPoolExecutor(1) as reader:
        prefetched = reader.submit(_read, place.store, {i: groups[i].key for i in wanted})
        return rank.update(read, plan, step, place.heartbeat.check)


def _read(store: ObjectStore, keys: dict[int, str]) -> dict[int, bytes]:
    return dict(zip(keys, store.get_many(keys.values()), strict=True))


def publish(run: str, fence: str, trained: int, anchor_every: int) -> Published:
    """Publishes what the ranks hold as the run's next version, the policy after `trained` steps;
    the same answer on every rank.

    When it is an anchor says `RankPublisher.anchor_due`. A rank that cannot prepare its part tells
    the others: nobody waits, nothing is committed.
    """
    with _in_epoch(run, fence, "publish") as place:
        return _publish(place, trained, anchor_every)


def _publish(place: Place, trained: int, anchor_every: int) -> Published:
    rank, publisher, spec = place.rank, place.publisher, place.spec
    version = publisher.next_version
    anchor = publisher.anchor_due(anchor_every)
    parts = _gathered(place, lambda: _prepare(place, anchor), f"version {version} not published")
    answer: list[Any] = [None]
    if rank.rank == 0:
        try:
            made = {TRAINED: trained}
            answer = [commit(place.store, spec.run, version, parts, made, place.fence)]
        except KindlingError as error:
            answer = [f"{type(error).__name__}: {error}"]
    dist.broadcast_object_list(answer, src=0)
    published = answer[0]
    if not isinstance(published, Published):
        raise GangError(f"version {version} not published: {published}")
    publisher.confirm(published)
    return published


def compare(
    run: str, fence: str, ref: ManifestRef, chain: tuple[int, int] | None = None
) -> list[str]:
    """Names of the tensors in which what the ranks hold differs from a version of the run; the
    same answer on every rank. Nothing is uploaded.

    Args:
        chain: where the version is the run's head, `commit.since_anchor` of it: if nothing differs,
            the next version can then be a delta.
    """
    with _in_epoch(run, fence, f"compare with version {ref.version}") as place:
        parts = _gathered(place, lambda: survey(_shards(place)), "weights not compared")
        odd = differing(load_manifest(place.store, run, ref), parts)
        if chain is not None and not odd:
            place.publisher.adopt(_shards(place), ref, *chain)
        return odd


def _gathered(place: Place, work: Callable[[], T], otherwise: str) -> list[T]:
    """What each rank's work gives, on every rank; where one fails, all raise and say why."""
    part: T | str
    try:
        part = work()
    except KindlingError as error:
        part = f"rank {place.rank.rank}: {error}"
    parts: list[Any] = [None] * place.rank.world
    dist.all_gather_object(parts, part)
    failed = [part for part in parts if isinstance(part, str)]
    if failed:
        raise GangError(f"{otherwise}: {'; '.join(failed)}")
    return parts


def _shards(place: Place) -> Iterator[LocalShard | DeviceShard]:
    for shard in place.rank.export_shards():
        place.heartbeat.check()
        yield shard


def _prepare(place: Place, anchor: bool) -> PreparedPart:
    rank, publisher, shards = place.rank, place.publisher, _shards(place)
    if not anchor:
        return publisher.prepare(shards, "delta")
    full = rank.full_tensors()
    if rank.rank == 0:
        part = publisher.prepare(shards, "anchor", full=full)
    else:
        # Gathering a whole tensor is a collective: the other ranks run through them as well.
        for _ in full:
            pass
        part = publisher.prepare(shards, "anchor")
    return part


def save_part(run: str, fence: str, step: int) -> checkpoint.Part:
    """Writes this rank's part of a checkpoint; the flow commits all of them."""
    with _in_epoch(run, fence, f"save checkpoint {step}") as place:
        return checkpoint.save_part(place.store, place.rank.state())


def restore(run: str, fence: str, made: checkpoint.Checkpoint) -> None:
    """Takes the checkpoint's parameters and optimizer state, cut as this gang is."""
    with _in_epoch(run, fence, f"restore checkpoint {made.step}") as place:
        rank = place.rank
        part = checkpoint.load_part(place.store, made, rank.ranges(), rank.rank, rank.world)
        rank.load_state(part)
