"""Who holds trainer workers, who has fallen silent, and what was accepted: without any cluster."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.errors import IntegrityError, StoreConflict
from tasks.rollout.accepted import AcceptedLog, batch_of
from tasks.training.claims import claim
from tasks.training.silence import SILENT_S, START_S, Silence

pytestmark = pytest.mark.fast
_WORKERS = [f"w{n}" for n in range(6)]
_actions = st.one_of(
    st.tuples(st.just("claim"), st.sampled_from("abc"), st.integers(1, 4)),
    st.tuples(st.just("close"), st.sampled_from("abc"), st.just(0)),
    st.tuples(st.just("toggle"), st.sampled_from(_WORKERS), st.just(0)),
)


@given(st.lists(_actions, max_size=40))
def test_a_run_holds_all_its_workers_or_none_and_nobody_else_s(
    actions: list[tuple[str, str, int]],
) -> None:
    present = list(_WORKERS)
    held: dict[str, tuple[str, ...]] = {}
    for action, who, size in actions:
        if action == "toggle":
            present = sorted(set(present) ^ {who})
        elif action == "close":
            held.pop(who, None)
        else:
            mine = held.get(who, ())
            others = {run: workers for run, workers in held.items() if run != who}
            made = claim(size, present, mine, others)
            held[who] = made.workers
            free = set(present) - {w for workers in others.values() for w in workers}
            assert len(made.workers) == (size if len(free) >= size else 0)
            assert set(made.workers) <= free
            living = [worker for worker in mine if worker in free]
            if made.workers:
                assert set(living[:size]) <= set(made.workers) or len(living) > size
        every = [worker for workers in held.values() for worker in workers]
        assert len(every) == len(set(every)), "two runs hold one worker"


def test_a_claim_says_why_it_is_empty() -> None:
    made = claim(2, ["a", "b", "c"], (), {"night": ("a", "b"), "idle": ()})
    assert made.workers == ()
    assert made.why() == (
        "2 trainer workers are needed and the cluster has 3, of which 2 by run night are in use"
    )


def test_a_rank_is_silent_when_it_gives_no_sign_and_its_worker_none_for_it() -> None:
    silence = Silence(2, now=0.0)
    assert silence.look([1, 0], [None, "a"], SILENT_S - 1) is None
    assert silence.look([2, 0], [None, "b"], SILENT_S + 1) is None, "its worker is heard of"
    late = silence.look([3, 0], [None, "b"], 2 * SILENT_S + 2)
    assert late is not None
    assert (late.rank, late.why()) == (1, f"gave no sign of life for {SILENT_S + 1:.0f} s")
    assert silence.look([4, 1], [None, "b"], 2 * SILENT_S + 3) is None, "it has begun"
    assert silence.look([5, 1], [None, "c"], 3 * SILENT_S + 2) is None
    late = silence.look([6, 1], [None, "d"], 3 * SILENT_S + 4)
    assert late is not None, "its own word counts from then on"
    assert late.rank == 1


def test_a_rank_that_never_begins_is_silent_however_often_its_worker_is_heard_of() -> None:
    silence = Silence(1, now=0.0)
    for second in range(int(START_S) + 1):
        assert silence.look([0], [second], second) is None
    assert silence.look([0], ["now"], START_S + 1) is not None


class _Folder:
    """A store in memory, of what the log needs."""

    def __init__(self) -> None:
        self.data: dict[str, bytes] = {}

    def create(self, key: str, data: bytes) -> None:
        if key in self.data:
            raise StoreConflict(key)
        self.data[key] = data

    def get_many(self, keys: Sequence[str]) -> list[bytes]:
        return [self.data[key] for key in keys]

    def list(self, prefix: str = "") -> list[str]:
        return [key for key in self.data if key.startswith(prefix)]


_units = st.builds(
    "{}-{:06d}-{}{:05d}".format,
    st.sampled_from(["train", "evaluation"]),
    st.integers(0, 2),
    st.sampled_from(["", "refill-", "greedy-"]),
    st.integers(0, 3),
)


@given(st.lists(st.lists(st.lists(_units, max_size=4), max_size=4), min_size=1, max_size=3))
def test_what_was_accepted_is_found_again(lives: list[list[list[str]]]) -> None:
    store = _Folder()
    wanted: dict[str, int] = {}
    count = 0
    for life, appends in enumerate(lives):
        log = AcceptedLog(store, "run", life)
        for units in appends:
            log.append([{"unit_id": unit, "version": count + n} for n, unit in enumerate(units)])
            wanted |= {unit: count + n for n, unit in enumerate(units)}
            count += len(units)
    log = AcceptedLog(store, "run", len(lives))
    for batch in {batch_of(unit) for unit in wanted}:
        found = log.read(batch)
        assert {unit: row["version"] for unit, row in found.items()} == {
            unit: version for unit, version in wanted.items() if batch_of(unit) == batch
        }


def test_a_first_life_reads_nothing_and_two_flows_cannot_share_a_life() -> None:
    store = _Folder()
    AcceptedLog(store, "run", 1).append([{"unit_id": "train-000001-00000"}])
    assert AcceptedLog(store, "run", 0).read("train-000001") == {}
    with pytest.raises(StoreConflict):
        AcceptedLog(store, "run", 1).append([{"unit_id": "train-000001-00001"}])


@pytest.mark.parametrize("data", [b"{", b"[1]\n", b"{}\n", b"\xff"])
def test_a_damaged_log_is_named(data: bytes) -> None:
    store = _Folder()
    store.create("runs/run/accepted/train-000001/0000-000000.jsonl", data)
    with pytest.raises(IntegrityError, match=r"0000-000000\.jsonl is no log"):
        AcceptedLog(store, "run", 1).read("train-000001")
