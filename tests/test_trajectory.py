"""A group's way through bytes."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.errors import IntegrityError
from tasks.rollout.trajectory import (
    End,
    Group,
    Trajectory,
    Turn,
    TurnKind,
    group_from_bytes,
    group_to_bytes,
)

pytestmark = [pytest.mark.fast, pytest.mark.timeout(120)]

FLOATS = st.floats(-100, 0, width=32)


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    tokens = draw(st.integers(0, 40))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    turn = st.builds(
        Turn,
        st.sampled_from(get_args(TurnKind)),
        st.integers(0, 9),
        st.integers(0, 9),
        st.integers(0, 9),
        st.none() | st.text(max_size=9),
        st.lists(st.integers(0, 2**40), max_size=3).map(tuple),
    )
    return Trajectory(
        ids=rng.integers(0, 2**31 - 1, tokens).astype(np.int32),
        loss_mask=rng.random(tokens) < 0.5,
        logprobs=np.array(draw(st.lists(FLOATS, min_size=tokens, max_size=tokens)), np.float32),
        versions=rng.integers(-1, 99, tokens).astype(np.int32),
        prompt_tokens=draw(st.integers(0, 9)),
        turns=tuple(draw(st.lists(turn, max_size=3))),
        end=draw(st.sampled_from(get_args(End))),
        answer=draw(st.none() | st.text(max_size=12)),
        exact_match=draw(st.booleans()),
        f1=draw(st.floats(0, 1)),
        reward=draw(st.floats(0, 2)),
        gold_titles=(titles := tuple(draw(st.lists(st.text(max_size=9), max_size=3)))),
        gold_found=titles[:1],
        search_r1=draw(st.booleans()),
    )


GROUPS = st.builds(
    Group,
    st.text(max_size=8),
    st.text(max_size=8),
    st.lists(trajectories(), min_size=1, max_size=4).map(tuple),
)
ARRAYS = ("ids", "loss_mask", "logprobs", "versions")


def _plain(trajectory: Trajectory) -> dict[str, Any]:
    names = Trajectory.__dataclass_fields__
    return {name: getattr(trajectory, name) for name in names if name not in ARRAYS}


@settings(deadline=None)
@given(GROUPS)
def test_a_group_survives_bytes(group: Group) -> None:
    back = group_from_bytes(group_to_bytes(group))
    assert (back.unit_id, back.question_id) == (group.unit_id, group.question_id)
    for ours, theirs in zip(group.trajectories, back.trajectories, strict=True):
        assert _plain(ours) == _plain(theirs)
        for name in ARRAYS:
            before, after = getattr(ours, name), getattr(theirs, name)
            assert before.dtype == after.dtype
            np.testing.assert_array_equal(before, after)


@settings(deadline=None, max_examples=300)
@given(GROUPS, st.data())
def test_damaged_bytes_are_a_group_or_an_integrity_error(group: Group, data: st.DataObject) -> None:
    whole = group_to_bytes(group)
    if data.draw(st.booleans()):
        damaged = bytearray(whole[: data.draw(st.integers(0, len(whole) - 1))])
        with pytest.raises(IntegrityError, match="should hold a group"):
            group_from_bytes(bytes(damaged))
        return
    damaged = bytearray(whole)
    header = 8 + int.from_bytes(whole[:8], "little")
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, header - 1))] = data.draw(st.integers(0, 255))
    try:
        group_from_bytes(bytes(damaged))
    except IntegrityError:
        return


@pytest.mark.parametrize("data", [b"", b"nonsense", b"\0" * 64, b"\xff" * 64])
def test_other_bytes_are_no_group(data: bytes) -> None:
    with pytest.raises(IntegrityError, match=f"^{len(data)} bytes that should hold a group do not"):
        group_from_bytes(data)
