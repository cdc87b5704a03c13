"""The flow's hold on its trainer gang: what the ranks compute, and that a new gang stands where the
last one stood.

What the gang has learned since the last checkpoint can be had again: the batches are in the store,
and the flow remembers which. So when an epoch breaks, its call raises, and the next call first
forms a gang of what is left plus replacements, restores the checkpoint and repeats the updates
since: the ranks then stand where they stood, to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from distributed import Client

from tasks.cluster import Log
from tasks.errors import GangError
from tasks.rollout.trajectory import GroupSummary
from tasks.store import ObjectStore
from tasks.training import checkpoint, member
from tasks.training.claims import Claim
from tasks.training.epochs import ALIKE, Epochs
from tasks.weights.commit import (
    Published,
    fence_off,
    lineage,
    published_before,
    require_fence,
    since_anchor,
)
from tasks.weights.manifest import ManifestRef


class Trainers:
    """What a run asks of its trainers; whatever broke, the next call has them where they stood."""

    def __init__(
        self,
        client: Client,
        spec: member.TrainerSpec,
        host: str,
        claim: Callable[[int], Claim],
        log: Log,
        made: checkpoint.Checkpoint | None = None,
    ) -> None:
        """The gang forms at the first call.

        Args:
            host: address of this machine as the ranks see it.
            claim: has this run hold so many trainer workers, or none.
            made: where the ranks are to stand; None: at the base.
        """
        self._epochs = Epochs(client, spec, host, claim, log)
        self._spec = spec
        self._log = log
        self._made = made
        self._since: list[tuple[int, Sequence[GroupSummary]]] = []
        self._existing: dict[int, ManifestRef] = {}
        self._head: ManifestRef | None = None  # as it was when this epoch formed
        self._held: ManifestRef | None = None  # the version that the ranks are known to hold
        self.base_loads = 0

    # ------------------------------------------------------------ the stages

    def update(self, step: int, groups: Sequence[GroupSummary]) -> dict[str, float]:
        """One GRPO update on a batch; returns the gang's metrics.

        Raises:
            GangError: the epoch broke; calling again forms the next one.
            MismatchError: nothing was changed.
            NotFiniteError: the optimizer step that would have been was not taken.
        """
        self._stand()
        self._held = None
        metrics = self._epochs.call(f"update-{step}", member.update, step, list(groups))[0]
        self._since.append((step, groups))
        return metrics

    def publish(self, trained: int) -> Published:
        """Publishes what the ranks hold, after `trained` steps, as the next version.

        Where the run has that version already (it was resumed, or the gang formed anew after the
        commit), the ranks' weights are compared with it, and it is returned as it is. Should they
        differ, which takes other machines or another number of ranks, they become the next version.

        Raises:
            GangError: as `update`.
        """
        self._stand()
        existing = self._existing.get(trained)
        if existing is not None and self._holds(trained, existing):
            store = ObjectStore(self._spec.store)
            found = published_before(store, self._spec.run, existing)
            self._log.info("version %d is there already, bit for bit", existing.version)
            return found
        every = self._spec.config.weights.anchor_every
        return self._epochs.call(f"publish-{trained}", member.publish, trained, every)[0]

    def save_checkpoint(self, step: int, extra: dict[str, Any]) -> checkpoint.Checkpoint:
        """A checkpoint of the state after `step` steps: parts first, the manifest last."""
        self._stand()
        store, run = ObjectStore(self._spec.store), self._spec.run
        parts = self._epochs.call(f"checkpoint-{step}", member.save_part, step, collective=False)
        require_fence(store, run, self._epochs.fence)
        self._made = checkpoint.commit(store, run, step, parts, extra)
        self._since.clear()
        checkpoint.expire(store, run)
        return self._made

    def close(self) -> None:
        """Ends the epoch: ranks still at work stop before their next micro-batch."""
        self._epochs.close()

    # ------------------------------------------------------------ forming

    def _stand(self) -> None:
        """Has the gang running and standing where the run is."""
        if self._epochs.running:
            return
        epoch = self._epochs.gather()
        reached = self._made.step if self._made else 0
        try:
            self._form(reached)
        except Exception as error:
            # Not where it should stand: whatever it was, the next call begins again.
            self._epochs.give_up(str(error))
            if isinstance(error, ALIKE):
                raise GangError(f"what the gang had done cannot be repeated: {error}") from error
            raise
        if epoch > 1:
            self._log.warning(
                "trainer epoch %d runs on %s; %d updates after checkpoint %d were repeated",
                epoch,
                ", ".join(self._epochs.members),
                len(self._since),
                reached,
            )

    def _form(self, reached: int) -> None:
        store, run = ObjectStore(self._spec.store), self._spec.run
        head = fence_off(store, run, self._epochs.fence)
        self._existing = lineage(store, run, reached) if head else {}
        self._head, self._held = head.ref if head else None, None
        self.base_loads += sum(self._epochs.meet(member.form))
        if self._made:
            self._epochs.call(f"restore-{reached}", member.restore, self._made, collective=False)
        self._take_up(reached)
        for done, (step, groups) in enumerate(self._since, reached + 1):
            self._held = None
            self._epochs.call(f"repeat-{step}", member.update, step, list(groups))
            self._take_up(done)

    def _take_up(self, trained: int) -> None:
        """Where the ranks stand at the run's head: so that the next version is a delta from it, and
        rollout workers need no anchor."""
        existing = self._existing.get(trained)
        if existing is not None and existing == self._head:
            self._holds(trained, existing)

    def _holds(self, trained: int, existing: ManifestRef) -> bool:
        """Whether the ranks hold, after `trained` steps, what the run's version of then is; warns
        where they do not."""
        if existing == self._held:
            return True
        store, run = ObjectStore(self._spec.store), self._spec.run
        chain = since_anchor(store, run, existing) if existing == self._head else None
        odd = self._epochs.call(f"compare-{trained}", member.compare, existing, chain)[0]
        if not odd:
            self._held = existing
            return True
        self._log.warning(
            "%d steps repeated give other weights than version %d (in %d tensors, %s first): the "
            "run goes on from these",
            trained,
            existing.version,
            len(odd),
            odd[0],
        )
        self._existing.clear()  # of the line that is left here
        return False
