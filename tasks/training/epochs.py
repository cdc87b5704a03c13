"""The trainer gang through its epochs, as the flow sees it: gathers workers, calls all of them at
once, and ends an epoch everywhere when one of its ranks dies, falls silent or raises.

`tasks.training.gang` is the state machine; this is its IO. What the ranks are to compute, and how a
new epoch gets where the last one stood, is `tasks.training.trainers`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Any, NoReturn, TypeVar

from distributed import Client, Future
from distributed.scheduler import KilledWorker

from tasks.cluster import ANSWER_S, TRAINER, Log, restart, submit_to, workers_of, workers_with
from tasks.errors import (
    ClusterError,
    GangError,
    MismatchError,
    NotFiniteError,
    StageFailed,
    StoreError,
    WorkerBusy,
)
from tasks.training import member
from tasks.training.claims import Claim
from tasks.training.gang import (
    EpochEnded,
    Gang,
    RankFailed,
    RankReady,
    WorkerJoined,
    WorkerLost,
    advance,
)
from tasks.training.group import GangCoordinator
from tasks.training.silence import Silence

T = TypeVar("T")
FORM_TIMEOUT_S = 120.0
LOOK_S = 1.0
"""Seconds between two looks at the ranks' signs of life."""
NOTICE_S = 2.0
"""Seconds in which ranks notice that a peer has died or has told them that it failed. Where one
has not, the failed rank's worker is restarted: gloo's connections last as long as their process."""
SETTLE_S = 10.0
"""Seconds the others then have to let go; or they are restarted too."""
ALIKE = (MismatchError, NotFiniteError)
"""All ranks raise these together, and stay in their group."""


class Epochs:
    """One gang: an epoch at a time, each with all its N ranks."""

    def __init__(
        self,
        client: Client,
        spec: member.TrainerSpec,
        host: str,
        claim: Callable[[int], Claim],
        log: Log,
    ) -> None:
        """
        Args:
            host: address of this machine as the ranks see it.
            claim: has this run hold so many trainer workers, or none.
        """
        self._client = client
        self._spec = spec
        self._claim = claim
        self._log = log
        self._left: dict[Future, int] = {}
        self._gang = Gang(spec.config.cluster.trainer_ranks)
        self._coordinator = GangCoordinator(host)
        self._pause = threading.Event()
        self._calls = 0
        self._raised: dict[str, str] = {}  # stage -> what a rank of its last, failed call raised

    @property
    def running(self) -> bool:
        return self._gang.state == "running"

    @property
    def fence(self) -> str:
        """By which the store tells the writes of this epoch from older ones."""
        return self._spec.fence(self._gang.epoch)

    @property
    def members(self) -> tuple[str, ...]:
        """Address of each rank's worker."""
        return self._gang.members

    def gather(self) -> int:
        """Begins the next epoch once all its workers are there, and nothing of the last one runs
        any more; returns its number. Its ranks have yet to meet.

        Raises:
            ClusterError: some are still missing after cluster.wait_s.
        """
        if self._gang.state != "waiting":
            self._clear()
        self._await_workers()
        epoch = self._coordinator.new_epoch()
        assert epoch == self._gang.epoch, (epoch, self._gang)
        return epoch

    def meet(self, function: Callable[..., T]) -> list[T]:
        """Calls every rank with the spec and where the others are; the epoch then runs.

        Raises:
            GangError, StageFailed: as `call`.
        """
        answers = self._call("form", function, self._meeting)
        for rank in range(self._gang.size):
            self._gang = advance(self._gang, RankReady(self._gang.epoch, rank))
        return answers

    def give_up(self, why: str) -> None:
        """Ends an epoch that did not get where it should stand: the next one begins again."""
        if self._gang.state != "broken":
            self._coordinator.end_epoch()
            self._gang = advance(self._gang, RankFailed(self._gang.epoch, 0, why))

    def close(self) -> None:
        """Ends the epoch: ranks still at work stop before their next micro-batch."""
        self._coordinator.close()

    # ------------------------------------------------------------ gathering

    def _clear(self) -> None:
        """Sees that nothing of the broken epoch runs any more.

        A rank that is stuck keeps its peers in their collective until its process is gone.
        """
        self._settle(time.monotonic() + SETTLE_S)
        stuck = sorted({self._gang.members[rank] for rank in self._left.values()})
        if stuck:
            self._log.warning("trainer workers %s do not let go: restarting them", stuck)
            restart(self._client, stuck)
            self._settle(time.monotonic() + SETTLE_S)
        for future in self._left:
            future.release()
        self._left = {}

    def _await_workers(self) -> None:
        """Holds as many workers as there are ranks; says who is missing while it waits.

        Raises:
            ClusterError: some are still missing after cluster.wait_s.
        """
        limit = self._spec.config.cluster.wait_s
        deadline = time.monotonic() + limit
        said = False
        while True:
            made = self._claim(self._gang.size)
            for gone in set(self._gang.workers) - set(made.workers):
                self._gang = advance(self._gang, WorkerLost(gone))
            for worker in made.workers:
                self._gang = advance(self._gang, WorkerJoined(worker))
            if self._gang.state == "broken":
                # After the losses: else the next epoch would form with the dead.
                self._gang = advance(self._gang, EpochEnded(self._gang.epoch))
            if self._gang.state == "forming":
                return
            if time.monotonic() > deadline:
                raise ClusterError(
                    f"{made.why()}, after {limit:g} s (cluster.wait_s); start more with "
                    "--resources TRAINER=1, lower cluster.trainer_ranks, or wait for the other "
                    "run, and resume this one"
                )
            if not said:
                self._log.warning("waiting for trainers: %s", made.why())
                said = True
            self._pause.wait(LOOK_S / 4)

    # ------------------------------------------------------------ calling

    def call(
        self, stage: str, function: Callable[..., T], *arguments: Any, collective: bool = True
    ) -> list[T]:
        """Runs a stage on every rank, and returns each rank's answer.

        Args:
            function: called with the run, the epoch's fence and the arguments.
            collective: ranks wait for each other in it.

        Raises:
            GangError: a rank died, fell silent or raised; the epoch is over.
            StageFailed: a rank raised what one of this stage's last call had raised.
            MismatchError, NotFiniteError: all ranks raised it.
        """
        return self._call(stage, function, self._place, *arguments, collective=collective)

    def _call(
        self,
        stage: str,
        function: Callable[..., T],
        place: Callable[[int], tuple[Any, ...]],
        *arguments: Any,
        collective: bool = True,
    ) -> list[T]:
        """`call`, with what each rank is told first."""
        epoch, members = self._gang.epoch, self._gang.members
        self._calls += 1  # a key that Dask knows already would get that call's answer
        key = f"{self._spec.run}-{self.fence}-{self._calls}-{stage}"
        futures = [
            submit_to(self._client, address, f"{key}-{rank}", function, *place(rank), *arguments)
            for rank, address in enumerate(members)
        ]
        self._left = {future: rank for rank, future in enumerate(futures)}
        answers: dict[int, T] = {}
        ended: SimpleQueue[Future] = SimpleQueue()
        for future in futures:
            future.add_done_callback(ended.put)
        silence = Silence(len(members), time.monotonic())
        while self._left:
            try:
                future = ended.get(timeout=LOOK_S)
            except Empty:
                counts = self._coordinator.beats(epoch, len(members))
                silent = silence.look(counts, self._seen(counts), time.monotonic())
                if silent is not None:
                    restart(self._client, [members[silent.rank]])
                    self._break(silent.rank, silent.why(), stage, None)
                continue
            rank = self._left.pop(future)
            try:
                # At once: the worker may die before the others have ended, its answer with it.
                answers[rank] = future.result(timeout=ANSWER_S)
            except TimeoutError:
                restart(self._client, [members[rank]])
                self._break(rank, f"did not hand over its answer in {ANSWER_S:g} s", stage, None)
            except Exception:  # noqa: BLE001 (whatever it is, it ends the epoch)
                self._failed(rank, _error(future), stage, collective)
        self._raised.pop(stage, None)
        return [answers[rank] for rank in range(len(members))]

    def _seen(self, counts: Sequence[int]) -> list[object]:
        """When the scheduler last heard of each rank's worker; asked while one has yet to begin."""
        workers = {} if all(counts) else workers_of(self._client)
        return [workers.get(one, {}).get("last_seen") for one in self._gang.members]

    def _place(self, _: int) -> tuple[str, str]:
        return self._spec.run, self.fence

    def _meeting(self, rank: int) -> tuple[member.TrainerSpec, member.Meeting]:
        where = self._coordinator.address, self._coordinator.port
        place = self._gang.epoch, rank, self._gang.size
        return self._spec, member.Meeting(*where, *place, FORM_TIMEOUT_S)

    def _failed(self, rank: int, error: BaseException, stage: str, collective: bool) -> NoReturn:
        """Raises what a rank's failure means. The others fail for that reason in a moment, and
        one of them may have been first to say so: the one that did not only lose its peer counts.
        """
        failures = {rank: error}
        failures |= self._settle(time.monotonic() + NOTICE_S)
        if all(isinstance(error, ALIKE) for error in failures.values()):
            failures |= self._settle(time.monotonic() + SETTLE_S)
            if not self._left and all(isinstance(error, ALIKE) for error in failures.values()):
                raise failures[rank]
        rank = min(failures, key=lambda one: _weight(failures[one]))
        error = failures[rank]
        present = workers_with(self._client, TRAINER)
        gone = [one for one, worker in enumerate(self._gang.members) if worker not in present]
        if gone and _weight(error):  # its own call's failure is not here yet
            self._break(gone[0], "died", stage, error)
        if isinstance(error, KilledWorker):
            self._break(rank, "died", stage, error)
        passing = isinstance(error, GangError | StoreError)
        # What else a process has raised may be what it would raise for ever: a lost accelerator.
        if (self._left and collective) or isinstance(error, WorkerBusy) or not passing:
            restart(self._client, [self._gang.members[rank]])
        why = f"failed: {type(error).__name__}: {error}"
        again = self._raised.get(stage) == why
        if not passing:
            self._raised[stage] = why
        self._break(rank, why, stage, error, again)

    def _break(
        self,
        rank: int,
        why: str,
        stage: str,
        error: BaseException | None,
        again: bool = False,
    ) -> NoReturn:
        """Ends the epoch and says why; `again`: for the same reason as the stage's last try."""
        worker = self._gang.members[rank]
        self._coordinator.end_epoch()
        self._gang = advance(self._gang, RankFailed(self._gang.epoch, rank, why))
        said = (
            f"trainer rank {rank} on {worker} {why}; {stage} of epoch {self._gang.epoch} was given "
            "up on all ranks"
        )
        if again:
            raise StageFailed(f"{said}, as it was before; mend that and resume the run") from error
        raise GangError(said) from error

    def _settle(self, deadline: float) -> dict[int, BaseException]:
        """Waits until the calls that are left have ended, up to the deadline; what they raised."""
        ended: SimpleQueue[Future] = SimpleQueue()
        for future in self._left:
            future.add_done_callback(ended.put)
        failures: dict[int, BaseException] = {}
        while self._left and (left := deadline - time.monotonic()) > 0:
            try:
                future = ended.get(timeout=left)
            except Empty:
                break
            rank = self._left.pop(future)
            if future.status != "finished":
                failures[rank] = _error(future)
        return failures


def _error(future: Future) -> BaseException:
    """Why a call did not finish; one that Dask cancelled has lost its scheduler or its worker."""
    if future.status == "error":
        error: Any = future.exception()
        return error
    return GangError(f"Dask says {future.status}: scheduler or worker are gone")


def _weight(error: BaseException) -> int:
    if isinstance(error, KilledWorker):
        return 0
    return 2 if isinstance(error, GangError) else 1
