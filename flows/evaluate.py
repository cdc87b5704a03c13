"""Evaluate any published version of a run, or any checkpoint, on a preset's held-out questions.

python -m flows.evaluate --preset tiny --run tiny-20261129-120000-1a2b
python -m flows.evaluate --run RUN --version 30 --against RUN:0   # or another run, checkpoint
prefect deployment run 'evaluate/evaluate' --param checkpoint=deployments/policies/tiny
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from prefect import flow, get_run_logger
from pydantic import BaseModel

from flows.cli import check_inputs, overrides_from, run_flow
from infra.local import attached
from infra.state import home_folder
from tasks.errors import ConfigError, DataError
from tasks.presets import Overrides, resolve

if TYPE_CHECKING:
    from tasks.cluster import Attached
    from tasks.evaluation.held_out import Evaluated
    from tasks.inputs import Inputs


class Compared(BaseModel):
    """A difference, its 95 % interval by the paired bootstrap, and the p-value of a paired
    randomisation test."""

    mode: str
    metric: str
    questions: int
    first: float
    second: float
    difference: float
    interval: tuple[float, float]
    p_value: float

    def line(self) -> str:
        low, high = self.interval
        return (
            f"{self.mode} {self.metric}: {self.first:.3f} against {self.second:.3f}, difference "
            f"{self.difference:+.3f} [{low:+.3f}, {high:+.3f}], p {self.p_value:.4f}"
        )


class Scores(BaseModel):
    """Held-out exact match and F1 with 95 % intervals.

    left_out: says on how many of the questions the reward failed, if on any.
    table: the same by kind and level of question. report: the page, on this machine.
    """

    of: str
    version: int
    questions: int
    left_out: str
    sampled_em: float
    sampled_interval: tuple[float, float]
    sampled_f1: float
    greedy_em: float
    greedy_interval: tuple[float, float]
    greedy_f1: float
    table: str
    report: str
    against: Scores | None = None
    compared: list[Compared] = []

    def line(self, label: str, seconds: float) -> str:
        """The scores for a human, the last line in short."""
        others = [] if self.against is None else [self.against._head(), self.against.table]
        return "\n".join(
            [
                *others,
                self._head(),
                self.table,
                f"report: {self.report}",
                *(one.line() for one in self.compared),
                f"{label}: {self.of} v{self.version} on {self.questions} questions"
                f"{self.left_out}: sampled EM {self.sampled_em:.3f} F1 {self.sampled_f1:.3f}, "
                f"greedy EM {self.greedy_em:.3f} F1 {self.greedy_f1:.3f}, {seconds:.0f} s",
            ]
        )

    def _head(self) -> str:
        return f"{self.of}, version {self.version}"


class Target(NamedTuple):
    """What to evaluate: a run's version (None: its newest), or a checkpoint."""

    run: str | None
    version: int | None
    checkpoint: str | None

    @property
    def name(self) -> str:
        return self.run or self.checkpoint or ""


@flow(name="evaluate", persist_result=False)
def evaluate(
    preset: str = "tiny",
    run: str | None = None,
    version: int | None = None,
    checkpoint: str | None = None,
    against: str | None = None,
    overrides: Overrides | None = None,  # type: ignore[valid-type]
) -> Scores:
    """Exact match and F1 on the preset's held-out questions, greedy and sampled.

    Args:
        preset: A file of deployments/presets, without its ending.
        run: Run whose version to evaluate; give this or checkpoint.
        version: Which version of the run; empty takes the newest.
        checkpoint: Folder or hub id of a Hugging Face checkpoint.
        against: Also evaluate this on the same questions and compare: RUN, RUN:VERSION, or a
            checkpoint's folder or hub id (with a slash in it).
        overrides: Fields to change in the preset.
    """
    from tasks import artifacts
    from tasks.evaluation.outcomes import METRIC_NAMES, compare
    from tasks.inputs import load_inputs
    from tasks.run import check_playable

    config = resolve(preset, overrides)
    targets = targets_of(run, version, checkpoint, against)
    inputs = load_inputs(config, home_folder() / "cache")
    if against is not None and len(inputs.held_out) < 2:
        raise ConfigError("one held-out question cannot be compared; raise data.held_out_questions")
    with attached(config, get_run_logger()) as cluster:
        for target in targets:  # both, before the first takes its time
            check_playable(inputs, cluster, *target)
            _compare_with_training(inputs, cluster, target)
        found = [_scores(cluster, inputs, target) for target in targets]
    (scores, evaluated), *others = found
    if not others:
        return scores
    ((other, other_evaluated),) = others
    differences = compare(evaluated.outcomes, other_evaluated.outcomes, config.seed)
    compared = [
        Compared(
            mode=one.mode,
            metric=METRIC_NAMES[one.metric],
            questions=one.questions,
            first=one.first,
            second=one.second,
            difference=one.difference.mean,
            interval=one.difference.interval,
            p_value=one.difference.p_value,
        )
        for one in differences
    ]
    names = [f"{one.of} v{one.version}" for one in (scores, other)]
    artifacts.comparison(names[0], names[1], [one.model_dump() for one in compared])
    return scores.model_copy(update={"against": other, "compared": compared})


def targets_of(
    run: str | None, version: int | None, checkpoint: str | None, against: str | None
) -> list[Target]:
    """What the parameters ask for, in order.

    Raises:
        ConfigError: run and checkpoint are both given or both missing, or `against` names no
            version.
    """
    if (run is None) == (checkpoint is None):
        raise ConfigError("give either run (and perhaps version) or checkpoint, not both or none")
    targets = [Target(run, version, checkpoint)]
    if against is None:
        return targets
    if "/" in against:
        return [*targets, Target(None, None, against)]
    name, colon, number = against.partition(":")
    if not name or (colon and not number.isdecimal()):
        raise ConfigError(
            f"against is {against!r}, expected RUN, RUN:VERSION, or a checkpoint's folder or hub "
            "id with a slash in it"
        )
    return [*targets, Target(name, int(number) if colon else None, None)]


def _compare_with_training(inputs: Inputs, cluster: Attached, target: Target) -> None:
    """Says in what the target was trained otherwise than it is evaluated.

    Raises:
        DataError: it was trained on some of the questions.
    """
    from tasks.config import DataConfig
    from tasks.inputs import check_unseen, trained_on
    from tasks.run_record import played_otherwise

    then = _trained_with(cluster, target)
    if then is None:
        return
    for difference in played_otherwise(then, inputs.config):
        cluster.log.warning("evaluated otherwise than %s: %s", target.name, difference)
    data = DataConfig.model_validate(then["data"])
    if data == inputs.config.data:
        return  # they have been looked at
    try:
        train = trained_on(data)
    except DataError as error:
        cluster.log.warning("%s may have been trained on these questions: %s", target.name, error)
        return
    check_unseen(inputs.held_out, train, f"{target.name}: data.train = {data.train!r}")


def _trained_with(cluster: Attached, target: Target) -> dict[str, Any] | None:
    """The configuration of the run, or of the warm start that wrote the checkpoint; None where that
    is not known, or it learned from no dataset."""
    from tasks.run_record import recorded
    from tasks.store import ObjectStore
    from tasks.training.warm_start import PROVENANCE

    if target.run is not None:
        record = recorded(ObjectStore(cluster.store), target.run)
        return record and record["config"]
    beside = Path(target.checkpoint or "") / PROVENANCE
    if not beside.is_file():
        return None
    config = json.loads(beside.read_text())["config"]
    shown = config["model"]["warm_start"]
    return None if shown["worlds"] or shown["trajectories"] else config


def _scores(cluster: Attached, inputs: Inputs, target: Target) -> tuple[Scores, Evaluated]:
    from tasks import artifacts
    from tasks.console import as_text, scores
    from tasks.evaluation.held_out import evaluate_version
    from tasks.metrics import History
    from tasks.run import history_of, open_evaluation

    with open_evaluation(inputs, cluster, *target) as opened:
        run, version = target.run, opened.version
        made_by = history_of(opened.store, run).steps if run else []
        history = History(steps=[record for record in made_by if record.version <= version])
        steps = history.steps[-1].step + 1 if history.steps else 0
        evaluated = evaluate_version(opened.fleet, inputs, version, steps)
        made = evaluated.record
        cluster.log.info("%s: %s", target.name, made.line())
        history.add_evaluation(made)
        report = artifacts.evaluation(opened.name, inputs, opened.store, history, evaluated)
    found = Scores(
        of=target.name,
        version=made.version,
        questions=made.questions,
        left_out=made.left_out,
        sampled_em=made.sampled.exact_match,
        sampled_interval=made.sampled_interval,
        sampled_f1=made.sampled.f1,
        greedy_em=made.greedy.exact_match,
        greedy_interval=made.greedy_interval,
        greedy_f1=made.greedy.f1,
        table=as_text(scores(made.rows)),
        report=str(report),
    )
    return found, evaluated


def main(
    preset: Annotated[str, typer.Option(help="A file of deployments/presets.")] = "tiny",
    run: Annotated[str | None, typer.Option(help="Run whose version to evaluate.")] = None,
    version: Annotated[int | None, typer.Option(help="Version; newest if not given.")] = None,
    checkpoint: Annotated[str | None, typer.Option(help="Checkpoint folder or hub id.")] = None,
    against: Annotated[
        str | None, typer.Option(help="Compare with RUN, RUN:VERSION, or a checkpoint.")
    ] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", help="Any field: data.held_out_questions=100")
    ] = None,
) -> None:
    """Evaluates a version of a run, or a checkpoint; compares it with another."""

    def parameters() -> dict[str, Any]:
        targets_of(run, version, checkpoint, against)
        return {
            "preset": preset,
            "run": run,
            "version": version,
            "checkpoint": checkpoint,
            "against": against,
            "overrides": overrides_from({}, changes or ()),
        }

    run_flow("evaluate", evaluate, parameters, check_inputs)


if __name__ == "__main__":
    typer.run(main)
