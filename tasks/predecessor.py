"""Has the Prefect UI tell the truth of a flow run whose process died: nothing of it is Running.

Whoever goes on with its run knows that it is dead, minutes before Prefect's heartbeats say so; and
those change the flow run alone, never its tasks.
"""

from __future__ import annotations

from uuid import UUID

import httpx
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterId,
    TaskRunFilter,
    TaskRunFilterState,
    TaskRunFilterStateType,
)
from prefect.client.schemas.objects import StateType
from prefect.exceptions import ObjectNotFound
from prefect.states import Crashed

from tasks.cluster import Log

_UNENDED = [StateType.RUNNING, StateType.PENDING, StateType.SCHEDULED]


def mark_crashed(flow_run: str, successor: str, log: Log) -> None:
    """Marks a flow run crashed that has died, and those of its task runs that have not ended.

    That this fails is no failure of the run, which goes on.

    Args:
        flow_run: id of the dead one. successor: of the one that goes on; the same where Prefect
            starts it again.
    """
    state = Crashed(
        message=f"The flow's process was gone when flow run {successor} went on with its run"
    )
    filters = {
        "flow_run_filter": FlowRunFilter(id=FlowRunFilterId(any_=[UUID(flow_run)])),
        "task_run_filter": TaskRunFilter(
            state=TaskRunFilterState(name=None, type=TaskRunFilterStateType(any_=_UNENDED))
        ),
    }
    try:
        with get_client(sync_client=True) as api:
            for task_run in api.read_task_runs(**filters):
                api.set_task_run_state(task_run.id, state, force=True)
            dead = api.read_flow_run(UUID(flow_run))
            if flow_run != successor and (dead.state is None or not dead.state.is_final()):
                api.set_flow_run_state(dead.id, state, force=True)
    except ObjectNotFound:
        return  # it was deleted, or another server has it
    except httpx.HTTPError as error:
        log.warning("flow run %s may show as running, though it is gone: %s", flow_run, error)
