"""Manifests: what a policy version is made of, and how versions link.

Keys in the store (objects named by their digest lie where `tasks.store` puts them):

    runs/<run>/manifests/<version:08d>-<BLAKE3 of the manifest's bytes>.json.zst   created once
    runs/<run>/head.json    {"format": 1, "run", "version", "manifest": <that digest>}

A manifest names its parent's digest, and the head names the newest manifest's. Readers start at a
head and follow these links, so a manifest that a failed commit left behind is unreachable: it
blocks nobody, and the next attempt at the same version has another key. The head is moved last, by
compare-and-swap.

A manifest is written as one Zstandard frame of JSON: every version names every tensor, and beside a
delta of a few hundred kilobytes the plain text would weigh. The JSON is validated strictly in both
directions: an unknown field, a float where an integer belongs, or a contradiction (`check_child`
for those between a version and its parent) is an IntegrityError.

A version is reached in one or two ways: by a delta from its parent, by an anchor, which is a full
export, or by either. An anchor of a running training has both, so that engines that follow go on by
the delta and only newcomers read the anchor.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal, TypeVar

import zstandard
from blake3 import blake3
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    StringConstraints,
    ValidationError,
    model_validator,
)

from tasks.errors import ConfigError, IntegrityError
from tasks.weights.bits import DtypeName, numel
from tasks.weights.codec import CODECS
from tasks.weights.frames import unpacked

_MAX_BYTES = 1 << 28  # of a manifest's JSON: what a damaged frame may make us allocate
_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")

Blake3 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
TensorDigest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]
Count = Annotated[int, Field(ge=0)]
History = Literal["kept", "new"]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


R = TypeVar("R", bound=_Record)


class ManifestRef(_Record):
    """A link: a version and the BLAKE3 digest of its manifest's bytes."""

    version: Count
    manifest: Blake3

    def __hash__(self) -> int:
        return hash((self.version, self.manifest))


class Shard(_Record):
    """One immutable object of a version.

    Attributes:
        tensors: names an anchor's file holds, in its order; empty for a delta's shards, whose own
            header says what they hold.
    """

    digest: Blake3
    bytes: Count
    rank: Count
    tensors: tuple[str, ...] = ()


class TensorState(_Record):
    """One tensor after the update: its digest (`tasks.weights.digest`) and how much changed."""

    name: Annotated[str, StringConstraints(min_length=1)]
    shape: tuple[Count, ...]
    dtype: DtypeName
    digest: TensorDigest
    changed: Count


class Manifest(_Record):
    """One policy version.

    Attributes:
        parent: the version before; None exactly for version 0.
        kind: "anchor" where the version has a full export.
        codec: of the delta from the parent; None where there is no such delta.
        history: "new" where the delta's publisher took the run over and remembers no step before:
            readers forget theirs first (`tasks.weights.history`).
        shards: the delta; none where nothing changed.
        anchor: the full export, safetensors files in Hugging Face naming; their `tensors` say which
            file holds what. None for a mere delta.
        writer: random name of the publisher that committed it; tells a retry from a rival.
        created: UTC, ISO 8601.
        creation: free data about how it came to be (step, host, ...).
    """

    format: Literal[1] = 1
    run: str
    version: Count
    parent: ManifestRef | None
    kind: Literal["anchor", "delta"]
    codec: str | None
    history: History = "kept"
    shards: tuple[Shard, ...]
    anchor: tuple[Shard, ...] = ()
    tensors: tuple[TensorState, ...]
    writer: str
    created: str
    creation: dict[str, str | int | float] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _holds_together(self) -> Manifest:
        if not _RUN.fullmatch(self.run):
            raise ValueError(f"run name {self.run!r} is not usable as a key")
        parent_version = self.parent.version if self.parent else -1
        if parent_version != self.version - 1:
            raise ValueError(
                f"version {self.version} has parent {parent_version}, expected {self.version - 1}"
            )
        if self.codec is None and (self.kind == "delta" or self.shards):
            raise ValueError("a delta needs a codec")
        if self.codec is not None and (self.parent is None or self.codec not in CODECS):
            raise ValueError(f"a delta needs a parent and a known codec, not {self.codec!r}")
        if self.codec is None and self.history == "new":
            raise ValueError("a new history, and no delta that begins it")
        names = [tensor.name for tensor in self.tensors]
        if not names or len(set(names)) != len(names):
            raise ValueError("no tensors, or a tensor named twice")
        for tensor in self.tensors:
            if tensor.changed > numel(tensor.shape):
                raise ValueError(f"{tensor.name}: more values changed than there are")
        held = [name for shard in self.anchor for name in shard.tensors]
        if sorted(held) != (sorted(names) if self.kind == "anchor" else []):
            raise ValueError("the anchor does not hold every tensor exactly once")
        if any(shard.tensors for shard in self.shards):
            raise ValueError("a delta shard names tensors; its own header does")
        return self

    # The bytes it was read from: its digest must outlive fields added to this class later.
    _bytes: bytes | None = PrivateAttr(None)
    _ref: ManifestRef | None = PrivateAttr(None)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Manifest) and self.to_bytes() == other.to_bytes()

    def __hash__(self) -> int:
        return hash(self.to_bytes())

    def to_bytes(self) -> bytes:
        """As stored: `Manifest.from_bytes` of it is equal, its BLAKE3 is `self.ref()`'s."""
        if self._bytes is None:
            # Readers of before know no such field, and most manifests need none.
            left_out = {"history"} if self.history == "kept" else None
            text = self.model_dump_json(exclude=left_out).encode()
            self._bytes = zstandard.ZstdCompressor(level=9).compress(text)
        return self._bytes

    @staticmethod
    def from_bytes(data: bytes) -> Manifest:
        """
        Raises:
            IntegrityError: not a manifest that holds together.
        """
        manifest = _parse(Manifest, unpacked(data, _MAX_BYTES, "manifest"), "manifest")
        manifest._bytes = data
        return manifest

    def ref(self) -> ManifestRef:
        """What a child or the head names this manifest by."""
        if self._ref is None:
            digest = blake3(self.to_bytes()).hexdigest()
            self._ref = ManifestRef(version=self.version, manifest=digest)
        return self._ref

    @property
    def values(self) -> int:
        """Number of weights."""
        return sum(numel(tensor.shape) for tensor in self.tensors)

    @property
    def changed(self) -> int:
        return sum(tensor.changed for tensor in self.tensors)

    @property
    def delta_bytes(self) -> int:
        """Bytes of the delta's shards."""
        return sum(shard.bytes for shard in self.shards)

    @property
    def anchor_bytes(self) -> int:
        """Bytes of the full export's files."""
        return sum(file.bytes for file in self.anchor)

    @property
    def full_bytes(self) -> int:
        """Bytes of all tensors, without any container."""
        return sum(
            numel(tensor.shape) * (4 if tensor.dtype == "float32" else 2) for tensor in self.tensors
        )


class Head(_Record):
    """The content of `head.json`. `fence`: whose commits alone may move it; empty: anybody's."""

    format: Literal[1] = 1
    run: str
    version: Count
    manifest: Blake3
    fence: str = ""

    def to_bytes(self) -> bytes:
        return self.model_dump_json().encode()

    @staticmethod
    def from_bytes(data: bytes, run: str) -> Head:
        """
        Raises:
            IntegrityError: unparseable, or the head of another run.
        """
        head = _parse(Head, data, "head")
        if head.run != run:
            raise IntegrityError(f"the head of run {run!r} says it belongs to run {head.run!r}")
        return head

    @property
    def ref(self) -> ManifestRef:
        return ManifestRef(version=self.version, manifest=self.manifest)


def _parse(record: type[R], data: bytes, what: str) -> R:
    try:
        return record.model_validate_json(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "content"
        raise IntegrityError(
            f"a {what} of {len(data)} bytes is not valid: {where}: {first['msg']}"
        ) from None


def head_key(run: str) -> str:
    """
    Raises:
        ConfigError: the run's name cannot be part of a key.
    """
    return f"runs/{_checked(run)}/head.json"


def manifest_key(run: str, ref: ManifestRef) -> str:
    """
    Raises:
        ConfigError: the run's name cannot be part of a key.
    """
    return f"runs/{_checked(run)}/manifests/{ref.version:08d}-{ref.manifest}.json.zst"


def _checked(run: str) -> str:
    if not _RUN.fullmatch(run):
        raise ConfigError(
            f"run name {run!r} cannot be part of a key; use at most 128 letters, digits, '.', '_' "
            "and '-', the first a letter or digit"
        )
    return run


def check_child(parent: Manifest, child: Manifest) -> None:
    """That `child` may follow `parent`.

    Raises:
        IntegrityError: another run, a gap in the versions, a parent link to something else, other
            tensors, or a tensor whose digest changed without a changed value (or the reverse).
    """
    where = f"run {child.run!r} version {child.version}"
    if child.run != parent.run:
        raise IntegrityError(f"{where}: its parent belongs to run {parent.run!r}")
    if child.parent != parent.ref():
        raise IntegrityError(f"{where}: its parent link does not name version {parent.version}")
    before = {tensor.name: tensor for tensor in parent.tensors}
    after = {tensor.name: tensor for tensor in child.tensors}
    if before.keys() != after.keys():
        odd = sorted(before.keys() ^ after.keys())
        raise IntegrityError(f"{where}: tensors added or lost against its parent: {odd[:5]}")
    for name, tensor in after.items():
        old = before[name]
        if (old.shape, old.dtype) != (tensor.shape, tensor.dtype):
            raise IntegrityError(
                f"{where}: {name} is {tensor.dtype}{list(tensor.shape)}, its parent's "
                f"{old.dtype}{list(old.shape)}"
            )
        if child.codec is not None and (old.digest == tensor.digest) != (tensor.changed == 0):
            raise IntegrityError(
                f"{where}: {name} says {tensor.changed} values changed, and its digest "
                f"{'did not change' if old.digest == tensor.digest else 'changed'}"
            )
