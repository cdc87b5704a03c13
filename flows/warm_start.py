"""Make a policy that knows the search protocol: the start of a preset's reinforcement learning.

    python -m flows.warm_start --preset smollm2 --data path/to/hotpotqa_train.jsonl

makes it in the store, where the preset's own runs find it: a run makes it itself where it is not
there. An interrupted one goes on from its last saved state. `--output` also writes it to a folder.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated, Any

import typer
from prefect import flow, get_run_logger
from pydantic import BaseModel

from flows.cli import check_inputs, overrides_from, run_flow
from infra.local import attached
from infra.state import home_folder
from tasks.config import TrainConfig
from tasks.errors import ConfigError
from tasks.presets import Overrides, resolve


class Made(BaseModel):
    """Where the policy is, and where it comes from. `prefix` is of keys in the store."""

    prefix: str
    folder: str | None
    provenance: dict[str, Any]

    def line(self, label: str, seconds: float) -> str:
        """The result for a human, one line."""
        came, where = self.provenance, f"{self.prefix} in the store"
        if self.folder is not None:
            where += f" and {self.folder}"
        return (
            f"{label}: policy at {where}, loss {came['first_loss']:.3f} -> "
            f"{came['final_loss']:.3f} in {came['steps']} steps on {came['demonstrations']} "
            f"demonstrations, {seconds:.0f} s"
        )


@flow(name="warm-start", persist_result=False)
def warm_start(
    preset: str = "smollm2",
    output: str | None = None,
    overrides: Overrides | None = None,  # type: ignore[valid-type]
) -> Made:
    """Fine-tunes a policy on demonstrations, built from the preset's questions or from a file.

    Args:
        preset: A file of deployments/presets, without its ending.
        output: Folder to write the policy to as well; must not exist.
        overrides: Fields to change in the preset; model.warm_start says how.
    """
    from tasks import stages
    from tasks.inputs import load_inputs
    from tasks.store import ObjectStore
    from tasks.training.stored_policy import provenance_of
    from tasks.weights.final import fetch_checkpoint

    config = resolve(preset, overrides)
    check(config, output)
    inputs = load_inputs(config, home_folder() / "cache")
    with attached(config, get_run_logger()) as cluster:
        prefix = stages.base_policy(cluster, inputs)
        assert prefix is not None
        store = ObjectStore(cluster.store)
        if output is not None:
            found = fetch_checkpoint(store, prefix, cluster.cache_dir / "models")
            shutil.copytree(found, output)
        return Made(prefix=prefix, folder=output, provenance=provenance_of(store, prefix))


def check(config: TrainConfig, output: str | None) -> None:
    """What else must hold before anything starts.

    Raises:
        ConfigError: there is nothing to do, or something where the policy is to be written.
    """
    if config.model.warm_start is None:
        raise ConfigError(
            "model.warm_start is not set; give at least model.warm_start.demonstrations > 0"
        )
    if output is not None and Path(output).exists():
        raise ConfigError(f"{output} exists; name a folder that does not, or remove it")


def main(
    preset: Annotated[str, typer.Option(help="A file of deployments/presets.")] = "smollm2",
    output: Annotated[
        str | None, typer.Option(help="Folder to write it to as well; must not exist.")
    ] = None,
    base: Annotated[str | None, typer.Option(help="Start model (model.path).")] = None,
    data: Annotated[str | None, typer.Option(help="Questions to demonstrate (data.train).")] = None,
    trajectories: Annotated[
        str | None,
        typer.Option(help="JSONL of trajectories instead (model.warm_start.trajectories)."),
    ] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", help="Any field: model.warm_start.good_share=0.3")
    ] = None,
) -> None:
    """Makes a policy by supervised fine-tuning on demonstrations."""
    named = {
        "model.path": base,
        "data.train": data,
        "model.warm_start.trajectories": trajectories,
    }

    def check_all(config: TrainConfig) -> None:
        check(config, output)
        check_inputs(config)

    run_flow(
        "warm-start",
        warm_start,
        lambda: {
            "preset": preset,
            "output": output,
            "overrides": overrides_from(named, changes or ()),
        },
        check_all,
    )


if __name__ == "__main__":
    typer.run(main)
