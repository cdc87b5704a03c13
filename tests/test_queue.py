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
from tasks.rollout.queue import (
    MAX_BAD_ROW,
    MAX_FAILURES,
    MAX_LOSSES,
    SLOW,
    WORKER_SILENT_S,
    UnitQueue,
)
from tasks.rollout.scaling import Change, Limits, Load, Starts, decide
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
        self.now = 0.0
        self.offered: list[str] = []
        self.held: dict[str, dict[str, float]] = {}  # unit -> workers that do it, since when
        self.pulled: set[tuple[str, str]] = set()  # whoever pulled a unit may send a result
        self.attempts: dict[str, int] = {}
        self.forgotten = 0
        self.accepted: list[str] = []
        self.cancelled: dict[str, set[str]] = {}

    @rule(names=st.lists(st.sampled_from(NAMES), max_size=6))
    def offer(self, names: list[str]) -> None:
        had = self.accepted[: self.forgotten]  # a unit id is offered once in a run
        names = [name for name in names if name not in had]
        self.queue.offer(_units(*names))
        for name in names:
            if name not in self.offered:
                self.offered.append(name)

    @rule(seconds=st.floats(0.01, 15))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(worker=st.sampled_from(WORKERS), count=st.integers(0, 8))
    def pull(self, worker: str, count: int) -> None:
        waiting = [u["unit_id"] for u in self.queue.pending]
        holds = [name for name, holders in self.held.items() if worker in holders]
        outstanding = len(waiting) + len(self.held)
        taken = self.queue.pull(worker, count, self.now)
        names = [unit["unit_id"] for unit in taken]
        if worker in self.queue.quarantined:
            assert not taken
            return
        able = len(self.queue.workers) - len(self.queue.quarantined)
        share = max(0, min(count, -(-outstanding // able) - len(holds)))
        if waiting and share:
            assert names == waiting[:share], "in order, a fair share"
        elif names:
            assert not holds, "a copy is for an idle worker"
            assert count
            assert not waiting, "and only where nothing waits"
            (name,) = names
            (since,) = self.held[name].values()
            assert since == min(min(h.values()) for h in self.held.values() if len(h) == 1)
            usual = self.queue.unit_s
            assert usual is not None
            assert self.now - since > SLOW * usual
        assert names or not waiting or holds or count == 0, "none starves"
        for unit in taken:
            name = unit["unit_id"]
            self.attempts[name] = self.attempts.get(name, 0) + 1
            assert unit == {**_units(name)[0], "attempt": self.attempts[name]}, "numbered"
            self.held.setdefault(name, {})[worker] = self.now
            self.pulled.add((worker, name))

    @precondition(lambda self: self.pulled)
    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        """From a holder, from a worker believed lost, or twice: the first one counts."""
        worker, name = data.draw(st.sampled_from(sorted(self.pulled)))
        fresh = name not in self.accepted
        result = {"unit_id": name, "worker": worker}
        assert self.queue.complete(worker, result, self.now) is fresh
        if fresh:
            self.accepted.append(name)
            for other in self.held.pop(name, {}).keys() - {worker}:
                self.cancelled.setdefault(other, set()).add(name)

    @rule(worker=st.sampled_from(WORKERS))
    def complete_unknown(self, worker: str) -> None:
        assert not self.queue.complete(worker, {"unit_id": "of another run"}, self.now)

    @rule(worker=st.sampled_from(WORKERS))
    def drop(self, worker: str) -> None:
        """Told once, and only of units that another one has done."""
        assert self.queue.cancellations(worker) == sorted(self.cancelled.pop(worker, ()))

    @precondition(lambda self: self.pulled)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        """Only a holder's word counts; the last attempt sets the unit aside."""
        worker, name = data.draw(st.sampled_from(sorted(self.pulled)))
        message = f"{worker} failed"
        before = dict(self.queue.failed)
        self.queue.fail(worker, name, message, self.now)
        if worker not in self.held.get(name, {}):
            assert self.queue.failed == before
            return
        self._released(name, worker)

    @rule(worker=st.sampled_from(WORKERS))
    def lose(self, worker: str) -> None:
        lost = [name for name, holders in self.held.items() if worker in holders]
        back = [name for name in lost if len(self.held[name]) == 1]
        assert self.queue.lose(worker) == lost
        assert worker not in self.queue.workers
        self.cancelled.pop(worker, None)
        for name in lost:
            self._released(name, worker)
        back = [name for name in back if name not in self.queue.failed]
        assert [u["unit_id"] for u in list(self.queue.pending)[: len(back)]] == back, "in order"

    def _released(self, name: str, worker: str) -> None:
        del self.held[name][worker]
        if not self.held[name]:
            del self.held[name]

    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        """What the flow has is nobody's business any more: late results do not count again."""
        count = data.draw(st.integers(0, len(self.queue.done)))
        had = self.accepted[self.forgotten :][:count]
        self.queue.forget(count)
        self.forgotten += count
        for name in had:
            assert not self.queue.complete("w0", {"unit_id": name}, self.now)
        assert len(self.queue._records) == len(self.offered) - self.forgotten

    @rule(worker=st.sampled_from(WORKERS))
    def retire(self, worker: str) -> None:
        holds = any(worker in holders for holders in self.held.values())
        assert self.queue.retire(worker) is not holds
        if not holds:
            assert self.queue.pull(worker, 5, self.now) == []
            assert worker not in self.queue.workers
            self.queue.lose(worker)  # its process ends; another may come under the same name
            self.cancelled.pop(worker, None)

    @rule()
    def silence(self) -> None:
        for worker in self.queue.silent(self.now):
            assert self.now - self.queue.workers[worker] > WORKER_SILENT_S
            self.lose(worker)

    @invariant()
    def every_unit_is_in_exactly_one_place(self) -> None:
        places = [u["unit_id"] for u in self.queue.pending]
        places += list(self.queue.leased)
        places += [result["unit_id"] for result in self.queue.done]
        places += self.accepted[: self.forgotten]
        places += list(self.queue.failed)
        assert sorted(places) == sorted(self.offered)

    @invariant()
    def agrees_with_the_model(self) -> None:
        assert {n: lease.holders for n, lease in self.queue.leased.items()} == self.held
        assert [result["unit_id"] for result in self.queue.done] == self.accepted[self.forgotten :]
        assert all(len(holders) <= 2 for holders in self.held.values())

    @invariant()
    def somebody_may_work(self) -> None:
        assert not self.queue.workers or self.queue.workers.keys() - self.queue.quarantined.keys()

    def teardown(self) -> None:
        """One healthy worker is enough to end it: nothing was lost."""
        for worker in WORKERS:
            self.queue.lose(worker)
        for _ in range(100):
            for unit in self.queue.pull("healthy", 3, self.now):
                assert self.queue.complete("healthy", {"unit_id": unit["unit_id"]}, self.now)
        done = [result["unit_id"] for result in self.queue.done]
        done += self.accepted[: self.forgotten]
        assert sorted(done + list(self.queue.failed)) == sorted(self.offered)
        super().teardown()


TestQueueMachine = pytest.mark.fast(QueueMachine.TestCase)
TestQueueMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def _names(units: list[dict[str, Any]]) -> list[str]:
    return [unit["unit_id"] for unit in units]


def test_the_first_to_ask_leaves_the_others_their_share() -> None:
    queue = UnitQueue()
    for worker in WORKERS:
        queue.pull(worker, 100, 0)  # all have asked while there was nothing
    queue.offer(_units(*NAMES))
    assert [len(queue.pull(worker, 100, 0)) for worker in WORKERS] == [4, 4, 4]
    queue.offer(_units("another"))
    assert len(queue.pull("w0", 100, 0)) == 1


def test_a_slow_worker_holds_back_only_what_it_took() -> None:
    queue = UnitQueue()
    queue.offer(_units(*NAMES))
    slow = queue.pull("slow", 1, 0)
    queue.pull("fast", 0, 0)
    done = 0
    while units := queue.pull("fast", 2, 0):
        done += sum(queue.complete("fast", unit, 1) for unit in units)
    assert done == len(NAMES) - len(slow)


def test_an_idle_worker_takes_over_what_a_straggler_holds_and_the_first_result_counts() -> None:
    queue = UnitQueue()
    queue.offer(_units("a", "b", "c"))
    queue.pull("fast", 0, 0)
    assert _names(queue.pull("slow", 1, 0)) == ["a"]
    for name in ("b", "c"):
        assert _names(queue.pull("fast", 1, 0)) == [name]
        queue.complete("fast", {"unit_id": name}, 5)
    assert queue.unit_s == 5
    assert queue.pull("fast", 4, SLOW * 5) == [], "not slower than usual yet"
    assert queue.pull("slow", 4, 100) == [], "the straggler itself gets nothing"
    (copy_of_a,) = queue.pull("fast", 4, 100)
    assert (copy_of_a["unit_id"], copy_of_a["attempt"]) == ("a", 2)
    assert queue.pull("third", 4, 100) == [], "two are enough"
    assert queue.complete("fast", {"unit_id": "a", "by": "fast"}, 101)
    assert queue.cancellations("slow") == ["a"]
    assert queue.cancellations("slow") == []
    assert not queue.complete("slow", {"unit_id": "a", "by": "slow"}, 102)
    assert [result.get("by") for result in queue.done] == [None, None, "fast"]


@pytest.mark.parametrize("first", ["slow", "fast"])
def test_one_of_two_that_fails_or_dies_leaves_the_unit_with_the_other(first: str) -> None:
    for end in (lambda queue: queue.fail(first, "a", "broke", 11), lambda queue: queue.lose(first)):
        queue = UnitQueue()
        queue.offer(_units("a", "b"))
        queue.pull("fast", 0, 0)
        queue.pull("slow", 1, 0)
        queue.pull("fast", 1, 0)
        queue.complete("fast", {"unit_id": "b"}, 1)
        assert _names(queue.pull("fast", 1, 10)) == ["a"]
        end(queue)
        (other,) = {"slow", "fast"} - {first}
        assert list(queue.leased["a"].holders) == [other]
        assert not queue.pending


def test_a_poisonous_unit_stands_aside_with_its_last_message() -> None:
    queue = UnitQueue()
    queue.offer(_units("bad", "good"))
    for attempt in range(MAX_FAILURES):
        assert _names(queue.pull("w0", 1, 0)) == ["bad"]
        queue.fail("w0", "bad", f"attempt {attempt}", 0)
    assert queue.failed == {"bad": f"attempt {MAX_FAILURES - 1}"}
    assert _names(queue.pull("w0", 9, 0)) == ["good"]


def test_a_late_result_is_taken_and_spares_the_second_try() -> None:
    queue = UnitQueue()
    queue.offer(_units("u"))
    queue.pull("w0", 1, 0)
    assert queue.lose("w0") == ["u"]
    assert queue.complete("w0", {"unit_id": "u", "from": "w0"}, 0)
    assert queue.pull("w1", 1, 0) == []
    assert not queue.complete("w1", {"unit_id": "u", "from": "w1"}, 0)
    assert [result["from"] for result in queue.done] == ["w0"]


def test_a_unit_whose_workers_keep_dying_is_set_aside() -> None:
    queue = UnitQueue()
    queue.offer(_units("deadly", "good"))
    for number in range(MAX_LOSSES):
        assert _names(queue.pull(f"w{number}", 1, 0)) == ["deadly"]
        queue.lose(f"w{number}")
    assert list(queue.failed) == ["deadly"]
    assert "lost" in queue.failed["deadly"]
    assert _names(queue.pull("w9", 9, 0)) == ["good"]


def test_a_silent_worker_loses_its_units_and_one_that_calls_keeps_them() -> None:
    queue = UnitQueue()
    queue.offer(_units("a", "b"))
    queue.pull("calls", 0, 0)
    queue.pull("silent", 1, 0)
    queue.pull("calls", 1, 0)
    queue.renew("calls", WORKER_SILENT_S)
    assert queue.silent(WORKER_SILENT_S) == []
    assert queue.silent(WORKER_SILENT_S + 1) == ["silent"]
    queue.renew("never asked", 0)
    assert "never asked" not in queue.workers


def _fail_in_a_row(queue: UnitQueue, worker: str, count: int) -> list[bool]:
    found = []
    for number in range(count):
        name = f"{worker}-{number}-{len(queue.done)}"
        queue.offer(_units(name))
        taken = queue.pull(worker, 1, number)
        found.append(queue.fail(worker, taken[0]["unit_id"], "engine broke", number))
        for unit in queue.pull("well", 1, 0):  # done elsewhere: not the unit's fault
            queue.complete("well", unit, 0)
    return found


def test_a_worker_that_fails_in_a_row_while_others_do_well_is_quarantined() -> None:
    queue = UnitQueue()
    queue.pull("well", 0, 0)
    assert _fail_in_a_row(queue, "ill", MAX_BAD_ROW) == [False] * (MAX_BAD_ROW - 1) + [True]
    assert "engine broke" in queue.quarantined["ill"]
    queue.offer(_units("more"))
    assert queue.pull("ill", 1, 0) == []
    assert _names(queue.pull("well", 9, 0)) == ["more"], "its share is not kept for it"
    queue.lose("ill")  # restarted: another process, another chance
    assert not queue.quarantined


def test_units_that_fail_together_are_one_failure_of_their_worker() -> None:
    queue = UnitQueue()
    queue.pull("well", 0, 0)
    queue.pull("ill", 0, 0)
    queue.offer(_units(*NAMES))
    for unit in queue.pull("ill", 6, 0):
        assert not queue.fail("ill", unit["unit_id"], "the retriever did not answer", 1)
    assert not queue.quarantined


def test_the_last_worker_is_never_quarantined() -> None:
    queue = UnitQueue()
    for number in range(3 * MAX_BAD_ROW):
        queue.offer(_units(f"u{number}"))
        queue.pull("only", 1, 0)
        assert not queue.fail("only", f"u{number}", "engine broke", number)
    assert not queue.quarantined


def test_only_a_worker_without_units_is_retired_and_it_gets_no_more() -> None:
    queue = UnitQueue()
    queue.offer(_units("a", "b"))
    queue.pull("stays", 0, 0)
    queue.pull("goes", 1, 0)
    assert not queue.retire("goes")
    queue.complete("goes", {"unit_id": "a"}, 3)
    assert queue.idle(5) == {"stays": 5, "goes": 2}
    assert queue.retire("goes")
    assert queue.pull("goes", 5, 5) == []
    assert _names(queue.pull("stays", 5, 5)) == ["b"], "all of it: the share counts who stays"


def test_a_units_cost_is_what_a_worker_spends_on_it_and_not_how_long_it_takes() -> None:
    queue = UnitQueue()
    queue.offer(_units(*NAMES[:4]))
    assert queue.worker_s is None
    queue.pull("w0", 4, 10)  # four at once
    for name in NAMES[:4]:
        queue.complete("w0", {"unit_id": name}, 18)
    assert (queue.unit_s, queue.worker_s) == (8, 2)


LOADS = st.builds(
    Load,
    outstanding=st.integers(0, 500),
    worker_s=st.none() | st.floats(0.01, 60),
    workers=st.integers(0, 20),
    starting=st.integers(0, 20),
    idle=st.dictionaries(st.sampled_from(WORKERS), st.floats(0, 600)),
)
LIMITS = st.builds(
    lambda least, more, drain_s, idle_s: Limits(least, least + more, drain_s, idle_s),
    st.integers(1, 8),
    st.integers(0, 12),
    st.floats(1, 300),
    st.floats(1, 300),
)


def test_workers_that_end_as_they_start_are_asked_for_ever_more_rarely() -> None:
    starts, now, waits = Starts(), 0.0, []
    for number in range(9):
        assert starts.may(now)
        starts.asked_for([f"w{number}"])
        assert starts.look([f"w{number}"], [], now) is None, "it is on its way"
        wait = starts.look([], [], now)
        assert wait is not None
        waits.append(wait)
        assert not starts.may(now + wait - 1)
        now += wait
    assert waits == [5, 10, 20, 40, 80, 160, 300, 300, 300]
    starts.asked_for(["good"])
    assert starts.look(["good"], ["good"], now) is None
    assert starts.look([], [], now) is None, "one that has served may end"
    starts.asked_for(["bad"])
    assert starts.look([], [], now) == 5, "from the beginning"


@given(load=LOADS, limits=LIMITS)
def test_workers_stay_within_the_limits_and_never_come_and_go_at_once(
    load: Load, limits: Limits
) -> None:
    change = decide(load, limits)
    assert not (change.start and change.retire)
    there = load.workers + load.starting
    if change.start:
        assert there + change.start <= limits.most
        assert there < limits.least or load.outstanding
    if change.retire:
        assert load.workers - len(change.retire) >= limits.least
        assert all(load.idle[worker] >= limits.idle_s for worker in change.retire)
    if there < limits.least:
        assert there + change.start >= limits.least


@pytest.mark.parametrize(
    ("load", "change"),
    [
        (Load(100, 1.0, 2, 0, {}), Change(start=8)),  # 100 s of work, to be done in 10
        (Load(100, 1.0, 2, 5, {}), Change(start=3)),
        (Load(1000, 1.0, 2, 0, {}), Change(start=12)),
        (Load(20, 1.0, 2, 0, {}), Change()),
        (Load(100, None, 2, 0, {}), Change()),
        (Load(0, None, 0, 0, {}), Change(start=2)),
        (Load(0, 1.0, 5, 0, {"a": 31, "b": 29, "c": 40, "d": 90, "e": 50}),
         Change(retire=("d", "e", "c"))),
        (Load(0, 1.0, 5, 0, {"a": 31}), Change(retire=("a",))),
        (Load(40, 1.0, 5, 0, {"a": 31, "b": 31}), Change(retire=("a",))),
        (Load(0, 1.0, 2, 0, {"a": 99}), Change()),
    ],
)  # fmt: skip
def test_what_is_done_about_a_load(load: Load, change: Change) -> None:
    assert decide(load, Limits(least=2, most=14, drain_s=10, idle_s=30)) == change


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
