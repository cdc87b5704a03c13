"""Names in the object store: which bucket, the keys of content-addressed objects, listings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any

from tasks.errors import IntegrityError, StoreError


@dataclass(frozen=True)
class StoreLocation:
    """Where the objects are. Picklable and free of credentials.

    Raises:
        StoreError: the endpoint is not an http(s) URL, or carries credentials.
    """

    endpoint: str
    bucket: str

    def __post_init__(self) -> None:
        if not self.endpoint.startswith(("http://", "https://")):
            raise StoreError(
                f"store endpoint {self.endpoint!r} is not a URL; expected http://HOST:PORT or "
                "https://HOST; correct cluster.store_endpoint"
            )
        if "@" in self.endpoint:
            raise StoreError(
                "the store endpoint carries credentials; remove them from the URL and set "
                "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
            )


def object_key(digest: str) -> str:
    """The key of the content-addressed object with this BLAKE3 digest (hexadecimal)."""
    return f"objects/{digest[:2]}/{digest}"


def quarantine_key(digest: str) -> str:
    """Where garbage collection sets that object aside before it deletes it."""
    return f"quarantine/{digest[:2]}/{digest}"


@dataclass(frozen=True)
class Listed:
    """An object in a listing.

    Attributes:
        bytes: its size.
        age_s: seconds since it was last written, by the store's clock at the time of the listing.
    """

    key: str
    bytes: int
    age_s: float


def listed(entry: Mapping[str, Any], answer: Mapping[str, Any]) -> Listed:
    """An entry of a page of S3's listing.

    Both times are the store's own: with this host's clock, one that is wrong by hours would make
    an object look old that was written a minute ago.

    Args:
        answer: the page's ResponseMetadata.

    Raises:
        StoreError: the store does not say what time it is.
    """
    date = answer.get("HTTPHeaders", {}).get("date")
    if date is None:
        raise StoreError(
            "the object store's answer to a listing has no Date header; expected one, as HTTP "
            "asks for: without it the age of an object is unknown. Check what is between it and us"
        )
    age = parsedate_to_datetime(date) - entry["LastModified"]
    return Listed(entry["Key"], int(entry["Size"]), age.total_seconds())


def check_digest(digest: str, found: str, size: int) -> None:
    """Refuses an object of `size` bytes whose content has another digest than its name.

    Raises:
        IntegrityError: names both.
    """
    if found != digest:
        raise IntegrityError(
            f"object {object_key(digest)} has digest {found} ({size} bytes), not the one it is "
            "named by; delete it so that it can be written again"
        )
