"""Who trains on what: mini-batches, ranks and micro-batches, from lengths alone.

Every rank computes the same plan from the group summaries, then reads only the groups it needs.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tasks.errors import ConfigError
from tasks.rollout.trajectory import GroupSummary

# Whole groups go to one rank (which then reads few objects) unless that leaves the fullest rank
# this much above the mean: the others would wait for it at every collective.
_IMBALANCE = 1.1


class Item(NamedTuple):
    """A trajectory by position: index of its group in the batch, index within the group."""

    group: int
    trajectory: int


MiniBatch = tuple[Item, ...]
MicroBatch = tuple[Item, ...]


@dataclass(frozen=True, slots=True)
class UpdatePlan:
    """What each rank does in one update: `micro_batches[mini_batch][rank]` is a tuple of
    micro-batches (tuples of `Item`), as many on every rank, the last ones perhaps empty."""

    micro_batches: tuple[tuple[tuple[MicroBatch, ...], ...], ...]

    @property
    def ranks(self) -> int:
        return len(self.micro_batches[0])

    def groups_of(self, rank: int) -> list[int]:
        """Indices of the groups a rank must read, ascending."""
        return sorted(
            {item.group for mini in self.micro_batches for micro in mini[rank] for item in micro}
        )


def mini_batches(
    groups: Sequence[GroupSummary], mini_batch_size: int, seed: int, step: int
) -> list[MiniBatch]:
    """Cut a batch into mini-batches, one optimizer step each.

    Groups are shuffled by (seed, step) and dealt whole over ceil(trajectories / mini_batch_size)
    mini-batches of even size, so one may exceed the size by less than a group; evenly, because a
    small last one would get a full learning rate for its noise. Only a group larger than a
    mini-batch is cut.

    Returns:
        Mini-batches, none empty; each trajectory of the batch in exactly one.
    """
    total = sum(len(group.trajectories) for group in groups)
    if total == 0:
        raise ConfigError(f"a batch of {len(groups)} groups without trajectories: nothing to train")
    count = -(-total // mini_batch_size)
    batches: list[list[Item]] = [[] for _ in range(count)]
    dealt = 0
    for index in _permutation(len(groups), seed, step):
        members = [Item(index, t) for t in range(len(groups[index].trajectories))]
        for piece in _even_pieces(members, mini_batch_size):
            middle = dealt + len(piece) / 2
            batches[int(middle * count / total)].extend(piece)
            dealt += len(piece)
    return [tuple(batch) for batch in batches if batch]


def plan_update(
    groups: Sequence[GroupSummary],
    *,
    mini_batch_size: int,
    ranks: int,
    tokens_per_micro_batch: int,
    seed: int,
    step: int,
) -> UpdatePlan:
    """The whole plan of one update; a pure function of its arguments, the same on every rank.

    Args:
        groups: the batch's summaries, in the same order everywhere.
        mini_batch_size: trajectories an optimizer step.
        ranks: size of the trainer group.
        tokens_per_micro_batch: padded tokens of a micro-batch at most.
        seed, step: of the run; they decide the shuffle.

    Raises:
        ConfigError: an empty batch, or a trajectory longer than tokens_per_micro_batch.
    """
    plan = []
    for mini_batch in mini_batches(groups, mini_batch_size, seed, step):
        per_rank = [
            micro_batches(share, groups, tokens_per_micro_batch)
            for share in assign_ranks(mini_batch, groups, ranks)
        ]
        # FSDP gathers and reduces in every micro-batch, on all ranks or not at all: a rank that
        # ran out of work would leave the others waiting. It takes part with an empty one.
        most = max(len(micros) for micros in per_rank)
        plan.append(tuple(tuple(m) + ((),) * (most - len(m)) for m in per_rank))
    return UpdatePlan(tuple(plan))


def assign_ranks(
    mini_batch: MiniBatch, groups: Sequence[GroupSummary], ranks: int
) -> list[list[Item]]:
    """Deal a mini-batch to the ranks, balanced by tokens: whole groups where that is balanced."""
    by_group: dict[int, list[Item]] = {}
    for item in mini_batch:
        by_group.setdefault(item.group, []).append(item)
    total = sum(_tokens(item, groups) for item in mini_batch)
    shares, fullest = _balance(list(by_group.values()), groups, ranks)
    if fullest > _IMBALANCE * total / ranks:
        shares, _ = _balance([[item] for item in mini_batch], groups, ranks)
    return shares


def micro_batches(
    items: Sequence[Item], groups: Sequence[GroupSummary], tokens_per_micro_batch: int
) -> list[MicroBatch]:
    """Cut a rank's share into micro-batches, longest first, padded tokens within the budget.

    Sorting by length leaves little padding; the longest come first so that memory runs out, if it
    does, at once.

    Raises:
        ConfigError: a trajectory is longer than the budget.
    """
    ordered = sorted(items, key=lambda item: (-_tokens(item, groups), item))
    micros: list[list[Item]] = []
    width = 0
    for item in ordered:
        tokens = _tokens(item, groups)
        if tokens > tokens_per_micro_batch:
            raise ConfigError(
                f"trajectory {item.trajectory} of unit {groups[item.group].unit_id} has {tokens} "
                f"tokens, more than training.tokens_per_micro_batch {tokens_per_micro_batch}; "
                "raise that"
            )
        if not micros or (len(micros[-1]) + 1) * width > tokens_per_micro_batch:
            micros.append([])
            width = tokens
        micros[-1].append(item)
    return [tuple(micro) for micro in micros]


def _permutation(count: int, seed: int, step: int) -> list[int]:
    digest = hashlib.blake2b(f"mini-batches/{seed}/{step}".encode(), digest_size=8).digest()
    order = list(range(count))
    random.Random(int.from_bytes(digest, "big")).shuffle(order)
    return order


def _even_pieces(members: list[Item], size: int) -> list[list[Item]]:
    pieces = -(-len(members) // size)
    edges = [len(members) * i // pieces for i in range(pieces + 1)] if pieces else []
    return [members[a:b] for a, b in itertools.pairwise(edges)]


def _tokens(item: Item, groups: Sequence[GroupSummary]) -> int:
    return groups[item.group].trajectories[item.trajectory].tokens


def _balance(
    bundles: list[list[Item]], groups: Sequence[GroupSummary], ranks: int
) -> tuple[list[list[Item]], int]:
    """Longest-processing-time-first: each bundle to the emptiest rank. Ties by rank, so stable."""
    weighed = sorted(
        ((sum(_tokens(item, groups) for item in bundle), bundle) for bundle in bundles),
        key=lambda pair: (-pair[0], pair[1]),
    )
    loads = [0] * ranks
    shares: list[list[Item]] = [[] for _ in range(ranks)]
    for tokens, bundle in weighed:
        rank = min(range(ranks), key=lambda r: (loads[r], r))
        loads[rank] += tokens
        shares[rank].extend(bundle)
    return shares, max(loads)
