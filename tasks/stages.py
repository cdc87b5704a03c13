"""The stages of a run as Prefect tasks: thin shells that call, time and record.

One task a step and stage, named by its step; what passes between them are small references, and
what they do inside is plain Dask work on warm workers.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from prefect import Task, task
from prefect.cache_policies import NO_CACHE
from prefect.states import State

from tasks import artifacts
from tasks.cluster import Attached
from tasks.errors import GangError, MismatchError, UnitFailed
from tasks.evaluation.held_out import evaluate_version
from tasks.inputs import Inputs
from tasks.metrics import BatchStats, Evaluation, StepRecord, batch_stats
from tasks.rollout.batches import refill_available, refill_units, train_units
from tasks.rollout.refill import Refill, is_uniform
from tasks.rollout.trajectory import GroupSummary
from tasks.run import Run
from tasks.run_record import recorded
from tasks.store import ObjectStore
from tasks.training import stored_policy
from tasks.weights.commit import Published

T = TypeVar("T")
MAY_FAIL = 0.25
"""Share of a step's questions that may be given up and made up for; more are no accident."""
RETRY_AFTER_S = [0.5, 10.0, 30.0]
"""Waits before a stage that has lost a trainer worker is tried again; no more than these: a batch
that kills its ranks must not do so for ever."""


def at(stage: Task[Any, T], step: int) -> Task[Any, T]:
    """The stage, its task run named by the step: `rollout-12`."""
    return stage.with_options(task_run_name=f"{stage.name}-{step}")


class Batch:
    """A step's groups, by reference.

    Not a dataclass, like `Run`: Prefect searches every field of those for futures, several times a
    task, and a batch has thousands of summaries.
    """

    def __init__(
        self, step: int, groups: tuple[GroupSummary, ...], stats: BatchStats, seconds: float
    ) -> None:
        self.step = step
        self.groups = groups
        self.stats = stats
        self.seconds = seconds


@dataclass(frozen=True, slots=True)
class Updated:
    """What the trainer gang reports of a step."""

    step: int
    metrics: dict[str, float]
    seconds: float


@dataclass(frozen=True, slots=True)
class Released:
    """A published version, and how long publishing took."""

    step: int
    published: Published
    seconds: float


def _gang_broke(task: Any, task_run: Any, state: State[Any]) -> bool:
    """Whether a stage failed because a trainer worker did: it is tried again, on what is there."""
    return isinstance(state.result(raise_on_failure=False), GangError)


gang_task = task(
    cache_policy=NO_CACHE,
    persist_result=False,
    retries=len(RETRY_AFTER_S),
    retry_delay_seconds=RETRY_AFTER_S,
    retry_condition_fn=_gang_broke,
)
"""A stage on trainer workers. That one was lost shows as this task's retry, with its reason."""


def base_policy(cluster: Attached, inputs: Inputs, resume: str | None = None) -> str | None:
    """The warm-started policy the configuration asks for, made where the store lacks it.

    Args:
        resume: a run to go on with, which keeps the policy that it began with.

    Returns its prefix in the store; None where model.path is to be taken as it is.
    """
    if inputs.config.model.warm_start is None:
        return None
    store = ObjectStore(cluster.store)
    if resume is not None:
        record = recorded(store, resume)
        return record.get("policy") if record else None  # `open_run` says what there is none of
    prefix = stored_policy.policy_prefix(inputs)
    if not stored_policy.is_made(store, prefix):
        # Bound beforehand: Prefect searches a task's arguments for futures, down to every passage.
        make = partial(stored_policy.make_policy, cluster, inputs, prefix)
        warm_start.with_options(name="warm-start")(make)
    cluster.log.info("policy: %s", prefix)
    return prefix


@gang_task
def warm_start(make: Callable[[], None]) -> None:
    """Fine-tunes the run's first policy on demonstrations."""
    make()


@gang_task
def prepare(run: Run) -> Released:
    """Forms the trainer gang where the run starts, and publishes that as its first version."""
    began = time.perf_counter()
    published = run.trainers.publish(run.next_step)
    run.note(published)
    run.progress_id = artifacts.start_progress()
    run.log.info(
        "run %s: version %d published (%s, %s of %s bytes new)",
        run.name,
        published.version,
        published.kind,
        f"{published.bytes_uploaded:,}",
        f"{published.full_bytes:,}",
    )
    return Released(run.next_step, published, time.perf_counter() - began)


@task(cache_policy=NO_CACHE, persist_result=False)
def rollout(run: Run, step: int, released: Released) -> Batch:
    """Waits for the step's groups, after offering what the admission rule allows."""
    began = time.perf_counter()
    for admitted in run.producer.admissible(step):
        units = train_units(run.inputs.train, run.config, admitted, released.published.version)
        run.fleet.offer(units)
    wanted = [f"train-{step:06d}-{i:05d}" for i in range(run.config.rollout.questions_per_step)]
    groups = run.fleet.collect(wanted, may_fail=MAY_FAIL)
    trained, stats = _filled_up(run, step, released.published.version, groups)
    return Batch(step, tuple(trained), stats, time.perf_counter() - began)


def _filled_up(
    run: Run, step: int, version: int, groups: list[GroupSummary]
) -> tuple[list[GroupSummary], BatchStats]:
    """The groups to train on once those of no use were made up for, and the numbers of all."""
    train, config = run.inputs.train, run.config
    available = refill_available(train, config, step)
    wanted, rounds = config.rollout.questions_per_step, config.training.refill_rounds
    refill = Refill(wanted, rounds, available, config.training.zero_variance == "keep")
    refill.take(groups)
    while count := refill.ask():
        span = range(refill.refilled - count, refill.refilled)
        units = refill_units(train, config, step, version, span)
        run.fleet.offer(units)
        refill.take(run.fleet.collect([unit.unit_id for unit in units], may_fail=MAY_FAIL))
    trained = refill.trained()
    if not trained:
        raise UnitFailed(f"step {step}: not one of its {wanted} groups could be sampled; see above")
    if len(trained) < wanted or (not refill.keep_uniform and any(map(is_uniform, trained))):
        run.log.warning(
            "step %d: %d groups are of use after %d further questions in %d rounds "
            "(training.refill_rounds %d), wanted %d; training on %d groups",
            step,
            len([g for g in trained if refill.keep_uniform or not is_uniform(g)]),
            refill.refilled,
            refill.round,
            rounds,
            wanted,
            len(trained),
        )
    dropped = wanted + refill.refilled - len(refill.sampled)
    return trained, batch_stats(refill.sampled, dropped, refill.refilled, len(trained))


@gang_task
def update(run: Run, batch: Batch) -> Updated:
    """The gang takes the batch's optimizer steps."""
    began = time.perf_counter()
    try:
        metrics = run.trainers.update(batch.step, batch.groups)
    except MismatchError:
        # Nothing was changed by it: what was learned since the last checkpoint is kept.
        run.trainers.save_checkpoint(batch.step, {"version": run.version})
        raise
    return Updated(batch.step, metrics, time.perf_counter() - began)


@gang_task
def publish(run: Run, updated: Updated) -> Released:
    """The gang publishes what it holds as the next version."""
    began = time.perf_counter()
    published = run.trainers.publish(updated.step + 1)
    run.note(published)
    run.next_step = updated.step + 1
    return Released(updated.step, published, time.perf_counter() - began)


@task(cache_policy=NO_CACHE, persist_result=False)
def evaluate(run: Run, released: Released) -> Evaluation:
    """Every held-out question at the published version, greedy and sampled."""
    evaluated = evaluate_version(run.fleet, run.inputs, released.published.version, run.next_step)
    run.history.add_evaluation(evaluated.record)
    run.save_history()
    run.log.info(evaluated.record.line())
    report = artifacts.evaluation(run.name, run.inputs, run.store, run.history, evaluated)
    run.log.info("report: %s", report)
    artifacts.weights(run.name, run.published)
    return evaluated.record


@gang_task
def checkpoint(run: Run, released: Released) -> None:
    """The gang's state after this step, from which `resume` goes on."""
    run.trainers.save_checkpoint(run.next_step, {"version": released.published.version})


@task(cache_policy=NO_CACHE, persist_result=False)
def export(run: Run, released: Released) -> str:
    """The last version as a Hugging Face checkpoint in the store; returns its prefix."""
    from tasks.weights.final import store_checkpoint

    return store_checkpoint(run.store, run.name, released.published.version, run.inputs.model_dir)


def record(run: Run, batch: Batch, updated: Updated, released: Released) -> StepRecord:
    """One line of history: kept, written to the store, logged, shown."""
    step = StepRecord(
        step=batch.step,
        version=released.published.version,
        batch=batch.stats,
        update=updated.metrics,
        seconds={
            "rollout": batch.seconds,
            "update": updated.seconds,
            "publish": released.seconds,
        },
        delta_bytes=released.published.delta_bytes,
        full_bytes=released.published.full_bytes,
    )
    run.history.add_step(step)
    run.save_history()
    run.log.info(step.line())
    artifacts.progress(run)
    return step
