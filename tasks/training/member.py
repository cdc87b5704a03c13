"""What a trainer worker does for its gang, one function a stage. Dask tasks; no flow in sight.

The rank, its model and its process group are warm state of the worker: they outlive steps and
runs. Every function here runs on all ranks of an epoch at once, since all of them are collective.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tasks.config import TrainConfig
from tasks.errors import GangError, KindlingError
from tasks.rollout.trajectory import Group, GroupSummary, group_from_bytes
from tasks.store import ObjectStore, StoreLocation
from tasks.training import checkpoint
from tasks.training.batching import plan_update
from tasks.training.group import gang_failures, join
from tasks.training.policy import resolve_model_dir
from tasks.training.rank import TrainerRank
from tasks.warm import warm
from tasks.weights.commit import Published
from tasks.weights.final import fetch_checkpoint
from tasks.weights.publisher import PreparedPart, RankPublisher, commit


@dataclass(frozen=True, slots=True)
class TrainerSpec:
    """What a rank is told of a run; small, and without credentials.

    policy: prefix in the store of the warm-started policy to begin with; None takes model.path.
    """

    run: str
    config: TrainConfig
    store: StoreLocation
    cache_dir: str
    resume: bool
    policy: str | None


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where and as whom a rank joins its gang."""

    address: str
    port: int
    epoch: int
    rank: int
    world: int
    timeout_s: float


class Member:
    """A trainer worker's warm state: the rank, and the publisher of the run it serves."""

    def __init__(self) -> None:
        self.rank: TrainerRank | None = None
        self.publisher: RankPublisher | None = None
        self.store: ObjectStore | None = None
        self.spec: TrainerSpec | None = None

    def form(self, spec: TrainerSpec, meeting: Meeting) -> int:
        """Joins the epoch and stands at the base weights; returns how often they were loaded."""
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
        self.store = store
        self.publisher = RankPublisher(self.store, spec.run, meeting.rank, resume=spec.resume)
        self.spec = spec
        return loads

    def ready(self) -> tuple[TrainerRank, RankPublisher, ObjectStore, TrainerSpec]:
        """The rank and all that belongs to it.

        Raises:
            GangError: this process never formed a gang.
        """
        if not (self.rank and self.publisher and self.store and self.spec):
            raise GangError("this worker holds no rank: it was restarted since the gang formed")
        return self.rank, self.publisher, self.store, self.spec


def form(spec: TrainerSpec, meeting: Meeting) -> int:
    """See `Member.form`."""
    with gang_failures(f"rank {meeting.rank}, forming epoch {meeting.epoch}"):
        return warm("trainer", Member).form(spec, meeting)


def update(step: int, groups: Sequence[GroupSummary]) -> dict[str, float]:
    """One GRPO update on a batch; the rank reads from the store only the groups it trains on."""
    rank, _, store, spec = warm("trainer", Member).ready()
    training = spec.config.training
    plan = plan_update(
        groups,
        mini_batch_size=training.mini_batch_size,
        ranks=rank.world,
        tokens_per_micro_batch=training.tokens_per_micro_batch,
        seed=spec.config.seed,
        step=step,
    )

    def read(index: int) -> Group:
        """Called by the rank, which tells the others when it fails."""
        return group_from_bytes(prefetched.result()[index])

    wanted = plan.groups_of(rank.rank)
    with ThreadPoolExecutor(1) as reader, gang_failures(f"rank {rank.rank}, step {step}"):
        prefetched = reader.submit(_read, store, {i: groups[i].key for i in wanted})
        return rank.update(read, plan, step)


def _read(store: ObjectStore, keys: dict[int, str]) -> dict[int, bytes]:
    return dict(zip(keys, store.get_many(keys.values()), strict=True))


def publish(step: int, anchor_every: int) -> Published:
    """Publishes what the ranks hold as the run's next version; the same answer on every rank.

    When it is an anchor says `RankPublisher.anchor_due`. A rank that cannot prepare its part tells
    the others: nobody waits, nothing is committed.
    """
    rank, publisher, store, spec = warm("trainer", Member).ready()
    version = publisher.next_version
    anchor = publisher.anchor_due(anchor_every)
    with gang_failures(f"rank {rank.rank}, publishing version {version}"):
        part: PreparedPart | str
        try:
            part = _prepare(rank, publisher, anchor)
        except KindlingError as error:
            part = f"rank {rank.rank}: {error}"
        parts: list[Any] = [None] * rank.world
        dist.all_gather_object(parts, part)
        failed = [part for part in parts if isinstance(part, str)]
        if failed:
            publisher.abandon()
            raise GangError(f"version {version} was not published: {'; '.join(failed)}")
        answer: list[Any] = [None]
        if rank.rank == 0:
            try:
                answer = [commit(store, spec.run, version, parts, {"step": step})]
            except KindlingError as error:
                answer = [f"{type(error).__name__}: {error}"]
        dist.broadcast_object_list(answer, src=0)
    published = answer[0]
    if not isinstance(published, Published):
        publisher.abandon()
        raise GangError(f"version {version} was not published: {published}")
    publisher.confirm(published)
    return published


def _prepare(rank: TrainerRank, publisher: RankPublisher, anchor: bool) -> PreparedPart:
    shards = rank.export_shards()
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


def save_part(step: int) -> checkpoint.Part:
    """Writes this rank's part of a checkpoint; the flow commits all of them."""
    rank, _, store, _ = warm("trainer", Member).ready()
    return checkpoint.save_part(store, rank.state())


def restore(made: checkpoint.Checkpoint) -> None:
    """Takes the checkpoint's parameters and optimizer state, cut as this gang is."""
    rank, _, store, _ = warm("trainer", Member).ready()
    part = checkpoint.load_part(store, made, rank.ranges(), rank.rank, rank.world)
    rank.load_state(part)
