"""How a benchmark shows what it measured: a table to read, then one JSON line to parse."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


def machine() -> str:
    """The machine and what else it does: a figure means little without its load."""
    cpu = platform.processor() or platform.machine()
    information = Path("/proc/cpuinfo")
    if information.exists():
        names = [line for line in information.read_text().splitlines() if "model name" in line]
        cpu = names[0].split(":", 1)[1].strip() if names else cpu
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    return f"{os.cpu_count()} x {cpu}, load {load}"


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """A table; numbers with four digits."""
    table = Table(*columns, title=title)
    for row in rows:
        table.add_row(*(f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in row))
    Console(width=110).print(table)


def finish(figures: Mapping[str, Any], json_path: Path | None) -> None:
    """The last line of output, and the same as a file where one is asked for."""
    line = json.dumps({**figures, "machine": machine()})
    if json_path is not None:
        json_path.write_text(line + "\n")
    print(line, flush=True)
