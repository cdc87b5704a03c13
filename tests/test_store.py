"""`tasks.store` against a real S3 server."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import pickle
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import fsspec.asyn
import numpy as np
import psutil
import pytest
from blake3 import blake3

from infra.object_store import ensure_credentials, read_credentials, start_store
from infra.processes import ProcessGroup, environment, free_ports
from tasks import store_errors, store_parts
from tasks.errors import IntegrityError, ServiceError, StoreConflict, StoreError
from tasks.store import ObjectStore, StoreLocation, object_key
from tasks.store_errors import ObjectMissing

pytestmark = pytest.mark.timeout(120)


def _race(count: int, call: Callable[[int], Any]) -> list[Any]:
    """Results of `count` calls that start together; an exception is a result."""
    barrier = threading.Barrier(count)

    def enter(index: int) -> Any:
        barrier.wait()
        try:
            return call(index)
        except StoreError as error:
            return error

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(enter, range(count)))


def _put_all(store: ObjectStore, objects: Mapping[str, bytes]) -> None:
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(store.put, objects, objects.values()))


class TestReadingAndWriting:
    @pytest.mark.parametrize("data", [b"", b"x", bytes(range(256)) * 5000])
    def test_put_get_round_trip(self, object_store: ObjectStore, data: bytes) -> None:
        object_store.put("round/trip", data)
        assert object_store.get("round/trip") == data
        assert object_store.size("round/trip") == len(data)

    @pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
    def test_buffers_of_every_kind(self, object_store: ObjectStore, kind: Any) -> None:
        key = f"buffers/{kind.__name__}"
        object_store.put(key, kind(b"abc"))
        assert object_store.get(key) == b"abc"
        assert object_store.get_object(object_store.create_object(kind(b"abc"))) == b"abc"

    def test_put_overwrites(self, object_store: ObjectStore) -> None:
        object_store.put("over", b"a longer first state")
        object_store.put("over", b"second")
        assert object_store.get("over") == b"second"

    def test_missing_object_is_named(self, object_store: ObjectStore) -> None:
        for read in (object_store.get, object_store.size):
            with pytest.raises(ObjectMissing, match="never/written"):
                read("never/written")
        assert issubclass(ObjectMissing, StoreError)
        assert not object_store.exists("never/written")
        assert object_store.read_head("never/written") is None

    def test_get_many_keeps_the_order(self, object_store: ObjectStore) -> None:
        objects = {f"many/{i:04}": b"%d" % i for i in range(120)}
        _put_all(object_store, objects)
        keys = sorted(objects, reverse=True)
        assert object_store.get_many(keys) == [objects[key] for key in keys]
        assert object_store.get_many([]) == []

    def test_list_is_recursive_and_pages(self, object_store: ObjectStore) -> None:
        keys = [f"list/{i % 7}/{i:05}" for i in range(1100)]  # S3 pages by 1,000
        _put_all(object_store, dict.fromkeys(keys, b"1"))
        assert object_store.list("list/") == sorted(keys)
        assert object_store.list("list/3/") == sorted(k for k in keys if k.startswith("list/3/"))
        assert object_store.list("nothing/here") == []
        object_store.delete([*keys, "list/never"])
        assert object_store.list("list/") == []

    def test_large_objects_go_and_come_in_parts(
        self, object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # The real sizes, hundreds of MB, take the same paths; S3's least part is 5 MiB.
        monkeypatch.setattr(store_parts, "SINGLE_PUT", 8 * 2**20)
        monkeypatch.setattr(store_parts, "PART", 5 * 2**20)
        data = os.urandom(17 * 2**20 + 11)
        object_store.put("large/put", data)
        assert object_store.get("large/put") == data
        assert object_store.create_if_absent("large/created", data)
        assert not object_store.create_if_absent("large/created", b"other" * 2**21)
        assert object_store.get("large/created") == data

    @pytest.mark.parametrize("size", [0, 1, 17 * 2**20 + 11])
    def test_a_download_is_the_object(
        self,
        object_store: ObjectStore,
        monkeypatch: pytest.MonkeyPatch,
        tmp_path: Path,
        size: int,
    ) -> None:
        monkeypatch.setattr(store_parts, "PART", 5 * 2**20)
        data = os.urandom(size)
        path = tmp_path / "object"
        path.write_bytes(os.urandom(2 * size + 5))  # what an earlier download left
        assert object_store.download_object(object_store.create_object(data), path) == size
        assert path.read_bytes() == data

    def test_bytes_are_counted(self, store_location: StoreLocation) -> None:
        store = ObjectStore(store_location)
        store.put("counted", b"12345")
        store.get("counted")
        store.get("counted")
        store.create_if_absent("counted", b"123")
        assert (store.bytes_written, store.bytes_read) == (5, 10)


class TestContentAddressing:
    def test_named_by_blake3_and_uploaded_once(self, store_location: StoreLocation) -> None:
        store = ObjectStore(store_location)
        digest = store.create_object(b"content")
        assert digest == blake3(b"content").hexdigest()
        assert store.get(object_key(digest)) == b"content"
        assert store.create_object(b"content") == digest
        assert store.bytes_written == len(b"content")

    def test_wrong_bytes_are_refused(self, object_store: ObjectStore, tmp_path: Path) -> None:
        digest = blake3(b"what should be there").hexdigest()
        object_store.put(object_key(digest), b"something else")
        with pytest.raises(IntegrityError, match=digest):
            object_store.get_object(digest)
        with pytest.raises(IntegrityError, match=digest):
            object_store.download_object(digest, tmp_path / "object")


class TestConditionalWrites:
    def test_create_race_has_one_winner(self, object_store: ObjectStore) -> None:
        for round_ in range(3):
            key = f"race/create-{round_}"
            won = _race(8, lambda i, key=key: object_store.create_if_absent(key, b"%d" % i))
            assert sorted(won) == [False] * 7 + [True]
            assert object_store.get(key) == b"%d" % won.index(True)

    def test_create_of_an_existing_object(self, object_store: ObjectStore) -> None:
        object_store.put("exists", b"old")
        with pytest.raises(StoreConflict, match="exists"):
            object_store.create("exists", b"new")
        assert object_store.get("exists") == b"old"

    @pytest.mark.parametrize("first", [True, False])
    def test_eight_swaps_have_one_winner(self, object_store: ObjectStore, first: bool) -> None:
        for round_ in range(3):
            key = f"race/swap-{first}-{round_}"
            etag = None if first else object_store.swap(key, b"start", None)
            results = _race(8, lambda i, k=key, e=etag: object_store.swap(k, b"%d" % i, e))
            winners = [i for i, result in enumerate(results) if isinstance(result, str)]
            assert len(winners) == 1
            losers = [r for r in results if not isinstance(r, str)]
            assert all(isinstance(loser, StoreConflict) for loser in losers)
            assert object_store.read_head(key) == (b"%d" % winners[0], results[winners[0]])

    def test_swap_chain(self, object_store: ObjectStore) -> None:
        etag = None
        for version in range(4):
            etag = object_store.swap("chain", b"version %d" % version, etag)
        assert object_store.read_head("chain") == (b"version 3", etag)
        with pytest.raises(StoreConflict):
            object_store.swap("chain", b"stale", '"0123"')
        object_store.delete(["chain"])
        with pytest.raises(StoreConflict):
            object_store.swap("chain", b"gone", etag)

    def test_a_lost_answer_is_no_lost_race(
        self, object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        _lose_first_answer(monkeypatch, object_store)
        etag = object_store.swap("lost-answer", b"mine", None)
        assert object_store.read_head("lost-answer") == (b"mine", etag)

    def test_a_lost_answer_and_another_writer(
        self, object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        other = ObjectStore(object_store.location)
        _lose_first_answer(monkeypatch, object_store, lambda: other.put("overtaken", b"theirs"))
        with pytest.raises(StoreConflict):
            object_store.swap("overtaken", b"mine", None)
        assert object_store.get("overtaken") == b"theirs"


def _lose_first_answer(
    monkeypatch: pytest.MonkeyPatch, store: ObjectStore, then: Callable[[], None] | None = None
) -> None:
    """The first request is applied, but its answer never arrives."""
    real = store._run
    lost: list[str] = []

    def run(what: str, attempt: Any, **options: Any) -> Any:
        async def lossy(fs: Any) -> Any:
            result = await attempt(fs)
            if not lost:
                lost.append(what)
                if then is not None:  # in another thread: this one runs s3fs' loop
                    await asyncio.get_running_loop().run_in_executor(None, then)
                raise ConnectionResetError("the answer got lost")
            return result

        return real(what, lossy, **options)

    monkeypatch.setattr(store, "_run", run)


class TestTravelling:
    def test_pickles_by_location(self, object_store: ObjectStore) -> None:
        object_store.put("pickled", b"here")
        copy = pickle.loads(pickle.dumps(object_store))  # noqa: S301 - our own bytes
        assert copy.location == object_store.location
        assert copy.get("pickled") == b"here"

    def test_threads_share_one(self, object_store: ObjectStore) -> None:
        object_store.put("shared", b"1" * 1000)
        assert _race(8, lambda _: object_store.get("shared")) == [b"1" * 1000] * 8

    def test_a_fork_is_told(self, object_store: ObjectStore) -> None:
        context = multiprocessing.get_context("fork")
        answers = context.SimpleQueue()

        def child() -> None:
            try:
                object_store.get("shared")
            except StoreError as error:
                answers.put(str(error))

        process = context.Process(target=child)
        process.start()
        process.join(20)
        assert "fork" in answers.get()

    @pytest.mark.parametrize("endpoint", ["127.0.0.1:1", "", "http://key:secret@127.0.0.1:1"])
    def test_bad_endpoints(self, endpoint: str) -> None:
        with pytest.raises(StoreError) as caught:
            StoreLocation(endpoint, "b")
        assert "secret" not in str(caught.value)

    def test_is_closed_in_its_own_loop_wherever_it_is_collected(
        self, store_location: StoreLocation
    ) -> None:
        failed: list[dict[str, Any]] = []
        clients: list[weakref.ref[Any]] = []

        async def collect() -> None:
            asyncio.get_running_loop().set_exception_handler(lambda _, why: failed.append(why))
            store = ObjectStore(store_location)
            await asyncio.to_thread(store.put, "x", b"1")
            client = store._client
            assert client is not None
            loop, clients[:] = client.loop, [weakref.ref(client)]
            del store, client
            gc.collect()
            # What was begun in either loop by then has ended.
            for _ in range(20):
                await asyncio.to_thread(fsspec.asyn.sync, loop, asyncio.sleep, 0)
            gc.collect()

        asyncio.run(collect())
        assert clients[0]() is None
        assert failed == []


class TestUnreachable:
    def test_check_makes_the_bucket(self, store_location: StoreLocation) -> None:
        store = ObjectStore(StoreLocation(store_location.endpoint, "made-by-check"))
        _race(4, lambda _: store.check())
        store.check()
        store.put("x", b"1")
        assert store.list() == ["x"]

    def test_nothing_listens(self, store_location: StoreLocation) -> None:
        endpoint = f"http://127.0.0.1:{free_ports(1)[0]}"
        _fails_within_10_s(StoreLocation(endpoint, "b"), endpoint)

    def test_accepts_and_never_answers(self, store_location: StoreLocation) -> None:
        with socket.socket() as silent:
            silent.bind(("127.0.0.1", 0))
            silent.listen()
            endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
            _fails_within_10_s(StoreLocation(endpoint, "b"), "did not answer", timeout_s=2)

    def test_wrong_secret(self, store_location: StoreLocation) -> None:
        with environment({"AWS_SECRET_ACCESS_KEY": "wrong"}):
            _fails_within_10_s(store_location, "refuses the credentials.*AWS_SECRET_ACCESS_KEY")
            with pytest.raises(StoreError, match="refuses the credentials"):
                ObjectStore(store_location).get("x")

    def test_unknown_key(self, store_location: StoreLocation) -> None:
        with environment({"AWS_ACCESS_KEY_ID": "nobody"}):
            _fails_within_10_s(store_location, "refuses the credentials")


def _fails_within_10_s(location: StoreLocation, pattern: str, timeout_s: float = 10) -> None:
    started = time.monotonic()
    with pytest.raises(StoreError, match=pattern):
        ObjectStore(location).check(timeout_s)
    assert time.monotonic() - started < 10


@contextmanager
def _store_on(folder: Path) -> Iterator[ObjectStore]:
    with ProcessGroup(folder / "logs") as group:
        location = start_store(group, folder, "kept")
        with environment(read_credentials(folder).environment()):
            yield ObjectStore(location)


class TestEmbeddedServer:
    def test_restart_keeps_the_data(self, tmp_path: Path) -> None:
        data = os.urandom(3_000_000)
        with _store_on(tmp_path) as store:
            digest = store.create_object(data)
            etag = store.swap("head", digest.encode(), None)
            before = (tmp_path / "credentials.json").read_bytes()
        with _store_on(tmp_path) as again:
            assert again.location != store.location  # ports are chosen anew
            assert again.read_head("head") == (digest.encode(), etag)
            assert again.get_object(digest) == data
            again.swap("head", b"next", etag)
        assert (tmp_path / "credentials.json").read_bytes() == before
        assert (tmp_path / "credentials.json").stat().st_mode & 0o777 == 0o600

    def test_a_failed_call_keeps_nothing_of_its_callers_alive(
        self, object_store: ObjectStore
    ) -> None:
        """Without the garbage collector's help: what they hold may be gigabytes."""
        calls = {
            "exists": lambda: object_store.exists("not-there"),
            "get": lambda: object_store.get("not-there"),
            "get_object": lambda: object_store.get_object("0" * 64),
            "head": lambda: object_store.read_head("not-there"),
            "create": lambda: object_store.create("there", b"1"),
            "swap": lambda: object_store.swap("there", b"2", "wrong"),
        }
        object_store.put("there", b"0")

        def caller(call: Callable[[], object]) -> weakref.ref[np.ndarray]:
            large = np.zeros(1000)
            with suppress(StoreError):
                call()
            return weakref.ref(large)

        gc.disable()
        try:
            kept = [name for name, call in calls.items() if caller(call)() is not None]
        finally:
            gc.enable()
        assert kept == []

    def test_lost_server(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(store_errors, "RETRY_FOR_S", 2.0)
        with _store_on(tmp_path) as store:
            store.put("x", b"1")
        started = time.monotonic()
        with pytest.raises(StoreError, match=store.location.endpoint):
            store.get("x")
        with pytest.raises(StoreError, match=store.location.endpoint):
            store.check()
        assert time.monotonic() - started < 10

    def test_credentials_are_nowhere_to_be_seen(self, tmp_path: Path) -> None:
        with ProcessGroup(tmp_path / "logs") as group:
            start_store(group, tmp_path, "kept")
            process = psutil.Process(group.children[0].pid)
            credentials = read_credentials(tmp_path)
            shown = " ".join(process.cmdline()) + (tmp_path / "logs" / "store.log").read_text()
            shown += repr(credentials)
            assert credentials.secret_key not in shown
            listening = [c for c in process.net_connections() if c.status == "LISTEN"]
            assert {c.laddr.ip for c in listening} == {"127.0.0.1"}

    def test_damaged_credentials(self, tmp_path: Path) -> None:
        ensure_credentials(tmp_path)
        (tmp_path / "credentials.json").write_text("{}")
        with pytest.raises(ServiceError, match=r"credentials\.json"):
            read_credentials(tmp_path)
