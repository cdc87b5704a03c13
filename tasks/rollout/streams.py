"""Random streams: one for every turn of a run, and none for two of them."""

from __future__ import annotations

import hashlib
from functools import lru_cache

from tasks.config import RolloutConfig

_STREAMS = 2**32


def stream_seed(seed: int, stream: int) -> int:
    """Seed of one turn's random stream: of what it is, never of who samples it.

    Torch's CPU generator uses the lower 32 bits of a seed alone, and of as many hashes two are soon
    the same. So those bits are a permutation of the stream's number, another one for every run
    seed: two streams of a run never share them. 63 bits: torch generators take int64.

    Args:
        seed: of the run, below 2**31.
        stream: number of the stream in its run; again the first one from 2**32 on.
    """
    key, other = _keys(seed)
    return seed << 32 | _mix(_mix(stream % _STREAMS ^ key) ^ other)


@lru_cache(maxsize=64)
def _keys(seed: int) -> tuple[int, int]:
    digest = hashlib.blake2b(f"streams/{seed}".encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def _mix(value: int) -> int:
    """A bijection of 32 bits: the finalizer of MurmurHash3 (Appleby, public domain)."""
    value = (value ^ value >> 16) * 0x85EBCA6B % _STREAMS
    value = (value ^ value >> 13) * 0xC2B2AE35 % _STREAMS
    return value ^ value >> 16


def turns_at_most(rollout: RolloutConfig) -> int:
    """Turns a trajectory has at most: those in which it may search, and one to answer in."""
    return rollout.max_search_turns + 1
