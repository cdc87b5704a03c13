"""What a failed S3 request means and whether to repeat it: the lower half of `tasks.store`.

botocore raises its own errors for the network and credentials it cannot find; s3fs turns S3's
error codes into OSErrors whose cause still holds the code (a lost conditional write is EINVAL, so
the errno is no help).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import aiohttp
from botocore import exceptions as boto
from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception_type,
    stop_after_attempt,
    stop_after_delay,
    wait_random_exponential,
)

from tasks.errors import StoreConflict, StoreError

CONFLICT_CODES = {"PreconditionFailed", "412"}
REFUSED_CODES = {
    "403",
    "AccessDenied",
    "InvalidAccessKeyId",
    "SignatureDoesNotMatch",
    "ExpiredToken",
    "InvalidToken",
    "RequestTimeTooSkewed",
}
MISSING_CODES = {"404", "NoSuchKey", "NoSuchBucket"}
RANGE_CODES = {"InvalidRange", "416"}
# 409 is S3's answer to two conditional writes at once: asked again it says who won.
BUSY_CODES = {"409", "ConditionalRequestConflict", "OperationAborted", "SlowDown", "RequestTimeout"}

T = TypeVar("T")
RETRY_FOR_S = 25.0
"""A store that is started again within 20 s costs a run nothing but that time; one that is not ends
it within a minute, which takes two such waits: a trainer rank's, and the flow's own."""
REQUEST_ERRORS = (boto.BotoCoreError, aiohttp.ClientError, OSError)


class ObjectMissing(StoreError, FileNotFoundError):
    """The store answers but holds no such object."""


class Transient(Exception):
    """An attempt failed in a way that a later one may not; its text is the cause."""


def s3_code(error: Exception) -> str:
    """S3's code for what s3fs raised ("NoSuchKey"); empty if S3 gave none."""
    cause = error.__cause__
    if not isinstance(cause, boto.ClientError):
        return ""
    return str(cause.response.get("Error", {}).get("Code", ""))


def translate(error: Exception, endpoint: str, bucket: str, what: str) -> Exception:
    """The error to raise instead of one of REQUEST_ERRORS: Transient, or a StoreError that says
    what could not be done."""
    store = f"object store {endpoint} (bucket {bucket})"
    if isinstance(error, (boto.NoCredentialsError, boto.PartialCredentialsError)):
        return _refused(store, str(error))
    if isinstance(error, (boto.HTTPClientError, boto.ConnectionError, aiohttp.ClientError)):
        return Transient(str(error) or type(error).__name__)
    cause = error.__cause__
    if not isinstance(cause, boto.ClientError):
        if isinstance(error, (ConnectionError, TimeoutError)):
            return Transient(str(error) or type(error).__name__)
        return StoreError(f"{store} cannot {what}: {error}")
    code = s3_code(error)
    status = int(cause.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    if code in CONFLICT_CODES:
        return StoreConflict(
            f"{store} did not {what}: the object exists or changed since it was read; read it again"
        )
    if code in REFUSED_CODES:
        return _refused(store, f"{code}: {error}")
    if code in MISSING_CODES:
        return ObjectMissing(f"{store} cannot {what}: it does not exist ({code})")
    if status >= 500 or status == 429 or code in BUSY_CODES:
        return Transient(f"{code}: {error}")
    return StoreError(f"{store} cannot {what}: {code}: {error}")


async def with_retries(
    attempt: Callable[[], Awaitable[T]],
    where: tuple[str, str],
    what: str,
    attempts: int | None = None,
    on_retry: Callable[[RetryCallState], None] | None = None,
) -> T:
    """The result of `attempt`, repeated after transient errors, others translated.

    Args:
        where: endpoint and bucket, for messages.
        what: what is being done ("read KEY"), for messages.
        attempts: at most so many; None: as many as RETRY_FOR_S has room for.
        on_retry: called before each repetition.

    Raises:
        StoreError: also when the last repetition failed.
    """

    async def translated() -> T:
        try:
            return await attempt()
        except (StoreError, Transient):
            raise
        except REQUEST_ERRORS as error:
            raise translate(error, *where, what) from error

    stop = stop_after_delay(RETRY_FOR_S)
    retrying = AsyncRetrying(
        retry=retry_if_exception_type(Transient),
        stop=stop if attempts is None else stop | stop_after_attempt(attempts),
        wait=wait_random_exponential(multiplier=0.2, max=5),
        before_sleep=on_retry,
        reraise=True,
    )
    try:
        return await retrying(translated)
    except Transient as error:
        tried = retrying.statistics["attempt_number"]
        raise StoreError(
            f"object store {where[0]} failed {tried} times to {what}: {error}; expected an S3 "
            "endpoint there; start it, or correct the address"
        ) from error.__cause__


def _refused(store: str, reason: str) -> StoreError:
    return StoreError(
        f"{store} refuses the credentials ({reason}); expected AWS_ACCESS_KEY_ID and "
        "AWS_SECRET_ACCESS_KEY in the environment with access to the bucket; correct them and "
        "start again"
    )
