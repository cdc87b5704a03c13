"""What flows show in the Prefect UI: progress, tables, a curve, trajectories."""

from __future__ import annotations

import base64
import html
import io
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prefect.artifacts import (
    create_link_artifact,
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)

from infra.state import home_folder
from tasks.console import markdown_table, sweep_tables
from tasks.evaluation.outcomes import Outcomes, compare
from tasks.evaluation.reader import Reading, choose, reading
from tasks.evaluation.report import Report, render
from tasks.evaluation.seeds import SeedRun, to_json
from tasks.metrics import History
from tasks.rollout.trajectory import Trajectory, group_from_bytes
from tasks.store import ObjectMissing
from tasks.weights.look import cells, chained, row_of_published

if TYPE_CHECKING:
    from rich.table import Table

    from tasks.evaluation.held_out import Evaluated
    from tasks.inputs import Inputs
    from tasks.run import Run
    from tasks.store import ObjectStore
    from tasks.weights.commit import Published
    from tasks.weights.garbage import Collection

SAMPLES = 5
VERSIONS = 20
LINK_S = 7 * 24 * 3600
"""How long a report's link opens: the longest that S3 signs for."""


def start_progress() -> Any:
    """The run's progress bar, at zero; returns its artifact id."""
    return create_progress_artifact(0.0, key="progress", description="Steps trained")


def progress(run: Run) -> None:
    """Moves the bar to the steps trained."""
    done = 100.0 * run.next_step / run.config.training.steps
    update_progress_artifact(run.progress_id, done)


def evaluation(
    name: str,
    inputs: Inputs,
    store: ObjectStore,
    history: History,
    evaluated: Evaluated,
) -> Path:
    """The tables and the curve so far, five trajectories of the evaluation, and its report.

    The report is kept in the store, and in the state folder of this machine for a reader without
    the store's credentials, or after it has stopped. Returns its path there.
    """
    if history.steps:
        create_table_artifact(
            table_rows(history), key="metrics", description=f"Run {name}, a row a step"
        )
    create_markdown_artifact(curve_markdown(name, history), key="exact-match")
    readings = _readings(inputs, store, evaluated)
    sampled = [one for one in readings if one.mode == "sampled"]
    pages = [
        trajectory_markdown(
            one.question.question, one.question.answers, one.trajectory, inputs.tokenizer
        )
        for one in sampled[:: max(1, len(sampled) // SAMPLES)][:SAMPLES]
    ]
    version = evaluated.record.version
    create_markdown_artifact(
        f"# Five held-out trajectories at version {version}\n\n" + "\n\n---\n\n".join(pages),
        key="trajectories",
    )
    return _report(name, inputs, store, history, evaluated, readings)


def _readings(inputs: Inputs, store: ObjectStore, evaluated: Evaluated) -> list[Reading]:
    chosen = choose(evaluated.groups)
    found = store.get_many([one.group.key for one in chosen])
    asked = {question.id: question for question in inputs.held_out}
    return [
        reading(
            one.mode,
            asked[one.group.question_id],
            group_from_bytes(data),
            one.number,
            inputs.tokenizer,
            inputs.config.rollout,
        )
        for one, data in zip(chosen, found, strict=True)
    ]


def _report(
    name: str,
    inputs: Inputs,
    store: ObjectStore,
    history: History,
    evaluated: Evaluated,
    readings: Sequence[Reading],
) -> Path:
    """Writes the evaluation's outcomes and its report, and links the report from the run."""
    record, outcomes = evaluated.record, evaluated.outcomes
    store.put(outcomes_key(name, record.version), outcomes.to_json())
    first = history.evaluations[0]
    earlier = _outcomes(store, name, first.version) if first.version != record.version else None
    comparable = earlier is not None and earlier.question_ids == outcomes.question_ids
    page = render(
        Report(
            name=name,
            config=inputs.config,
            history=history,
            evaluation=record,
            readings=readings,
            comparisons=compare(outcomes, earlier) if earlier and comparable else (),
            against=first if comparable else None,
        )
    ).encode()
    key = report_key(name, record.version)
    store.put(key, page)
    path = home_folder() / "reports" / name / Path(key).name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(page)
    create_link_artifact(
        store.signed_url(key, "text/html; charset=utf-8", LINK_S),
        link_text=f"Report of version {record.version}",
        key="report",
        description=(
            f"{record.line()}\n\nThe link opens for {LINK_S // 86_400} days, for whoever has it, "
            f"while the store runs that it was made by. The same page is `{path}` on "
            f"`{socket.gethostname()}`, and `{key}` in the store."
        ),
    )
    return path


def sweep(name: str, store: ObjectStore, runs: Sequence[SeedRun]) -> None:
    """A sweep as far as it is: its results in the store, tables and a curve a seed."""
    store.put(sweep_key(name), to_json(runs))
    tables = sweep_tables(runs)
    create_markdown_artifact(sweep_markdown(name, runs, tables), key="sweep")


def sweep_key(name: str) -> str:
    """Where the store keeps a sweep's runs and their evaluations."""
    return f"sweeps/{name}.json"


def sweep_markdown(name: str, runs: Sequence[SeedRun], tables: Sequence[Table]) -> str:
    """Held-out exact match over steps, a curve a seed, and the tables."""
    picture = base64.b64encode(_seeds_png(runs)).decode()
    parts = [f"# Sweep {name}", f"![exact match over steps](data:image/png;base64,{picture})"]
    parts += [markdown_table(table) for table in tables]
    return "\n\n".join(parts) + "\n"


def _seeds_png(runs: Sequence[SeedRun]) -> bytes:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.6), dpi=100)
    axes = figure.subplots()
    variants = list(dict.fromkeys(run.variant for run in runs))
    for run in runs:
        steps = [e.step for e in run.evaluations]
        values = [e.sampled.exact_match for e in run.evaluations]
        color = f"C{variants.index(run.variant) % 10}"
        axes.plot(steps, values, ".-", color=color, alpha=0.6, linewidth=1)
    for number, variant in enumerate(variants):
        axes.plot([], [], ".-", color=f"C{number % 10}", label=variant)
    axes.set(xlabel="step", ylabel="held-out exact match, sampled", ylim=(0, 1))
    axes.legend(title="a line a seed")
    figure.tight_layout()
    return _png(figure)


def comparison(first: str, second: str, rows: list[dict[str, Any]]) -> None:
    """How two evaluations of the same questions differ, a row a score."""
    create_table_artifact(
        rows,
        key="comparison",
        description=f"{first} against {second}, question by question: 95 % by the paired "
        "bootstrap, p by the paired randomisation test",
    )


def report_key(run: str, version: int) -> str:
    """Where the store keeps the report of an evaluation."""
    return f"runs/{run}/evaluations/{version:06d}.html"


def outcomes_key(run: str, version: int) -> str:
    """Where the store keeps what an evaluation found question by question."""
    return f"runs/{run}/evaluations/{version:06d}.json"


def _outcomes(store: ObjectStore, run: str, version: int) -> Outcomes | None:
    """None for an evaluation whose outcomes were not kept."""
    try:
        return Outcomes.from_json(store.get(outcomes_key(run, version)))
    except ObjectMissing:
        return None


def weights(name: str, published: Sequence[Published]) -> None:
    """What the last versions weigh, as `python -m tasks.weights log` shows it."""
    rows = chained([row_of_published(one) for one in published])[-VERSIONS:]
    create_table_artifact(
        [cells(row) for row in rows],
        key="weights",
        description=f"Run {name}, the last {len(rows)} published versions",
    )


def garbage(found: Collection, dry_run: bool) -> None:
    """What a collection did, or in a dry run would do: a row a run that anything goes from."""
    would = "would be " if dry_run else ""
    create_table_artifact(
        garbage_rows(found),
        key="garbage",
        description=f"What {would}set aside, and what was aside and {would}deleted, run by run",
    )


def garbage_rows(found: Collection) -> list[dict[str, Any]]:
    """Runs that lose something, the largest first, and a sum."""
    changed = [r for r in found.rows if r.set_aside.objects or r.deleted.objects or r.manifests]
    changed.sort(key=lambda row: (-row.set_aside.bytes - row.deleted.bytes, row.run))
    rows: list[dict[str, Any]] = [
        {
            "run": row.run,
            "newest version": row.head,
            "kept from version": row.oldest_kept,
            "pinned": row.pinned,
            "objects set aside": row.set_aside.objects,
            "bytes set aside": row.set_aside.bytes,
            "objects deleted": row.deleted.objects,
            "bytes deleted": row.deleted.bytes,
            "manifests deleted": row.manifests,
        }
        for row in changed
    ]
    counts = list(rows[0])[4:] if rows else []
    total = {name: sum(row[name] for row in rows) for name in counts}
    return [*rows, {"run": f"all {len(found.rows)}", **total}]


def table_rows(history: History) -> list[dict[str, Any]]:
    """A row a step, newest last."""
    return [
        {
            "step": record.step,
            "version": record.version,
            "reward": round(record.batch.reward, 4),
            "EM": round(record.batch.exact_match, 4),
            "answered": round(record.batch.answered, 3),
            "searches": round(record.batch.searches, 2),
            "loss": round(record.update["loss"], 5),
            "grad norm": round(record.update["grad_norm"], 4),
            "mismatch KL": _rounded(record.update.get("mismatch_kl"), 6),
            **{f"{name} s": round(value, 2) for name, value in record.seconds.items()},
            "delta bytes": record.delta_bytes,
        }
        for record in history.steps
    ]


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


def curve_markdown(name: str, history: History) -> str:
    """Held-out exact match over steps, as a picture and as numbers."""
    rows = "\n".join(
        f"| {e.step} | {e.version} | {e.sampled.exact_match:.3f} | "
        f"{e.sampled_interval[0]:.3f} - {e.sampled_interval[1]:.3f} | "
        f"{e.greedy.exact_match:.3f} | {e.greedy_interval[0]:.3f} - {e.greedy_interval[1]:.3f} |"
        for e in history.evaluations
    )
    picture = base64.b64encode(_curve_png(history)).decode()
    return (
        f"# Exact match of {name}\n\n![exact match over steps](data:image/png;base64,{picture})\n\n"
        "| step | version | sampled EM | 95 % | greedy EM | 95 % |\n|---|---|---|---|---|---|\n"
        f"{rows}\n"
    )


def _curve_png(history: History) -> bytes:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.2), dpi=100)
    axes = figure.subplots()
    steps = [record.step + 1 for record in history.steps]
    axes.plot(steps, [r.batch.exact_match for r in history.steps], ".", label="training, sampled")
    at = [e.step for e in history.evaluations]
    for label in ("sampled", "greedy"):
        values = [getattr(e, label).exact_match for e in history.evaluations]
        bounds = [getattr(e, f"{label}_interval") for e in history.evaluations]
        low = [max(0.0, v - b[0]) for v, b in zip(values, bounds, strict=True)]
        high = [max(0.0, b[1] - v) for v, b in zip(values, bounds, strict=True)]
        axes.errorbar(at, values, yerr=[low, high], capsize=3, label=f"held out, {label}")
    axes.set(xlabel="step", ylabel="exact match", ylim=(0, 1))
    axes.legend()
    figure.tight_layout()
    return _png(figure)


def _png(figure: Any) -> bytes:
    data = io.BytesIO()
    figure.savefig(data, format="png")
    return data.getvalue()


def trajectory_markdown(
    question: str, answers: Sequence[str], trajectory: Trajectory, tokenizer: Any
) -> str:
    """A trajectory for a reader: what the policy wrote and what it was shown, turn by turn."""
    lines = [
        f"**{question}**",
        f"wanted {' or '.join(map(repr, answers))}, got {trajectory.answer!r}: exact match "
        f"{int(trajectory.exact_match)}, F1 {trajectory.f1:.2f}, reward {trajectory.reward:.2f}; "
        f"{trajectory.end}",
    ]
    for turn in trajectory.turns:
        wrote = tokenizer.decode(trajectory.ids[turn.start : turn.sampled_end])
        saw = tokenizer.decode(trajectory.ids[turn.sampled_end : turn.observed_end])
        lines.append(f"**{turn.kind}** <code>{_escape(wrote)}</code>")
        if saw.strip():
            quoted = "\n".join(f"> {_escape(line)}  " for line in saw.strip().splitlines())
            lines.append(quoted)
    return "\n\n".join(lines)


def _escape(text: str) -> str:
    return html.escape(text.strip(), quote=False).replace("|", "&#124;")
