"""A host's shadow copy of a run's weights: files that every process of the host maps.

    <folder>/<run>/users         flock, shared, by every process that uses the shadow
    <folder>/<run>/lock          flock: exclusive to change the shadow, shared to read it
    <folder>/<run>/state.json    what it holds; written last, and taken away before a change
    <folder>/<run>/weights       the patterns of all tensors, one after the other
    <folder>/<run>/history       the codec's history, a byte a value
    <folder>/<run>/moved-<version>.safetensors   positions that this version changed, by tensor

Whoever first wants a version downloads, decodes and verifies it here, once for all engines of the
host; the others find it done. A process that dies while it writes leaves no state.json, so the
shadow holds nothing and the next one starts from an anchor. The record names the boot it was
written in: after a crash of the host, pages of these files may be older than the record.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from tasks.weights.bits import Bits, DtypeName, numel, pattern_dtype
from tasks.weights.history import no_history
from tasks.weights.manifest import Manifest, ManifestRef
from tasks.weights.versions import Holds, Nothing, State

# (name, dtype, number of values) of each tensor, in the order of the files.
Layout: TypeAlias = tuple[tuple[str, DtypeName, int], ...]

_ALIGN = 64
_MOVED_KEPT = 64
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    boot: str
    run: str
    ref: ManifestRef
    tensors: Layout


@dataclass(frozen=True)
class _Mapped:
    """The files of one layout, mapped."""

    tensors: Layout
    weights: dict[str, Bits]
    history: dict[str, Bits]
    inode: int


class Shadow:
    """One process's hold on the shadow of a run. Not thread-safe.

    Attributes:
        weights, history: name -> flat arrays over the shared files; to be used under a lock only.
        state: what the shadow holds, as of the last time it was locked.
    """

    def __init__(self, folder: Path, run: str) -> None:
        self.folder = folder / run
        self.run = run
        self.weights: Mapping[str, Bits] = {}
        self.history: Mapping[str, Bits] = {}
        self.state: State = Nothing()
        self._mapped: _Mapped | None = None
        self._release = weakref.finalize(self, os.close, self._use())

    def close(self) -> None:
        """Lets others remove the shadow."""
        self._release()

    def _use(self) -> int:
        """A descriptor whose lock says that somebody uses this folder, made where missing."""
        path = self.folder / "users"
        while True:
            self.folder.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):  # somebody removes it at this moment
                handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
                fcntl.flock(handle, fcntl.LOCK_SH)
                with contextlib.suppress(FileNotFoundError):
                    if os.path.samestat(os.fstat(handle), os.stat(path)):
                        return handle
                os.close(handle)  # what we locked had been removed

    @contextlib.contextmanager
    def locked(self, *, to_write: bool) -> Iterator[None]:
        """Holds the shadow, alone or with other readers; other processes and threads wait."""
        with (self.folder / "lock").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX if to_write else fcntl.LOCK_SH)
            self._look()
            yield

    @contextlib.contextmanager
    def changing(self, target: Holds) -> Iterator[None]:
        """Around all writes that lead to `target`; until it ends well the shadow holds nothing."""
        self._record_path.unlink(missing_ok=True)
        self.state = Nothing()
        yield
        assert self._mapped is not None
        record = _Record(boot=_boot(), run=self.run, ref=target.ref, tensors=self._mapped.tensors)
        _write_whole(self._record_path, record.model_dump_json().encode())
        self.state = target

    def lay_out(self, manifest: Manifest) -> None:
        """Makes room for the tensors of a manifest and forgets what moved; inside `changing`."""
        for path in self.folder.glob("moved-*"):
            path.unlink()
        tensors: Layout = tuple((t.name, t.dtype, numel(t.shape)) for t in manifest.tensors)
        if self._mapped is None or self._mapped.tensors != tensors:
            for name, size in (("weights", _size(tensors)), ("history", _values(tensors))):
                # A new file: another process may have the old one mapped in another layout.
                (self.folder / name).unlink(missing_ok=True)
                with (self.folder / name).open("wb") as file:
                    file.truncate(max(size, 1))
            self._map(tensors)
        for held in self.history.values():
            held[:] = no_history(held.size)

    def note_moved(self, manifest: Manifest, moved: Mapping[str, Bits]) -> None:
        """Keeps the positions (int64) that a version changed; engines behind ask for them."""
        names = sorted(moved)
        save_file(
            {str(at): moved[name] for at, name in enumerate(names)},
            self._moved_path(manifest.version),
            metadata={
                "names": json.dumps(names),
                "version": manifest.ref().model_dump_json(),
                "parent": manifest.parent.model_dump_json() if manifest.parent else "",
            },
        )
        self._moved_path(manifest.version - _MOVED_KEPT).unlink(missing_ok=True)

    def moved_since(self, ref: ManifestRef) -> dict[str, list[Bits]] | None:
        """Positions by tensor that were changed on the way from a version to the one held.

        None where not every step of the way is known.
        """
        found: dict[str, list[Bits]] = {}
        if not isinstance(self.state, Holds) or ref.version > self.state.ref.version:
            return None
        at = ref
        while at != self.state.ref:
            path = self._moved_path(at.version + 1)
            try:
                step, positions = _read_moved(path)
            except (FileNotFoundError, SafetensorError):
                return None
            if step["parent"] != at.model_dump_json():
                return None
            for name, indices in positions.items():
                found.setdefault(name, []).append(indices)
            at = ManifestRef.model_validate_json(step["version"])
            if at.version > self.state.ref.version:
                return None
        return found

    def _look(self) -> None:
        """Takes notice of what other processes did."""
        try:
            record = _Record.model_validate_json(self._record_path.read_bytes())
        except (FileNotFoundError, ValidationError):
            record = None
        if record is None or record.boot != _boot() or record.run != self.run:
            self.state = Nothing()
            return
        inode = (self.folder / "weights").stat().st_ino
        mapped = self._mapped
        if mapped is None or mapped.inode != inode or mapped.tensors != record.tensors:
            self._map(record.tensors)
        self.state = Holds(self.run, record.ref)

    def _map(self, tensors: Layout) -> None:
        weights = _map_file(self.folder / "weights", max(_size(tensors), 1))
        history = _map_file(self.folder / "history", max(_values(tensors), 1))
        patterns: dict[str, Bits] = {}
        bytes_: dict[str, Bits] = {}
        at = values = 0
        for name, dtype, count in tensors:
            kind = pattern_dtype(dtype)
            patterns[name] = np.frombuffer(weights, kind, count, at)
            bytes_[name] = np.frombuffer(history, np.uint8, count, values)
            at += _padded(kind.itemsize * count)
            values += count
        inode = (self.folder / "weights").stat().st_ino
        self._mapped = _Mapped(tensors, patterns, bytes_, inode)
        self.weights, self.history = patterns, bytes_

    @property
    def _record_path(self) -> Path:
        return self.folder / "state.json"

    def _moved_path(self, version: int) -> Path:
        return self.folder / f"moved-{version:08d}.safetensors"


def remove_unused(folder: Path) -> None:
    """Removes the shadows that no living process uses."""
    for path in folder.iterdir() if folder.is_dir() else ():
        with (
            contextlib.suppress(FileNotFoundError, BlockingIOError),
            (path / "users").open("r+") as file,
        ):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)


def _read_moved(path: Path) -> tuple[dict[str, str], dict[str, Bits]]:
    """(metadata, positions by tensor) of what `note_moved` wrote."""
    with safe_open(path, framework="np") as file:
        step = dict(file.metadata())
        names = json.loads(step["names"])
        return step, {name: file.get_tensor(str(at)) for at, name in enumerate(names)}


def _map_file(path: Path, size: int) -> mmap.mmap:
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), size)


def _padded(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


def _size(tensors: Layout) -> int:
    return sum(_padded(pattern_dtype(dtype).itemsize * count) for _, dtype, count in tensors)


def _values(tensors: Layout) -> int:
    return sum(count for _, _, count in tensors)


def _boot() -> str:
    return _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""


def _write_whole(path: Path, data: bytes) -> None:
    """Written aside and renamed: a killed process leaves the old file, or none."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    with os.fdopen(handle, "wb") as file:
        file.write(data)
    os.replace(name, path)
