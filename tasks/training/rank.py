"""One rank of the trainer group, kept warm in its process across steps and runs."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tasks.config import TrainConfig
from tasks.errors import GangError, IntegrityError, KindlingError, NotFiniteError
from tasks.rollout.trajectory import Group, Trajectory
from tasks.training.batching import MicroBatch, UpdatePlan, check_trajectory, collate
from tasks.training.checkpoint import Range, RankState
from tasks.training.group import gang_failures
from tasks.training.grpo import group_advantages, token_mean
from tasks.training.objective import SUMS, terms
from tasks.training.policy import load_policy
from tasks.training.sft import learning_rate_at
from tasks.training.sharding import (
    ShardedPolicy,
    cast_parameters,
    is_bf16,
    local_rows,
    rebuild,
)
from tasks.weights.publisher import DeviceShard, LocalShard

Groups = Mapping[int, Group] | Callable[[int], Group]
_MOMENTS = ("exp_avg", "exp_avg_sq")


class TrainerRank:
    """The policy's shard of this rank, its optimizer, and GRPO updates on them.

    Needs the default process group (`tasks.training.group.join`) before it is built and whenever
    it works; every method that is called on one rank must be called on all, in the same order,
    except `export_shards`, `state` and `ranges`, which touch this rank alone.

    Attributes:
        base_loads: how often weights were read from disk; 1 on a warm rank, whatever it runs.
        optimizer_steps: taken since the base (they drive the learning-rate warm-up).
    """

    def __init__(
        self,
        config: TrainConfig,
        model_dir: Path,
        rank: int,
        world: int,
        device: str | None = None,
    ) -> None:
        """Read the policy and shard it.

        Args:
            config: the run's; `reset` takes another run's.
            model_dir: a policy's folder, see `resolve_model_dir`.
            rank, world: must be the default process group's.
            device: "cpu" or "cuda"; None takes a GPU where there is one.

        Raises:
            PolicyError: the folder holds no whole policy.
            GangError: no process group, or another rank or world than the group's.
        """
        self.config, self.model_dir = config, Path(model_dir)
        self.rank, self.world = rank, world
        self._check_group()
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.base_loads = 0
        self._reference: ShardedPolicy | None = None
        self._load()
        self._fresh_optimizer()

    # ------------------------------------------------------------ life

    def reset(
        self, config: TrainConfig | None = None, rank: int | None = None, world: int | None = None
    ) -> None:
        """Back to the base weights with a fresh optimizer, without reading the model again.

        Also moves to the current default process group where that is a new one, in the place
        given. Another place, or a gang of another size, holds other rows: there the model is read
        again, so keep each worker's rank from run to run.
        """
        self.config = config or self.config
        self.rank = self.rank if rank is None else rank
        self.world = self.world if world is None else world
        self._check_group()
        plain = self._policy.plain_head
        if (self._policy.rank, self._policy.world) != (self.rank, self.world):
            self._load()
        elif self._policy.group is not dist.group.WORLD:
            self._policy = rebuild(self.model_dir, self._base, self.device, True, plain)
            self._reference = None
        self._policy.load_local(self._base)
        if self.config.training.kl_coefficient == 0:
            self._reference = None
        elif self._reference is None:
            self._reference = rebuild(self.model_dir, self._base, self.device, False, plain)
        self._fresh_optimizer()

    def _check_group(self) -> None:
        if not dist.is_initialized():
            raise GangError(f"trainer rank {self.rank} has no process group; join the gang first")
        actual = (dist.get_rank(), dist.get_world_size())
        if actual != (self.rank, self.world):
            raise GangError(
                f"trainer rank {self.rank} of {self.world} is rank {actual[0]} of {actual[1]} in "
                "the process group: it joined another epoch than it was built for"
            )

    def _load(self) -> None:
        model = load_policy(self.model_dir, torch.float32)
        self.base_loads += 1
        # The base stays at hand, sharded, for `reset`: in bf16 where that loses nothing.
        kept = torch.bfloat16 if is_bf16(model) else torch.float32
        self._reference = None
        if self.config.training.kl_coefficient > 0:
            frozen = copy.deepcopy(model)
            cast_parameters(frozen, kept)
            self._reference = ShardedPolicy(frozen, self.device, trainable=False)
        self._policy = ShardedPolicy(model, self.device, trainable=True)
        rows = (self._reference or self._policy).local()
        self._base = {name: own.to(kept, copy=True) for name, own in rows.items()}

    def _fresh_optimizer(self) -> None:
        training = self.config.training
        self._optimizer = torch.optim.AdamW(
            [parameter for _, parameter in self._policy.parameters()],
            lr=training.learning_rate,
            betas=(training.beta1, training.beta2),
            weight_decay=training.weight_decay,
        )
        self.optimizer_steps = 0

    # ------------------------------------------------------------ learning

    def update(self, groups: Groups, plan: UpdatePlan, step: int) -> dict[str, float]:
        """One GRPO update: the plan's mini-batches in order, an optimizer step each.

        Args:
            groups: this rank's groups (`plan.groups_of(rank)`) by index, or what reads one.
            plan: of the whole gang, equal on every rank.
            step: of the run; for messages.

        Returns:
            The same on every rank, means over the batch's sampled tokens unless said: loss,
            policy_loss, entropy and kl (nats; kl only with a reference), clip_low and clip_high
            (fractions), mismatch_kl and mismatch_max (k1 of sampler against trainer and the
            largest |difference| of log-probabilities, before the first optimizer step), grad_norm
            (mean over optimizer steps, before the clip), grad_norm_max, learning_rate (of the last
            step), optimizer_steps (in this update), tokens (sampled), micro_batches (of this
            gang), seconds.

        Raises:
            NotFiniteError: on every rank alike; the failing optimizer step changed nothing.
            GangError: another rank refused its groups (nothing was changed), or died.
            KindlingError: this rank could not read or use its groups; nothing was changed.
        """
        with gang_failures(f"step {step}, rank {self.rank} of {self.world}"):
            return self._update(groups, plan, step)

    def _update(self, groups: Groups, plan: UpdatePlan, step: int) -> dict[str, float]:
        began = time.perf_counter()
        if self.device.type == "cpu":
            # Here, not once: the setting belongs to the thread, and Dask runs tasks in any.
            torch.set_num_threads(self.config.cluster.trainer_threads)
        mine, counts = self._prepare(groups, plan, step)
        sums, norms, rate, micros = torch.zeros(len(SUMS), dtype=torch.float64), [], 0.0, 0
        first = {"mismatch_kl": 0.0, "mismatch_max": 0.0}
        for index, mini_batch in enumerate(plan.micro_batches):
            if counts[index] == 0:
                continue  # nothing was sampled in it: no gradient, and no mean to take
            where = f"step {step}, mini-batch {index} of {len(plan.micro_batches)}"
            done, norm, worst = self._mini_batch(mini_batch[self.rank], mine, counts[index], where)
            if not norms:
                mismatch = done[SUMS.index("mismatch_kl")].item() / counts[index]
                first = {"mismatch_kl": mismatch, "mismatch_max": worst}
            rate = self._step(norm)
            sums += done
            norms.append(norm)
            micros += len(mini_batch[self.rank]) * self.world
        total = max(1, sum(counts))
        metrics = {name: value / total for name, value in zip(SUMS, sums.tolist(), strict=True)}
        if self._reference is None:
            del metrics["kl"]
        return {
            **metrics,
            **first,
            "grad_norm": sum(norms) / max(1, len(norms)),
            "grad_norm_max": max(norms, default=0.0),
            "learning_rate": rate,
            "optimizer_steps": len(norms),
            "tokens": sum(counts),
            "micro_batches": micros,
            "seconds": time.perf_counter() - began,
        }

    def _prepare(
        self, groups: Groups, plan: UpdatePlan, step: int
    ) -> tuple[dict[tuple[int, int], tuple[Trajectory, float]], list[int]]:
        """This rank's trajectories with their advantages, and each mini-batch's global count.

        One rank that raises alone would leave the others waiting in a collective. So what can be
        wrong with a rank's input is found here, and all ranks learn of it in the same all-reduce
        that sums the token counts.
        """
        error: KindlingError | None = None
        mine: dict[tuple[int, int], tuple[Trajectory, float]] = {}
        counts = [0] * len(plan.micro_batches)
        try:
            self._check_group()
            if plan.ranks != self.world:
                raise GangError(f"step {step}: a plan for {plan.ranks} ranks, not {self.world}")
            vocabulary = self._policy.model.config.get_text_config().vocab_size
            read = groups if callable(groups) else groups.__getitem__
            for index in plan.groups_of(self.rank):
                group = read(index)
                advantages = group_advantages([t.reward for t in group.trajectories]).tolist()
                for number, trajectory in enumerate(group.trajectories):
                    where = f"step {step}: trajectory {number} of {group.unit_id}"
                    check_trajectory(trajectory, vocabulary, where)
                    mine[index, number] = (trajectory, advantages[number])
            for index, mini_batch in enumerate(plan.micro_batches):
                counts[index] = sum(
                    mine[item][0].sampled_tokens for m in mini_batch[self.rank] for item in m
                )
        except KindlingError as caught:
            error = caught
        except KeyError as caught:
            error = GangError(f"step {step}: rank {self.rank} was not given group {caught}")
        table = torch.zeros(self.world + len(counts), dtype=torch.int64, device=self.device)
        table[self.rank] = error is not None
        table[self.world :] = torch.tensor(counts)
        dist.all_reduce(table)
        failed = [rank for rank in range(self.world) if table[rank]]
        if error is not None:
            raise error
        if failed:
            raise GangError(f"step {step}: ranks {failed} cannot use their groups; see their error")
        return mine, table[self.world :].tolist()

    def _mini_batch(
        self,
        micros: tuple[MicroBatch, ...],
        mine: dict[tuple[int, int], tuple[Trajectory, float]],
        count: int,
        where: str,
    ) -> tuple[Tensor, float, float]:
        """Gradients of one mini-batch, checked; (sums over tokens, gradient norm, worst mismatch).

        Raises:
            NotFiniteError: gradients are dropped, parameters and optimizer untouched.
        """
        self._optimizer.zero_grad(set_to_none=True)
        sums = torch.zeros(len(SUMS), dtype=torch.float64, device=self.device)
        worst = torch.zeros((), device=self.device)
        for micro in micros:
            part, difference = self._micro_batch([mine[item] for item in micro], count)
            sums += part
            worst = torch.maximum(worst, difference)
        gradients = [local_rows(p.grad) for _, p in self._policy.parameters() if p.grad is not None]
        square = sum(
            (g.double().square().sum() for g in gradients),
            torch.zeros((), dtype=torch.float64, device=self.device),
        )
        flags = torch.zeros(self.world, dtype=torch.float64, device=self.device)
        flags[self.rank] = not bool(torch.isfinite(sums).all())
        table = torch.cat([sums.nan_to_num(0, 0, 0), square[None], flags])
        dist.all_reduce(table)
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        norm = float(table[len(SUMS)].sqrt())
        bad = [rank for rank in range(self.world) if table[len(SUMS) + 1 + rank]]
        if bad or not math.isfinite(norm):
            self._optimizer.zero_grad(set_to_none=True)
            raise NotFiniteError(
                f"{where}: loss not finite on ranks {bad}, gradient norm {norm} (seen by rank "
                f"{self.rank}); this optimizer step changed nothing; lower the learning rate or "
                "resume from a checkpoint"
            )
        return table[: len(SUMS)].cpu(), norm, float(worst)

    def _micro_batch(
        self, members: list[tuple[Trajectory, float]], count: int
    ) -> tuple[Tensor, Tensor]:
        """Forward and backward of one micro-batch; adds to the gradients."""
        training = self.config.training
        batch = {k: v.to(self.device) for k, v in collate([t for t, _ in members]).items()}
        ids_BT, mask_BT, old_BT = batch["ids"], batch["loss_mask"], batch["logprobs"]
        advantages_B1 = torch.tensor(
            [advantage for _, advantage in members] or [0.0], device=self.device
        )[:, None]
        temperature = self.config.rollout.temperature
        logprobs_BT, entropy_BT = self._policy.score(
            ids_BT, mask_BT, temperature, training.entropy_coefficient > 0
        )
        reference_BT = None
        if self._reference is not None:
            with torch.no_grad():
                reference_BT, _ = self._reference.score(ids_BT, mask_BT, temperature)
        loss_BT, sums, worst = terms(
            logprobs_BT, entropy_BT, old_BT, reference_BT, advantages_B1, mask_BT, training
        )
        # FSDP averages gradients over the ranks; the loss is already this micro-batch's share of
        # the global mean, so the average is undone here.
        (token_mean(loss_BT, mask_BT, count) * self.world).backward()
        return sums, worst

    def _step(self, norm: float) -> float:
        """Clip by the global norm and step; returns the learning rate used."""
        training = self.config.training
        rate = learning_rate_at(self.optimizer_steps, training.learning_rate, training.warmup_steps)
        scale = min(1.0, training.max_grad_norm / (norm + 1e-6))
        for group in self._optimizer.param_groups:
            group["lr"] = rate
            for parameter in group["params"]:
                if parameter.grad is not None and scale < 1:
                    local_rows(parameter.grad).mul_(scale)
        self._optimizer.step()
        self.optimizer_steps += 1
        return rate

    # ------------------------------------------------------------ handing over

    def export_shards(self) -> Iterator[LocalShard | DeviceShard]:
        """This rank's rows of every parameter as bf16 patterns, Hugging Face names, for the
        publisher; made one at a time. Tied parameters appear once, under the canonical name."""
        ranges = self.ranges()
        for name, rows in self._policy.local().items():
            place, rounded = ranges[name], rows.to(torch.bfloat16)
            if rounded.device.type == "cpu":
                yield LocalShard.from_tensor(name, rounded, place.shape, place.start)
            else:
                yield DeviceShard(name, place.shape, place.start, rounded)

    def full_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(name, whole bf16 tensor), for an anchor. Collective: every rank runs it to its end."""
        return self._policy.full_tensors(torch.bfloat16)

    def ranges(self) -> dict[str, Range]:
        """Which flat range of every parameter this rank holds."""
        return self._policy.ranges()

    def state(self) -> RankState:
        """Copies of this rank's parameters and moments for a checkpoint."""
        kinds: dict[str, dict[str, Tensor]] = {"parameter": {}}
        if self.optimizer_steps:
            kinds |= {moment: {} for moment in _MOMENTS}
        for name, parameter in self._policy.parameters():
            kinds["parameter"][name] = _flat_copy(local_rows(parameter))
            for moment in _MOMENTS if self.optimizer_steps else ():
                kinds[moment][name] = _flat_copy(
                    local_rows(self._optimizer.state[parameter][moment])
                )
        return RankState(self.rank, self.world, self.optimizer_steps, self.ranges(), kinds)

    def load_state(self, state: RankState) -> None:
        """Continue from a checkpoint's part for this rank (`load_part(..., self.ranges(), ...)`).

        Raises:
            IntegrityError: the part is of other ranges than this rank's; nothing was changed.
        """
        if state.ranges != self.ranges():
            raise IntegrityError(
                f"a checkpoint part cut for rank {state.rank} of {state.world} was given to rank "
                f"{self.rank} of {self.world}; load the ranges this rank names"
            )
        self._fresh_optimizer()
        for name, parameter in self._policy.parameters():
            rows = local_rows(parameter)
            rows.copy_(state.values["parameter"][name].view_as(rows))
            if state.optimizer_steps:
                entry: dict[str, Any] = {"step": torch.tensor(float(state.optimizer_steps))}
                for moment in _MOMENTS:
                    entry[moment] = torch.zeros_like(parameter, requires_grad=False)
                    own = local_rows(entry[moment])
                    own.copy_(state.values[moment][name].view_as(own))
                self._optimizer.state[parameter] = entry
        self.optimizer_steps = state.optimizer_steps


def _flat_copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.float32, copy=True).reshape(-1)
