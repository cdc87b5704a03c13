"""Services of one machine: `python -m infra.local up | status | down`, and what flows attach to.

`up` starts the object store, the Dask scheduler, its workers and a Prefect server, which outlive
the command; `services` and `prefect_api` give a flow whichever run already, or embedded ones that
end with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from infra.cluster import connect, start_scheduler, start_workers, wait_for_workers
from infra.elastic import base_workers, growth
from infra.object_store import read_credentials, remove_sockets, start_store
from infra.prefect_server import configured_api, is_healthy, start_prefect, using_api
from infra.processes import ProcessGroup, environment, is_alive, stop_children
from infra.state import (
    Record,
    home_folder,
    living_services,
    locked,
    read_record,
    remove_record,
    write_record,
)
from tasks.cluster import Attached, Log
from tasks.config import TrainConfig
from tasks.config_cluster import ClusterConfig
from tasks.errors import ConfigError, KindlingError, ServiceError
from tasks.presets import resolve
from tasks.store import ObjectStore, StoreLocation

_STACK = "stack"  # the lock of store and cluster; `up`, `down` and embedded runs exclude each other
_PREFECT = "prefect"  # an embedded Prefect server alone

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)
Home = Annotated[
    Path | None, typer.Option(help="State folder; KINDLING_HOME, else .kindling in the repository.")
]
Preset = Annotated[str, typer.Option(help="Preset whose cluster section sizes the cluster.")]


@dataclass(frozen=True)
class Services:
    """What a run uses: picklable, no credentials."""

    store: StoreLocation
    scheduler: str
    prefect_api: str | None
    embedded: bool


@contextmanager
def services(config: TrainConfig, home: Path | None = None) -> Iterator[Services]:
    """The store and the cluster for a run; checked to answer and, if embedded, ended with it.

    Addresses in `config.cluster` come first, then the services of `infra.local up`, then embedded
    ones. For the duration the environment holds the local store's credentials.

    Raises:
        ConfigError: a scheduler elsewhere is named without the store its workers share, or a store
            other than that of `up`'s services without a scheduler.
        StoreError: the store does not answer or refuses the credentials.
        ClusterError: the scheduler does not answer or lacks workers.
        ServiceError: an embedded service does not start, or `up`'s are partly dead.
    """
    folder = home_folder(home)
    cluster = config.cluster
    record = living_services(folder)
    local = record is not None and cluster.scheduler in (None, record.scheduler)
    if cluster.scheduler is not None and cluster.store_endpoint is None and not local:
        raise ConfigError(
            f"cluster.scheduler is {cluster.scheduler!r} and cluster.store_endpoint is not set: "
            "its workers cannot know an embedded store; set both, or neither"
        )
    if cluster.scheduler is not None and cluster.store_endpoint is not None:
        store = StoreLocation(cluster.store_endpoint, cluster.store_bucket)
        api = record.prefect_api if record else None
        with base_workers(cluster, folder):
            yield _checked(config, Services(store, cluster.scheduler, api, embedded=False))
    elif record is not None:
        if cluster.store_endpoint not in (None, record.store_endpoint):
            raise ConfigError(
                f"cluster.store_endpoint is {cluster.store_endpoint!r}, and the services that run "
                f"use {record.store_endpoint!r}: their workers cannot know another; run "
                "`python -m infra.local down` first, or name cluster.scheduler too"
            )
        with _standing_store(record, folder, cluster.store_bucket) as store:
            attached = Services(store, record.scheduler, record.prefect_api, embedded=False)
            yield _checked(config, attached)
    else:
        with _embedded(config, folder) as own:
            yield own


@contextmanager
def attached(config: TrainConfig, log: Log, home: Path | None = None) -> Iterator[Attached]:
    """`services`, and a client of their scheduler: what a flow works with.

    Raises:
        As `services`.
    """
    folder = home_folder(home)
    with (
        services(config, home) as found,
        growth(config.cluster, found.scheduler, folder) as pool,
        connect(found.scheduler, config.cluster.wait_s) as client,
    ):
        yield Attached(client, found.store, folder / "cache", log, pool)


@contextmanager
def store_alone(
    endpoint: str | None = None, bucket: str | None = None, home: Path | None = None
) -> Iterator[ObjectStore]:
    """The store, checked to answer, for what needs no workers; found as `services` finds it.

    Args:
        endpoint: of a store whose credentials are in the environment. None: the store of
            `infra.local up`, else the folder's own, started for the duration.
        bucket: None: the one that runs use where their preset names none.

    Raises:
        ConfigError: no services run, and the folder holds no store.
        ServiceError: `up`'s services are partly dead, the folder is in use, or the store does not
            start.
        StoreError: the endpoint is no URL, or the store does not answer or refuses the credentials.
    """
    folder = home_folder(home)
    name = bucket or ClusterConfig.model_fields["store_bucket"].default
    record = None if endpoint else living_services(folder)
    if endpoint:
        store = ObjectStore(StoreLocation(endpoint, name))
        store.check()
        yield store
    elif record is not None:
        with _standing_store(record, folder, name) as location:
            yield ObjectStore(location)
    elif (folder / "store" / "credentials.json").exists():
        with (
            _exclusive(folder) as lock,
            ProcessGroup(folder / "logs", keep_open=[lock]) as group,
        ):
            location = start_store(group, folder / "store", name)
            with environment(read_credentials(folder / "store").environment()):
                yield ObjectStore(location)
    else:
        raise ConfigError(
            f"no services run, and {folder} holds no store; expected the state folder of earlier "
            "runs: set KINDLING_HOME, or name the store (--endpoint, or --set "
            "cluster.store_endpoint=URL)"
        )


@contextmanager
def _standing_store(record: Record, home: Path, bucket: str) -> Iterator[StoreLocation]:
    """The store of `up`'s services. The credentials are set while this lasts if `up` started it,
    else they are in the environment."""
    own = read_credentials(home / "store").environment() if record.keeps_store else {}
    with environment(own):
        yield StoreLocation(record.store_endpoint, bucket)


@contextmanager
def _embedded(config: TrainConfig, home: Path) -> Iterator[Services]:
    with (
        _exclusive(home) as lock,
        ProcessGroup(home / "logs", keep_open=[lock]) as group,
        _stack(group, config, home) as (store, scheduler),
    ):
        yield _checked(config, Services(store, scheduler, None, embedded=True))


@contextmanager
def _exclusive(home: Path) -> Iterator[int]:
    """The lock under which a store may be started on this folder.

    Raises:
        ServiceError: another process holds it, or services came up in the meantime.
    """
    with locked(home, _STACK) as lock:
        record = read_record(home)
        if record is not None:
            if living_services(home) is not None:
                raise ServiceError(f"services came up in {home} in the meantime; start again")
            stop_children(record.children, record.token)  # a dead nanny's worker, say
        yield lock


@contextmanager
def _stack(
    group: ProcessGroup, config: TrainConfig, home: Path
) -> Iterator[tuple[StoreLocation, str]]:
    """Start what the configuration does not name; the credentials are set while it lasts."""
    cluster = config.cluster
    if cluster.store_endpoint is not None:
        store, credentials = StoreLocation(cluster.store_endpoint, cluster.store_bucket), {}
    else:
        store = start_store(group, home / "store", cluster.store_bucket)
        credentials = read_credentials(home / "store").environment()
    with environment(credentials):
        ObjectStore(store).check()  # before the slower workers
        scheduler = start_scheduler(group, home / "dask")
        start_workers(group, scheduler, cluster, home / "dask")
        yield store, scheduler


def _checked(config: TrainConfig, found: Services) -> Services:
    """Raise unless the store answers and the cluster has the workers the run asks for."""
    cluster = config.cluster
    ObjectStore(found.store).check()
    with connect(found.scheduler, cluster.wait_s) as client:
        wait_for_workers(client, cluster.rollout_workers, cluster.trainer_ranks, cluster.wait_s)
    return found


@contextmanager
def prefect_api(home: Path | None = None) -> Iterator[str]:
    """A Prefect API for the flows called inside: the configured one if it answers, else the one
    of `infra.local up`, else an embedded server.

    Raises:
        ServiceError: the embedded server does not start.
    """
    folder = home_folder(home)
    api = configured_api()
    if api is None:
        record = read_record(folder)
        if record is not None and is_healthy(record.prefect_api):
            api = record.prefect_api
    if api is not None:
        with using_api(api):
            yield api
        return
    with (
        locked(folder, _PREFECT) as lock,
        ProcessGroup(folder / "logs", keep_open=[lock]) as group,
        using_api(start_prefect(group, folder)) as own,
    ):
        yield own


def start_all(config: TrainConfig, preset: str, home: Path) -> Record:
    """Start services that outlive this process, and record them; nothing stays if one fails.

    Raises:
        ServiceError, ClusterError, StoreError: a service did not start.
    """
    with ProcessGroup(home / "logs", outlive=True) as group:
        with _stack(group, config, home) as (store, scheduler):
            api = start_prefect(group, home)
            _checked(config, Services(store, scheduler, api, embedded=False))
        record = Record(
            group.token,
            preset,
            store.endpoint,
            store.bucket,
            scheduler,
            api,
            tuple(group.children),
        )
        write_record(home, record)
    return record


@app.command()
def up(preset: Preset = "tiny", home: Home = None) -> None:
    """Start the services, unless they run already."""
    folder = home_folder(home)
    with reported():
        record = living_services(folder)
        if record is not None:
            _console().print(f"already up, for preset {record.preset}")
        else:
            config = resolve(preset)
            with _exclusive(folder), locked(folder, _PREFECT):
                record = start_all(config, preset, folder)
            _mark_zombies(record.prefect_api)
            _console().print(f"up: {len(record.children)} services")
        _show(record)


def _mark_zombies(api: str) -> None:
    from infra.zombies import mark_zombies  # imports Prefect's client

    with using_api(api):
        mark_zombies()


@app.command()
def status(home: Home = None) -> None:
    """Show the services; exit code 1 unless all run."""
    folder = home_folder(home)
    with reported():
        record = read_record(folder)
    if record is None:
        _console().print(f"nothing is up (no services.json in {folder})")
        raise typer.Exit(1)
    _show(record)
    if record.dead():
        _console().print("some services are dead: run `down`, then `up`")
        raise typer.Exit(1)


@app.command()
def down(home: Home = None) -> None:
    """Stop the services and everything they started."""
    folder = home_folder(home)
    with reported(), locked(folder, _STACK):
        record = read_record(folder)
        if record is None:
            _console().print("nothing is up")
            return
        stop_children(record.children, record.token)
        remove_sockets(folder / "store")
        remove_record(folder)
        _console().print(f"down: {len(record.children)} services stopped; data stays in {folder}")


@contextmanager
def reported() -> Iterator[None]:
    """For command lines: prints our own errors without a traceback, and exits with code 1."""
    try:
        yield
    except KindlingError as error:
        Console(stderr=True, soft_wrap=True).print(f"error: {error}", markup=False)
        raise typer.Exit(1) from None


def _console() -> Console:
    return Console(soft_wrap=True, highlight=False)


def _show(record: Record) -> None:
    addresses = {
        "store": record.store_endpoint,
        "scheduler": record.scheduler,
        "prefect": record.prefect_api.removesuffix("/api"),
    }
    table = Table("service", "state", "pid", "address")
    for child in record.children:
        alive = is_alive(child.pid, child.created)
        state = "[green]running[/green]" if alive else "[red]dead[/red]"
        table.add_row(child.name, state, str(child.pid), addresses.get(child.name, ""))
    console = _console()
    console.print(table)
    console.print(f"point Prefect at it:  export PREFECT_API_URL={record.prefect_api}")


if __name__ == "__main__":
    app()
