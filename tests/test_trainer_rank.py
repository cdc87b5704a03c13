"""Trainer ranks as real processes: the update does not depend on how the work is cut."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import PreTrainedModel

from tasks.config import TrainConfig
from tasks.errors import GangError
from tasks.training.batching import Item
from tasks.training.gang import (
    EpochEnded,
    Event,
    Gang,
    RankFailed,
    RankReady,
    WorkerJoined,
    WorkerLost,
    advance,
)
from tasks.training.group import GangCoordinator, check_address, join
from tasks.training.grpo import KL_ESTIMATORS, clipped_objective, group_advantages, kl_k3
from tasks.training.policy import load_policy, token_logprobs
from tests import trainer_pool as scenarios
from tests.trainer_pool import FolderStore, Pool, config, plan_of
from tests.training_helpers import make_batch, save_tiny_policy


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """The policies are too small to share out, and the ranks need the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    pool = Pool()
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_policy(tmp_path_factory.mktemp("policy") / "model")


FULL = {"kl_coefficient": 0.3, "entropy_coefficient": 0.05}
WHOLE = {"mini_batch_size": 16, **FULL}
VARIANTS: list[dict[str, Any]] = [
    {},
    {"aggregation": "sequence_mean_token_mean", "truncated": "mask"},
    {"aggregation": "sequence_mean_token_sum", "truncated": "mask", "advantage": "dr_grpo"},
    {"aggregation": "sequence_mean_token_sum", "aggregation_constant": 9, "dual_clip": 1.5},
    {"train_on_observations": True, "truncated": "mask", "importance": "off"},
    {
        "importance": "truncated",
        "importance_bound": 1.1,
        "advantage": "rloo",
        "train_on_observations": True,
        "aggregation": "sequence_mean_token_mean",
    },
    # k1's gradient is not 0 where policy and base are equal, as k2's and k3's are.
    {"kl_estimator": "k1", "clip_low": 0.1, "clip_high": 0.6, "temperature": 1.3},
]


def _plain_loss(
    model: PreTrainedModel, settings: TrainConfig, items: list[Item], old: dict[Item, Tensor]
) -> Tensor:
    """A mini-batch's loss, one unpadded trajectory at a time and written out, sharing nothing with
    the trainer but the per-token formulas. `old`: by the trainer, before the first step."""
    groups, training = make_batch(4, 4)[0], settings.training
    sums, counts = [], []
    for item in items:
        group = groups[item.group]
        one = group.trajectories[item.trajectory]
        rewards = [o.reward for o in group.trajectories]
        advantage = group_advantages(rewards, training.advantage)[item.trajectory]
        ids, sampled = torch.tensor(one.ids[None]).long(), torch.tensor(one.loss_mask[None])
        mask = sampled.clone()
        if training.train_on_observations:
            mask[:, one.prompt_tokens :] = True
        if training.truncated == "mask" and one.end == "truncated":
            continue
        logprobs, entropy = token_logprobs(
            model, ids, mask, settings.rollout.temperature, entropy_gradient=True
        )
        trainer = old.get(item, logprobs.detach())
        sampler = torch.where(sampled, torch.tensor(one.logprobs[None]), trainer)
        behaviour = sampler if training.importance == "sampler" else trainer
        made = clipped_objective(
            logprobs,
            behaviour,
            advantage,
            clip_low=training.clip_low,
            clip_high=training.clip_high,
            dual_clip=training.dual_clip,
        )
        weight = torch.ones_like(sampler)
        if training.importance == "truncated":
            weight = (trainer - sampler).exp().clamp(max=training.importance_bound)
        loss = weight * made.loss - training.entropy_coefficient * entropy
        # The base is the policy itself before the first step.
        kl = KL_ESTIMATORS[training.kl_estimator](logprobs, logprobs.detach())
        loss = loss + training.kl_coefficient * kl
        sums.append((loss * mask).sum())
        counts.append(int(mask.sum()))
    if training.aggregation == "token_mean":
        return sum(sums, torch.zeros(())) / sum(counts)
    if training.aggregation == "sequence_mean_token_mean":
        return torch.stack([s / c for s, c in zip(sums, counts, strict=True)]).mean()
    return torch.stack(sums).mean() / (training.aggregation_constant or settings.model.context)


def _first_items(settings: TrainConfig, mini_batch: int = 0) -> list[Item]:
    plan = plan_of(make_batch(4, 4), settings, 1)
    return [item for micro in plan.micro_batches[mini_batch][0] for item in micro]


def _plain_gradient(folder: Path, **training: Any) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradient of the first mini-batch."""
    model, settings = load_policy(folder), config(**training)
    loss = _plain_loss(model, settings, _first_items(settings), {})
    loss.backward()
    return loss.item(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.fixture(scope="module")
def plain(folder: Path) -> list[tuple[float, dict[str, Tensor]]]:
    return [_plain_gradient(folder, **WHOLE, **variant) for variant in VARIANTS]


@pytest.mark.parametrize(
    ("world", "budget", "order"), [(1, 64, 0), (1, 4096, 1), (2, 64, 2), (2, 4096, 0), (4, 96, 3)]
)
def test_gradient_depends_on_neither_ranks_nor_padding_nor_cut_nor_order(
    pool: Pool,
    folder: Path,
    plain: list[tuple[float, dict[str, Tensor]]],
    world: int,
    budget: int,
    order: int,
) -> None:
    settings = [config(tokens_per_micro_batch=budget, **WHOLE, **v) for v in VARIANTS]
    for rank in pool.run(world, scenarios.gradients, folder=folder, settings=settings, order=order):
        for variant, (loss, full), (wanted, expected) in zip(VARIANTS, rank, plain, strict=True):
            assert loss == pytest.approx(wanted, rel=1e-4), variant
            assert full.keys() == expected.keys()
            for name, gradient in full.items():
                torch.testing.assert_close(gradient, expected[name], rtol=1e-3, atol=1e-6)


def test_every_variant_is_another_gradient(plain: list[tuple[float, dict[str, Tensor]]]) -> None:
    """Else the test above would not tell them apart."""
    flat = [torch.cat([g.flatten() for g in one.values()]) for _, one in plain]
    for i, one in enumerate(flat):
        for other in flat[:i]:
            assert (one - other).norm() > 1e-3 * one.norm()


@pytest.mark.parametrize("importance", ["truncated", "off", "sampler"])
def test_the_denominator_is_from_before_the_first_of_two_steps(
    pool: Pool, folder: Path, importance: str
) -> None:
    settings = config(1.3, importance=importance, importance_bound=1.1, learning_rate=1e-2)
    items = [_first_items(settings, index) for index in (0, 1)]
    model, groups = load_policy(folder), make_batch(4, 4)[0]
    old, apart = {}, []
    for number, mini_batch in enumerate(items):
        for item in mini_batch:
            one = groups[item.group].trajectories[item.trajectory]
            mask = torch.tensor(one.loss_mask[None])
            with torch.no_grad():
                ids = torch.tensor(one.ids[None]).long()
                old[item], _ = token_logprobs(model, ids, mask, 1.3)
            if number == 0 or importance != "sampler":
                apart.append((torch.tensor(one.logprobs[None]) - old[item])[mask])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0)
    losses, counts = [], []
    for mini_batch in items:
        loss = _plain_loss(model, settings, mini_batch, old)
        losses.append(loss.item())
        counts.append(
            sum(groups[i.group].trajectories[i.trajectory].sampled_tokens for i in mini_batch)
        )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    wrong = _plain_loss(model, settings, items[1], {}).item()
    for metrics, *_ in pool.run(2, scenarios.updated, folder=folder, settings=settings, steps=1):
        assert metrics[0]["loss"] == pytest.approx(sum(losses) / 2, rel=1e-3)
        a_token = float(np.dot(losses, counts)) / sum(counts)
        assert metrics[0]["policy_loss"] == pytest.approx(a_token, rel=1e-3)
        difference = torch.cat(apart)
        kl = kl_k3(difference, torch.zeros(())).mean().item()
        assert metrics[0]["mismatch_kl"] == pytest.approx(kl, rel=1e-4)
        assert metrics[0]["mismatch_max"] == pytest.approx(float(difference.abs().max()), rel=1e-4)
        assert ("importance_cut" in metrics[0]) == (importance == "truncated")
    if importance != "sampler":
        assert wrong != pytest.approx(losses[1], rel=1e-2), "the policy has moved"


def test_a_mismatch_stops_all_ranks_before_the_first_step(pool: Pool, folder: Path) -> None:
    for importance in ("sampler", "truncated"):
        settings = config(mismatch_alarm=0.2, importance=importance)
        for said in pool.run(2, scenarios.alarmed, folder=folder, settings=settings):
            assert said[0].startswith("MismatchError: step 5: the log-probabilities the engine")
            assert "training.mismatch_alarm 0.2; no optimizer step was taken" in said[0]
            assert said[1:] == ["unchanged: True, steps 0", "works again: steps 2"]


def test_an_update_moves_the_policy_and_exports_it_whole(pool: Pool, folder: Path) -> None:
    answers = pool.run(2, scenarios.updated, folder=folder, settings=config(**FULL), steps=2)
    (metrics, _, full, bf16), other = answers[0], answers[1]
    timeless = [{k: v for k, v in m.items() if k != "seconds"} for m in metrics]
    assert timeless == [{k: v for k, v in m.items() if k != "seconds"} for m in other[0]]
    first, second = metrics
    assert first["optimizer_steps"] == 2
    assert first["learning_rate"] == 1e-3
    assert first["kl"] >= 0
    assert second["kl"] > first["kl"]
    assert 0 < first["mismatch_max"] < 20
    assert first["tokens"] == sum(
        t.sampled_tokens for g in make_batch(4, 4)[0] for t in g.trajectories
    )
    base = dict(load_policy(folder).named_parameters())
    assert full.keys() == base.keys(), "Hugging Face names, tied embeddings once"
    assert "lm_head.weight" not in full
    assert all(not torch.equal(full[name], base[name]) for name in full)
    for name, tensor in bf16.items():
        assert torch.equal(tensor, full[name].bfloat16())
        pieces = sorted(
            (s.start, s.values) for a in answers for s in a[1] if s.name == name and s.values.size
        )
        assert [p[0] for p in pieces] == list(np.cumsum([0, *(p[1].size for p in pieces[:-1])]))
        whole = np.concatenate([p[1] for p in pieces])
        assert np.array_equal(whole, tensor.flatten().view(torch.int16).numpy().view(np.uint16))


def test_a_batch_that_is_masked_whole_changes_nothing(pool: Pool, folder: Path) -> None:
    settings = config(truncated="mask", **FULL)
    for metrics, unchanged in pool.run(2, scenarios.all_masked, folder=folder, settings=settings):
        assert unchanged
        assert (metrics["tokens"], metrics["optimizer_steps"], metrics["loss"]) == (0, 0, 0)
        assert "mismatch_kl" not in metrics, "nothing was measured, which is not a perfect 0"


def test_a_step_equals_plain_adamw(pool: Pool, folder: Path) -> None:
    settings = config(mini_batch_size=16, warmup_steps=2, max_grad_norm=0.01)
    ((metrics, _, full, _),) = pool.run(
        1, scenarios.updated, folder=folder, settings=settings, steps=1
    )
    _, gradients = _plain_gradient(folder, mini_batch_size=16)
    model = load_policy(folder)
    for name, parameter in model.named_parameters():
        parameter.grad = gradients[name].clone()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0).step()
    assert metrics[0]["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    assert metrics[0]["learning_rate"] == 5e-4
    for name, parameter in model.named_parameters():
        # Adam's first step is lr * sign(g) nearly: entries whose gradient is rounding may differ.
        close = (full[name] - parameter).abs() < 1e-5
        assert close.float().mean() > 0.99, name


def test_a_whole_update_is_the_same_on_1_2_and_4_ranks(pool: Pool, folder: Path) -> None:
    settings = config(1.3, **FULL, clip_low=0.1, clip_high=0.6, kl_estimator="k1")
    ran = [
        pool.run(world, scenarios.updated, folder=folder, settings=settings, steps=2)[0]
        for world in (1, 2, 4)
    ]
    (alone, _, expected, _), *others = ran
    for metrics, _, full, _ in others:
        for found, wanted in zip(metrics, alone, strict=True):
            for key in wanted.keys() - {"seconds", "micro_batches"}:
                assert found[key] == pytest.approx(wanted[key], rel=1e-3, abs=1e-5), key
        for name, tensor in full.items():
            # Of Adam's sign-like first steps, those of gradients that are rounding may differ.
            close = (tensor - expected[name]).abs() < 1e-4
            assert close.float().mean() > 0.99, name


def test_a_rank_without_work_takes_part(pool: Pool, folder: Path) -> None:
    settings = config(**FULL)
    three = pool.run(3, scenarios.one_trajectory, folder=folder, settings=settings)
    one = pool.run(1, scenarios.one_trajectory, folder=folder, settings=settings)[0]
    for metrics in three:
        for key in ("loss", "grad_norm", "entropy", "tokens"):
            assert metrics[key] == pytest.approx(one[key], rel=1e-4)


def test_what_fails_on_one_rank_is_an_error_on_all_and_changes_nothing(
    pool: Pool, folder: Path
) -> None:
    zero, one = pool.run(2, scenarios.failures, folder=folder, settings=config())
    assert zero[0] == "GangError: step 7: ranks [1] cannot use their groups; see their error"
    assert one[0].startswith("NotFiniteError: step 7: trajectory 0 of u: the sampler's")
    assert "ranks [1]" in zero[1]
    assert "was not given group" in one[1]
    for said in (zero, one):
        assert said[2].startswith("NotFiniteError: step 8, mini-batch 0 of 2: loss not finite on")
        assert said[3:] == ["unchanged: True, steps 0", "works again: steps 2"]


def test_a_warm_second_run_equals_the_first_and_reads_nothing(pool: Pool, folder: Path) -> None:
    base = dict(load_policy(folder).named_parameters())
    runs = [
        pool.run(2, scenarios.warm_run, folder=folder, settings=config(**training))
        for training in ({}, FULL, {}, FULL)
    ]
    for run in runs:
        for loads, start, _, _ in run:
            assert loads == 1
            assert all(torch.equal(start[name], base[name]) for name in base)
    for first, second in ((runs[0], runs[2]), (runs[1], runs[3])):
        assert all(torch.equal(first[0][2][n], second[0][2][n]) for n in base)
    for loads, start, trained, _ in pool.run(
        2, scenarios.warm_run, shift=1, folder=folder, settings=config(**FULL)
    ):
        assert loads == 2, "another rank holds other rows"
        assert all(torch.equal(start[name], base[name]) for name in base)
        assert all(torch.equal(trained[n], runs[1][0][2][n]) for n in base)
    loads, start, _, _ = pool.run(1, scenarios.warm_run, folder=folder, settings=config())[0]
    assert loads == 3, "a gang of another size cuts the parameters differently"
    assert all(torch.equal(start[name], base[name]) for name in base)


def test_training_resumes_exactly_and_on_other_gang_sizes(
    pool: Pool, folder: Path, tmp_path: Path
) -> None:
    arguments = {
        "folder": folder,
        "settings": config(warmup_steps=6, kl_coefficient=0.1),
        "store": FolderStore(tmp_path),
    }
    going_on = pool.run(2, scenarios.save, more=2, **arguments)[0]
    extra, resumed = pool.run(2, scenarios.resume, more=2, **arguments)[0]
    assert extra == (2, {"version": 2, "cursor": [0, 8]}, 8)
    for name, tensor in going_on.items():
        assert torch.equal(tensor, resumed[name]), name
    _, at_checkpoint = pool.run(2, scenarios.resume, more=0, **arguments)[0]
    for world in (1, 3):
        for _, full in pool.run(world, scenarios.resume, more=0, **arguments):
            assert all(torch.equal(full[n], at_checkpoint[n]) for n in full)
        _, further = pool.run(world, scenarios.resume, more=1, **arguments)[0]
        assert further["model.norm.weight"].isfinite().all()


def test_join_names_who_is_missing_and_refuses_older_epochs(pool: Pool, folder: Path) -> None:
    arguments = {"folder": folder, "settings": config()}
    ((kind, text),) = pool.answers(3, scenarios.one_trajectory, [1], timeout_s=1.0, **arguments)
    assert kind == "failed"
    assert "rank 1 of 3" in text
    assert "ranks [0, 2] did not join within 1 s" in text
    coordinator = GangCoordinator()
    old = coordinator.new_epoch()
    assert coordinator.missing(old, 2) == [0, 1]
    new = coordinator.new_epoch()
    with pytest.raises(GangError, match=f"refused, the coordinator is at epoch {new}"):
        join("127.0.0.1", coordinator.port, old, 0, 1, 2.0)
    port = coordinator.port
    coordinator.close()
    with pytest.raises(GangError, match="no gang through"):
        join("127.0.0.1", port, new, 0, 1, 1.0)
    with pytest.raises(GangError, match="closed"):
        coordinator.new_epoch()
    with pytest.raises(GangError, match="rank 0 was meant for worker a"):
        check_address(0, "a", "b")


def test_a_rank_that_dies_is_a_gang_error_for_the_others(pool: Pool, folder: Path) -> None:
    answers = pool.answers(2, scenarios.die, range(2), folder=folder, settings=config())
    assert answers[1] == ("dead", 1)
    assert answers[0][0] == "done", answers[0][1]
    assert answers[0][1].startswith("GangError: step 2, rank 0 of 2: a peer is gone")


# ---------------------------------------------------------------- the state machine

_workers = st.sampled_from("abcd")
_epochs, _ranks = st.integers(0, 4), st.integers(0, 2)
_events = st.one_of(
    st.builds(WorkerJoined, _workers),
    st.builds(WorkerLost, _workers),
    st.builds(RankReady, _epochs, _ranks),
    st.builds(RankFailed, _epochs, _ranks, st.just("why")),
    st.builds(EpochEnded, _epochs),
)


@pytest.mark.fast
@given(st.lists(_events, max_size=40))
def test_gang_runs_with_all_its_ranks_or_not_at_all(events: list[Event]) -> None:
    gang = Gang(size=3)
    for event in events:
        try:
            after = advance(gang, event)
        except GangError:
            assert isinstance(event, RankReady)
            assert event.epoch != gang.epoch or gang.state not in ("forming", "running")
            continue
        assert after.epoch in (gang.epoch, gang.epoch + 1)
        if after.epoch > gang.epoch:
            assert after.state == "forming"
            assert after.ready == frozenset()
            last = gang.members or gang.former
            assert all(
                worker not in after.workers or after.members[rank] == worker
                for rank, worker in enumerate(last)
            )
        if after.state in ("forming", "running"):
            assert len(set(after.members)) == 3
            assert set(after.members) <= set(after.workers)
        assert (after.state == "running") == (
            after.state in ("forming", "running") and after.ready == {0, 1, 2}
        )
        if after.state == "waiting":
            assert after.missing > 0
        gang = after


@pytest.mark.fast
def test_gang_breaks_and_forms_again_with_a_replacement() -> None:
    gang = Gang(size=2)
    for event in (WorkerJoined("a"), WorkerJoined("b"), RankReady(1, 0), RankReady(1, 1)):
        gang = advance(gang, event)
    assert (gang.state, gang.members) == ("running", ("a", "b"))
    gang = advance(gang, WorkerLost("a"))
    assert (gang.state, gang.reason) == ("broken", "rank 0 was lost with worker a")
    gang = advance(gang, WorkerJoined("c"))
    assert gang.state == "broken", "its old ranks may still run"
    with pytest.raises(GangError, match="let go of the old epoch"):
        advance(gang, RankReady(1, 1))
    gang = advance(gang, EpochEnded(1))
    assert (gang.state, gang.epoch) == ("forming", 2)
    assert gang.members == ("c", "b"), "who is left keeps its rank: it has read that rank's rows"
    assert advance(gang, RankFailed(1, 1, "late")) == gang
