"""GRPO's pure functions against other trainers' values, finite differences and edge cases."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tasks.config import Advantage, Aggregation, TrainingConfig
from tasks.errors import NotFiniteError
from tasks.training.examples import Padded
from tasks.training.grpo import (
    KL_ESTIMATORS,
    Totals,
    aggregate,
    clipped_objective,
    group_advantages,
    kl_k1,
    kl_k3,
    masked_sum,
    token_mean,
    truncated_importance,
)
from tasks.training.objective import SUMS, terms

pytestmark = pytest.mark.fast
KINDS: tuple[Advantage, ...] = get_args(Advantage)
AGGREGATIONS: tuple[Aggregation, ...] = get_args(Aggregation)
REFERENCE = Path(__file__).resolve().parents[2] / "shared/reference/core_algos_reference.json"


@pytest.fixture(scope="module")
def reference() -> dict:
    if not REFERENCE.exists():
        pytest.skip(f"{REFERENCE} is absent")
    return json.loads(REFERENCE.read_text())


def _advantages(reference: dict, kind: Advantage = "grpo") -> torch.Tensor:
    """[B, T], each row its trajectory's advantage within its group."""
    groups: dict[str, list[int]] = {}
    for row, uid in enumerate(reference["uid"]):
        groups.setdefault(uid, []).append(row)
    advantages = torch.zeros(len(reference["uid"]))
    for rows in groups.values():
        advantages[rows] = group_advantages([reference["scores"][row] for row in rows], kind)
    return advantages[:, None].expand(-1, len(reference["mask"][0]))


@pytest.mark.parametrize(
    ("name", "kind"),
    [("adv_grpo_verl", "grpo"), ("adv_grpo_search_r1", "grpo"), ("adv_grpo_nostd", "dr_grpo")],
)
def test_advantages_equal_others(reference: dict, name: str, kind: Advantage) -> None:
    actual = _advantages(reference, kind) * torch.tensor(reference["mask"])
    torch.testing.assert_close(actual, torch.tensor(reference[name]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "estimator"),
    [
        ("kl_kl", "k1"),
        ("kl_k1", "k1"),
        ("kl_sr1_kl", "k1"),
        ("kl_mse", "k2"),
        ("kl_k2", "k2"),
        ("kl_sr1_mse", "k2"),
        ("kl_k3", "k3"),
        ("kl_low_var_kl", "k3"),
        ("kl_sr1_low_var_kl", "k3"),
    ],
)
def test_kl_equals_others(reference: dict, name: str, estimator: str) -> None:
    actual = KL_ESTIMATORS[estimator](
        torch.tensor(reference["new"]), torch.tensor(reference["ref"])
    )
    torch.testing.assert_close(actual, torch.tensor(reference[name]), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "how", "constant"),
    [
        ("agg_token-mean", "token_mean", 1),
        ("agg_seq-mean-token-mean", "sequence_mean_token_mean", 1),
        ("agg_seq-mean-token-sum", "sequence_mean_token_sum", 1),
        ("agg_seq-mean-token-sum-norm", "sequence_mean_token_sum", 5),  # theirs: the padded width
    ],
)
def test_aggregation_equals_others(
    reference: dict, name: str, how: Aggregation, constant: int
) -> None:
    mask = torch.tensor(reference["mask"]).bool()
    totals = Totals(int(mask.sum()), len(mask))
    actual = aggregate(torch.tensor(reference["loss_mat"]), mask, totals, how, constant)
    torch.testing.assert_close(actual.item(), reference[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "low", "high", "dual"),
    [("search_r1_policy_loss", 0.2, 0.2, None), ("verl_policy_loss", 0.2, 0.28, 3.0)],
)
def test_policy_loss_and_gradient_equal_others(
    reference: dict, name: str, low: float, high: float, dual: float | None
) -> None:
    expected = reference[name]
    mask = torch.tensor(reference["mask"]).bool()
    new = torch.tensor(reference["new"], requires_grad=True)
    old = torch.tensor(reference["old"])
    objective = clipped_objective(new, old, _advantages(reference), low, high, dual)
    loss = token_mean(objective.loss, mask, int(mask.sum()))
    loss.backward()
    torch.testing.assert_close(loss.item(), expected["pg_loss"], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(new.grad, torch.tensor(expected["grad"]), rtol=1e-4, atol=1e-6)
    clipped = (objective.clipped_low | objective.clipped_high)[mask].float().mean()
    torch.testing.assert_close(clipped.item(), expected["clipfrac"], rtol=1e-5, atol=1e-6)
    ppo_kl = kl_k1(old, new.detach())[mask].mean()
    torch.testing.assert_close(ppo_kl.item(), expected["ppo_kl"], rtol=1e-4, atol=1e-6)
    assert objective.clipped_dual[mask].float().mean() == expected.get("clipfrac_lower", 0.0)


def test_dual_clip_bounds_the_loss_of_bad_tokens_alone() -> None:
    new = torch.tensor([2.0, 2.0, 0.5, -2.0], requires_grad=True)
    advantages = torch.tensor([-1.0, 1.0, -1.0, -1.0])
    made = clipped_objective(new, torch.zeros(4), advantages, 0.2, 0.2, 3.0)
    made.loss.sum().backward()
    ratio = new.detach().exp().tolist()
    assert made.loss.tolist() == pytest.approx([3.0, -1.2, ratio[2], 0.8])
    assert made.clipped_dual.tolist() == [True, False, False, False]
    assert made.clipped_high.tolist() == [False, True, False, False]
    assert made.clipped_low.tolist() == [False, False, False, True]
    assert new.grad is not None
    assert new.grad.tolist() == pytest.approx([0.0, 0.0, ratio[2], 0.0])


def test_truncated_importance_is_the_ratio_up_to_its_bound() -> None:
    trainer = torch.tensor([-1.0, -1.0, -5.0, 300.0], requires_grad=True)
    weights = truncated_importance(trainer, torch.tensor([-1.0, -3.0, -4.0, 0.0]), 2.0)
    assert weights.tolist() == pytest.approx([1.0, 2.0, math.exp(-1), 2.0])
    assert not weights.requires_grad


@pytest.mark.parametrize("kind", KINDS)
def test_equal_rewards_and_singletons_get_exactly_zero(reference: dict, kind: Advantage) -> None:
    """A singleton gets 0; the reference file's `edge_singleton` shows that others give it 1."""
    singleton = reference["edge_singleton"]
    assert singleton["verl"] != [[0.0, 0.0]]
    assert group_advantages(singleton["scores"], kind).tolist() == [0.0]
    assert group_advantages([0.1] * 7, kind).tolist() == [0.0] * 7
    equal = reference["edge_all equal"]
    assert group_advantages(equal["scores"], kind).tolist() == [row[0] for row in equal["verl"]]


def test_rloo_leaves_each_one_out() -> None:
    rewards = [1.0, 0.0, 0.5, 0.0]
    expected = [r - (sum(rewards) - r) / 3 for r in rewards]
    assert group_advantages(rewards, "rloo").tolist() == pytest.approx(expected)


def test_rounding_residue_does_not_explode() -> None:
    rewards = torch.tensor([0.1, 0.2, 0.3], dtype=torch.float32)
    nearly = [float(rewards[0] + rewards[1]), 0.3, 0.3, 0.3]
    assert len(set(nearly)) == 2
    for kind in KINDS:
        assert group_advantages(nearly, kind).abs().max() < 1e-3


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=16), st.sampled_from(KINDS))
def test_advantages_sum_to_zero_and_keep_order(rewards: list[float], kind: Advantage) -> None:
    advantages = group_advantages(rewards, kind)
    assert abs(float(advantages.sum())) < 1e-4
    order = sorted(range(len(rewards)), key=lambda i: rewards[i])
    ranked = [float(advantages[i]) for i in order]
    assert ranked == sorted(ranked)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_reward_that_is_not_finite_is_refused(bad: float) -> None:
    with pytest.raises(NotFiniteError, match=r"rewards \[1.0"):
        group_advantages([1.0, bad])


@pytest.mark.parametrize("dual", [None, 1.5])
@pytest.mark.parametrize("seed", [0, 1])
def test_clipped_objective_by_finite_differences(dual: float | None, seed: int) -> None:
    torch.manual_seed(seed)
    new, old = (torch.randn(4, 6, dtype=torch.float64) * 0.5 for _ in range(2))
    advantages = torch.randn(4, 6, dtype=torch.float64)

    def loss(logprobs: torch.Tensor) -> torch.Tensor:
        return clipped_objective(logprobs, old, advantages, 0.2, 0.28, dual).loss

    assert torch.autograd.gradcheck(loss, (new.requires_grad_(),))


@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_kl_by_finite_differences(name: str) -> None:
    torch.manual_seed(0)
    new, reference = (torch.randn(4, 6, dtype=torch.float64) * 0.5 for _ in range(2))
    kl = KL_ESTIMATORS[name]
    assert torch.autograd.gradcheck(lambda x: kl(x, reference), (new.requires_grad_(),))
    reference.requires_grad_()
    assert not kl(new.detach(), reference).requires_grad, "the reference is a constant"


@pytest.mark.parametrize("how", AGGREGATIONS)
def test_aggregation_by_finite_differences(how: Aggregation) -> None:
    torch.manual_seed(0)
    values, mask = torch.randn(4, 6, dtype=torch.float64), torch.rand(4, 6) > 0.4
    totals = Totals(50, 7)
    values.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: aggregate(x, mask, totals, how, 9.0), (values,))
    (gradient,) = torch.autograd.grad(aggregate(values, mask, totals, how, 9.0), values)
    assert (gradient[~mask] == 0).all()
    assert (gradient[mask] != 0).all()


def test_an_absurd_ratio_gives_no_nan() -> None:
    new = torch.tensor([0.0, -200.0, 0.0], requires_grad=True)
    old = torch.tensor([-200.0, 0.0, 0.0])
    objective = clipped_objective(new, old, torch.tensor([1.0, -1.0, 1.0]), 0.2, 0.2)
    (objective.loss.sum() + kl_k3(new, old).sum()).backward()
    assert new.grad is not None
    assert torch.isfinite(new.grad).all()
    assert torch.isfinite(objective.loss).all()


def test_outside_the_mask_nothing_counts_not_even_nan() -> None:
    values = torch.tensor([[1.0, float("nan")], [3.0, float("inf")]], requires_grad=True)
    mask = torch.tensor([[True, False], [True, False]])
    total = masked_sum(values, mask)
    total.backward()
    assert total.item() == 4.0
    assert values.grad is not None
    assert values.grad.tolist() == [[1.0, 0.0], [1.0, 0.0]]


def _padded(mask: torch.Tensor, sampled: torch.Tensor, old: torch.Tensor) -> Padded:
    advantages = torch.linspace(-1, 1, len(mask), dtype=torch.float64)[:, None]
    return Padded(torch.zeros_like(mask).long(), mask, sampled, old, advantages)


WHOLE_LOSSES: list[dict[str, Any]] = [
    {},
    {"aggregation": "sequence_mean_token_mean", "kl_estimator": "k1"},
    {"aggregation": "sequence_mean_token_sum", "kl_estimator": "k2", "dual_clip": 1.5},
    {"importance": "truncated", "importance_bound": 1.2},
    {"importance": "off", "dual_clip": 1.1, "entropy_coefficient": 0.0},
]


class WrittenOut(NamedTuple):
    policy: torch.Tensor
    loss: torch.Tensor


def _written_out(
    new: torch.Tensor,
    entropy: torch.Tensor,
    batch: Padded,
    old: torch.Tensor,
    reference: torch.Tensor,
    training: TrainingConfig,
) -> tuple[WrittenOut, dict[str, torch.Tensor]]:
    """The loss of every token and which clip cut it, one token at a time from the formulas: the
    signs, weights and order of `terms` are checked against this, not against its own pieces."""
    policy, loss = torch.zeros_like(new), torch.zeros_like(new)
    clipped = {
        name: torch.zeros_like(new, dtype=torch.bool)
        for name in ("clip_low", "clip_high", "clip_dual")
    }
    for at in np.ndindex(*new.shape):
        p, q, advantage = float(new[at]), float(reference[at]), float(batch.advantages_B1[at[0], 0])
        sampled, weight = bool(batch.sampled_BT[at]), 1.0
        behaviour = float(old[at])
        if training.importance == "sampler":
            behaviour = float(batch.logprobs_BT[at]) if sampled else p
        if training.importance == "truncated" and sampled:
            apart = float(old[at]) - float(batch.logprobs_BT[at])
            weight = min(math.exp(apart), training.importance_bound)
        ratio = math.exp(p - behaviour)
        gain = ratio * advantage
        if advantage > 0 and ratio > 1 + training.clip_high:
            gain, clipped["clip_high"][at] = (1 + training.clip_high) * advantage, True
        if advantage < 0 and ratio < 1 - training.clip_low:
            gain, clipped["clip_low"][at] = (1 - training.clip_low) * advantage, True
        if training.dual_clip is not None and advantage < 0 and ratio > training.dual_clip:
            gain, clipped["clip_dual"][at] = training.dual_clip * advantage, True
        kl = {"k1": p - q, "k2": (p - q) ** 2 / 2, "k3": math.exp(q - p) - 1 - (q - p)}
        policy[at] = -weight * gain
        loss[at] = (
            policy[at]
            + training.kl_coefficient * kl[training.kl_estimator]
            - training.entropy_coefficient * float(entropy[at])
        )
    return WrittenOut(policy, loss), clipped


@pytest.mark.parametrize("changes", WHOLE_LOSSES)
def test_the_whole_loss_by_finite_differences_and_zero_outside_the_mask(
    changes: dict[str, Any],
) -> None:
    torch.manual_seed(0)
    new, entropy, sampler, old, reference = (
        torch.randn(4, 6, dtype=torch.float64) * 0.5 for _ in range(5)
    )
    mask = torch.rand(4, 6) > 0.4
    sampled = mask & (torch.rand(4, 6) > 0.1)
    batch, totals = _padded(mask, sampled, sampler), Totals(int(mask.sum()), 4)
    training = TrainingConfig.model_validate(
        {"clip_high": 0.28, "kl_coefficient": 0.3, "entropy_coefficient": 0.05, **changes}
    )
    # Where nobody sampled the ratio is 1 whatever the policy, which no difference can show; so
    # differences are taken where the sampler did.
    old = torch.where(sampled, old, new)

    def loss(logprobs: torch.Tensor, entropies: torch.Tensor) -> torch.Tensor:
        given = torch.where(sampled, logprobs, new.detach())
        return terms(given, entropies, batch, old, reference, totals, training, 64).loss

    inputs = (new.clone().requires_grad_(), entropy.requires_grad_())
    assert torch.autograd.gradcheck(loss, inputs)
    logprobs = new.clone().requires_grad_()
    made = terms(logprobs, entropy, batch, old, reference, totals, training, 64)
    gradient, of_entropy = torch.autograd.grad(made.loss, (logprobs, entropy), allow_unused=True)
    assert (gradient[~mask] == 0).all()
    assert (gradient[mask & ~sampled] != 0).all(), "trained on though not sampled: ratio 1"
    if training.entropy_coefficient:
        assert (of_entropy[~mask] == 0).all()
        assert (of_entropy[mask] < 0).all()
    wanted, clipped = _written_out(new, entropy.detach(), batch, old, reference, training)
    weight = {
        "token_mean": mask.double() / mask.sum(),
        "sequence_mean_token_mean": mask.double() / mask.sum(-1, keepdim=True) / 4,
        "sequence_mean_token_sum": mask.double() / 64 / 4,
    }[training.aggregation]
    assert made.loss.item() == pytest.approx(float((wanted.loss * weight).sum()))
    sums: dict[str, float] = dict(zip(SUMS, made.sums.tolist(), strict=True))
    assert sums["policy_loss"] == pytest.approx(float(wanted.policy[mask].sum()))
    assert [sums[name] for name in clipped] == [int(one[mask].sum()) for one in clipped.values()]
    apart = (sampler - new)[sampled]
    assert sums["sampled"] == int(sampled.sum())
    assert sums["mismatch_kl"] == pytest.approx(float(kl_k3(sampler, new)[sampled].sum()))
    assert float(made.worst) == pytest.approx(float(apart.abs().max()))
    kl = KL_ESTIMATORS[training.kl_estimator](new, reference)
    assert sums["kl"] == pytest.approx(float(kl[mask].sum()))
    assert sums["entropy"] == pytest.approx(float(entropy.detach()[mask].sum()))
    if training.importance == "truncated":
        cut = (old - sampler)[sampled] >= math.log(1.2)
        assert sums["importance_cut"] == int(cut.sum()) > 0


@pytest.mark.parametrize("how", AGGREGATIONS)
def test_aggregation_does_not_depend_on_the_cut_or_the_padding(how: Aggregation) -> None:
    torch.manual_seed(0)
    values, mask = torch.randn(6, 5), torch.rand(6, 5) > 0.4
    mask[2] = False  # a trajectory that is not trained on
    totals = Totals(int(mask.sum()), int(mask.any(-1).sum()))
    assert totals.sequences == 5
    whole = aggregate(values, mask, totals, how, 7.0)
    parts = [
        aggregate(values[rows], mask[rows], totals, how, 7.0) for rows in ([0], [5, 2], [3, 4, 1])
    ]
    torch.testing.assert_close(sum(parts), whole)
    wide = torch.nn.functional.pad(values, (0, 4), value=float("nan"))
    padded = torch.nn.functional.pad(mask, (0, 4))
    torch.testing.assert_close(aggregate(wide, padded, totals, how, 7.0), whole)
    alone = [v[m] for v, m in zip(values, mask, strict=True) if m.any()]
    expected = {
        "token_mean": torch.cat(alone).mean(),
        "sequence_mean_token_mean": torch.stack([v.mean() for v in alone]).mean(),
        "sequence_mean_token_sum": torch.stack([v.sum() / 7 for v in alone]).mean(),
    }
    torch.testing.assert_close(whole, expected[how])
    with pytest.raises(ValueError, match="no sampled t"):
        aggregate(values, mask, Totals(0, 0), how, 7.0)
