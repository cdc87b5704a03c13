"""Evaluate any published version of a run, or any checkpoint, on a preset's held-out questions.

python -m flows.evaluate --preset tiny --run tiny-20261129-120000-1a2b
prefect deployment run 'evaluate/evaluate' --param checkpoint=deployments/policies/tiny
"""

from __future__ import annotations

from typing import Annotated

import typer
from prefect import flow, get_run_logger
from pydantic import BaseModel

from flows.cli import check_inputs, overrides_from, run_flow
from infra.local import attached
from infra.state import home_folder
from tasks.config import Overrides, resolve
from tasks.errors import ConfigError


class Scores(BaseModel):
    """Held-out exact match and F1 with 95 % intervals."""

    of: str
    version: int
    questions: int
    sampled_em: float
    sampled_interval: tuple[float, float]
    sampled_f1: float
    greedy_em: float
    greedy_interval: tuple[float, float]
    greedy_f1: float

    def line(self, label: str, seconds: float) -> str:
        """The scores for a human, one line."""
        return (
            f"{label}: {self.of} v{self.version} on {self.questions} questions: sampled EM "
            f"{self.sampled_em:.3f} F1 {self.sampled_f1:.3f}, greedy EM {self.greedy_em:.3f} "
            f"F1 {self.greedy_f1:.3f}, {seconds:.0f} s"
        )


@flow(name="evaluate", persist_result=False)
def evaluate(
    preset: str = "tiny",
    run: str | None = None,
    version: int | None = None,
    checkpoint: str | None = None,
    overrides: Overrides | None = None,  # type: ignore[valid-type]
) -> Scores:
    """Exact match and F1 on the preset's held-out questions, greedy and sampled.

    Args:
        preset: A file of deployments/presets, without its ending.
        run: Run whose version to evaluate; give this or checkpoint.
        version: Which version of the run; empty takes the newest.
        checkpoint: Folder or hub id of a Hugging Face checkpoint.
        overrides: Fields to change in the preset.
    """
    from tasks import artifacts
    from tasks.evaluation.held_out import evaluate_version
    from tasks.inputs import load_inputs
    from tasks.metrics import History
    from tasks.run import open_evaluation

    if (run is None) == (checkpoint is None):
        raise ConfigError("give either run (and perhaps version) or checkpoint, not both or none")
    config = resolve(preset, overrides)
    inputs = load_inputs(config, home_folder() / "cache")
    with (
        attached(config, get_run_logger()) as cluster,
        open_evaluation(inputs, cluster, run, version, checkpoint) as opened,
    ):
        made, sampled = evaluate_version(opened.fleet, inputs, opened.version, step=0)
        cluster.log.info(made.line())
        history = History(evaluations=[made])
        artifacts.evaluation(opened.name, inputs, opened.store, history, sampled)
    return Scores(
        of=run or checkpoint or "",
        version=made.version,
        questions=made.questions,
        sampled_em=made.sampled.exact_match,
        sampled_interval=made.sampled_interval,
        sampled_f1=made.sampled.f1,
        greedy_em=made.greedy.exact_match,
        greedy_interval=made.greedy_interval,
        greedy_f1=made.greedy.f1,
    )


def main(
    preset: Annotated[str, typer.Option(help="A file of deployments/presets.")] = "tiny",
    run: Annotated[str | None, typer.Option(help="Run whose version to evaluate.")] = None,
    version: Annotated[int | None, typer.Option(help="Version; newest if not given.")] = None,
    checkpoint: Annotated[str | None, typer.Option(help="Checkpoint folder or hub id.")] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", help="Any field: data.held_out_questions=100")
    ] = None,
) -> None:
    """Evaluates a version of a run, or a checkpoint."""
    run_flow(
        "evaluate",
        evaluate,
        lambda: {
            "preset": preset,
            "run": run,
            "version": version,
            "checkpoint": checkpoint,
            "overrides": overrides_from({}, changes or ()),
        },
        check_inputs,
    )


if __name__ == "__main__":
    typer.run(main)
