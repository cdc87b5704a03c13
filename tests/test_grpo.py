"""GRPO's pure functions against other trainers' values, finite differences and edge cases."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tasks.config import TrainingConfig
from tasks.errors import NotFiniteError
from tasks.training.grpo import (
    clipped_objective,
    group_advantages,
    kl_k1,
    kl_k3,
    masked_sum,
    token_mean,
)
from tasks.training.objective import SUMS, terms

pytestmark = pytest.mark.fast
REFERENCE = Path(__file__).resolve().parents[2] / "shared/reference/core_algos_reference.json"


@pytest.fixture(scope="module")
def reference() -> dict:
    if not REFERENCE.exists():
        pytest.skip(f"{REFERENCE} is absent")
    return json.loads(REFERENCE.read_text())


def _advantages(reference: dict) -> torch.Tensor:
    """[B, T], each row its trajectory's advantage within its group."""
    groups: dict[str, list[int]] = {}
    for row, uid in enumerate(reference["uid"]):
        groups.setdefault(uid, []).append(row)
    advantages = torch.zeros(len(reference["uid"]))
    for rows in groups.values():
        advantages[rows] = group_advantages([reference["scores"][row] for row in rows])
    return advantages[:, None].expand(-1, len(reference["mask"][0]))


def test_advantages_equal_verl(reference: dict) -> None:
    expected = torch.tensor(reference["adv_grpo_verl"])
    actual = _advantages(reference) * torch.tensor(reference["mask"])
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["kl_k3", "kl_low_var_kl"])
def test_k3_equals_verl(reference: dict, name: str) -> None:
    actual = kl_k3(torch.tensor(reference["new"]), torch.tensor(reference["ref"]))
    torch.testing.assert_close(actual, torch.tensor(reference[name]), rtol=1e-4, atol=1e-6)


def test_k1_equals_verl(reference: dict) -> None:
    actual = kl_k1(torch.tensor(reference["new"]), torch.tensor(reference["ref"]))
    torch.testing.assert_close(actual, torch.tensor(reference["kl_k1"]), rtol=1e-5, atol=1e-6)


def test_token_mean_equals_verl(reference: dict) -> None:
    mask = torch.tensor(reference["mask"]).bool()
    actual = token_mean(torch.tensor(reference["loss_mat"]), mask, int(mask.sum()))
    torch.testing.assert_close(actual.item(), reference["agg_token-mean"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [("search_r1_policy_loss", 0.2, 0.2), ("verl_policy_loss", 0.2, 0.28)],
)
def test_policy_loss_and_gradient_equal_others(
    reference: dict, name: str, low: float, high: float
) -> None:
    expected = reference[name]
    assert expected.get("clipfrac_lower", 0.0) == 0.0, "dual clip active: not comparable"
    mask = torch.tensor(reference["mask"]).bool()
    new = torch.tensor(reference["new"], requires_grad=True)
    objective = clipped_objective(
        new, torch.tensor(reference["old"]), _advantages(reference), low, high
    )
    loss = token_mean(objective.loss, mask, int(mask.sum()))
    loss.backward()
    torch.testing.assert_close(loss.item(), expected["pg_loss"], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(new.grad, torch.tensor(expected["grad"]), rtol=1e-4, atol=1e-6)
    clipped = (objective.clipped_low | objective.clipped_high)[mask].float().mean()
    torch.testing.assert_close(clipped.item(), expected["clipfrac"], rtol=1e-5, atol=1e-6)


def test_equal_rewards_and_singletons_get_exactly_zero(reference: dict) -> None:
    assert group_advantages([1.0]).tolist() == [0.0]
    assert group_advantages([0.1] * 7).tolist() == [0.0] * 7
    equal = reference["edge_all equal"]
    assert group_advantages(equal["scores"]).tolist() == [row[0] for row in equal["verl"]]


def test_rounding_residue_does_not_explode() -> None:
    rewards = torch.tensor([0.1, 0.2, 0.3], dtype=torch.float32)
    nearly = [float(rewards[0] + rewards[1]), 0.3, 0.3, 0.3]
    assert len(set(nearly)) == 2
    assert group_advantages(nearly).abs().max() < 1e-3


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=16))
def test_advantages_sum_to_zero_and_keep_order(rewards: list[float]) -> None:
    advantages = group_advantages(rewards)
    assert abs(float(advantages.sum())) < 1e-4
    order = sorted(range(len(rewards)), key=lambda i: rewards[i])
    ranked = [float(advantages[i]) for i in order]
    assert ranked == sorted(ranked)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_reward_that_is_not_finite_is_refused(bad: float) -> None:
    with pytest.raises(NotFiniteError, match=r"rewards \[1.0"):
        group_advantages([1.0, bad])


def test_gradients_by_finite_differences() -> None:
    torch.manual_seed(0)
    new, old, ref = (torch.randn(4, 6, dtype=torch.float64) * 0.5 for _ in range(3))
    advantages = torch.randn(4, 6, dtype=torch.float64)
    new.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: clipped_objective(x, old, advantages, 0.2, 0.28).loss, (new,)
    )
    assert torch.autograd.gradcheck(lambda x: kl_k3(x, ref), (new,))


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


def test_the_whole_loss_by_finite_differences_and_zero_outside_the_mask() -> None:
    torch.manual_seed(0)
    new, entropy, old, reference = (torch.randn(4, 6, dtype=torch.float64) * 0.5 for _ in range(4))
    mask = torch.rand(4, 6) > 0.4
    advantages = torch.randn(4, 1, dtype=torch.float64)
    training = TrainingConfig.model_validate(
        {"clip_high": 0.28, "kl_coefficient": 0.3, "entropy_coefficient": 0.05}
    )

    def loss(logprobs: torch.Tensor, entropies: torch.Tensor) -> torch.Tensor:
        made = terms(logprobs, entropies, old, reference, advantages, mask, training)
        return token_mean(made.loss_BT, mask, int(mask.sum()))

    inputs = (new.requires_grad_(), entropy.requires_grad_())
    assert torch.autograd.gradcheck(loss, inputs)
    for gradient in torch.autograd.grad(loss(*inputs), inputs):
        assert (gradient[~mask] == 0).all()
        assert (gradient[mask] != 0).any()
    new, entropy = new.detach(), entropy.detach()
    made = terms(new, entropy, old, reference, advantages, mask, training)
    sums = dict(zip(SUMS, made.sums.tolist(), strict=True))
    difference = (old - new)[mask]
    assert sums["mismatch_kl"] == pytest.approx(float(difference.sum()))
    assert sums["kl"] == pytest.approx(float(kl_k3(new, reference)[mask].sum()))
    assert float(made.worst) == pytest.approx(float(difference.abs().max()))


def test_token_mean_does_not_depend_on_the_cut() -> None:
    torch.manual_seed(0)
    values, mask = torch.randn(6, 5), torch.rand(6, 5) > 0.4
    count = int(mask.sum())
    whole = token_mean(values, mask, count)
    parts = [token_mean(values[rows], mask[rows], count) for rows in ([0], [1, 2], [3, 4, 5])]
    torch.testing.assert_close(sum(parts), whole)
    with pytest.raises(ValueError, match="no sampled token"):
        token_mean(values, mask, 0)
