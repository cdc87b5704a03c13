"""A look at a run's published weights: what versions there are, whether all is right, one of them.

The store is the one of `python -m infra.local up`, else that of the state folder, started meanwhile
(KINDLING_HOME, else .kindling); or --endpoint, with its credentials in the environment.
"""

# A command line, as the flows' modules are, and imported by nobody: so it may use infra.

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from infra.local import reported, store_alone
from tasks.store import ObjectStore
from tasks.weights import look
from tasks.weights.commit import existing_ref, load_manifest
from tasks.weights.compile import compile_kernels
from tasks.weights.export import export as export_version
from tasks.weights.look import Fault, Row
from tasks.weights.verify import Check, Report
from tasks.weights.verify import verify as verify_run

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)
Run = Annotated[str, typer.Argument(help="Name of the run.")]
Endpoint = Annotated[str | None, typer.Option(help="URL of an S3 endpoint.")]
Bucket = Annotated[str | None, typer.Option(help="Bucket, where it is not the usual one.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON document in place of the table.")]


@app.command()
def log(
    run: Run,
    limit: Annotated[
        bool,
        typer.Option("--limit", help="With the limit in bits a change: replays every version."),
    ] = False,
    as_json: Json = False,
    endpoint: Endpoint = None,
    bucket: Bucket = None,
) -> None:
    """Lists the versions: kind, bytes, changed share, bits a change, deltas since the anchor."""
    with reported(), store_alone(endpoint, bucket) as store:
        report = verify_run(store, run) if limit else _listed(store, run)
    if as_json:
        _print_json(report, {})
    else:
        _print_table(report.rows, {}, limit)
    _end(report.faults)


@app.command()
def verify(
    run: Run, as_json: Json = False, endpoint: Endpoint = None, bucket: Bucket = None
) -> None:
    """Reads, hashes and replays everything the run has published; exit code 1 on any fault."""
    began = time.perf_counter()
    with reported(), store_alone(endpoint, bucket) as store:
        report = verify_run(store, run)
    if as_json:
        _print_json(report, report.checks)
        _end(report.faults)
        return
    _print_table(report.rows, report.checks, True)
    _end(report.faults)
    counts = {check: list(report.checks.values()).count(check) for check in ("ok", "not-kept")}
    typer.echo(
        f"clean: {counts['ok']} versions right, {counts['not-kept']} not kept, {report.objects} "
        f"objects of {report.bytes:,} bytes read in {time.perf_counter() - began:.1f} s"
    )


@app.command()
def export(
    run: Run,
    version: Annotated[int, typer.Argument(help="Which version.")],
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder.")],
    model: Annotated[
        Path, typer.Option(help="The base model's folder: config, tokenizer and the like.")
    ],
    endpoint: Endpoint = None,
    bucket: Bucket = None,
) -> None:
    """Writes a version as a Hugging Face checkpoint."""
    with reported(), store_alone(endpoint, bucket) as store:
        existing_ref(store, run)  # names the runs there are, where this is none of them
        folder = export_version(store, run, version, directory, model)
    typer.echo(f"version {version} of {run} is in {folder}")


@app.command(name="compile")
def compile_() -> None:
    """Compiles the codec's kernels into numba's cache, so that no run waits for it."""
    began = time.perf_counter()
    compile_kernels()
    typer.echo(f"codec kernels are compiled ({time.perf_counter() - began:.1f} s)")


def _listed(store: ObjectStore, run: str) -> Report:
    """What the manifests alone say."""
    head = existing_ref(store, run)
    walk = look.walk(head, lambda ref: load_manifest(store, run, ref))
    return Report(run, head.version, walk.rows, {}, walk.faults, 0, 0)


def _print_json(report: Report, checks: Mapping[int, Check]) -> None:
    rows: list[dict[str, Any]] = []
    for row in report.rows:
        found = look.as_json(row)
        rows.append({**found, "check": checks[row.version]} if checks else found)
    document = {
        "run": report.run,
        "head": report.head,
        "versions": rows,
        "faults": [{"version": fault.version, "what": fault.what} for fault in report.faults],
    }
    typer.echo(json.dumps(document, indent=1))


def _print_table(rows: Sequence[Row], checks: Mapping[int, Check], limited: bool) -> None:
    """A table on a terminal; elsewhere columns of plain text, a line a version."""
    found = [look.cells(row, limited) for row in rows]
    for row, cells in zip(rows, found, strict=True):
        if checks:
            cells["check"] = checks[row.version]
    if not found:
        return
    names = list(found[0])
    console = Console()
    if console.is_terminal:
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for name in names:
            side = "left" if name in ("kind", "check") else "right"
            # Where the terminal is narrow, cells break at spaces, and no digit is hidden.
            header = name.replace("-", " ").replace("/", " a ")
            whole = name == "created"  # month to minute here
            table.add_column(header, justify=side, overflow="fold", no_wrap=whole)
        for cells in found:
            cells["kind"] = cells["kind"].replace("+", " +")
            cells["created"] = cells["created"][5:16].replace("T", " ")
            table.add_row(*cells.values())
        console.print(table)
        return
    widths = [max(len(name), *(len(cells[name]) for cells in found)) for name in names]
    for line in (names, *(list(cells.values()) for cells in found)):
        padded = [text.rjust(width) for text, width in zip(line, widths, strict=True)]
        typer.echo("  ".join(padded))


def _end(faults: Sequence[Fault]) -> None:
    """Lists the faults and ends with exit code 1 where there are any."""
    for fault in faults:
        typer.echo(fault.line(), err=True)
    if faults:
        typer.echo(f"{len(faults)} faults", err=True)
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
