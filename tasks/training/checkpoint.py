"""Checkpoints of the trainer group in the object store, restorable on any number of ranks.

Each rank writes its own flat ranges of every parameter and of both AdamW moments, as
content-addressed safetensors objects; one JSON manifest, written last, says which object holds
which range. So a checkpoint exists whole or not at all, and a rank of another gang picks the
ranges it needs. Nothing here is pickled.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load, save
from torch import Tensor

from tasks.errors import IntegrityError

FORMAT = 1
KINDS = ("parameter", "exp_avg", "exp_avg_sq")
# Ranges are cut so that no object is larger than this: what a rank holds twice while it saves.
OBJECT_BYTES = 128 * 2**20
KEPT = 2
"""Checkpoints of a run that are kept: the one before the newest too, for whoever reads it now."""
_MANIFEST = re.compile(r"runs/(?P<run>.+)/checkpoints/(?P<step>\d{8})\.json")


class Store(Protocol):
    """What a checkpoint needs of `tasks.store.ObjectStore`."""

    def create_object(self, data: bytes) -> str: ...
    def get_object(self, digest: str) -> bytes: ...
    def put(self, key: str, data: bytes) -> None: ...
    def get(self, key: str) -> bytes: ...
    def list(self, prefix: str = "") -> list[str]: ...
    def delete(self, keys: Iterable[str]) -> None: ...


class Range(NamedTuple):
    """Flat values [start, end) of a tensor of the full `shape`."""

    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class RankState:
    """What one rank holds. `values[kind][name]` is float32, flat, on the CPU, as long as
    `ranges[name]` says; the moments are absent before the first optimizer step."""

    rank: int
    world: int
    optimizer_steps: int
    ranges: dict[str, Range]
    values: dict[str, dict[str, Tensor]]


@dataclass(frozen=True)
class Record:
    """Flat values [start, end) of one kind of one tensor lie in object `digest` under `key`."""

    name: str
    kind: str
    start: int
    end: int
    digest: str
    key: str


@dataclass(frozen=True)
class Part:
    """What one rank has saved; small, travels to the committer."""

    rank: int
    world: int
    optimizer_steps: int
    shapes: dict[str, tuple[int, ...]]
    records: tuple[Record, ...]


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint. `extra` is the caller's: version, data cursor, seeds, metrics."""

    run: str
    step: int
    optimizer_steps: int
    shapes: dict[str, tuple[int, ...]]
    records: tuple[Record, ...]
    extra: dict[str, Any]


def manifest_key(run: str, step: int) -> str:
    return f"runs/{run}/checkpoints/{step:08d}.json"


def run_and_step(key: str) -> tuple[str, int] | None:
    """Whose manifest a key of the store is; None where it is no checkpoint's manifest."""
    match = _MANIFEST.fullmatch(key)
    return (match["run"], int(match["step"])) if match else None


def save_part(store: Store, state: RankState) -> Part:
    """Write one rank's ranges; every rank does this, then one commits all parts.

    Objects are named by their content: a retry, or an unchanged tensor, is not uploaded again.

    Raises:
        StoreError: the store does not take an object; nothing was committed.
    """
    records: list[Record] = []
    for pieces in _packed(_pieces(state)):
        arrays = {key: values for key, _, values in pieces}
        digest = store.create_object(save(arrays))
        records += [
            Record(name, kind, start, start + len(values), digest, key)
            for key, (name, kind, start), values in pieces
        ]
    shapes = {name: one.shape for name, one in state.ranges.items()}
    return Part(state.rank, state.world, state.optimizer_steps, shapes, tuple(records))


def commit(
    store: Store, run: str, step: int, parts: Iterable[Part], extra: dict[str, Any]
) -> Checkpoint:
    """Make the checkpoint of a step exist, once all its parts are in the store.

    A gang that replays a step after a failure commits the same step again: the manifest is simply
    replaced, in one write.

    Raises:
        IntegrityError: the parts are not one of each rank, disagree, or leave a gap.
        StoreError: the store does not take the manifest; no checkpoint exists.
    """
    ordered = sorted(parts, key=lambda part: part.rank)
    world = ordered[0].world if ordered else 0
    if [part.rank for part in ordered] != list(range(world)) or world == 0:
        raise IntegrityError(
            f"checkpoint {step} of run {run}: parts of ranks {[part.rank for part in ordered]}, "
            f"expected one of each of {world}"
        )
    if len({(p.optimizer_steps, p.world, repr(sorted(p.shapes.items()))) for p in ordered}) != 1:
        raise IntegrityError(
            f"checkpoint {step} of run {run}: the ranks disagree on tensors or optimizer steps "
            f"({[part.optimizer_steps for part in ordered]})"
        )
    records = tuple(record for part in ordered for record in part.records)
    made = Checkpoint(run, step, ordered[0].optimizer_steps, ordered[0].shapes, records, extra)
    _check_complete(made)
    store.put(manifest_key(run, step), json.dumps({"format": FORMAT, **asdict(made)}).encode())
    return made


def latest(store: Store, run: str) -> Checkpoint | None:
    """The committed checkpoint of a run with the highest step, or None."""
    keys = [key for key in store.list(f"runs/{run}/checkpoints/") if _of_run(key, run)]
    steps = [found[1] for key in keys if (found := run_and_step(key))]
    return read(store, run, max(steps)) if steps else None


def expire(store: Store, run: str) -> None:
    """Delete the manifests of all but the newest checkpoints of a run.

    Their objects go with the next garbage collection, where nothing else names them.
    """
    keys = [key for key in store.list(f"runs/{run}/checkpoints/") if _of_run(key, run)]
    store.delete(sorted(keys)[:-KEPT])


def _of_run(key: str, run: str) -> bool:
    found = run_and_step(key)
    return found is not None and found[0] == run


def read(store: Store, run: str, step: int) -> Checkpoint:
    """The committed checkpoint of a step.

    Raises:
        StoreError: there is none.
        IntegrityError: the manifest is damaged or incomplete.
    """
    key = manifest_key(run, step)
    data = store.get(key)
    try:
        content = json.loads(data)
        if content.pop("format") != FORMAT:
            raise ValueError(f"format is not {FORMAT}")
        content["shapes"] = {n: tuple(shape) for n, shape in content["shapes"].items()}
        content["records"] = tuple(Record(**record) for record in content["records"])
        checkpoint = Checkpoint(**content)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise IntegrityError(f"{key} is no checkpoint manifest: {error}") from error
    if (checkpoint.run, checkpoint.step) != (run, step):
        raise IntegrityError(f"{key} says it is step {checkpoint.step} of run {checkpoint.run}")
    _check_complete(checkpoint)
    return checkpoint


def load_part(
    store: Store, checkpoint: Checkpoint, wanted: Mapping[str, Range], rank: int, world: int
) -> RankState:
    """The ranges a rank wants, whatever gang wrote them; each object is read once.

    Args:
        wanted: parameter name to range, as this rank's policy is cut.

    Raises:
        IntegrityError: another model's checkpoint, or an object whose bytes do not match.
        StoreError: an object is missing.
    """
    found = {name: tuple(one.shape) for name, one in wanted.items()}
    if found != checkpoint.shapes:
        differ = sorted(
            n
            for n in found.keys() | checkpoint.shapes.keys()
            if found.get(n) != checkpoint.shapes.get(n)
        )
        raise IntegrityError(
            f"checkpoint {checkpoint.step} of run {checkpoint.run} is of another model: "
            f"{differ[:3]} differ (of {len(differ)}), e.g. {checkpoint.shapes.get(differ[0])} "
            f"there, {found.get(differ[0])} here"
        )
    kinds = KINDS if checkpoint.optimizer_steps else KINDS[:1]
    values = {
        kind: {name: torch.empty(one.end - one.start) for name, one in wanted.items()}
        for kind in kinds
    }
    by_object: dict[str, list[Record]] = {}
    for record in checkpoint.records:
        one = wanted[record.name]
        if record.start < one.end and one.start < record.end:
            by_object.setdefault(record.digest, []).append(record)
    for digest, records in by_object.items():
        _copy_overlaps(store, digest, records, wanted, values)
    return RankState(rank, world, checkpoint.optimizer_steps, dict(wanted), values)


def _copy_overlaps(
    store: Store,
    digest: str,
    records: list[Record],
    wanted: Mapping[str, Range],
    values: dict[str, dict[str, Tensor]],
) -> None:
    try:
        arrays = load(store.get_object(digest))
    except SafetensorError as error:
        raise IntegrityError(f"object {digest} is not safetensors: {error}") from error
    for record in records:
        array = arrays.get(record.key)
        if array is None or array.shape != (record.end - record.start,) or array.dtype != "<f4":
            raise IntegrityError(f"object {digest} does not hold {record.key} as the manifest says")
        one = wanted[record.name]
        start, end = max(record.start, one.start), min(record.end, one.end)
        values[record.kind][record.name][start - one.start : end - one.start] = torch.from_numpy(
            array[start - record.start : end - record.start]
        )


_Piece = tuple[str, tuple[str, str, int], np.ndarray]


def _pieces(state: RankState) -> Iterator[_Piece]:
    """(key, (name, kind, start), values), none larger than an object may be."""
    most = OBJECT_BYTES // 4
    if sys.byteorder != "little":
        raise IntegrityError("checkpoints are little-endian; this machine is not")
    for kind, tensors in state.values.items():
        for name, values in tensors.items():
            flat, base = values.numpy(), state.ranges[name].start
            for offset in range(0, len(flat), most):
                start = base + offset
                yield f"{kind}/{name}/{start}", (name, kind, start), flat[offset : offset + most]


def _packed(pieces: Iterator[_Piece]) -> Iterator[list[_Piece]]:
    batch: list[_Piece] = []
    size = 0
    for piece in pieces:
        if batch and size + piece[2].nbytes > OBJECT_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(piece)
        size += piece[2].nbytes
    if batch:
        yield batch


def _check_complete(checkpoint: Checkpoint) -> None:
    """Every value of every kind exactly once: a lost part must not become uninitialised memory."""
    kinds = KINDS if checkpoint.optimizer_steps else KINDS[:1]
    spans: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for record in checkpoint.records:
        spans.setdefault((record.kind, record.name), []).append((record.start, record.end))
    for kind in kinds:
        for name, shape in checkpoint.shapes.items():
            reached = 0
            for start, end in sorted(spans.pop((kind, name), [])):
                if start != reached:
                    break
                reached = end
            if reached != math.prod(shape):
                raise IntegrityError(
                    f"checkpoint {checkpoint.step} of run {checkpoint.run}: {kind} of {name} is "
                    f"whole up to value {reached} of {math.prod(shape)} only"
                )
    if spans:
        raise IntegrityError(
            f"checkpoint {checkpoint.step} of run {checkpoint.run} holds what it does not name: "
            f"{sorted(spans)[:3]}"
        )
