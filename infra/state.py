"""The state folder of one machine: what `infra.local up` started, and who may start something.

`services.json` names the services with pids, creation times and addresses, never credentials. A
lock keeps two launchers from starting a store on one folder; the kernel releases it with the last
process that holds it, which is the launcher's reaper when the launcher was killed.
"""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from infra.processes import ROOT, Child, is_alive
from tasks.errors import ServiceError

STORE = "store"
"""Name of the process that is the object store."""


@dataclass(frozen=True)
class Record:
    """The services that `up` started."""

    token: str
    preset: str
    store_endpoint: str
    store_bucket: str
    scheduler: str
    prefect_api: str
    children: tuple[Child, ...]

    @property
    def keeps_store(self) -> bool:
        """Whether the store is one of them, and its credentials are in the state folder."""
        return any(child.name == STORE for child in self.children)

    def dead(self) -> list[str]:
        """Names of the services that no longer run."""
        return [child.name for child in self.children if not is_alive(child.pid, child.created)]


def home_folder(home: Path | None = None) -> Path:
    """The state folder: the one given, else KINDLING_HOME, else .kindling in the repository."""
    chosen = home or Path(os.environ.get("KINDLING_HOME") or ROOT / ".kindling")
    return chosen.expanduser().resolve()


def read_record(home: Path) -> Record | None:
    """What `up` wrote, or None.

    Raises:
        ServiceError: the file is damaged.
    """
    path = home / "services.json"
    try:
        fields = json.loads(path.read_text())
        children = tuple(Child(**child) for child in fields.pop("children"))
        return Record(**fields, children=children)
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise ServiceError(
            f"{path} is damaged ({error!r}); stop what it started by hand and remove it"
        ) from error


def write_record(home: Path, record: Record) -> None:
    """Replace services.json as a whole."""
    handle, temporary = tempfile.mkstemp(dir=home, prefix="services")
    with os.fdopen(handle, "w") as file:
        json.dump(asdict(record), file, indent=2)
    os.replace(temporary, home / "services.json")


def remove_record(home: Path) -> None:
    (home / "services.json").unlink(missing_ok=True)


def living_services(home: Path) -> Record | None:
    """The services of `up` if all run, None if there are none.

    Raises:
        ServiceError: some of them are dead.
    """
    record = read_record(home)
    if record is None:
        return None
    dead = record.dead()
    if len(dead) == len(record.children):
        return None  # the machine was restarted, say
    if dead:
        raise ServiceError(
            f"of the services in {home / 'services.json'} these are dead: {', '.join(dead)}; run "
            "`python -m infra.local down`, then `up` (their logs are in the folder `logs`)"
        )
    return record


@contextmanager
def locked(home: Path, purpose: str) -> Iterator[int]:
    """Hold the folder's lock for `purpose`; yields its descriptor, for a reaper to inherit.

    Raises:
        ServiceError: another process holds it.
    """
    home.mkdir(parents=True, exist_ok=True)
    path = home / f"{purpose}.lock"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 64, 0).decode(errors="replace").strip() or "unknown"
            raise ServiceError(
                f"{home} is in use: process {holder} runs {purpose} there; wait for it, share "
                "services with `python -m infra.local up`, or choose another folder by "
                "KINDLING_HOME"
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield descriptor
    finally:
        os.close(descriptor)  # releases the lock unless a reaper still holds it
