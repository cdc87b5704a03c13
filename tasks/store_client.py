"""How the S3 client is set up: the lower half of `tasks.store`, beside `tasks.store_errors`."""

from __future__ import annotations

import os

import s3fs

CONNECT_S = 5.0
READ_S = 30.0  # a store that shares two cores with training can be late without being gone


def connect(endpoint: str) -> s3fs.S3FileSystem:
    """A client of an endpoint, with the environment's credentials; makes no request yet."""
    client = s3fs.S3FileSystem(
        endpoint_url=endpoint,
        use_listings_cache=False,  # other processes write too
        skip_instance_cache=True,  # a new ObjectStore reads the environment's credentials again
        client_kwargs={"region_name": region()},
        config_kwargs={
            "connect_timeout": CONNECT_S,
            "read_timeout": READ_S,
            "max_pool_connections": 32,
            "signature_version": "s3v4",  # signed addresses too: botocore's default there is v2
            # One layer of retries, ours: it has to know whether a conditional write was repeated.
            "retries": {"total_max_attempts": 1},
            "request_checksum_calculation": "when_required",  # not every S3 server knows CRC32
            "response_checksum_validation": "when_required",
        },
    )
    client.retries = 1  # s3fs' own, for the same reason
    return client


def region() -> str:
    return os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"
