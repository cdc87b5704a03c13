"""Free the store of what no run's newest versions, pin, checkpoint or index can reach.

python -m flows.collect_garbage --delete
prefect deployment run 'collect-garbage/collect-garbage' --param dry_run=true

Objects are set aside first and deleted a grace period later, by a following collection
(`tasks.weights.garbage` says why); a dry run changes nothing.
"""

from __future__ import annotations

from typing import Annotated

import typer
from prefect import flow, get_run_logger
from pydantic import BaseModel, Field

from flows.cli import overrides_from, run_flow
from infra.local import store_alone
from tasks.presets import Overrides, resolve


class Collected(BaseModel):
    """What a collection did, or would have done."""

    dry_run: bool
    runs: int
    objects_kept: int
    bytes_kept: int
    objects_set_aside: int
    bytes_set_aside: int
    objects_restored: int
    objects_deleted: int
    bytes_deleted: int
    manifests_deleted: int

    def summary(self) -> str:
        """The numbers for a human, one line."""
        would = "would be " if self.dry_run else ""
        return (
            f"{self.runs} runs; {self.objects_deleted} objects ({self.bytes_deleted:,} bytes) and "
            f"{self.manifests_deleted} manifests {would}deleted, {self.objects_set_aside} objects "
            f"({self.bytes_set_aside:,} bytes) {would}set aside, {self.objects_restored} {would}"
            f"brought back, {self.objects_kept} ({self.bytes_kept:,} bytes) kept"
        )

    def line(self, label: str, seconds: float) -> str:
        return f"{label}: {self.summary()}, {seconds:.0f} s"


@flow(name="collect-garbage", persist_result=False)
def collect_garbage(
    dry_run: bool = True,
    grace_hours: Annotated[float, Field(ge=1, le=24 * 365)] = 24.0,
    keep_versions: Annotated[int, Field(ge=0)] = 8,
    preset: str = "tiny",
    overrides: Overrides | None = None,  # type: ignore[valid-type]
) -> Collected:
    """Sets unreachable objects of the store aside, and deletes those set aside long enough ago.

    Args:
        dry_run: Only say what would be done.
        grace_hours: Nothing younger is touched; must exceed twice the longest publish.
        keep_versions: Versions kept behind each run's newest, for readers on their way.
        preset: A file of deployments/presets, without its ending; its cluster section says which
            store.
        overrides: Fields to change in the preset.
    """
    from tasks import artifacts
    from tasks.weights.garbage import Retention, collect

    config = resolve(preset, overrides)
    retention = Retention(grace_hours=grace_hours, keep_versions=keep_versions)
    cluster = config.cluster
    with store_alone(cluster.store_endpoint, cluster.store_bucket) as store:
        found = collect(store, retention, dry_run=dry_run)
    totals, kept = found.totals, found.kept.values()
    made = Collected(
        dry_run=dry_run,
        runs=sum(row.head is not None for row in found.rows),
        objects_kept=sum(tally.objects for tally in kept),
        bytes_kept=sum(tally.bytes for tally in kept),
        objects_set_aside=totals["set_aside"].objects,
        bytes_set_aside=totals["set_aside"].bytes,
        objects_restored=totals["restored"].objects,
        objects_deleted=totals["deleted"].objects,
        bytes_deleted=totals["deleted"].bytes,
        manifests_deleted=len(found.manifests),
    )
    get_run_logger().info(made.summary())
    artifacts.garbage(found, dry_run)
    return made


def main(
    dry_run: Annotated[
        bool, typer.Option("--dry-run/--delete", help="Only say what would be done, or do it.")
    ] = True,
    grace_hours: Annotated[float, typer.Option(min=1, help="Touch nothing younger.")] = 24.0,
    keep_versions: Annotated[int, typer.Option(min=0, help="Kept behind each newest.")] = 8,
    preset: Annotated[str, typer.Option(help="A file of deployments/presets.")] = "tiny",
    changes: Annotated[
        list[str] | None, typer.Option("--set", help="Any field: cluster.store_endpoint=URL")
    ] = None,
) -> None:
    """Collects the store's garbage; without --delete it only says what that would be."""
    run_flow(
        "collect-garbage",
        collect_garbage,
        lambda: {
            "dry_run": dry_run,
            "grace_hours": grace_hours,
            "keep_versions": keep_versions,
            "preset": preset,
            "overrides": overrides_from({}, changes or ()),
        },
        lambda config: None,
    )


if __name__ == "__main__":
    typer.run(main)
