"""Pins: versions that garbage collection keeps however old they become.

    runs/<run>/pins/<version:08d>-<name>.json    {"format": 1, "run", "name", "ref": {...}}

Several names may pin one version (a report, a deployment); it is kept until the last is removed.
"""

from __future__ import annotations

import re
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from tasks.errors import ConfigError, IntegrityError, StoreError
from tasks.store import ObjectMissing, ObjectStore, object_key
from tasks.store_location import quarantine_key
from tasks.weights.commit import load_manifest, read_ref
from tasks.weights.manifest import ManifestRef, head_key
from tasks.weights.versions import Nothing, Plan, Refusal, plan

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class Pin(BaseModel):
    """The content of a pin."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    format: Literal[1] = 1
    run: str
    name: str
    ref: ManifestRef

    @property
    def key(self) -> str:
        return pin_key(self.run, self.ref.version, self.name)


def pin_key(run: str, version: int, name: str) -> str:
    """
    Raises:
        ConfigError: the run's or the pin's name cannot be part of a key.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"pin name {name!r} cannot be part of a key; use at most 64 letters, digits, '.', '_' "
            "and '-', the first a letter or digit"
        )
    return f"{head_key(run).removesuffix('head.json')}pins/{version:08d}-{name}.json"


def pin(store: ObjectStore, run: str, version: int, name: str) -> str:
    """Keeps a version, and the way to it, until `unpin`; returns the pin's key. Repeating is safe.

    Raises:
        ConfigError: a name cannot be part of a key.
        StoreError: the run has no such version, its objects were collected, or the store failed.
        IntegrityError: the run's head or a manifest is damaged.
    """
    road = _road(store, run, version)
    made = Pin(run=run, name=name, ref=road.target.ref())
    # The pin first: a collection that reads it keeps the objects; one that began before sets them
    # aside at most, and the next one brings them back. Checked first, they could go in between.
    new = store.create_if_absent(made.key, made.model_dump_json().encode())
    objects = [file.digest for file in road.steps[0].anchor]
    objects += [shard.digest for manifest in road.steps[1:] for shard in manifest.shards]
    try:
        for digest in objects:
            if not store.exists(object_key(digest)):
                store.copy(quarantine_key(digest), object_key(digest))
    except ObjectMissing as missing:
        if new:
            store.delete([made.key])
        raise StoreError(
            f"run {run!r} version {version} cannot be pinned: it was collected ({missing}); pin a "
            "version near the head"
        ) from missing
    return made.key


def unpin(store: ObjectStore, run: str, version: int, name: str) -> None:
    """Removes a pin.

    Raises:
        StoreError: there is no such pin.
    """
    key = pin_key(run, version, name)
    if not store.exists(key):
        known = [one.rpartition("/")[2] for one in store.list(key.rpartition("/")[0] + "/")]
        raise StoreError(f"there is no pin {key}; the run's pins are: {', '.join(known) or 'none'}")
    store.delete([key])


def read_pin(store: ObjectStore, key: str) -> Pin:
    """
    Raises:
        IntegrityError: it is not a pin, or not the one its key says.
        StoreError: the store failed, or lacks it.
    """
    try:
        found = Pin.model_validate_json(store.get(key))
        expected = found.key
    except (ValidationError, ConfigError) as error:
        raise IntegrityError(f"not a pin: {error}") from error
    if expected != key:
        raise IntegrityError(f"it holds the pin that belongs at {expected}")
    return found


def _road(store: ObjectStore, run: str, version: int) -> Plan:
    """How a newcomer reaches the version."""
    head = read_ref(store, run)
    found = plan(run, Nothing(), head, version, lambda ref: load_manifest(store, run, ref))
    if isinstance(found, Refusal):
        raise IntegrityError(found.reason) if found.broken else StoreError(found.reason)
    return found
