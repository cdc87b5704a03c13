"""Train a search agent: sample, learn, publish, evaluate, until the steps are done.

python -m flows.train --preset tiny
prefect deployment run 'train/tiny'
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from prefect import flow, get_run_logger
from prefect.runtime import flow_run
from pydantic import BaseModel

from flows.cli import check_inputs, overrides_from, run_flow
from infra.local import attached
from infra.state import home_folder
from tasks.presets import Overrides, resolve

if TYPE_CHECKING:
    from tasks.metrics import History


class Result(BaseModel):
    """What a run leaves. `checkpoint` and `metrics` are keys in the store; EM is sampled, held
    out; bytes are a mean over the steps."""

    run: str
    version: int
    checkpoint: str
    metrics: str
    first_em: float
    last_em: float
    delta_bytes: float
    full_bytes: int

    def line(self, label: str, seconds: float) -> str:
        """The run for a human, one line."""
        return (
            f"{label}: EM {self.first_em:.2f} -> {self.last_em:.2f} in {seconds:.0f} s, "
            f"delta {_size(self.delta_bytes)} of {_size(self.full_bytes)} a step"
        )


@flow(name="train", persist_result=False)
def train(
    preset: str = "tiny",
    overrides: Overrides | None = None,  # type: ignore[valid-type]
    resume: str | None = None,
) -> Result:
    """Trains a search agent by GRPO on questions whose answers it must search for.

    Args:
        preset: A file of deployments/presets, without its ending.
        overrides: Fields to change in the preset.
        resume: Name of a run to go on with from where it stopped; empty starts a new one. A flow
            run that is retried goes on with its own.
    """
    from tasks import stages
    from tasks.console import live_table
    from tasks.inputs import load_inputs
    from tasks.run import begun_by, open_run
    from tasks.store import ObjectStore

    config = resolve(preset, overrides)
    inputs = load_inputs(config, home_folder() / "cache")
    flow_run_id = flow_run.get_id()
    with attached(config, get_run_logger()) as cluster:
        resume = resume or begun_by(ObjectStore(cluster.store), flow_run_id)
        policy = stages.base_policy(cluster, inputs, resume)
        with (
            open_run(preset, inputs, cluster, policy, resume, flow_run_id) as run,
            live_table(run.history),
        ):
            released = stages.prepare(run)
            if run.evaluation_due:
                stages.evaluate(run, released)
            for step in run.remaining_steps:
                batch = stages.at(stages.rollout, step)(run, step, released)
                updated = stages.at(stages.update, step)(run, batch)
                released = stages.at(stages.publish, step)(run, updated)
                stages.record(run, batch, updated, released)
                if run.evaluation_due:
                    stages.at(stages.evaluate, step)(run, released)
                if run.checkpoint_due:
                    stages.at(stages.checkpoint, step)(run, released)
            final = stages.export(run, released)
    return _result(run.name, run.version, final, run.history)


def _result(name: str, version: int, checkpoint: str, history: History) -> Result:
    from tasks.run import metrics_key

    steps = history.steps
    return Result(
        run=name,
        version=version,
        checkpoint=checkpoint,
        metrics=metrics_key(name),
        first_em=history.evaluations[0].sampled.exact_match,
        last_em=history.evaluations[-1].sampled.exact_match,
        delta_bytes=sum(step.delta_bytes for step in steps) / max(1, len(steps)),
        full_bytes=steps[-1].full_bytes if steps else 0,
    )


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"


def main(
    preset: Annotated[str, typer.Option(help="A file of deployments/presets.")] = "tiny",
    data: Annotated[str | None, typer.Option(help="Training questions (data.train).")] = None,
    steps: Annotated[int | None, typer.Option(help="Steps (training.steps).")] = None,
    questions_per_step: Annotated[int | None, typer.Option(help="Questions a step.")] = None,
    group_size: Annotated[int | None, typer.Option(help="Trajectories a question.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the run.")] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", help="Any field: rollout.temperature=0.9")
    ] = None,
    resume: Annotated[str | None, typer.Option(help="Run to go on with.")] = None,
    label: Annotated[str | None, typer.Option(help="First word of the last line.")] = None,
) -> None:
    """Trains, with a Prefect server and services of its own where none are running."""
    named: dict[str, Any] = {
        "data.train": data,
        "training.steps": steps,
        "rollout.questions_per_step": questions_per_step,
        "rollout.group_size": group_size,
        "seed": seed,
    }
    run_flow(
        label or preset,
        train,
        lambda: {
            "preset": preset,
            "overrides": overrides_from(named, changes or ()),
            "resume": resume,
        },
        check_inputs,
    )


if __name__ == "__main__":
    typer.run(main)
