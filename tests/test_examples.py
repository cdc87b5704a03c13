"""What each trajectory tells the objective, and that nothing but trained tokens has a gradient."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tasks.config import TrainingConfig
from tasks.errors import IntegrityError, NotFiniteError
from tasks.rollout.trajectory import Group, Trajectory, Turn
from tasks.training.examples import check_trajectory, collate, group_examples
from tasks.training.grpo import Totals
from tasks.training.objective import terms
from tasks.training.policy import has_plain_head, token_logprobs
from tests.training_helpers import VOCABULARY, make_trajectory, tiny_model

pytestmark = pytest.mark.fast
PAD = 0  # what `collate` pads with
EOS = PAD
AGGREGATIONS = ("token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum")


def _training(**changes: Any) -> TrainingConfig:
    return TrainingConfig.model_validate(
        {"kl_coefficient": 0.3, "entropy_coefficient": 0.05, **changes}
    )


# ---------------------------------------------------------------- examples


def _group(*rewards: float, end: str = "answered") -> Group:
    made = [make_trajectory(16, seed, reward) for seed, reward in enumerate(rewards)]
    return Group("u", "q", (replace(made[0], end=end), *made[1:]))  # type: ignore[arg-type]


def test_examples_hold_advantages_and_what_was_sampled() -> None:
    group = _group(1.0, 0.0, 0.0)
    for one, trajectory in zip(
        group_examples(group, _training(advantage="rloo"), VOCABULARY, "x"),
        group.trajectories,
        strict=True,
    ):
        assert one.advantage == pytest.approx(1.0 if trajectory.reward else -0.5)
        assert np.array_equal(one.trained, trajectory.loss_mask)
        assert np.array_equal(one.sampled, trajectory.loss_mask)
        assert np.array_equal(one.logprobs, trajectory.logprobs)


def test_a_masked_trajectory_is_out_of_the_loss_and_in_the_baseline() -> None:
    group = _group(0.0, 1.0, end="truncated")
    scored = group_examples(group, _training(), VOCABULARY, "x")
    masked = group_examples(group, _training(truncated="mask"), VOCABULARY, "x")
    assert scored[0].tokens > 0
    assert masked[0].tokens == 0
    assert not masked[0].sampled.any()
    assert [one.advantage for one in masked] == [one.advantage for one in scored]
    assert masked[1].tokens == scored[1].tokens


def test_observations_are_trained_on_only_when_told_to() -> None:
    group = _group(0.0, 1.0)
    one = group_examples(group, _training(train_on_observations=True), VOCABULARY, "x")[0]
    prompt = group.trajectories[0].prompt_tokens
    assert one.trained.tolist() == [False] * prompt + [True] * (16 - prompt)
    assert np.array_equal(one.sampled, group.trajectories[0].loss_mask)
    assert one.logprobs[~one.sampled].tolist() == [0.0] * int((~one.sampled).sum())


def test_collate_pads_on_the_right() -> None:
    short, long = make_trajectory(5, seed=1), make_trajectory(9, seed=2)
    examples = group_examples(Group("u", "q", (short, long)), _training(), VOCABULARY, "x")
    batch = collate(examples)
    assert batch.ids_BT.shape == (2, 9)
    assert batch.ids_BT.dtype == torch.int64
    assert batch.trained_BT.dtype == batch.sampled_BT.dtype == torch.bool
    assert batch.logprobs_BT.dtype == torch.float32
    assert batch.ids_BT[0, :5].tolist() == short.ids.tolist()
    assert batch.ids_BT[0, 5:].tolist() == [PAD] * 4
    assert not batch.trained_BT[0, 5:].any()
    assert batch.logprobs_BT[1].tolist() == long.logprobs.tolist()
    empty = collate([])
    assert empty.ids_BT.shape == (1, 2)
    assert not empty.trained_BT.any()


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("ids", np.arange(8, dtype=np.int32), "8 ids, 9 mask entries"),
        ("ids", np.full(9, 61, np.int32), "token ids 61..61, the policy has 0..60"),
        ("ids", np.full(9, -1, np.int32), "token ids -1"),
        ("loss_mask", np.arange(9) == 1, r"prompt \(2 tokens, at least 1\) is marked as sampled"),
        ("prompt_tokens", 5, "marked as sampled"),
        ("logprobs", np.full(9, -np.inf, np.float32), "not finite"),
    ],
)
def test_a_broken_trajectory_is_refused(field: str, value: Any, message: str) -> None:
    good = make_trajectory(9, seed=0)
    check_trajectory(good, 61, "unit u")
    with pytest.raises((IntegrityError, NotFiniteError), match=f"unit u: .*{message}"):
        check_trajectory(replace(good, **{field: value}), 61, "unit u")
    with pytest.raises((IntegrityError, NotFiniteError), match="x: trajectory 1 of u: "):
        group_examples(
            Group("u", "q", (good, replace(good, **{field: value}))), _training(), 61, "x"
        )


# ---------------------------------------------------------------- gradients by token class

CLASSES = ("prompt", "sampled", "observation", "corrective", "end", "padding")
SHORT, LONG = 0, 1
# (class, tokens) of the long trajectory: a search, an invalid action, an answer that ends in EOS.
PARTS = [
    ("prompt", 5),
    ("sampled", 4),
    ("observation", 6),
    ("sampled", 3),
    ("corrective", 4),
    ("sampled", 4),
    ("end", 1),
]


def _trajectory(parts: list[tuple[str, int]], seed: int) -> tuple[Trajectory, list[str]]:
    classes = [name for name, count in parts for _ in range(count)]
    rng = np.random.default_rng(seed)
    ids = rng.integers(1, VOCABULARY, len(classes), dtype=np.int32)
    ids[[name == "end" for name in classes]] = EOS
    mask = np.array([name in ("sampled", "end") for name in classes])
    turns, at = [], 0
    for (name, count), (after, more) in zip(parts, [*parts[1:], ("", 0)], strict=True):
        if name == "sampled":
            observed = more if after in ("observation", "corrective") else 0
            kind = {"observation": "search", "corrective": "invalid"}.get(after, "answer")
            turns.append(Turn(kind, at, at + count, at + count + observed))  # type: ignore[arg-type]
        at += count
    made = Trajectory(
        ids=ids,
        loss_mask=mask,
        logprobs=np.where(mask, -rng.uniform(3, 5, len(ids)), 0).astype(np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        prompt_tokens=parts[0][1],
        turns=tuple(turns),
        end="answered",
        answer=None,
        exact_match=False,
        f1=0.0,
        reward=float(seed),
    )
    return made, classes


def _batch() -> tuple[Group, list[list[str]]]:
    short, short_classes = _trajectory(PARTS[:2] + PARTS[-1:], 0)
    long, classes = _trajectory(PARTS, 1)
    padding = ["padding"] * (len(classes) - len(short_classes))
    return Group("u", "q", (short, long)), [short_classes + padding, classes]


def _backward(group: Group, training: TrainingConfig, pad: int = PAD) -> tuple[Tensor, Tensor]:
    """Gradients of a whole loss at every position: of what the head reads there, and of the
    embedding there. Both [B, T, D]."""
    model = tiny_model()
    assert has_plain_head(model)  # tried now, so that the hooks see one forward pass
    batch = collate(group_examples(group, training, VOCABULARY, "x"))
    padding = torch.arange(batch.ids_BT.shape[1]) >= torch.tensor(
        [[len(t.ids)] for t in group.trajectories]
    )
    batch = batch._replace(ids_BT=batch.ids_BT.masked_fill(padding, pad))
    seen: list[Tensor] = []

    def keep(module: Any, arguments: Any, output: Any) -> None:
        tensor = output if isinstance(output, Tensor) else output.last_hidden_state
        tensor.retain_grad()
        seen.append(tensor)

    model.get_input_embeddings().register_forward_hook(keep)
    model.base_model.register_forward_hook(keep)
    logprobs, entropy = token_logprobs(model, batch.ids_BT, batch.trained_BT, entropy_gradient=True)
    torch.manual_seed(0)
    reference = torch.where(batch.trained_BT, logprobs.detach() - 0.5, 0)
    lengths = batch.trained_BT.sum(-1)
    totals = Totals(int(lengths.sum()), int((lengths > 0).sum()))
    terms(logprobs, entropy, batch, None, reference, totals, training, 64).loss.backward()
    embedded, hidden = (tensor.grad for tensor in seen)
    assert embedded is not None
    assert hidden is not None
    return embedded, hidden


def _of_class(gradient: Tensor, classes: list[list[str]], name: str, shift: int) -> Tensor:
    rows = [
        gradient[row, position - shift]
        for row, names in enumerate(classes)
        for position, one in enumerate(names)
        if one == name and position >= shift
    ]
    return torch.stack(rows)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("name", CLASSES)
def test_gradient_by_token_class(name: str, aggregation: str) -> None:
    """Exactly zero where a token that was not sampled is predicted, not zero elsewhere."""
    group, classes = _batch()
    _, hidden = _backward(group, _training(aggregation=aggregation))
    found = _of_class(hidden, classes, name, shift=1)
    if name in ("sampled", "end"):
        assert (found.abs().amax(-1) > 0).all()
    else:
        assert found.abs().max() == 0


def test_padding_that_looks_like_the_end_of_a_trajectory_reaches_nothing() -> None:
    """EOS = PAD: the sampled one counts, those behind it are nobody's context either."""
    group, classes = _batch()
    assert group.trajectories[SHORT].ids[-1] == PAD
    embedded, hidden = _backward(group, _training())
    assert _of_class(embedded, classes, "padding", shift=0).abs().max() == 0
    other_embedded, other_hidden = _backward(group, _training(), pad=7)
    assert torch.equal(hidden, other_hidden)
    assert torch.equal(embedded, other_embedded)


@pytest.mark.parametrize("importance", ["sampler", "truncated", "off"])
def test_log_probabilities_of_what_was_not_sampled_are_never_read(importance: str) -> None:
    group, _ = _batch()
    training = _training(importance=importance, train_on_observations=True)
    spoiled = [
        replace(t, logprobs=np.where(t.loss_mask, t.logprobs, np.float32("nan")))
        for t in group.trajectories
    ]
    for one, other in zip(
        _backward(group, training),
        _backward(replace(group, trajectories=tuple(spoiled)), training),
        strict=True,
    ):
        assert torch.equal(one, other)


def test_observations_trained_on_have_a_gradient_and_prompts_still_none() -> None:
    group, classes = _batch()
    _, hidden = _backward(group, _training(train_on_observations=True))
    for name in ("observation", "corrective"):
        assert (_of_class(hidden, classes, name, shift=1).abs().amax(-1) > 0).all()
    for name in ("prompt", "padding"):
        assert _of_class(hidden, classes, name, shift=1).abs().max() == 0


def test_a_masked_trajectory_has_no_gradient() -> None:
    group, _ = _batch()
    short, long = group.trajectories
    group = replace(group, trajectories=(short, replace(long, end="truncated")))
    _, hidden = _backward(group, _training(truncated="mask"))
    assert hidden[LONG].abs().max() == 0
    assert hidden[SHORT].abs().max() > 0
