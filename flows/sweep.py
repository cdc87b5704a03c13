"""Train a preset with several seeds, and perhaps variants of it, one run after the other.

python -m flows.sweep --preset tiny --seeds 3
python -m flows.sweep --variant cold:rollout.temperature=0.7 --variant f1:rollout.reward=f1
prefect deployment run 'sweep/tiny'
"""

from __future__ import annotations

import sys
import time
from typing import Annotated, Any

import typer
from prefect import flow, get_run_logger
from pydantic import BaseModel, Field, ValidationError

from flows.cli import check_inputs, overrides_from, run_flow
from flows.train import train
from infra.local import Services, services
from tasks.errors import ConfigError, SeedFailed
from tasks.evaluation.seeds import DEFAULT, SeedRun, variant_rows
from tasks.presets import Overrides, merge, resolve


class Variant(BaseModel):
    """The preset with some fields changed, under a name of its own."""

    name: str = Field(pattern=r"^[A-Za-z0-9_.-]+$", description="Its row in the tables.")
    overrides: Overrides = Field(description="Fields to change, on top of the sweep's.")  # type: ignore[valid-type]


class Swept(BaseModel):
    """A sweep's result. EM is of held-out questions at the last evaluation of the preset as it is;
    intervals are 95 %, Student's t over the seeds. `results` is a key in the store."""

    preset: str
    seeds: int
    step: int
    sampled: str
    greedy: str
    seconds_a_seed: float
    results: str

    def line(self, label: str, seconds: float) -> str:
        """The sweep for a human, one line."""
        return (
            f"{label}: {self.seeds} seeds, after {self.step} steps sampled EM {self.sampled}, "
            f"greedy EM {self.greedy} (95 % t over seeds), {self.seconds_a_seed:.0f} s a seed, "
            f"{seconds:.0f} s in all"
        )


@flow(name="sweep", persist_result=False)
def sweep(
    preset: str = "tiny",
    seeds: Annotated[int, Field(ge=1, le=1000)] = 3,
    variants: list[Variant] | None = None,
    overrides: Overrides | None = None,  # type: ignore[valid-type]
) -> Swept:
    """Trains the preset once a seed on one cluster, and reports what the seeds have in common.

    Args:
        preset: A file of deployments/presets, without its ending.
        seeds: How many seeds, counted up from the preset's.
        variants: Also train these with the same seeds, and compare them with the preset as it is.
        overrides: Fields to change in the preset, for all runs.
    """
    from tasks import artifacts
    from tasks.console import as_text, sweep_tables
    from tasks.run import new_name
    from tasks.store import ObjectStore

    plan = planned(preset, variants or [], overrides)
    config = resolve(preset, overrides)
    name, runs = new_name("sweep"), list[SeedRun]()
    with services(config) as found:
        store = ObjectStore(found.store)
        for seed in range(config.seed, config.seed + seeds):
            for variant, tree in plan.items():
                runs.append(_train(preset, variant, tree, seed, found, store))
                # After every run: a sweep that is stopped keeps what it has.
                artifacts.sweep(name, store, runs)
    sys.stdout.write("".join(as_text(table) + "\n" for table in sweep_tables(runs)))
    failed = [f"{run.variant} seed {run.seed}: {run.error}" for run in runs if run.error]
    if failed:
        raise SeedFailed(
            f"{len(failed)} of {len(runs)} runs failed, the others are in "
            f"{artifacts.sweep_key(name)}: {'; '.join(failed)}"
        )
    return _swept(preset, runs, artifacts.sweep_key(name))


def planned(preset: str, variants: list[Variant], overrides: Any) -> dict[str, dict[str, Any]]:
    """Each variant's overrides by its name, the preset as it is first; all of them checked.

    Raises:
        ConfigError: a variant's name is taken, or its settings cannot work.
    """
    base = _tree(overrides)
    plan = {DEFAULT: base}
    for variant in variants:
        if variant.name in plan:
            raise ConfigError(
                f"two variants are named {variant.name!r}; give each a name of its own, other than "
                f"{DEFAULT!r}, which is the preset as it is"
            )
        tree = _tree(variant.overrides)
        if "seed" in tree:
            raise ConfigError(
                f"variant {variant.name!r} sets seed = {tree['seed']}, and a sweep counts the "
                "seeds itself; set the first of them for all variants, with --set seed=N"
            )
        plan[variant.name] = merge(base, tree)
        resolve(preset, plan[variant.name])
    return plan


def variant_from(text: str) -> Variant:
    """Reads NAME:field=value[,field=value].

    Raises:
        ConfigError: the text is not laid out so.
    """
    name, _, rest = text.partition(":")
    if not name or not rest:
        raise ConfigError(f"--variant {text!r}: expected NAME:section.field=value[,...]")
    try:
        return Variant(name=name, overrides=overrides_from({}, rest.split(",")))
    except ValidationError as error:
        raise ConfigError(f"--variant {text!r}: {error}") from None


def _train(
    preset: str, variant: str, tree: dict[str, Any], seed: int, found: Services, store: Any
) -> SeedRun:
    """One run on the sweep's services; its failure is a result, too."""
    from tasks.run import history_of

    here = {
        "seed": seed,
        "cluster": {
            "scheduler": found.scheduler,
            "store_endpoint": found.store.endpoint,
            "store_bucket": found.store.bucket,
        },
    }
    began = time.perf_counter()
    state = train.with_options(flow_run_name=f"{variant}-seed-{seed}")(
        preset=preset, overrides=Overrides.model_validate(merge(tree, here)), return_state=True
    )
    seconds = time.perf_counter() - began
    if not state.is_completed():
        get_run_logger().error("%s, seed %d failed: %s", variant, seed, state.message)
        return SeedRun(variant, seed, seconds, error=state.message or state.name or "failed")
    run = state.result().run
    evaluations = tuple(history_of(store, run).evaluations)
    return SeedRun(variant, seed, seconds, run, evaluations)


def _swept(preset: str, runs: list[SeedRun], key: str) -> Swept:
    base = variant_rows(runs)[0]
    return Swept(
        preset=preset,
        seeds=base.seeds,
        step=base.step,
        sampled=base.exact_match["sampled"].text(),
        greedy=base.exact_match["greedy"].text(),
        seconds_a_seed=base.seconds,
        results=key,
    )


def _tree(overrides: Any) -> dict[str, Any]:
    if isinstance(overrides, BaseModel):
        return overrides.model_dump(exclude_none=True)
    return overrides or {}


def main(
    preset: Annotated[str, typer.Option(help="A file of deployments/presets.")] = "tiny",
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds.")] = 3,
    variants: Annotated[
        list[str] | None,
        typer.Option("--variant", help="NAME:field=value[,field=value]; may be repeated."),
    ] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", help="Any field, for all runs: training.steps=20")
    ] = None,
) -> None:
    """Trains a preset with several seeds; prints means and 95 % intervals over the seeds."""

    def parameters() -> dict[str, Any]:
        made = [variant_from(text) for text in variants or ()]
        overrides = overrides_from({}, changes or ())
        for tree in planned(preset, made, overrides).values():
            check_inputs(resolve(preset, tree))
        return {"preset": preset, "seeds": seeds, "variants": made, "overrides": overrides}

    run_flow(preset, sweep, parameters, lambda config: None)


if __name__ == "__main__":
    typer.run(main)
