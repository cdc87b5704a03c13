"""A rank's snapshot, the last committed state of its ranges, and new shards held against it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from tasks.weights import compare
from tasks.weights.bits import Bits, DtypeName, to_bits
from tasks.weights.codec import Change, threads
from tasks.weights.digest import Piece, piece
from tasks.weights.history import no_history
from tasks.weights.parts import DeviceShard, LocalShard

_VALUES_AHEAD = 1 << 25  # of shards that are made before the ones before them are done with


@dataclass
class Held:
    """The last committed state of one range."""

    start: int
    dtype: DtypeName
    bits: Bits
    history: Bits
    mirror: torch.Tensor | None = None  # of a `DeviceShard`: the pattern where its tensor lies

    @property
    def place(self) -> tuple[int, int, DtypeName]:
        return (self.start, self.bits.size, self.dtype)


@dataclass(frozen=True)
class Looked:
    """A shard against the snapshot.

    Attributes:
        found: what changed, or what is held from now on; None: a value is NaN or infinite.
    """

    found: Change | Held | None
    piece: Piece


def look(
    snapshot: Mapping[str, Held], shards: Iterable[LocalShard | DeviceShard]
) -> Iterator[tuple[LocalShard | DeviceShard, Looked]]:
    """Every shard against the snapshot, while the next ones are made and looked at."""
    waiting: deque[tuple[LocalShard | DeviceShard, Callable[[], Looked]]] = deque()
    values = 0
    with ThreadPoolExecutor(threads()) as pool:
        for shard in shards:
            if isinstance(shard, LocalShard):
                waiting.append((shard, _look_here(snapshot.get(shard.name), shard, pool)))
            else:
                waiting.append((shard, _look_there(snapshot.get(shard.name), shard, pool)))
            values += shard.count
            while values > _VALUES_AHEAD and len(waiting) > 1:
                first, result = waiting.popleft()
                values -= first.count
                yield first, result()
        for shard, result in waiting:
            yield shard, result()


def _look_here(
    held: Held | None, shard: LocalShard, pool: ThreadPoolExecutor
) -> Callable[[], Looked]:
    """What a shard in host memory holds against the snapshot."""
    known = held is not None and held.place == (shard.start, shard.count, shard.dtype)
    old = held.bits if held is not None and known else shard.values
    comparison = compare.begin(pool, old, shard.values, shard.dtype, shard.start)

    def result() -> Looked:
        made = comparison()
        if not made.finite:
            return Looked(None, made.piece)
        if known:
            return Looked(made.change, made.piece)
        values = shard.values.copy()  # the caller may go on training in this memory
        history = no_history(shard.count)
        return Looked(Held(shard.start, shard.dtype, values, history), made.piece)

    return result


def _look_there(
    held: Held | None, shard: DeviceShard, pool: ThreadPoolExecutor
) -> Callable[[], Looked]:
    """The same of a shard on an accelerator: its changed values alone are copied here."""
    integers = shard.integers()
    place = (shard.start, shard.count, shard.dtype)
    found: Change | Held | None
    if held is None or held.place != place or held.mirror is None:
        values = to_bits(shard.tensor).copy()
        history = no_history(values.size)
        found = Held(shard.start, shard.dtype, values, history, integers.clone())
    else:
        where = torch.nonzero(integers != held.mirror).reshape(-1)
        found = Change(
            where.to("cpu", torch.int32).numpy(),
            integers[where].cpu().numpy().view(held.bits.dtype),
        )
        values = held.bits.copy()
        values[found.indices] = found.values
    if not shard.is_finite():
        found = None
    made = pool.submit(piece, values, shard.start)
    return lambda: Looked(found, made.result())


def as_integers(values: Bits) -> torch.Tensor:
    """int16 or int32, the signed twin of a pattern."""
    return torch.from_numpy(values.view(f"<i{values.itemsize}"))
