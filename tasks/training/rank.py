"""One rank of the trainer group, kept warm in its process across steps and runs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from tasks.config import TrainConfig
from tasks.errors import IntegrityError
from tasks.training.batching import UpdatePlan
from tasks.training.checkpoint import Range, RankState
from tasks.training.group import check_place, gang_failures
from tasks.training.optimizer import PolicyOptimizer
from tasks.training.policy import load_policy
from tasks.training.sharding import (
    ShardedPolicy,
    cast_parameters,
    is_bf16,
    rebuild,
)
from tasks.training.update import BatchUpdate, Groups
from tasks.weights.publisher import DeviceShard, LocalShard


class TrainerRank:
    """The policy's shard of this rank, its optimizer, and updates of both.

    Needs the default process group (`tasks.training.group.join`) before it is built and whenever
    it works; every method that is called on one rank must be called on all, in the same order,
    except `export_shards`, `state` and `ranges`, which touch this rank alone.

    Attributes:
        base_loads: how often weights were read from disk; 1 on a warm rank, whatever it runs.
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
        check_place(self.rank, self.world)
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.base_loads = 0
        self._reference: ShardedPolicy | None = None
        self._load()
        self._optimizer = PolicyOptimizer(self._policy, self.config.training)

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
        check_place(self.rank, self.world)
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
        self._optimizer = PolicyOptimizer(self._policy, self.config.training)

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

    @property
    def optimizer_steps(self) -> int:
        """Taken since the base (they drive the learning-rate warm-up)."""
        return self._optimizer.steps

    # ------------------------------------------------------------ learning

    def update(
        self,
        groups: Groups,
        plan: UpdatePlan,
        step: int,
        between: Callable[[], None] = lambda: None,
    ) -> dict[str, float]:
        """One update: the plan's mini-batches in order, an optimizer step each.

        Args:
            groups: this rank's groups (`plan.groups_of(rank)`) by index, or what reads one.
            plan: of the whole gang, equal on every rank.
            step: of the run; for messages.
            between: called before every micro-batch; what it raises ends the update there.

        Returns:
            The same on every rank. loss: mean over the optimizer steps, as aggregated. Means over
            the tokens trained on: policy_loss, entropy and kl (nats; kl only with a reference, by
            its estimator), clip_low, clip_high, clip_dual and importance_cut (fractions; the last
            two where they are configured). Over the sampled tokens, before the first optimizer
            step: mismatch_kl (k3 of KL(sampler || trainer), nats) and mismatch_max (largest
            |difference| of log-probabilities); of the first mini-batch alone where nothing
            scores the others beforehand (importance = sampler), and not there where nothing is
            trained on. grad_norm (mean over optimizer steps, before the clip), grad_norm_max,
            learning_rate (of the last step), optimizer_steps (in this update), tokens (trained
            on), micro_batches (of this gang), seconds.

        Raises:
            NotFiniteError: on every rank alike; the failing optimizer step changed nothing.
            MismatchError: on every rank alike, before the first optimizer step; nothing was
                changed.
            GangError: another rank refused its groups (nothing was changed), or died.
            KindlingError: this rank could not read or use its groups; nothing was changed.
        """
        if self.device.type == "cpu":
            # Here, not once: the setting belongs to the thread, and Dask runs tasks in any.
            torch.set_num_threads(self.config.cluster.trainer_threads)
        with gang_failures(f"step {step}, rank {self.rank} of {self.world}"):
            return self._batch_update(plan, step, between).run(groups)

    def _batch_update(
        self, plan: UpdatePlan, step: int, between: Callable[[], None] = lambda: None
    ) -> BatchUpdate:
        parts = self._policy, self._reference, self._optimizer
        return BatchUpdate(self.config, *parts, plan, step, between)

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
        kinds = {"parameter": self._policy.local(), **self._optimizer.moments()}
        values = {
            kind: {name: _flat_copy(rows) for name, rows in named.items()}
            for kind, named in kinds.items()
        }
        return RankState(self.rank, self.world, self.optimizer_steps, self.ranges(), values)

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
        self._optimizer = PolicyOptimizer(self._policy, self.config.training)
        for name, rows in self._policy.local().items():
            rows.copy_(state.values["parameter"][name].view_as(rows))
        self._optimizer.load(state.optimizer_steps, state.values)


def _flat_copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.float32, copy=True).reshape(-1)
