"""How the S3 client is set up: the lower half of `tasks.store`, beside `tasks.store_errors`."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import s3fs

CONNECT_S = 5.0
READ_S = 30.0  # a store that shares two cores with training can be late without being gone


class _Client(s3fs.S3FileSystem):
    @staticmethod
    def close_session(loop: Any, s3: Any) -> None:
        """Closes the connections of a client that nobody holds any more, in the loop they live in.

        s3fs takes the loop that runs where the garbage collector comes by, if any (Prefect's,
        Dask's); aiohttp fails there and the failure is logged as nobody's.
        """
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            s3fs.S3FileSystem.close_session(loop, s3)
        else:
            asyncio.run_coroutine_threadsafe(s3.__aexit__(None, None, None), loop)


def connect(endpoint: str) -> s3fs.S3FileSystem:
    """A client of an endpoint, with the environment's credentials; makes no request yet."""
    client = _Client(
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
