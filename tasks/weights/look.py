"""What a run's versions are and weigh: a row a version, from what its manifest alone says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from tasks.errors import IntegrityError
from tasks.store_errors import ObjectMissing
from tasks.weights.commit import Published
from tasks.weights.manifest import Manifest, ManifestRef, check_child


@dataclass(frozen=True, slots=True)
class Row:
    """One version.

    Attributes:
        kind: "anchor", "delta" or, for an anchor that has a delta from its parent, "anchor+delta".
        delta_bytes, anchor_bytes, manifest_bytes: of its objects in the store.
        changed: weights that differ from the parent's, of `values`; None without a delta, as of the
            first version, where nothing was compared.
        chain: deltas to apply after the last anchor, 0 at an anchor; None where it is not known.
        chain_bytes: of these deltas.
        created: UTC, ISO 8601.
        limit: bits that all changes take at least given the exponents (`tasks.weights.entropy`);
            None where it was not computed: that takes the weights.
    """

    version: int
    kind: str
    delta_bytes: int
    anchor_bytes: int
    manifest_bytes: int
    changed: int | None
    values: int
    created: str
    chain: int | None = None
    chain_bytes: int | None = None
    limit: float | None = None

    @property
    def share(self) -> float | None:
        """Of the weights that changed, 0 to 1."""
        return None if self.changed is None else self.changed / max(1, self.values)

    @property
    def bits(self) -> float | None:
        """Bits of delta a changed weight."""
        return 8 * self.delta_bytes / self.changed if self.changed else None

    @property
    def limit_bits(self) -> float | None:
        """The limit in bits a changed weight."""
        return None if self.limit is None or not self.changed else self.limit / self.changed


def row_of(manifest: Manifest) -> Row:
    """The row of a manifest, without its chain."""
    return Row(
        version=manifest.version,
        kind=_kind(manifest.kind, manifest.codec),
        delta_bytes=manifest.delta_bytes,
        anchor_bytes=manifest.anchor_bytes,
        manifest_bytes=len(manifest.to_bytes()),
        changed=None if manifest.codec is None else manifest.changed,
        values=manifest.values,
        created=manifest.created,
    )


def row_of_published(published: Published) -> Row:
    """The same row from what publishing answered."""
    return Row(
        version=published.version,
        kind=_kind(published.kind, published.codec),
        delta_bytes=published.delta_bytes,
        anchor_bytes=published.anchor_bytes,
        manifest_bytes=published.manifest_bytes,
        changed=None if published.codec is None else published.changed,
        values=published.total,
        created=published.created,
    )


def chained(rows: Sequence[Row]) -> list[Row]:
    """The rows, version after version, with the chains that lead to them."""
    found: list[Row] = []
    chain: int | None = None
    spent: int | None = None
    for row in rows:
        if row.kind != "delta":
            chain, spent = 0, 0
        elif chain is not None and spent is not None:
            chain, spent = chain + 1, spent + row.delta_bytes
        found.append(replace(row, chain=chain, chain_bytes=spent))
    return found


def cells(row: Row, limited: bool = False) -> dict[str, str]:
    """The row for a human, by column; a cell holds no space. "-": does not apply, or unknown.

    Args:
        limited: with the column of the limit, which only a replay knows.
    """
    made = {
        "version": str(row.version),
        "kind": row.kind,
        "delta-bytes": f"{row.delta_bytes:,}",
        "anchor-bytes": f"{row.anchor_bytes:,}",
        "manifest-bytes": f"{row.manifest_bytes:,}",
        "changed": _or_dash(row.changed, ",d"),
        "share": _or_dash(row.share, ".3%"),
        "bits/change": _or_dash(row.bits, ".2f"),
        "limit": _or_dash(row.limit_bits, ".2f"),
        "chain": _or_dash(row.chain, "d"),
        "chain-bytes": _or_dash(row.chain_bytes, ",d"),
        "created": row.created.replace("+00:00", "Z") or "-",
    }
    if not limited:
        del made["limit"]
    return made


def as_json(row: Row) -> dict[str, Any]:
    """The row for a program: its fields, `share` (0 to 1), `bits` and `limit_bits` a change."""
    derived = {"share": row.share, "bits": row.bits, "limit_bits": row.limit_bits}
    return {**asdict(row), **derived}


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that is not as a manifest or a head says; `version` None: the run's head."""

    version: int | None
    what: str

    def line(self) -> str:
        where = "head" if self.version is None else f"version {self.version}"
        return f"fault: {where}: {self.what}"


@dataclass(frozen=True, slots=True)
class Walk:
    """What the links from a head lead to, oldest first.

    Attributes:
        links: of the manifests found.
        rows: of the same versions.
        lost: the version whose manifest is missing, where the walk ended; None: it went to the end
            or to a fault.
        faults: newest first.
    """

    links: tuple[ManifestRef, ...]
    rows: tuple[Row, ...]
    lost: int | None
    faults: tuple[Fault, ...]

    @property
    def newest_anchor(self) -> int | None:
        """What a newcomer starts from: everything from here to the head must be there."""
        anchors = [row.version for row in self.rows if row.kind != "delta"]
        return anchors[-1] if anchors else None


def walk(head: ManifestRef, load: Callable[[ManifestRef], Manifest]) -> Walk:
    """All manifests from the head down, each checked against its link and its child.

    A manifest that is missing below an anchor was collected as garbage: no fault.

    Args:
        load: the manifest of a link, as `tasks.weights.commit.load_manifest`. Two are held at a
            time: they name every tensor.

    Raises:
        StoreError: the store failed, other than by lacking a manifest.
    """
    links: list[ManifestRef] = []
    rows: list[Row] = []
    faults: list[Fault] = []
    lost: int | None = None
    child: Manifest | None = None
    link: ManifestRef | None = head
    while link is not None:
        try:
            manifest = load(link)
        except ObjectMissing as error:
            lost = link.version
            if all(row.kind == "delta" for row in rows):
                faults.append(Fault(link.version, f"its manifest is missing: {error}"))
            break
        except IntegrityError as error:
            faults.append(Fault(link.version, f"{error}; what lies below cannot be found"))
            break
        if child is not None:
            try:
                check_child(manifest, child)
            except IntegrityError as error:
                faults.append(Fault(child.version, str(error)))
        links.append(link)
        rows.append(row_of(manifest))
        child, link = manifest, manifest.parent
    return Walk(tuple(reversed(links)), tuple(chained(rows[::-1])), lost, tuple(faults))


def _kind(kind: str, codec: str | None) -> str:
    return "anchor+delta" if kind == "anchor" and codec is not None else kind


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
