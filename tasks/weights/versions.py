"""What a reader at one version needs to reach another: a pure state machine, no IO.

A reader (the shadow copy on a host, or an engine) holds nothing, a whole version, or half of one.
`plan` walks the manifests from the run's head down and answers with the shortest sound way up:
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
    """The steps to take in order; an anchor can only be the first.

    Attributes:
        target: the manifest reached, with or without steps.
        steps: () where the target is held already.
    """

    target: Manifest
    steps: tuple[Manifest, ...]

    @property
    def kind(self) -> Literal["full", "delta"]:
        return "full" if self.steps and self.steps[0].kind == "anchor" else "delta"


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
    steps: list[Manifest] = []
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
                    return Plan(target, tuple(reversed(steps)))
                steps.append(manifest)
                if manifest.kind == "anchor":
                    return Plan(target, tuple(reversed(steps)))
            child, link = manifest, manifest.parent
    except IntegrityError as error:
        return Refusal(str(error), broken=True)
    return Refusal(f"run {run!r} has no anchor at or below version {version}", broken=True)


def _check_link(run: str, link: ManifestRef, manifest: Manifest, child: Manifest | None) -> None:
    if manifest.run != run or manifest.ref() != link:
        raise IntegrityError(
            f"run {run!r}: the link to version {link.version} leads to version "
            f"{manifest.version} of run {manifest.run!r}, or to another manifest of it"
        )
    if child is not None:
        check_child(manifest, child)
