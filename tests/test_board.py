"""The queues on the scheduler: who is woken by what. No Dask, its event loop alone."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
from distributed import Scheduler

from tasks.errors import RunClosed
from tasks.rollout import board as board_module
from tasks.rollout.board import QueueBoard
from tasks.rollout.queue import Wire

pytestmark = [pytest.mark.fast, pytest.mark.timeout(60)]

SOON_S = 5.0
RUN = {"run": "r", "token": "t"}
A, B = "tcp://a", "tcp://b"


@pytest.fixture(autouse=True)
def long_poll(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that nothing here comes of a poll's end."""
    monkeypatch.setattr(board_module, "POLL_S", 60.0)


async def _opened(units: int) -> QueueBoard:
    board = QueueBoard()
    workers = {A: None, B: None}
    await board.start(cast("Scheduler", SimpleNamespace(handlers={}, workers=workers)))
    await board.kindling_open(**RUN, client="flow")
    await _pull(board, A, wait=False)
    await _pull(board, B, wait=False)  # both are known now, and share
    await board.kindling_offer(**RUN, units=[{"unit_id": f"u{i}"} for i in range(units)])
    return board


async def _pull(board: QueueBoard, worker: str, wait: bool = True) -> list[str]:
    answer: Wire = await board.kindling_pull(**RUN, worker=worker, count=1, wait=wait)
    return [unit["unit_id"] for unit in answer["units"]]


async def _waiting(board: QueueBoard, worker: str) -> asyncio.Task[list[str]]:
    """A pull that found nothing and waits."""
    asked = asyncio.create_task(_pull(board, worker))
    await asyncio.sleep(0)
    assert not asked.done()
    return asked


def _complete(board: QueueBoard, worker: str, unit_id: str) -> Any:
    return board.kindling_complete(**RUN, worker=worker, results=[{"unit_id": unit_id}])


def test_a_worker_that_waits_gets_its_next_unit_with_its_own_result() -> None:
    """It asks while the last result is on its way: that unit is still its whole share."""

    async def story() -> None:
        board = await _opened(units=2)
        assert await _pull(board, A) == ["u0"]
        asked = await _waiting(board, A)
        await _complete(board, A, "u0")
        assert await asyncio.wait_for(asked, SOON_S) == ["u1"]

    asyncio.run(story())


@pytest.mark.parametrize("how", ["offered", "lost", "failed"])
def test_a_worker_that_waits_gets_what_comes_free(how: str) -> None:
    async def story() -> None:
        board = await _opened(units=1)
        assert await _pull(board, A) == ["u0"]
        asked = await _waiting(board, B)
        match how:
            case "offered":
                await board.kindling_offer(**RUN, units=[{"unit_id": "u1"}])
            case "lost":
                board.remove_worker(cast("Scheduler", None), A)
            case _:
                await board.kindling_fail(**RUN, worker=A, unit_id="u0", message="why")
        assert await asyncio.wait_for(asked, SOON_S) == ["u1" if how == "offered" else "u0"]

    asyncio.run(story())


def test_a_result_wakes_nobody_else() -> None:
    async def story() -> None:
        board = await _opened(units=1)
        assert await _pull(board, A) == ["u0"]
        asked = await _waiting(board, B)
        await _complete(board, A, "u0")
        done, _ = await asyncio.wait({asked}, timeout=0.2)
        assert not done
        asked.cancel()

    asyncio.run(story())


def test_who_waits_is_told_at_once_that_the_run_is_closed() -> None:
    async def story() -> None:
        board = await _opened(units=0)
        asked = await _waiting(board, A)
        await board.kindling_close(**RUN)
        with pytest.raises(RunClosed):
            await asyncio.wait_for(asked, SOON_S)

    asyncio.run(story())
