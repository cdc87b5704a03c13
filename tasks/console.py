"""The run on a terminal: a live table of its steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.table import Table

from tasks.metrics import History

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
