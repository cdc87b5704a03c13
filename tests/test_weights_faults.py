"""Faults of real processes against the real S3 server: nothing wrong is ever served, and the next
publish and the next read work."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, cast

import psutil
import pytest

from infra.object_store import read_credentials, start_store
from infra.processes import ProcessGroup, environment
from tasks import store_client, store_errors
from tasks.errors import StoreError
from tasks.store import ObjectStore, StoreLocation
from tasks.weights import subscriber as subscriber_module
from tasks.weights.subscriber import Subscriber
from tasks.weights.versions import Nothing
from tests.proxy import Proxy
from tests.weights_helpers import (
    Gang,
    Weights,
    perturbed,
    publish_chain,
    random_weights,
    same,
)

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def killable() -> Iterator[Callable[..., int]]:
    """Runs a function in a process of its own; its exit code, -9 where it killed itself."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.test_weights_faults"])

    def run(target: Callable[..., None], *args: Any) -> int:
        process = context.Process(target=target, args=args)
        process.start()
        process.join()
        assert process.exitcode is not None
        return process.exitcode

    yield run
    forkserver._forkserver._stop()  # type: ignore[attr-defined]


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _versions() -> list[Weights]:
    """What the versions of every run here hold."""
    held = [random_weights(11)]
    for seed in range(1, 4):
        held.append(perturbed(held[-1], seed))
    return held


# ------------------------------------------------------------------------------ publisher killed


class _Deadly:
    """A store whose user dies before its operation number `at`, or after the last one."""

    def __init__(self, store: ObjectStore, at: int) -> None:
        self._store, self._left = store, at

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)
        if not callable(method):
            return method

        def call(*args: Any, **kwargs: Any) -> Any:
            self._left -= 1
            if self._left == 0:
                _die()
            return method(*args, **kwargs)

        return call


def _publish_and_die(location: StoreLocation, run: str, at: int, kind: Any) -> None:
    held, store = _versions(), ObjectStore(location)
    gang = Gang(store, run)
    gang.publish(held[0], "anchor")
    gang.publish(held[1], "delta")
    deadly = cast(ObjectStore, _Deadly(store, at))
    for part in (gang, *gang.ranks):
        part.store = deadly
    gang.publish(held[2], kind)


@pytest.mark.parametrize("kind", ["delta", "anchor"])
def test_a_publisher_killed_at_any_store_operation(
    object_store: ObjectStore, killable: Callable[..., int], tmp_path: Path, kind: str
) -> None:
    held = _versions()
    seen: set[int] = set()
    at, code = 0, -signal.SIGKILL
    while code:
        at += 1
        run = f"killed-{kind}-{at}"
        code = killable(_publish_and_die, object_store.location, run, at, kind)
        assert code in (0, -signal.SIGKILL)
        reader = Subscriber(object_store, tmp_path)
        newest = reader.newest(run)
        assert newest in (1, 2)
        reader.fetch(run, newest)
        assert same(reader.shadow, held[newest])
        seen.add(newest)
        gang = Gang(object_store, run, ranks=3, resume=True)
        assert gang.publish(held[3], "anchor").version == newest + 1
        reader.fetch(run, newest + 1)
        assert same(reader.shadow, held[3])
        reader.close()
    assert seen == {1, 2}
    assert at > 6


# ------------------------------------------------------------------------------ subscriber killed


def _fetch_and_die(location: StoreLocation, run: str, cache: Path, calls: int, at: str) -> None:
    reader = Subscriber(ObjectStore(location), cache)
    if at != "tensor_digest":
        reader.fetch(run, 1)
    real, left = getattr(subscriber_module, at), [calls]

    def deadly(*args: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            _die()
        return real(*args)

    setattr(subscriber_module, at, deadly)
    reader.fetch(run, 2)


@pytest.mark.parametrize("at", ["advance", "unpack_delta", "tensor_digest"])
def test_a_subscriber_killed_while_it_applies(
    object_store: ObjectStore, killable: Callable[..., int], tmp_path: Path, at: str
) -> None:
    """Before the first write, between two tensors, and when all is written but not verified."""
    run = f"reader-killed-{at}"
    history = publish_chain(Gang(object_store, run), 3)
    code = killable(_fetch_and_die, object_store.location, run, tmp_path, 2, at)
    assert code == -signal.SIGKILL
    reader = Subscriber(object_store, tmp_path)
    update = reader.fetch(run, 2, Nothing())
    assert update.kind == "full"
    assert same(reader.shadow, history[2])
    reader.close()


# ------------------------------------------------------------------------------ the server


@dataclass
class _Server:
    """A store of its own behind a proxy, that can be killed and started again."""

    folder: Path
    proxy: Proxy
    store: ObjectStore
    group: ProcessGroup | None = None

    def kill(self) -> None:
        if self.group is not None:
            self.group.stop()
        self.proxy.upstream = None
        self.proxy.cut()

    def start(self) -> None:
        self.group = ProcessGroup(self.folder / "logs")
        location = start_store(self.group, self.folder, "faults")
        self.proxy.upstream = ("127.0.0.1", int(location.endpoint.rsplit(":", 1)[1]))

    @contextmanager
    def full(self) -> Iterator[None]:
        """No file of the server may grow any more, as on a disk without room."""
        processes = [p for p in psutil.Process().children(recursive=True) if p.name() == "weed"]
        own = [p for p in processes if str(self.folder) in " ".join(p.cmdline())]
        assert own
        for process in own:
            process.rlimit(psutil.RLIMIT_FSIZE, (1, psutil.RLIM_INFINITY))
        try:
            yield
        finally:
            for process in own:
                process.rlimit(psutil.RLIMIT_FSIZE, (psutil.RLIM_INFINITY, psutil.RLIM_INFINITY))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Server]:
    folder = tmp_path_factory.mktemp("faulty")
    with Proxy() as proxy, pytest.MonkeyPatch.context() as patch:
        patch.setattr(store_client, "CONNECT_S", 2.0)
        patch.setattr(store_client, "READ_S", 2.0)
        patch.setattr(store_errors, "RETRY_FOR_S", 3.0)  # most tests here want the error
        endpoint = f"http://127.0.0.1:{proxy.port}"
        made = _Server(folder, proxy, ObjectStore(StoreLocation(endpoint, "faults")))
        try:
            made.start()
            with environment(read_credentials(folder).environment()):
                yield made
        finally:
            made.kill()


def _hit_by(store: ObjectStore, operation: str, fault: Callable[[], None]) -> ObjectStore:
    """The store, with a fault that strikes just before the first such operation."""

    class Struck:
        def __init__(self) -> None:
            self.pending = True

        def __getattr__(self, name: str) -> Any:
            if name == operation and self.pending:
                self.pending = False
                fault()
            return getattr(store, name)

    return cast(ObjectStore, Struck())


def _recovers(server: _Server, gang: Gang, reader: Subscriber, new: Weights) -> None:
    """After a failed publish: readers have the old version, publishing again works, they follow."""
    base = gang.base
    assert base is not None
    assert reader.newest(gang.run) == base.version
    reader.fetch(gang.run, base.version)
    assert gang.publish(new, "delta").version == base.version + 1
    reader.fetch(gang.run, base.version + 1)
    assert same(reader.shadow, new)


@pytest.mark.parametrize("operation", ["create_if_absent", "swap"])
def test_the_server_dies_in_the_middle_of_a_publish(
    server: _Server, tmp_path: Path, operation: str
) -> None:
    gang = Gang(server.store, f"server-{operation}")
    history = publish_chain(gang, 2)
    reader = Subscriber(server.store, tmp_path)
    reader.fetch(gang.run, 1)
    new = perturbed(history[1], 7)
    struck = _hit_by(server.store, operation, server.kill)
    for part in (gang, *gang.ranks):
        part.store = struck
    with pytest.raises(StoreError):
        gang.publish(new, "delta")
    with pytest.raises(StoreError):
        reader.fetch(gang.run, 1)
    assert same(reader.shadow, history[1])
    server.start()
    _recovers(server, gang, reader, new)
    reader.close()


@pytest.mark.parametrize("operation", ["create_if_absent", "swap"])
def test_a_server_that_comes_back_in_time_is_only_waited_for(
    server: _Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    monkeypatch.setattr(store_errors, "RETRY_FOR_S", 60.0)
    gang = Gang(server.store, f"waits-{operation}")
    history = publish_chain(gang, 2)
    back = threading.Timer(4.0, server.start)

    def away() -> None:
        server.kill()
        back.start()

    struck = _hit_by(server.store, operation, away)
    for part in (gang, *gang.ranks):
        part.store = struck
    new = perturbed(history[1], 7)
    assert gang.publish(new, "delta").version == 2
    back.join()
    reader = Subscriber(server.store, tmp_path)
    reader.fetch(gang.run, 2)
    assert same(reader.shadow, new)
    reader.close()


def test_the_server_dies_in_the_middle_of_a_read(server: _Server, tmp_path: Path) -> None:
    gang = Gang(server.store, "server-read")
    history = publish_chain(gang, 3)
    reader = Subscriber(server.store, tmp_path)
    reader.fetch("server-read", 1)
    reader.store = _hit_by(server.store, "get_object", server.kill)
    with pytest.raises(StoreError):
        reader.fetch("server-read", 2)
    assert same(reader.shadow, history[1])
    server.start()
    assert reader.fetch("server-read", 2).kind == "delta"
    assert same(reader.shadow, history[2])
    reader.close()


def test_the_server_dies_in_the_middle_of_an_anchor(server: _Server, tmp_path: Path) -> None:
    gang = Gang(server.store, "server-anchor")
    history = publish_chain(gang, 2)
    reader = Subscriber(_hit_by(server.store, "download_object", server.kill), tmp_path)
    with pytest.raises(StoreError):
        reader.fetch("server-anchor", 1)
    assert not reader.shadow
    assert not list((tmp_path / "anchors").iterdir())
    server.start()
    again = Subscriber(server.store, tmp_path)
    assert again.fetch("server-anchor", 1).kind == "full"
    assert same(again.shadow, history[1])
    reader.close()
    again.close()


def test_a_full_store(server: _Server, tmp_path: Path) -> None:
    gang = Gang(server.store, "full")
    history = publish_chain(gang, 2)
    reader = Subscriber(server.store, tmp_path)
    reader.fetch("full", 1)
    new = perturbed(history[1], 7, share=1.0)
    with server.full(), pytest.raises(StoreError, match=r"failed \d+ times"):
        gang.publish(new, "delta")
    _recovers(server, gang, reader, new)
    reader.close()


def test_a_store_that_stands_still(server: _Server, tmp_path: Path) -> None:
    """A time-out and bounded retries, then a clear error; and on it goes when the store does."""
    gang = Gang(server.store, "slow")
    history = publish_chain(gang, 2)
    reader = Subscriber(server.store, tmp_path)
    reader.fetch("slow", 1)
    new = perturbed(history[1], 7)
    server.proxy.flowing.clear()
    with pytest.raises(StoreError, match=r"failed \d+ times"):
        gang.publish(new, "delta")
    server.proxy.flowing.set()
    server.proxy.cut()
    _recovers(server, gang, reader, new)
    reader.close()


def test_a_joiner_far_down_a_chain(object_store: ObjectStore, tmp_path: Path) -> None:
    history = publish_chain(Gang(object_store, "long"), 38)
    joiner = Subscriber(object_store, tmp_path)
    assert joiner.fetch("long", 37).kind == "full"
    assert same(joiner.shadow, history[37])
    assert joiner.anchor_loads == 1
    joiner.close()
