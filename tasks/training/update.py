"""One batch's optimizer steps on one rank: what `TrainerRank.update` does."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from tasks.config import TrainConfig
from tasks.errors import GangError, KindlingError, MismatchError, NotFiniteError
from tasks.rollout.trajectory import Group
from tasks.training.batching import Item, UpdatePlan
from tasks.training.examples import Example, Padded, collate, group_examples
from tasks.training.group import check_place
from tasks.training.grpo import Totals
from tasks.training.objective import SUMS, mismatch_of, terms
from tasks.training.optimizer import PolicyOptimizer
from tasks.training.sharding import ShardedPolicy

Groups = Mapping[int, Group] | Callable[[int], Group]
_MISMATCH = SUMS.index("mismatch_kl")


class BatchUpdate:
    """A plan's mini-batches on one rank, in order, an optimizer step each.

    Collective throughout: every rank runs the same methods in the same order.

    Attributes:
        totals: of each mini-batch, over all ranks; known after `prepare`.
    """

    def __init__(
        self,
        config: TrainConfig,
        policy: ShardedPolicy,
        reference: ShardedPolicy | None,
        optimizer: PolicyOptimizer,
        plan: UpdatePlan,
        step: int,
        between: Callable[[], None],
    ) -> None:
        """`between`: called before every micro-batch; what it raises ends the update there."""
        self._config, self._training = config, config.training
        self._between = between
        self._policy, self._reference, self._optimizer = policy, reference, optimizer
        self._plan, self._step = plan, step
        self._rank, self._world, self._device = policy.rank, policy.world, policy.device
        self._examples: dict[Item, Example] = {}
        # By (mini-batch, micro-batch): the trainer's log-probabilities before the first step.
        self._old: dict[tuple[int, int], Tensor] = {}
        # What was measured ahead of the first mini-batch.
        self._ahead = torch.zeros(len(SUMS), dtype=torch.float64, device=self._device)
        self._worst = torch.zeros((), device=self._device)
        self.totals: list[Totals] = []

    def run(self, groups: Groups) -> dict[str, float]:
        """See `TrainerRank.update`."""
        began = time.perf_counter()
        self.prepare(groups)
        # Where nothing is trained on there is no gradient, and no mean to take.
        indices = [i for i, totals in enumerate(self.totals) if totals.tokens]
        if self._training.importance != "sampler":
            self.look_ahead(indices[1:])
        sums = torch.zeros(len(SUMS), dtype=torch.float64)
        losses, norms, rate = [], [], 0.0
        first: dict[str, float] = {}  # a batch of which nothing is trained on has no mismatch
        for index in indices:
            done, loss, norm = self.mini_batch(index)
            if not norms:
                first = self._check_mismatch(done)
            sums += done
            losses.append(loss)
            norms.append(norm)
            rate = self._optimizer.step(norm)
        return {
            "loss": _mean(losses),
            **self._means(sums),
            **first,
            "grad_norm": _mean(norms),
            "grad_norm_max": max(norms, default=0.0),
            "learning_rate": rate,
            "optimizer_steps": len(norms),
            "tokens": sum(totals.tokens for totals in self.totals),
            "micro_batches": self._world * sum(len(self._micros(index)) for index in indices),
            "seconds": time.perf_counter() - began,
        }

    def prepare(self, groups: Groups) -> None:
        """This rank's examples, and each mini-batch's totals over all ranks.

        One rank that raises alone would leave the others waiting in a collective. So what can be
        wrong with a rank's input is found here, and all ranks learn of it in the same all-reduce
        that sums the totals.
        """
        error: KindlingError | None = None
        step, minis = self._step, len(self._plan.micro_batches)
        counts = torch.zeros((minis, 2), dtype=torch.int64)
        try:
            self._read(groups)
            for index in range(minis):
                mine = [self._examples[item] for micro in self._micros(index) for item in micro]
                counts[index, 0] = sum(one.tokens for one in mine)
                counts[index, 1] = sum(one.tokens > 0 for one in mine)
        except KindlingError as caught:
            error = caught
        except KeyError as caught:
            error = GangError(f"step {step}: rank {self._rank} was not given group {caught}")
        flags = torch.zeros(self._world, dtype=torch.int64)
        flags[self._rank] = error is not None
        table = torch.cat([flags, counts.flatten()]).to(self._device)
        dist.all_reduce(table)
        failed = [rank for rank in range(self._world) if table[rank]]
        if error is not None:
            raise error
        if failed:
            raise GangError(f"step {step}: ranks {failed} cannot use their groups; see their error")
        self.totals = [Totals(*pair) for pair in table[self._world :].view(minis, 2).tolist()]

    def _read(self, groups: Groups) -> None:
        check_place(self._rank, self._world)
        if self._plan.ranks != self._world:
            raise GangError(
                f"step {self._step}: a plan for {self._plan.ranks} ranks, not {self._world}"
            )
        vocabulary = self._policy.model.config.get_text_config().vocab_size
        read = groups if callable(groups) else groups.__getitem__
        for index in self._plan.groups_of(self._rank):
            made = group_examples(read(index), self._training, vocabulary, f"step {self._step}")
            self._examples |= {Item(index, number): one for number, one in enumerate(made)}

    def _micros(self, index: int) -> tuple[tuple[Item, ...], ...]:
        return self._plan.micro_batches[index][self._rank]

    def _padded(self, micro: tuple[Item, ...]) -> Padded:
        return collate([self._examples[item] for item in micro]).to(self._device)

    @torch.no_grad()
    def look_ahead(self, indices: list[int]) -> None:
        """Scores mini-batches that are trained on only after the policy has moved.

        The batch's first mini-batch needs none of it: its own forward pass says the same.
        """
        for index in indices:
            for number, micro in enumerate(self._micros(index)):
                self._between()
                batch = self._padded(micro)
                scored, _ = self._policy.score(
                    batch.ids_BT, batch.trained_BT, self._config.rollout.temperature, False
                )
                self._old[index, number] = scored
                sums, worst = mismatch_of(scored, batch)
                self._ahead[_MISMATCH:] += sums
                self._worst = torch.maximum(self._worst, worst)

    def mini_batch(self, index: int) -> tuple[Tensor, float, float]:
        """Gradients of one mini-batch, checked, on every parameter.

        Returns:
            `SUMS` over all ranks (with the first mini-batch, also what `look_ahead` measured),
            the loss, and the gradient norm.

        Raises:
            NotFiniteError: on every rank alike; gradients are dropped, parameters and optimizer
                untouched.
        """
        self._optimizer.zero_grad()
        sums, self._ahead = self._ahead, torch.zeros_like(self._ahead)
        loss = torch.zeros((), dtype=torch.float64, device=self._device)
        for number, micro in enumerate(self._micros(index)):
            self._between()
            part_loss, part = self._micro_batch(index, number, self._padded(micro))
            loss += part_loss
            sums += part
        square = torch.zeros((), dtype=torch.float64, device=self._device)
        for rows in self._optimizer.gradients():
            square += rows.double().square().sum()
        values = torch.cat([sums, loss[None]])
        flags = torch.zeros(self._world, dtype=torch.float64, device=self._device)
        flags[self._rank] = not bool(torch.isfinite(values).all())
        table = torch.cat([values.nan_to_num(0, 0, 0), square[None], flags])
        dist.all_reduce(table)
        *summed, total, squared = table[: len(SUMS) + 2].tolist()
        norm = math.sqrt(squared) if squared >= 0 else math.nan
        bad = [rank for rank in range(self._world) if table[len(SUMS) + 2 + rank]]
        if bad or not math.isfinite(norm):
            self._optimizer.zero_grad()
            raise NotFiniteError(
                f"step {self._step}, mini-batch {index} of {len(self.totals)}: loss not finite on "
                f"ranks {bad}, gradient norm {norm} (seen by rank {self._rank}); this optimizer "
                "step changed nothing. Resumed, the run would do the same again: start a new one "
                "with a lower training.learning_rate, from a version of this one if you like"
            )
        return torch.tensor(summed, dtype=torch.float64), total, norm

    def _micro_batch(self, index: int, number: int, batch: Padded) -> tuple[Tensor, Tensor]:
        """Forward and backward of one micro-batch; adds to the gradients."""
        training, temperature = self._training, self._config.rollout.temperature
        logprobs_BT, entropy_BT = self._policy.score(
            batch.ids_BT, batch.trained_BT, temperature, training.entropy_coefficient > 0
        )
        reference_BT = None
        if self._reference is not None:
            with torch.no_grad():
                reference_BT, _ = self._reference.score(batch.ids_BT, batch.trained_BT, temperature)
        made = terms(
            logprobs_BT,
            entropy_BT,
            batch,
            self._old.get((index, number)),
            reference_BT,
            self.totals[index],
            training,
            self._config.model.context,
        )
        # FSDP averages gradients over the ranks; the loss is already this micro-batch's share of
        # the mini-batch's, so the average is undone here.
        (made.loss * self._world).backward()
        self._worst = torch.maximum(self._worst, made.worst)
        return made.loss.detach().double(), made.sums

    def _check_mismatch(self, sums: Tensor) -> dict[str, float]:
        """The mismatch before the first optimizer step; the same answer on every rank.

        Raises:
            MismatchError: on every rank alike; gradients are dropped, nothing was changed.
        """
        dist.all_reduce(self._worst, dist.ReduceOp.MAX)
        kl, sampled = sums[_MISMATCH:].tolist()
        found = {"mismatch_kl": kl / max(1.0, sampled), "mismatch_max": float(self._worst)}
        alarm = self._training.mismatch_alarm
        if found["mismatch_kl"] > alarm:
            self._optimizer.zero_grad()
            raise MismatchError(
                f"step {self._step}: the log-probabilities the engine sampled with and the "
                f"trainer's own are {found['mismatch_kl']:.3g} nats a token apart (KL over "
                f"{sampled:.0f} tokens; largest difference {found['mismatch_max']:.3g}), more than "
                f"training.mismatch_alarm {alarm:g}; no optimizer step was taken. The engine may "
                "hold other weights, or work in a lower precision; a rollout.top_p below 1 counts "
                "too. Mend that, or raise the alarm, and resume the run"
            )
        return found

    def _means(self, sums: Tensor) -> dict[str, float]:
        tokens = max(1, sum(totals.tokens for totals in self.totals))
        means = {n: v / tokens for n, v in zip(SUMS[:_MISMATCH], sums.tolist(), strict=False)}
        if self._reference is None:
            del means["kl"]
        if self._training.dual_clip is None:
            del means["clip_dual"]
        if self._training.importance != "truncated":
            del means["importance_cut"]
        return means


def _mean(values: list[float]) -> float:
    return sum(values) / max(1, len(values))
