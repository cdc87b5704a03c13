"""The object store: the only module that talks S3, through s3fs.

Weights, batches, checkpoints and metrics move through it. Three ways to write: `put` overwrites,
`create` makes an object once (the loser of a race gets `StoreConflict`), `swap` replaces an object
only if it still is what the caller read (compare-and-swap on its ETag: head pointers). Objects
named by their own BLAKE3 digest go through `create_object` and `get_object`, which verifies.

Credentials come from the environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY) of the process
that makes the first call; a `StoreLocation` holds none, so it may travel and be logged.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import s3fs
from blake3 import blake3
from fsspec.asyn import sync
from tenacity import RetryCallState

from tasks.errors import StoreConflict, StoreError
from tasks.store_client import connect, region
from tasks.store_errors import (
    MISSING_CODES,
    ObjectMissing,
    with_retries,
)
from tasks.store_location import (
    Listed,
    StoreLocation,
    check_digest,
    listed,
    object_key,
    quarantine_key,
)
from tasks.store_parts import Data, as_body, fetch, parallel, upload, write_at

__all__ = ["Data", "ObjectMissing", "ObjectStore", "StoreLocation", "object_key"]

T = TypeVar("T")

_COPY = 4 * 2**30  # larger objects are copied in parts: S3 copies at most 5 GiB in one request


class ObjectStore:
    """Synchronous, thread-safe client of one bucket.

    Pickles as its location and reconnects where it is unpickled. Not fork-safe (s3fs runs an
    event loop in a thread): a forked child gets a StoreError. Keys are relative to the bucket; no
    key may be a folder of another ("a" and "a/b"), which some servers refuse.

    Every method raises StoreError when the store does not answer after bounded retries or refuses
    the credentials, ObjectMissing when it lacks the object, StoreConflict when a conditional write
    loses.
    """

    def __init__(self, location: StoreLocation) -> None:
        self.location = location
        self.bytes_read = 0
        self.bytes_written = 0
        self._lock = threading.Lock()
        self._client: s3fs.S3FileSystem | None = None
        self._pid = os.getpid()

    def __reduce__(self) -> tuple[type[ObjectStore], tuple[StoreLocation]]:
        return (ObjectStore, (self.location,))

    def __repr__(self) -> str:
        return f"ObjectStore({self.location.endpoint}, {self.location.bucket})"

    # Reading

    def get(self, key: str) -> bytes:
        """The object's bytes."""
        return self._read(key)[0]

    def get_many(self, keys: Iterable[str], concurrency: int = 16) -> list[bytes]:
        """The objects' bytes in the order of `keys`, read in parallel."""
        return parallel(self.get, list(keys), concurrency)

    def get_object(self, digest: str) -> bytes:
        """The content-addressed object, also where garbage collection has set it aside meanwhile.

        Raises:
            IntegrityError: the bytes do not have this digest.
        """
        data = _wherever(self.get, digest)
        check_digest(digest, blake3(data).hexdigest(), len(data))
        return data

    def download_object(self, digest: str, path: Path) -> int:
        """`get_object` into a file; holds a few parts in memory, however large the object is.

        Returns its bytes. Raises as `get_object`; the file may then hold anything.
        """
        size = _wherever(lambda key: self._download(key, path), digest)
        found = blake3(max_threads=blake3.AUTO).update_mmap(path).hexdigest()
        check_digest(digest, found, size)
        return size

    def _download(self, key: str, path: Path) -> int:
        def attempt(fs: s3fs.S3FileSystem) -> Awaitable[tuple[int, str]]:
            os.ftruncate(file.fileno(), 0)  # an earlier attempt may have read a longer object
            keep = partial(write_at, file.fileno())
            return fetch(fs, self.location.bucket, key, keep)

        with path.open("wb") as file:
            size, _ = self._run(f"read {key}", attempt)
            os.fsync(file.fileno())
        self._count(read=size)
        return size

    def read_head(self, key: str) -> tuple[bytes, str] | None:
        """The object's bytes and the ETag for `swap`, both of one read; None if there is none."""
        try:
            return self._read(key)
        except ObjectMissing:
            return None

    def exists(self, key: str) -> bool:
        try:
            self._head(key)
        except ObjectMissing:
            return False
        return True

    def size(self, key: str) -> int:
        """The object's size in bytes."""
        return int(self._head(key)["ContentLength"])

    def signed_url(self, key: str, content_type: str, seconds: int) -> str:
        """An address under which whoever has it can read the object, without credentials, for at
        most 604,800 s. Nothing is asked of the store: the object need not exist."""
        path, kind = f"{self.location.bucket}/{key}", {"ResponseContentType": content_type}
        return self._run(f"sign {key}", lambda fs: fs._url(path, expires=seconds, **kind))

    def list(self, prefix: str = "") -> list[str]:
        """All keys that start with `prefix`, sorted."""
        found = self._run(f"list {prefix!r}", lambda fs: self._list(fs, prefix))
        return sorted(entry["Key"] for entry, _ in found)

    def listing(self, prefix: str = "") -> list[Listed]:
        """All objects whose keys start with `prefix`, with size and age, sorted by key."""
        found = self._run(f"list {prefix!r}", lambda fs: self._list(fs, prefix))
        return sorted((listed(*one) for one in found), key=lambda one: one.key)

    # Writing

    def put(self, key: str, data: Data) -> None:
        """Write the object, whether it exists or not."""
        self._run(
            f"write {key}", lambda fs: upload(fs, self.location.bucket, key, data, "overwrite")
        )
        self._count(written=len(data))

    def create(self, key: str, data: Data) -> None:
        """Write the object unless it exists.

        Raises:
            StoreConflict: it exists; nothing was changed.
        """
        self._conditional(
            key, data, lambda fs: upload(fs, self.location.bucket, key, data, "create")
        )

    def create_if_absent(self, key: str, data: Data) -> bool:
        """Write the object unless it exists; True if this call wrote it."""
        try:
            self.create(key, data)
        except StoreConflict:
            return False
        return True

    def create_object(self, data: Data) -> str:
        """Store the bytes under their own BLAKE3 digest and return it; no upload if present."""
        digest = blake3(data).hexdigest()
        if not self.exists(object_key(digest)):
            self.create_if_absent(object_key(digest), data)
        return digest

    def swap(self, key: str, data: Data, etag: str | None) -> str:
        """Replace the object only if its ETag is still `etag` (None: only if there is none).

        Returns the new ETag. Equal bytes have equal ETags: data that must not be confused with an
        older state has to differ from it (a version number does).

        Raises:
            StoreConflict: the object changed, appeared or vanished; nothing was written.
        """
        match = {"IfNoneMatch": "*"} if etag is None else {"IfMatch": etag}
        body = as_body(data)

        async def attempt(fs: s3fs.S3FileSystem) -> str:
            answer = await fs._call_s3(
                "put_object", Bucket=self.location.bucket, Key=key, Body=body, **match
            )
            return str(answer["ETag"])

        try:
            etag_now = self._conditional(key, body, attempt)
        except ObjectMissing as error:  # AWS' answer to If-Match on nothing; others conflict
            raise StoreConflict(f"{self!r} did not write {key}: the object vanished") from error
        return etag_now or str(self._head(key)["ETag"])

    def copy(self, source: str, target: str) -> None:
        """Copy an object inside the store, over what `target` holds; the copy's age is zero."""
        size = self.size(source)
        bucket = self.location.bucket

        async def attempt(fs: s3fs.S3FileSystem) -> None:
            if size > _COPY:
                await fs._copy_managed(f"{bucket}/{source}", f"{bucket}/{target}", size, _COPY)
            else:
                origin = {"Bucket": bucket, "Key": source}
                await fs._call_s3("copy_object", Bucket=bucket, Key=target, CopySource=origin)

        self._run(f"copy {source} to {target}", attempt)

    def delete(self, keys: Iterable[str]) -> None:
        """Remove the objects; those that do not exist are no error."""
        doomed = list(keys)
        for start in range(0, len(doomed), 1000):  # what one S3 request takes
            batch = doomed[start : start + 1000]
            self._run(f"delete {len(batch)} objects", lambda fs, b=batch: self._delete(fs, b))

    # Connection

    def check(self, timeout_s: float = 10.0) -> None:
        """Make sure the store answers, accepts the credentials and has the bucket (made if not).

        Raises:
            StoreError: it does not, within `timeout_s`; says what was expected and what to do.
        """
        try:
            self._run("check", self._ensure_bucket, budget_s=timeout_s, attempts=3)
        except ObjectMissing as error:
            raise StoreError(
                f"{self.location.endpoint} answers, but knows no bucket {self.location.bucket!r} "
                "and makes none; expected an S3 endpoint; correct cluster.store_endpoint"
            ) from error
        except TimeoutError:
            raise StoreError(
                f"object store {self.location.endpoint} did not answer within {timeout_s:g} s; "
                "expected an S3 endpoint there; start it, or correct cluster.store_endpoint"
            ) from None

    async def _ensure_bucket(self, fs: s3fs.S3FileSystem) -> None:
        bucket = self.location.bucket
        try:
            await fs._call_s3("head_bucket", Bucket=bucket)
        except FileNotFoundError:
            where = region()
            place = {} if where == "us-east-1" else {"LocationConstraint": where}
            extra = {"CreateBucketConfiguration": place} if place else {}
            try:
                await fs._call_s3("create_bucket", Bucket=bucket, **extra)
            except FileExistsError:  # another process made it at the same time
                await fs._call_s3("head_bucket", Bucket=bucket)

    def _filesystem(self) -> s3fs.S3FileSystem:
        if os.getpid() != self._pid:
            raise StoreError(
                f"{self!r} was made in process {self._pid} and used in its fork {os.getpid()}; "
                "start processes by spawn, or make the ObjectStore in the child"
            )
        with self._lock:
            if self._client is None:
                self._client = connect(self.location.endpoint)
            return self._client

    def _run(
        self,
        what: str,
        attempt: Callable[[s3fs.S3FileSystem], Awaitable[T]],
        budget_s: float | None = None,
        attempts: int | None = None,
        on_retry: Callable[[RetryCallState], None] | None = None,
    ) -> T:
        """Run `attempt` with retries in s3fs' loop; with a budget at most that long in all
        (TimeoutError)."""
        fs = self._filesystem()
        where = (self.location.endpoint, self.location.bucket)

        async def bounded() -> T | _Failure:
            trials = with_retries(lambda: attempt(fs), where, what, attempts, on_retry)
            try:
                return await asyncio.wait_for(trials, budget_s)
            except Exception as error:  # noqa: BLE001 (raised below)
                return _Failure(error)

        # Raised by fsspec's `sync` itself, or with the frames in which tenacity keeps it, it would
        # hold on to itself, and to all its callers' locals (an anchor of a gigabyte, say), until
        # the garbage collector comes by. Its cause keeps its own traceback.
        outcome: Any = sync(fs.loop, bounded)
        if not isinstance(outcome, _Failure):
            return outcome
        try:
            raise outcome.error.with_traceback(None)
        finally:
            del outcome

    # Requests

    def _conditional(
        self, key: str, data: Data, attempt: Callable[[s3fs.S3FileSystem], Awaitable[T]]
    ) -> T | None:
        """Run a conditional write; None if it had succeeded though its answer was lost."""
        retries: list[RetryCallState] = []
        try:
            result = self._run(f"write {key}", attempt, on_retry=retries.append)
        except StoreConflict:
            # After a lost answer the repeated request conflicts with our own first one.
            head = self.read_head(key) if retries else None
            if head is None or head[0] != data:
                raise
            result = None
        self._count(written=len(data))
        return result

    def _read(self, key: str) -> tuple[bytes, str]:
        async def attempt(fs: s3fs.S3FileSystem) -> tuple[bytes, str]:
            parts: dict[int, bytes] = {}
            _, etag = await fetch(fs, self.location.bucket, key, parts.__setitem__)
            return b"".join(parts[at] for at in sorted(parts)), etag

        data, etag = self._run(f"read {key}", attempt)
        self._count(read=len(data))
        return data, etag

    def _head(self, key: str) -> dict[str, Any]:
        return self._run(
            f"look up {key}",
            lambda fs: fs._call_s3("head_object", Bucket=self.location.bucket, Key=key),
        )

    async def _list(
        self, fs: s3fs.S3FileSystem, prefix: str
    ) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """Entries, each with the metadata of the answer that it came in."""
        found: list[tuple[dict[str, Any], dict[str, Any]]] = []
        more: dict[str, str] = {}
        while True:
            page = await fs._call_s3(
                "list_objects_v2", Bucket=self.location.bucket, Prefix=prefix, **more
            )
            found.extend(
                (entry, page["ResponseMetadata"])
                for entry in page.get("Contents", [])
                if not entry["Key"].endswith("/")  # folder markers
            )
            if not page.get("IsTruncated"):
                return found
            more = {"ContinuationToken": page["NextContinuationToken"]}

    async def _delete(self, fs: s3fs.S3FileSystem, keys: list[str]) -> None:
        answer = await fs._call_s3(
            "delete_objects",
            Bucket=self.location.bucket,
            Delete={"Objects": [{"Key": key} for key in keys], "Quiet": True},
        )
        errors = [e for e in answer.get("Errors", []) if e.get("Code") not in MISSING_CODES]
        if errors:
            first = errors[0]
            raise StoreError(
                f"{self!r} cannot delete {len(errors)} of {len(keys)} objects; the first is "
                f"{first.get('Key')}: {first.get('Code')}: {first.get('Message')}"
            )

    def _count(self, read: int = 0, written: int = 0) -> None:
        with self._lock:
            self.bytes_read += read
            self.bytes_written += written


@dataclass(frozen=True, slots=True)
class _Failure:
    error: Exception


def _wherever(read: Callable[[str], T], digest: str) -> T:
    """Reads an object, or its copy where garbage collection has set it aside.

    Set aside is not deleted: see tasks.weights.garbage on publishes that go on meanwhile.
    """
    try:
        return read(object_key(digest))
    except ObjectMissing as missing:
        try:
            return read(quarantine_key(digest))
        except ObjectMissing:
            raise missing from None
