"""No two turns of a run share a random stream."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tasks.config import TrainConfig
from tasks.data.questions import Passage, Question
from tasks.errors import ConfigError
from tasks.presets import resolve
from tasks.rollout.agent import Unit
from tasks.rollout.batches import (
    check_streams,
    evaluation_units,
    refill_units,
    train_units,
    unit_from_wire,
)
from tasks.rollout.streams import stream_seed, turns_at_most

pytestmark = [pytest.mark.fast, pytest.mark.timeout(120)]
SEEDS = st.integers(0, 2**31 - 1)
STREAMS = st.integers(0, 2**32 - 1)


def _questions(count: int) -> list[Question]:
    context = (Passage("Ada", "An actor."),)
    return [
        Question(f"q{i}", "Who?", ("Ada",), "bridge", "easy", context, ("Ada",), "")
        for i in range(count)
    ]


def _streams(unit: Unit, config: TrainConfig) -> list[int]:
    return list(range(unit.stream, unit.stream + unit.size * turns_at_most(config.rollout)))


def test_torch_uses_half_of_a_seed_on_cpus() -> None:
    """Why 63 bits of hash would not do: if this ever fails, a plain hash is enough."""

    def drawn(seed: int) -> list[float]:
        generator = torch.Generator().manual_seed(seed)
        return torch.empty(4).exponential_(generator=generator).tolist()

    assert drawn(5) == drawn(5 + 2**32)
    assert drawn(5) != drawn(6)


@given(SEEDS, STREAMS, STREAMS)
def test_seeds_of_two_streams_differ_where_torch_looks(seed: int, a: int, b: int) -> None:
    x, y = stream_seed(seed, a), stream_seed(seed, b)
    assert 0 <= x < 2**63
    assert (x % 2**32 == y % 2**32) == (a == b)


@given(st.lists(SEEDS, min_size=2, max_size=2, unique=True))
def test_runs_with_other_seeds_have_other_streams(seeds: list[int]) -> None:
    first, second = ([stream_seed(seed, i) % 2**32 for i in range(50)] for seed in seeds)
    assert first != second
    assert [b - a for a, b in zip(first, second, strict=True)] != [second[0] - first[0]] * 50


def test_neighbouring_streams_are_unlike() -> None:
    bits = [(stream_seed(0, i) ^ stream_seed(0, i + 1)).bit_count() for i in range(2000)]
    assert 15 < sum(bits) / len(bits) < 17


@pytest.mark.parametrize("samples", [1, 3])
def test_no_two_turns_of_a_run_share_a_stream(samples: int) -> None:
    config = resolve(
        "tiny",
        {
            "rollout": {"questions_per_step": 6, "group_size": 4},
            "training": {"mini_batch_size": 24},
            "evaluation": {"samples": samples},
        },
    )
    questions = _questions(9)
    streams: list[int] = []
    for step in range(5):
        units = train_units(questions, config, step, step)
        units += refill_units(questions, config, step, step, range(3))
        units += evaluation_units(questions, config, step, greedy=False)
        for unit in units:
            streams += _streams(unit, config)
            assert unit.seed == config.seed
    turns = turns_at_most(config.rollout)
    assert turns == config.rollout.max_search_turns + 1
    assert len(streams) == 5 * (9 * 4 + 9 * samples) * turns
    assert len(set(streams)) == len(streams)
    assert max(streams) < 2**32


@pytest.mark.parametrize(("held_out", "kind"), [(0, "trained on"), (10_000_000, "evaluated")])
def test_a_run_longer_than_its_streams_is_refused(held_out: int, kind: str) -> None:
    """The last step that is allowed shares no stream with an evaluation, nor with itself."""
    config = resolve("tiny")
    check_streams(config, held_out=500)
    turns = turns_at_most(config.rollout)
    of_a_step = 24 * (1 + config.training.refill_rounds) * config.rollout.group_size * turns
    most = 2**31 // (held_out * turns or of_a_step) - 2
    last = resolve("tiny", {"training": {"steps": most}})
    check_streams(last, held_out)
    (*_, unit) = train_units(_questions(30), last, most - 1, most - 1)
    assert max(_streams(unit, last)) < 2**31
    with pytest.raises(ConfigError, match=f"turns of a step that are {kind} .* {most:,} steps"):
        check_streams(resolve("tiny", {"training": {"steps": most + 1}}), held_out)


def test_a_unit_keeps_its_streams_on_its_way_to_a_worker() -> None:
    (unit, *_) = train_units(_questions(9), resolve("tiny"), 3, 2)
    assert unit.stream > 0
    assert unit_from_wire(asdict(unit)) == unit
    assert unit_from_wire(asdict(replace(unit, stream=7))).stream == 7
