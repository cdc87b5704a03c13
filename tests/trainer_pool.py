"""Warm processes that act as trainer ranks in tests, and the scenarios they run.

A scenario is a function of this module, called on every rank with the gang formed; what it returns
travels back. The processes live for a test module, as trainer workers live for many runs.
"""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from blake3 import blake3

from tasks.config import TrainConfig
from tasks.errors import IntegrityError, KindlingError, NotFiniteError, StoreError
from tasks.rollout.trajectory import Group
from tasks.training import checkpoint
from tasks.training.batching import UpdatePlan, plan_update
from tasks.training.group import GangCoordinator, join
from tasks.training.rank import TrainerRank
from tests.training_helpers import make_batch, reordered

Full = dict[str, torch.Tensor]


def config(temperature: float = 1.0, **training: Any) -> TrainConfig:
    settings = {
        "mini_batch_size": 8,
        "learning_rate": 1e-3,
        "kl_coefficient": 0.0,
        "entropy_coefficient": 0.0,
        "tokens_per_micro_batch": 4096,
        "mismatch_alarm": 1e9,  # the log-probabilities are made up
    }
    return TrainConfig.model_validate(
        {
            "model": {"path": "tiny", "chat": False, "context": 64},
            "data": {},
            "retrieval": {},
            "rollout": {
                "questions_per_step": 4,
                "group_size": 4,
                "max_prompt_tokens": 32,
                "temperature": temperature,
            },
            "training": {**settings, **training},
            "weights": {},
            "cluster": {},
            "evaluation": {},
        }
    )


def plan_of(batch: tuple[list[Group], list], settings: TrainConfig, ranks: int) -> UpdatePlan:
    return plan_update(
        batch[1],
        mini_batch_size=settings.training.mini_batch_size,
        ranks=ranks,
        tokens_per_micro_batch=settings.training.tokens_per_micro_batch,
        seed=0,
        step=1,
    )


class FolderStore:
    """The object store's contract on a folder, shared by the processes of a test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def create_object(self, data: bytes) -> str:
        digest = blake3(data).hexdigest()
        self.put(f"objects/{digest}", data)
        return digest

    def get_object(self, digest: str) -> bytes:
        data = self.get(f"objects/{digest}")
        if blake3(data).hexdigest() != digest:
            raise IntegrityError(f"object {digest} is damaged")
        return data

    def put(self, key: str, data: bytes) -> None:
        path = self.folder / key
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_bytes(data)
        temporary.rename(path)

    def get(self, key: str) -> bytes:
        try:
            return (self.folder / key).read_bytes()
        except FileNotFoundError:
            raise StoreError(f"{key} is not in the store") from None

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            (self.folder / key).unlink()

    def list(self, prefix: str = "") -> list[str]:
        files = (p for p in self.folder.rglob("*") if p.is_file())
        keys = (str(p.relative_to(self.folder)) for p in files)
        return sorted(key for key in keys if key.startswith(prefix))


# ---------------------------------------------------------------- scenarios


def gradients(
    rank: int, world: int, folder: Path, settings: list[TrainConfig], order: int
) -> list[tuple[float, Full]]:
    """Loss and full gradient of the first mini-batch for each of the settings, with the batch in
    one of many orders."""
    trainer = TrainerRank(settings[0], folder, rank, world, "cpu")
    batch = reordered(make_batch(4, 4), order)
    made = []
    for one in settings:
        trainer.reset(one)
        update = trainer._batch_update(plan_of(batch, one, world), 1)
        update.prepare(dict(enumerate(batch[0])))
        _, loss, _ = update.mini_batch(0)
        full = {
            name: p.grad.full_tensor() if p.grad is not None else torch.zeros(p.shape)  # type: ignore[union-attr]
            for name, p in trainer._policy.parameters()
        }
        made.append((loss, full))
    return made


def updated(rank: int, world: int, folder: Path, settings: TrainConfig, steps: int) -> Any:
    """After some updates: metrics, this rank's export, full float32 parameters."""
    trainer = TrainerRank(settings, folder, rank, world, "cpu")
    batch = make_batch(4, 4)
    plan = plan_of(batch, settings, world)
    needed = {index: batch[0][index] for index in plan.groups_of(rank)}
    metrics = [trainer.update(needed, plan, step) for step in range(steps)]
    full = dict(trainer._policy.full_tensors(torch.float32))
    return metrics, list(trainer.export_shards()), full, dict(trainer.full_tensors())


def all_masked(rank: int, world: int, folder: Path, settings: TrainConfig) -> Any:
    """Metrics of an update whose trajectories all ran out of room; whether it did nothing."""
    trainer = TrainerRank(settings, folder, rank, world, "cpu")
    groups, summaries = make_batch(4, 4)
    cut = {
        i: replace(g, trajectories=tuple(replace(t, end="truncated") for t in g.trajectories))
        for i, g in enumerate(groups)
    }
    before = trainer.state()
    metrics = trainer.update(cut, plan_of((groups, summaries), settings, world), 1)
    return metrics, _same(before, trainer)


def alarmed(rank: int, world: int, folder: Path, settings: TrainConfig) -> list[str]:
    """An update that stops at the mismatch alarm, and one after it that does not."""
    trainer = TrainerRank(settings, folder, rank, world, "cpu")
    batch = make_batch(4, 4)
    plan = plan_of(batch, settings, world)
    before = trainer.state()
    said = [_error(lambda: trainer.update(dict(enumerate(batch[0])), plan, 5))]
    said.append(f"unchanged: {_same(before, trainer)}, steps {trainer.optimizer_steps}")
    training = settings.training.model_copy(update={"mismatch_alarm": 1e9})
    trainer.reset(settings.model_copy(update={"training": training}))
    trainer.update(dict(enumerate(batch[0])), plan, 5)
    said.append(f"works again: steps {trainer.optimizer_steps}")
    return said


def _same(before: checkpoint.RankState, trainer: TrainerRank) -> bool:
    after = trainer.state()
    return all(
        torch.equal(one, after.values["parameter"][name])
        for name, one in before.values["parameter"].items()
    )


def one_trajectory(rank: int, world: int, folder: Path, settings: TrainConfig) -> Any:
    trainer = TrainerRank(settings, folder, rank, world, "cpu")
    batch = make_batch(1, 2)
    single = ([batch[0][0]], batch[1])
    plan = plan_of(single, settings, world)
    return trainer.update(dict(enumerate(batch[0])), plan, 1)


def failures(rank: int, world: int, folder: Path, settings: TrainConfig) -> list[str]:
    """One thing goes wrong on rank 1 alone, one at a time; what each rank raises, and whether the
    parameters stayed as they were."""
    trainer = TrainerRank(settings, folder, rank, world, "cpu")
    batch = make_batch(4, 4)
    plan = plan_of(batch, settings, world)
    good = dict(enumerate(batch[0]))
    bad = dict(good)
    index = plan.groups_of(1)[0]
    t = good[index].trajectories[0]
    poisoned = t.logprobs.copy()
    poisoned[t.loss_mask] = float("nan")
    broken = type(t)(
        **{**{f: getattr(t, f) for f in type(t).__dataclass_fields__}, "logprobs": poisoned}
    )
    bad[index] = Group("u", "q", (broken, *good[index].trajectories[1:]))
    said = [
        _error(lambda g=groups: trainer.update(g if rank == 1 else good, plan, 7))
        for groups in (bad, {})
    ]
    before = trainer.state()
    weights = trainer._policy.local()["model.layers.1.mlp.up_proj.weight"]
    kept = weights.clone()
    if rank == 1:
        weights[0, 0] = float("nan")
    said.append(_error(lambda: trainer.update(good, plan, 8)))
    weights.copy_(kept)
    said.append(f"unchanged: {_same(before, trainer)}, steps {trainer.optimizer_steps}")
    trainer.update(good, plan, 9)
    said.append(f"works again: steps {trainer.optimizer_steps}")
    return said


def _error(call: Callable[[], object]) -> str:
    try:
        call()
    except (KindlingError, NotFiniteError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


_warm: dict[str, TrainerRank] = {}


def warm_run(rank: int, world: int, folder: Path, settings: TrainConfig) -> Any:
    """A run on whatever this process kept from the run before: the second must equal the first."""
    trainer = _warm.get("trainer")
    if trainer is None:
        trainer = _warm["trainer"] = TrainerRank(settings, folder, rank, world, "cpu")
    else:
        trainer.reset(settings, rank, world)
    base = dict(trainer._policy.full_tensors(torch.float32))
    batch = make_batch(4, 4)
    plan = plan_of(batch, settings, world)
    metrics = trainer.update(dict(enumerate(batch[0])), plan, 1)
    trained = dict(trainer._policy.full_tensors(torch.float32))
    return trainer.base_loads, base, trained, metrics


def save(
    rank: int, world: int, folder: Path, settings: TrainConfig, store: FolderStore, more: int
) -> Full:
    """Two updates, a checkpoint, `more` updates; the full parameters at the end."""
    trainer = TrainerRank(settings, folder, rank, world, "cpu")
    batch = make_batch(4, 4)
    plan = plan_of(batch, settings, world)
    for step in (1, 2):
        trainer.update(dict(enumerate(batch[0])), plan, step)
    part = checkpoint.save_part(store, trainer.state())
    parts: list[Any] = [None] * world
    dist.all_gather_object(parts, part)
    if rank == 0:
        checkpoint.commit(store, "run/a", 2, parts, {"version": 2, "cursor": [0, 8]})
    for step in range(3, 3 + more):
        trainer.update(dict(enumerate(batch[0])), plan, step)
    return dict(trainer._policy.full_tensors(torch.float32))


def resume(
    rank: int, world: int, folder: Path, settings: TrainConfig, store: FolderStore, more: int
) -> tuple[Any, Full]:
    """Restore the latest checkpoint in a fresh trainer, then `more` updates."""
    trainer = TrainerRank(settings, folder, rank, world, "cpu")
    found = checkpoint.latest(store, "run/a")
    assert found is not None
    trainer.load_state(checkpoint.load_part(store, found, trainer.ranges(), rank, world))
    batch = make_batch(4, 4)
    plan = plan_of(batch, settings, world)
    for step in range(3, 3 + more):
        trainer.update(dict(enumerate(batch[0])), plan, step)
    extra = (found.step, found.extra, trainer.optimizer_steps)
    return extra, dict(trainer._policy.full_tensors(torch.float32))


def die(rank: int, world: int, folder: Path, settings: TrainConfig) -> str:
    """Rank 1 dies between two updates; what the others see."""
    trainer = TrainerRank(settings, folder, rank, world, "cpu")
    batch = make_batch(4, 4)
    plan = plan_of(batch, settings, world)
    trainer.update(dict(enumerate(batch[0])), plan, 1)
    if rank == 1:
        os._exit(3)
    return _error(lambda: trainer.update(dict(enumerate(batch[0])), plan, 2))


# ---------------------------------------------------------------- processes


def _serve(pipe: Connection) -> None:
    torch.set_num_threads(1)
    while (order := pipe.recv()) is not None:
        scenario, port, epoch, rank, world, timeout_s, arguments = order
        try:
            join("127.0.0.1", port, epoch, rank, world, timeout_s)
            pipe.send(("done", scenario(rank, world, **arguments)))
        except Exception as error:  # noqa: BLE001 - whatever it is, the test is to see it
            pipe.send(("failed", f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))


class Pool:
    """Warm rank processes. `run` forms a new epoch's gang of `world` of them each time."""

    def __init__(self) -> None:
        os.environ["OMP_WAIT_POLICY"] = "passive"  # spinning threads on two cores starve the rest
        self._context = multiprocessing.get_context("spawn")
        self._workers: list[tuple[Any, Connection]] = []
        self.coordinator = GangCoordinator()

    def run(
        self, world: int, scenario: Callable[..., Any], *, shift: int = 0, **arguments: Any
    ) -> list[Any]:
        """What each process answers; process p is rank (p + shift) % world."""
        ranks = [(process + shift) % world for process in range(world)]
        answers = self.answers(world, scenario, ranks, **arguments)
        failed = [text for kind, text in answers if kind == "failed"]
        assert not failed, "\n".join(failed)
        return [answer for _, answer in answers]

    def answers(
        self,
        world: int,
        scenario: Callable[..., Any],
        ranks: Sequence[int],
        timeout_s: float = 60.0,
        **arguments: Any,
    ) -> list[tuple[str, Any]]:
        """("done", result), ("failed", text) or ("dead", rank) of the first processes, which take
        these ranks; the processes left over stay out of it."""
        while len(self._workers) < world:
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))
        epoch, port = self.coordinator.new_epoch(), self.coordinator.port
        for (_, pipe), rank in zip(self._workers, ranks, strict=False):
            pipe.send((scenario, port, epoch, rank, world, timeout_s, arguments))
        answers, dead = [], []
        for worker, rank in zip(list(self._workers), ranks, strict=False):
            try:
                answers.append(worker[1].recv())
            except EOFError:
                answers.append(("dead", rank))
                dead.append(worker)
        self._workers = [worker for worker in self._workers if worker not in dead]
        return answers

    def close(self) -> None:
        for process, _ in self._workers:
            process.kill()
        for process, _ in self._workers:
            process.join()
        self.coordinator.close()
