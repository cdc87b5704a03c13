"""Forming the gang's process group: a store on the flow's host, one prefix an epoch."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from tasks.errors import GangError

_EPOCH = "epoch"
_NONE = 0
_POLL_S = 0.05
CONNECT_S = 30.0
"""Seconds the ranks have to connect once all are there: gloo was seen to hang in it. It takes less
than one; then the epoch is given up, and the next one connects."""
_CPU, _CUDA = "gloo", "cpu:gloo,cuda:nccl"


class GangCoordinator:
    """Holds the TCP store that ranks meet at. Lives where the flow runs; close it at the end.

    The port is the operating system's choice: a port picked beforehand may be taken meanwhile.
    """

    def __init__(self, host: str = "127.0.0.1") -> None:
        """Listen on `host` alone, an address of this machine that the ranks can reach.

        Raises:
            GangError: this machine has no such address.
        """
        try:
            listener = socket.create_server((host, 0))
        except OSError as error:
            raise GangError(f"the gang's store cannot listen on {host}: {error}") from error
        self.address, self.port = host, int(listener.getsockname()[1])
        # The store takes the socket over: left to itself it would listen on every interface.
        self._store: dist.TCPStore | None = dist.TCPStore(
            host,
            self.port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        self._last = 0
        self._store.set(_EPOCH, str(_NONE))

    def new_epoch(self) -> int:
        """Begin an epoch: from now on ranks of older ones are refused. Epochs count from 1."""
        self._last += 1
        self._open().set(_EPOCH, str(self._last))
        return self._last

    def end_epoch(self) -> None:
        """No epoch is current until the next begins: ranks that join or work now give up."""
        self._open().set(_EPOCH, str(_NONE))

    def missing(self, epoch: int, world: int) -> list[int]:
        """Ranks that have not yet come to join this epoch."""
        return _missing(self._open(), epoch, world)

    def beats(self, epoch: int, world: int) -> list[int]:
        """How often each rank of the epoch has said that it lives; 0: it has not begun."""
        store = self._open()
        keys = [alive_key(epoch, rank) for rank in range(world)]
        return [int(store.get(key)) if store.check([key]) else 0 for key in keys]

    def close(self) -> None:
        """End the epoch and stop listening: ranks still at work stop when they next ask."""
        if self._store is not None:
            self._store.set(_EPOCH, str(_NONE))
        self._store = None

    def _open(self) -> dist.TCPStore:
        if self._store is None:
            raise GangError("the gang's coordinator is closed")
        return self._store


def join(
    address: str,
    port: int,
    epoch: int,
    rank: int,
    world: int,
    timeout_s: float = 60.0,
    *,
    cuda: bool = False,
    collective_timeout_s: float = 1800.0,
) -> None:
    """Make this process rank `rank` of the epoch's default process group, all ranks or none.

    A group of an older epoch in this process is destroyed first. Every rank must call this; it
    returns when all have.

    Args:
        address, port: of the `GangCoordinator`.
        timeout_s: how long to wait for the coordinator and for the other ranks to come; to connect
            they then have CONNECT_S.
        cuda: NCCL for GPU tensors beside gloo for CPU tensors.
        collective_timeout_s: how long one collective may take later, the slowest rank included.

    Raises:
        GangError: the coordinator does not answer, the epoch is over, another process holds this
            rank, or ranks are missing at the end of the time; names them.
    """
    leave()
    where = f"rank {rank} of {world}, epoch {epoch}"
    limit = timedelta(seconds=timeout_s)
    try:
        store = dist.TCPStore(address, port, is_master=False, timeout=limit)
        if store.add(_key(epoch, rank), 1) > 1:
            raise GangError(f"{where}: another process has joined as this rank")
        _await_all(store, epoch, world, timeout_s, where)
        dist.init_process_group(
            _CUDA if cuda else _CPU,
            store=dist.PrefixStore(f"epoch-{epoch}", store),
            rank=rank,
            world_size=world,
            timeout=min(limit, timedelta(seconds=CONNECT_S)),
        )
        # Every rank has connected to every other once this returns; only then is there a gang.
        dist.barrier()
    except (dist.DistError, RuntimeError) as error:
        leave()
        if isinstance(error, GangError):
            raise
        raise GangError(
            f"{where}: no gang through {address}:{port} within {timeout_s:g} s: {error}"
        ) from error
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=collective_timeout_s))


def leave() -> None:
    """Destroy this process' default process group, if it has one."""
    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def gang_failures(where: str) -> Iterator[None]:
    """Turn a collective that failed (a peer died, a time limit) into a GangError that says where.

    Gloo raises plain RuntimeErrors, known by their text alone.
    """
    try:
        yield
    except dist.DistError as error:
        raise GangError(f"{where}: a peer is gone: {error}") from error
    except RuntimeError as error:
        if "gloo" not in str(error).lower() and "nccl" not in str(error).lower():
            raise
        raise GangError(f"{where}: a peer is gone: {error}") from error


def current_epoch(store: dist.TCPStore) -> int:
    """The epoch that a coordinator is at; 0: none."""
    return int(store.get(_EPOCH))


def alive_key(epoch: int, rank: int) -> str:
    """Where a rank counts its signs of life."""
    return f"alive/{epoch}/{rank}"


def check_place(rank: int, world: int) -> None:
    """Refuse to work in another process group, or in another place of it, than one was built for.

    Raises:
        GangError: names both places.
    """
    if not dist.is_initialized():
        raise GangError(f"trainer rank {rank} has no process group; join the gang first")
    actual = (dist.get_rank(), dist.get_world_size())
    if actual != (rank, world):
        raise GangError(
            f"trainer rank {rank} of {world} is rank {actual[0]} of {actual[1]} in the process "
            "group: it joined another epoch than it was built for"
        )


def check_address(rank: int, expected: str, actual: str) -> None:
    """Refuse to run a rank on another worker than the one the gang was formed with.

    Dask may move a task; a rank that ran elsewhere would meet no warm state and wrong peers.

    Raises:
        GangError: names both workers.
    """
    if expected != actual:
        raise GangError(
            f"rank {rank} was meant for worker {expected} and runs on {actual}: its worker is gone"
        )


def _await_all(store: dist.TCPStore, epoch: int, world: int, timeout_s: float, where: str) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        current = current_epoch(store)
        if current != epoch:
            raise GangError(f"{where}: refused, the coordinator is at epoch {current} (0: none)")
        missing = _missing(store, epoch, world)
        if not missing:
            return
        if time.monotonic() > deadline:
            raise GangError(f"{where}: ranks {missing} did not join within {timeout_s:g} s")
        time.sleep(_POLL_S)


def _missing(store: dist.TCPStore, epoch: int, world: int) -> list[int]:
    return [rank for rank in range(world) if not store.check([_key(epoch, rank)])]


def _key(epoch: int, rank: int) -> str:
    return f"joined/{epoch}/{rank}"
