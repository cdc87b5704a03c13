"""The unit queue as a state machine, the admission rule, and the numbers of a batch."""

from __future__ import annotations

import copy
import json
from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tasks.metrics import batch_stats
from tasks.rollout.agent import Unit
from tasks.rollout.batches import Producer, summary_from_wire, summary_to_wire, unit_from_wire
from tasks.rollout.engine import Sampling
from tasks.rollout.queue import MAX_ATTEMPTS, UnitQueue
from tasks.rollout.trajectory import GroupSummary, TrajectorySummary

pytestmark = [pytest.mark.fast, pytest.mark.timeout(120)]
WORKERS = ("w0", "w1", "w2")
NAMES = [f"u{i}" for i in range(12)]


def _units(*names: str) -> list[dict[str, Any]]:
    return [{"unit_id": name, "payload": f"of {name}"} for name in names]


class QueueMachine(RuleBasedStateMachine):
    """A model that only counts: which units are where, and who may still send what."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = UnitQueue()
        self.offered: list[str] = []
        self.seen: set[str] = set()
        self.held: dict[str, str] = {}  # unit -> the worker that is to do it
        self.pulled: set[tuple[str, str]] = set()  # whoever pulled a unit may send a result
        self.failures: dict[str, int] = {}
        self.accepted: list[str] = []

    @rule(names=st.lists(st.sampled_from(NAMES), max_size=6))
    def offer(self, names: list[str]) -> None:
        self.queue.offer(_units(*names))
        for name in names:
            if name not in self.offered:
                self.offered.append(name)

    @rule(worker=st.sampled_from(WORKERS), count=st.integers(0, 8))
    def pull(self, worker: str, count: int) -> None:
        waiting = [u["unit_id"] for u in self.queue.pending]
        self.seen.add(worker)
        taken = self.queue.pull(worker, count)
        outstanding = len(waiting) + len(self.held)
        share = -(-outstanding // len(self.seen)) - list(self.held.values()).count(worker)
        assert taken == _units(*waiting[: max(0, min(count, share))]), "in order, a fair share"
        assert taken or not waiting or worker in self.held.values() or count == 0, "none starves"
        for unit in taken:
            assert unit["unit_id"] not in self.held
            self.held[unit["unit_id"]] = worker
            self.pulled.add((worker, unit["unit_id"]))

    @precondition(lambda self: self.pulled)
    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        """From the holder, from a worker believed lost, or twice: the first one counts."""
        worker, name = data.draw(st.sampled_from(sorted(self.pulled)))
        fresh = name not in self.accepted
        assert self.queue.complete(worker, {"unit_id": name, "worker": worker}) is fresh
        if fresh:
            self.accepted.append(name)
            self.held.pop(name, None)

    @rule(worker=st.sampled_from(WORKERS))
    def complete_unknown(self, worker: str) -> None:
        assert not self.queue.complete(worker, {"unit_id": "of another run"})

    @precondition(lambda self: self.pulled)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        """Only the holder's word counts; the last attempt sets the unit aside."""
        worker, name = data.draw(st.sampled_from(sorted(self.pulled)))
        message = f"{worker} failed"
        self.queue.fail(worker, name, message)
        if self.held.get(name) != worker:
            return
        del self.held[name]
        self.failures[name] = self.failures.get(name, 0) + 1
        if self.failures[name] == MAX_ATTEMPTS:
            assert self.queue.failed[name] == message
        else:
            assert self.queue.pending[0]["unit_id"] == name

    @rule(worker=st.sampled_from(WORKERS))
    def lose(self, worker: str) -> None:
        self.seen.discard(worker)
        lost = [name for name, holder in self.held.items() if holder == worker]
        assert sorted(self.queue.lose(worker)) == sorted(lost)
        front = [u["unit_id"] for u in list(self.queue.pending)[: len(lost)]]
        assert sorted(front) == sorted(lost)
        for name in lost:
            del self.held[name]

    @invariant()
    def every_unit_is_in_exactly_one_place(self) -> None:
        places = [u["unit_id"] for u in self.queue.pending]
        places += list(self.queue.leased)
        places += [result["unit_id"] for result in self.queue.done]
        places += list(self.queue.failed)
        assert sorted(places) == sorted(self.offered)

    @invariant()
    def agrees_with_the_model(self) -> None:
        assert {n: worker for n, (worker, _) in self.queue.leased.items()} == self.held
        assert [result["unit_id"] for result in self.queue.done] == self.accepted
        poisonous = {n for n, count in self.failures.items() if count >= MAX_ATTEMPTS}
        assert set(self.queue.failed) == poisonous - set(self.accepted)

    def teardown(self) -> None:
        """One healthy worker is enough to end it: nothing was lost."""
        for worker in WORKERS:
            self.queue.lose(worker)
        for _ in range(100):
            for unit in self.queue.pull("healthy", 3):
                assert self.queue.complete("healthy", {"unit_id": unit["unit_id"]})
        done = [result["unit_id"] for result in self.queue.done]
        assert sorted(done + list(self.queue.failed)) == sorted(self.offered)
        super().teardown()


TestQueueMachine = pytest.mark.fast(QueueMachine.TestCase)
TestQueueMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_the_first_to_ask_leaves_the_others_their_share() -> None:
    queue = UnitQueue()
    for worker in WORKERS:
        queue.pull(worker, 100)  # all have asked while there was nothing
    queue.offer(_units(*NAMES))
    assert [len(queue.pull(worker, 100)) for worker in WORKERS] == [4, 4, 4]
    queue.offer(_units("another"))
    assert len(queue.pull("w0", 100)) == 1


def test_a_slow_worker_holds_back_only_what_it_took() -> None:
    queue = UnitQueue()
    queue.offer(_units(*NAMES))
    slow = queue.pull("slow", 1)
    queue.pull("fast", 0)
    done = 0
    while units := queue.pull("fast", 2):
        done += sum(queue.complete("fast", unit) for unit in units)
    assert done == len(NAMES) - len(slow)


def test_a_poisonous_unit_stands_aside_with_its_last_message() -> None:
    queue = UnitQueue()
    queue.offer(_units("bad", "good"))
    for attempt in range(MAX_ATTEMPTS):
        assert queue.pull("w0", 1) == _units("bad")
        queue.fail("w0", "bad", f"attempt {attempt}")
    assert queue.failed == {"bad": f"attempt {MAX_ATTEMPTS - 1}"}
    assert queue.pull("w0", 9) == _units("good")


def test_a_late_result_is_taken_and_spares_the_second_try() -> None:
    queue = UnitQueue()
    queue.offer(_units("u"))
    queue.pull("w0", 1)
    assert queue.lose("w0") == ["u"]
    assert queue.complete("w0", {"unit_id": "u", "from": "w0"})
    assert queue.pull("w1", 1) == []
    assert not queue.complete("w1", {"unit_id": "u", "from": "w1"})
    assert [result["from"] for result in queue.done] == ["w0"]


def test_losing_a_worker_is_no_failed_attempt() -> None:
    queue = UnitQueue()
    queue.offer(_units("u"))
    for _ in range(MAX_ATTEMPTS + 1):
        queue.pull("w0", 1)
        queue.lose("w0")
    assert queue.pull("w1", 1) == _units("u")


# The admission rule


@given(
    steps=st.integers(1, 40),
    bound=st.integers(0, 5),
    start=st.integers(0, 40),
    asked_again=st.lists(st.integers(0, 3), min_size=41, max_size=41),
)
def test_each_step_starts_once_in_order_within_the_bound(
    steps: int, bound: int, start: int, asked_again: list[int]
) -> None:
    start = min(start, steps - 1)
    producer = Producer(steps, bound, start)
    started: list[int] = []
    for training in range(start, steps):
        for _ in range(1 + asked_again[training]):
            for step in producer.admissible(training):
                assert training <= step <= training + bound
                started.append(step)
        assert training in started, "what trains next can be sampled"
        assert started[-1] == min(training + bound, steps - 1), "and all that the bound allows"
    assert started == list(range(start, steps))


def test_bound_zero_starts_only_the_next_step() -> None:
    producer = Producer(steps=3, bound=0, offered=0)
    assert [producer.admissible(step) for step in (0, 0, 1, 1, 2, 2)] == [[0], [], [1], [], [2], []]


# Numbers


def _summary(unit_id: str, *rewards: float, end: Any = "answered") -> GroupSummary:
    trajectories = tuple(
        TrajectorySummary(100, 40, reward, reward == 1.0, reward, end, n, 1)
        for n, reward in enumerate(rewards)
    )
    return GroupSummary(unit_id, "q", f"groups/{unit_id}", "w0", 3, 1.5, trajectories)


def test_batch_stats_are_means_over_trajectories() -> None:
    groups = [_summary("a", 1.0, 0.0, 0.5), _summary("b", 0.0, end="truncated")]
    stats = batch_stats(groups)
    assert (stats.groups, stats.trajectories, stats.tokens, stats.sampled_tokens) == (
        2,
        4,
        400,
        160,
    )
    assert (stats.reward, stats.exact_match, stats.f1) == (0.375, 0.25, 0.375)
    assert (stats.answered, stats.truncated, stats.uniform_groups) == (0.75, 0.25, 0.5)
    assert (stats.searches, stats.invalid_actions) == (0.75, 1.0)


def test_summaries_and_units_survive_the_wire() -> None:
    summary = _summary("a", 1.0, 0.0)
    assert summary_from_wire(json.loads(json.dumps(summary_to_wire(summary)))) == summary
    assert copy.copy(summary) == summary  # copies as it pickles
    unit = Unit("u", "q", "who?", ("A", "B"), 3, 4, 5, Sampling(0.5, 0.9))
    assert unit_from_wire(json.loads(json.dumps(asdict(unit)))) == unit
