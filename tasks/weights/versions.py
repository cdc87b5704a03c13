"""What a reader at one version needs to reach another: a pure state machine, no IO.

A reader (the shadow copy on a host, or an engine) holds nothing, a whole version, or half of one.
`plan` walks the manifests from the run's head down and answers with the cheapest sound way up:
deltas onto what is held, or the newest anchor not above the target and the deltas since. What is
half applied counts as nothing: only an anchor mends it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from tasks.errors import IntegrityError
from tasks.weights.manifest import Manifest, ManifestRef, check_child


@dataclass(frozen=True)
class Nothing:
    """No usable weights."""


@dataclass(frozen=True)
class HalfApplied:
    """An update to this version began and did not end: nothing may be served."""

    run: str
    version: int


@dataclass(frozen=True)
class Holds:
    """All weights of one version, verified."""

    run: str
    ref: ManifestRef


State: TypeAlias = Nothing | HalfApplied | Holds


@dataclass(frozen=True)
class Plan:
    """The steps to take in order.

    Attributes:
        target: the manifest reached, with or without steps.
        kind: "full": the first step is taken by its anchor, the others by their deltas. "delta":
            all by their deltas.
        steps: () where the target is held already.
    """

    target: Manifest
    kind: Literal["full", "delta"]
    steps: tuple[Manifest, ...]


@dataclass(frozen=True)
class Refusal:
    """Why no sound way leads there.

    Attributes:
        broken: True where the history contradicts itself, False where the version is not (or not
            yet) published.
    """

    reason: str
    broken: bool


def plan(
    run: str,
    state: State,
    head: ManifestRef | None,
    version: int,
    load: Callable[[ManifestRef], Manifest],
) -> Plan | Refusal:
    """The way from `state` to `version` of `run`.

    Args:
        head: what the run's head names; None where the run has none.
        load: the manifest of a link; it raises IntegrityError for one that is damaged. Called once
            a link, from the head down, and no further than needed.
    """
    if head is None:
        return Refusal(f"run {run!r} has published nothing", broken=False)
    if not 0 <= version <= head.version:
        return Refusal(
            f"run {run!r} has no version {version}; its newest is {head.version}", broken=False
        )
    held = state.ref if isinstance(state, Holds) and state.run == run else None
    target: Manifest | None = None
    steps: list[Manifest] = []  # from the target down
    full: Plan | None = None  # by the first anchor below the target
    spent = 0  # bytes of the deltas in `steps`
    dear = 0  # bytes of `full`
    child: Manifest | None = None
    link: ManifestRef | None = head
    try:
        while link is not None:
            manifest = load(link)
            _check_link(run, link, manifest, child)  # what is held is checked as a parent, too
            if manifest.version == version:
                target = manifest
            if target is not None:
                if link == held:
                    return Plan(target, "delta", tuple(reversed(steps)))
                steps.append(manifest)
                if full is None and manifest.kind == "anchor":
                    full = Plan(target, "full", tuple(reversed(steps)))
                    dear = spent + manifest.anchor_bytes
                spent += manifest.delta_bytes
                if full is not None and (
                    # The deltas below the anchor are worth a look only towards what is held.
                    held is None
                    or held.version >= link.version
                    or manifest.codec is None
                    or spent > dear
                ):
                    return full
            child, link = manifest, manifest.parent
    except IntegrityError as error:
        # Damage below an anchor concerns nobody who can start from it.
        return full or Refusal(str(error), broken=True)
    return full or Refusal(f"run {run!r} has no anchor at or below version {version}", broken=True)


def _check_link(run: str, link: ManifestRef, manifest: Manifest, child: Manifest | None) -> None:
    if manifest.run != run or manifest.ref() != link:
        raise IntegrityError(
            f"run {run!r}: the link to version {link.version} leads to version "
            f"{manifest.version} of run {manifest.run!r}, or to another manifest of it"
        )
    if child is not None:
        check_child(manifest, child)
