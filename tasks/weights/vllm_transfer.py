"""Kindling's weight-transfer engine for vLLM: the worker's side of `tasks.weights.transfer`.

vLLM imports this module by name when an engine is built with `weight_transfer_config` backend
"kindling"; nothing else should, since it imports vLLM. The lifecycle is vLLM's own:

    init_weight_transfer_engine  {"endpoint", "bucket", "cache_dir"}     which store
    start_weight_update
    update_weights               {"run", "version"}                      which version
    finish_weight_update

All of the download, decoding and verification can be done before, by `prefetch` from another
thread; `update_weights` then only scatters.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch
from vllm.config import VllmConfig
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from tasks.errors import IntegrityError, PolicyError
from tasks.store import ObjectStore, StoreLocation
from tasks.weights.bits import Bits
from tasks.weights.index_map import IndexMap, TensorSpec, check_parameters, learn
from tasks.weights.manifest import Manifest
from tasks.weights.subscriber import Subscriber
from tasks.weights.update import Update
from tasks.weights.versions import HalfApplied, Nothing, State


@dataclass
class KindlingInitInfo(WeightTransferInitInfo):
    """The store, and a folder of this host for anchor files. Credentials: the environment."""

    endpoint: str
    bucket: str
    cache_dir: str


@dataclass
class KindlingUpdateInfo(WeightTransferUpdateInfo):
    """The version to bring the engine to."""

    run: str
    version: int


class KindlingWeightTransferEngine(WeightTransferEngine[KindlingInitInfo, KindlingUpdateInfo]):
    """Brings one worker's model to a version through the object store.

    Attributes:
        state: what the model holds. `HalfApplied` from the first write until a whole update has
            been written: nothing may be served then; the next update starts from an anchor.
        subscriber: the shadow copy; None until `init_transfer_engine`.
    """

    init_info_cls = KindlingInitInfo
    update_info_cls = KindlingUpdateInfo
    supports_draft_weight_update = False

    def __init__(
        self,
        config: WeightTransferConfig,
        vllm_config: VllmConfig,
        device: torch.device,
        model: torch.nn.Module,
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        self.state: State = Nothing()
        self.subscriber: Subscriber | None = None
        self._map: IndexMap | None = None
        self._pending: Update | None = None
        self._lock = threading.Lock()

    def init_transfer_engine(self, init_info: KindlingInitInfo) -> None:
        """Connect to a store; a second call for another store drops the shadow.

        Raises:
            PolicyError: parameters of the model are empty (see `check_parameters`).
        """
        check_parameters(dict(self.model.named_parameters()))
        location = StoreLocation(init_info.endpoint, init_info.bucket)
        if self.subscriber is None or self.subscriber.store.location != location:
            self._drop_subscriber()
            self.subscriber = Subscriber(ObjectStore(location), init_info.cache_dir)

    def prefetch(self, run: str, version: int) -> Update:
        """Download and verify a version; the engine is not touched. Any thread may call it.

        Raises:
            IntegrityError, StoreError: as `Subscriber.fetch`.
        """
        subscriber = self._subscriber()
        with self._lock:
            self._pending = None
            self._pending = subscriber.fetch(run, version, self.state)
            return self._pending

    def pending(self, run: str, version: int) -> Update | None:
        """What `prefetch` holds ready for this version."""
        update = self._pending
        return update if update and (update.run, update.version) == (run, version) else None

    def start_weight_update(self) -> None:
        """Nothing to prepare: values are written in place."""

    def update_weights(self, update_info: dict[str, object]) -> None:
        """As the base class, which however synchronises with an accelerator even without one."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: KindlingUpdateInfo) -> None:
        """Write a version's values into the model, after fetching what was not prefetched.

        Raises:
            IntegrityError, StoreError: as `Subscriber.fetch`; the model is untouched.
            PolicyError: the model cannot be mapped, see `index_map.learn`.
        """
        subscriber = self._subscriber()
        run, version = update_info.run, update_info.version
        with self._lock:
            update = self.pending(run, version) or subscriber.fetch(run, version, self.state)
            self._pending = None
            if update.kind == "delta" and update.base != self.state:
                raise IntegrityError(
                    f"the update to version {version} of run {run!r} builds on {update.base}, the "
                    f"engine holds {self.state}"
                )
            parameters = dict(self.model.named_parameters())
            self._learn(update.manifest)
            assert self._map is not None
            with subscriber.reading(update) as update:
                if update.tensors:
                    self.state = HalfApplied(run, version)
                    self._map.scatter(update, parameters)
                self.state = update.target

    def finish_weight_update(self) -> None:
        """
        Raises:
            IntegrityError: the model is half written.
        """
        if isinstance(self.state, HalfApplied):
            raise IntegrityError(
                f"the update to version {self.state.version} of run {self.state.run!r} did not "
                "finish; update again before anything is served"
            )

    def gather(self) -> dict[str, Bits]:
        """The checkpoint's flat patterns as the model holds them now, by name.

        Raises:
            PolicyError: no version was applied yet.
        """
        if self._map is None:
            raise PolicyError("no version was applied yet: nothing to read back")
        return self._map.gather(dict(self.model.named_parameters()))

    def shutdown(self) -> None:
        """Drop the shadow copy; the model keeps its weights."""
        self._drop_subscriber()

    def _subscriber(self) -> Subscriber:
        if self.subscriber is None:
            raise PolicyError("call init_weight_transfer_engine first: which store?")
        return self.subscriber

    def _learn(self, manifest: Manifest) -> None:
        """Learns the map for the first manifest, and again only for one of other tensors."""
        specs = {t.name: TensorSpec(t.name, t.shape, t.dtype) for t in manifest.tensors}
        if self._map is None or dict(self._map.specs) != specs:
            complete = self.parallel_config.world_size == 1
            self._map = learn(self.model, list(specs.values()), complete=complete)

    def _drop_subscriber(self) -> None:
        if self.subscriber is not None:
            self.subscriber.close()
        self.subscriber = None
        self._pending = None
