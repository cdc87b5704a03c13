"""What the flows' command lines share: overrides from options, a Prefect API, the last line."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from infra.local import prefect_api, reported
from infra.state import home_folder
from tasks.config import TrainConfig
from tasks.errors import ConfigError
from tasks.presets import resolve


def overrides_from(named: Mapping[str, Any], assignments: Sequence[str]) -> Any:
    """Overrides out of options that were given and `section.field=value` assignments.

    A value is read as JSON where it is JSON (numbers, true, "text"), else as text.

    Raises:
        ConfigError: an assignment has no `=`, or sets a field to null.
    """
    fields = {path: value for path, value in named.items() if value is not None}
    for assignment in assignments:
        path, equals, text = assignment.partition("=")
        if not equals:
            raise ConfigError(f"--set {assignment!r}: expected section.field=value")
        try:
            fields[path] = json.loads(text)
        except json.JSONDecodeError:
            fields[path] = text
        if fields[path] is None:
            # A form leaves null where nothing was entered, so it cannot mean anything else here.
            raise ConfigError(
                f"--set {assignment!r}: null cannot be set; leave the field out to keep the "
                "preset's value (model.warm_start.demonstrations=0 takes the policy as it is)"
            )
    tree: dict[str, Any] = {}
    for path, value in fields.items():
        *sections, name = path.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[name] = value
    return tree


def check_inputs(config: TrainConfig) -> None:
    """Reads and checks all that a run reads, as the run itself will."""
    from tasks.inputs import load_inputs

    load_inputs(config, home_folder() / "cache")


def run_flow(
    label: str,
    flow: Callable[..., Any],
    parameters: Callable[[], dict[str, Any]],
    check: Callable[[TrainConfig], object],
) -> None:
    """Runs a flow with a Prefect API, its own where none is there, and prints its last line.

    Args:
        parameters: makes the flow's parameters.
        check: what else must hold, before a server is started for the flow.

    Our own errors end the command with exit code 1 and their message, without a traceback.
    """
    began = time.perf_counter()
    with reported():
        arguments = parameters()
        check(resolve(arguments["preset"], arguments["overrides"]))
        with prefect_api():
            result = flow(**arguments)
    sys.stdout.write(result.line(label, time.perf_counter() - began) + "\n")
