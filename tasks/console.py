"""The run on a terminal: a live table of its steps, and tables of scores."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tasks.evaluation.breakdown import Mode, Row
from tasks.evaluation.intervals import Interval
from tasks.evaluation.seeds import SeedRun, step_rows, variant_rows
from tasks.metrics import BatchStats, History

_SHOWN: tuple[Mode, Mode] = ("sampled", "greedy")
ROWS = 12
"""Steps the table shows; older ones have scrolled by in the log."""


@contextmanager
def live_table(history: History) -> Iterator[None]:
    """Shows the last steps while the block runs; nothing where the output is no terminal."""
    console = Console()
    if not console.is_terminal:
        yield
        return
    with Live(get_renderable=lambda: table(history), console=console, refresh_per_second=2):
        yield


def table(history: History) -> Table:
    """The last steps and the last evaluation."""
    title = history.evaluations[-1].line() if history.evaluations else "no evaluation yet"
    made = Table("step", "reward", "EM", "searches", "loss", "stages", "delta bytes", title=title)
    for record in history.steps[-ROWS:]:
        made.add_row(
            str(record.step),
            f"{record.batch.reward:.3f}",
            f"{record.batch.exact_match:.3f}",
            f"{record.batch.searches:.2f}",
            f"{record.update['loss']:.4f}",
            " ".join(f"{name} {value:.1f}s" for name, value in record.seconds.items()),
            f"{record.delta_bytes:,}",
        )
    return made


def scores(rows: Sequence[Row]) -> Table:
    """An evaluation by kind and level of question."""
    columns = "questions", "count", "EM", "95 %", "F1", "answered", "truncated", "invalid", "found"
    made = Table("", *columns)
    for row in rows:
        low, high = row.exact_match_interval
        made.add_row(
            row.mode if row.by == "all" else "",
            row.label,
            str(row.questions),
            f"{row.exact_match:.3f}",
            f"{low:.3f} - {high:.3f}",
            f"{row.f1:.3f}",
            str(row.answered),
            str(row.truncated),
            str(row.invalid),
            "" if row.gold_recall is None else f"{row.gold_recall:.3f}",
        )
    return made


def sweep_tables(runs: Sequence[SeedRun]) -> list[Table]:
    """What a sweep has so far: by step, by variant where there are some, and run by run."""
    rows = step_rows(runs)
    found = dict.fromkeys(name for row in rows for _, name in row.exact_match)
    parts: list[tuple[Mode, str]] = [(mode, name) for name in found for mode in _SHOWN]
    steps = Table(
        "variant",
        "step",
        "seeds",
        *(f"{mode} {name}" for mode, name in parts),
        title="Held-out EM: mean over seeds [95 % t interval over seeds, cut to 0 and 1]",
    )
    for row in rows:
        cells = [row.exact_match[key].text() if key in row.exact_match else "" for key in parts]
        steps.add_row(row.variant, str(row.step), str(row.seeds), *cells)
    each = Table(
        *("variant", "seed", "seconds", "sampled EM", "greedy EM", "run"),
        title="Each run at its last evaluation [95 % Wilson interval over questions]",
    )
    for run in runs:
        last = run.evaluations[-1] if run.evaluations else None
        cells = (
            [_with_interval(getattr(last, m), getattr(last, f"{m}_interval")) for m in _SHOWN]
            if last
            else ["failed", ""]
        )
        each.add_row(
            run.variant, str(run.seed), f"{run.seconds:.0f}", *cells, Text(run.run or run.error)
        )
    if len({run.variant for run in runs}) < 2:
        return [steps, each]
    return [steps, _variants(runs), each]


def _variants(runs: Sequence[SeedRun]) -> Table:
    made = Table(
        *("variant", "step", "seeds", "sampled EM", "greedy EM"),
        *("sampled - default", "greedy - default", "seconds a seed"),
        title="Variants: mean [95 % t interval over seeds]; differences are paired by seed",
    )
    for row in variant_rows(runs):
        versus = [row.versus[mode].text("+") if row.versus else "" for mode in _SHOWN]
        values = [row.exact_match[mode].text() for mode in _SHOWN]
        made.add_row(
            row.variant, str(row.step), str(row.seeds), *values, *versus, f"{row.seconds:.0f}"
        )
    return made


def _with_interval(stats: BatchStats, interval: Interval) -> str:
    return f"{stats.exact_match:.3f} [{interval[0]:.3f}, {interval[1]:.3f}]"


def markdown_table(made: Table) -> str:
    """The table for an artifact."""
    columns = [list(column.cells) for column in made.columns]
    lines = [[str(column.header) for column in made.columns], ["---"] * len(columns)]
    lines += [list(map(str, cells)) for cells in zip(*columns, strict=True)]
    body = "\n".join("| " + " | ".join(_cell(c) for c in line) + " |" for line in lines)
    return f"### {made.title}\n\n{body}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def as_text(made: Table) -> str:
    """The table as text without colours, as wide as it needs."""
    console = Console(file=io.StringIO(), width=200, no_color=True)
    with console.capture() as found:
        console.print(made)
    return found.get().rstrip("\n")
