"""Names in the object store: which bucket, and the keys of content-addressed objects."""

from __future__ import annotations

from dataclasses import dataclass

from tasks.errors import StoreError


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
