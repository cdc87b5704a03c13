"""The automation that marks a flow run crashed once its process has gone without a word.

    python -m infra.zombies        # at the Prefect server that PREFECT_API_URL names

`infra.local up` does it for its own server. Flow runs send heartbeats as often as
PREFECT_FLOWS_HEARTBEAT_FREQUENCY says, which `deployments/prefect.yaml` sets for deployments and
`infra.prefect_server.using_api` for a shell. When three in a row are missing and nothing says that
the run ended, it is a zombie: its machine was lost, or its process killed.
"""

from __future__ import annotations

import asyncio
import sys
from datetime import timedelta

from prefect.automations import Automation
from prefect.client.schemas.objects import StateType
from prefect.events.actions import ChangeFlowRunState
from prefect.events.schemas.automations import EventTrigger, Posture
from prefect.events.schemas.events import ResourceSpecification

from infra.prefect_server import HEARTBEAT_S

NAME = "kindling: zombie runs"
_BEAT = "prefect.flow-run.heartbeat"
_ENDS = ("Completed", "Failed", "Cancelled", "Crashed")


def mark_zombies() -> bool:
    """Creates the automation at the current Prefect server; whether it was not there."""
    return asyncio.run(_mark())


async def _mark() -> bool:
    try:
        await Automation.aread(name=NAME)
    except ValueError:  # how Prefect says that there is none of that name
        await _automation().acreate()
        return True
    return False


def _automation() -> Automation:
    return Automation(
        name=NAME,
        description="Marks a run crashed that stopped sending heartbeats; its workers are free "
        "again, and it can be resumed.",
        trigger=EventTrigger(
            after={_BEAT},
            expect={_BEAT, *(f"prefect.flow-run.{state}" for state in _ENDS)},
            match=ResourceSpecification({"prefect.resource.id": ["prefect.flow-run.*"]}),
            for_each={"prefect.resource.id"},
            posture=Posture.Proactive,
            threshold=1,
            within=timedelta(seconds=3 * HEARTBEAT_S),
        ),
        actions=[  # type: ignore[arg-type] (a list of one of the kinds that there are)
            ChangeFlowRunState(
                name=None,
                force=False,
                state=StateType.CRASHED,
                message="No heartbeat for 90 seconds: the flow's process or machine is gone. Start "
                "it again with `resume` set to the run's name",
            )
        ],
    )


if __name__ == "__main__":
    sys.stdout.write(f"{NAME!r} {'created' if mark_zombies() else 'is there already'}\n")
