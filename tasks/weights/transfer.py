"""How a rollout worker brings its vLLM engine to a version.

    prepare_vllm()                                             before the engine is built
    engine = LLMEngine.from_engine_args(EngineArgs(..., load_format="dummy",
        weight_transfer_config={"backend": BACKEND}))          it starts empty
    weights = EngineWeights(engine, store.location, cache_dir)
    weights.prefetch(run, version)                             any thread, while generation goes on
    weights.apply(run, version)                                between two engine steps

The engine must run in this process (`VLLM_ENABLE_V1_MULTIPROCESSING=0`). This module does not
import vLLM at the top; `tasks.weights.vllm_transfer` is the worker's side.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.errors import PolicyError
from tasks.store_location import StoreLocation
from tasks.weights.bits import Bits
from tasks.weights.versions import Holds, State

if TYPE_CHECKING:
    from tasks.weights.vllm_transfer import KindlingWeightTransferEngine

BACKEND = "kindling"
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}


def register() -> None:
    """Make "kindling" known to this process's vLLM; calling it again does nothing.

    This is the entry point of group `vllm.general_plugins` (pyproject.toml), so vLLM calls it in
    every process it starts, a plain server's engine core among them, before any model is built.

    On CPUs vLLM would pack linear weights for oneDNN and free the originals; updates would then
    fail, or leave a stale lm_head while checksums match. It is told that oneDNN is missing: no
    vLLM process of an environment with Kindling in it packs, unless `VLLM_PLUGINS` leaves us out.

    Raises:
        PolicyError: this vLLM lacks the switch.
    """
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        _keep_weights_unpacked()
        _give_llvmlite_a_dict()
    with contextlib.suppress(ValueError):  # it says that the name is registered already
        WeightTransferEngineFactory.register_engine(
            BACKEND, "tasks.weights.vllm_transfer", "KindlingWeightTransferEngine"
        )


def prepare_vllm() -> None:
    """What must hold before an engine is built in this process: environment, then `register`.

    Raises:
        PolicyError: as `register`.
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    register()


def _keep_weights_unpacked() -> None:
    from vllm import __version__, _custom_ops

    if not hasattr(_custom_ops, "_supports_onednn"):
        raise PolicyError(
            f"vLLM {__version__} has no vllm._custom_ops._supports_onednn; Kindling switches "
            "weight packing off by it and cannot update this engine; install 0.32"
        )
    _custom_ops._supports_onednn = False


def _give_llvmlite_a_dict() -> None:
    """Lets vLLM's CPU platform look at every loaded module's attributes.

    Building an engine, vLLM 0.32 calls `vars(value).get` on all of them, and llvmlite's function
    table (loaded wherever numba is) answers `__dict__` with a function: AttributeError.
    """
    from llvmlite.binding import ffi

    ffi.lib._fntab.setdefault("__dict__", {})


@dataclass(frozen=True)
class Applied:
    """One update of one engine.

    Attributes:
        kind: "full" or "delta".
        values: how many were written.
        fetch_s: downloading, decoding and verifying, as far as `prefetch` had not done it.
        stopped_s: how long the engine could not step for the rest.
    """

    run: str
    version: int
    kind: str
    values: int
    fetch_s: float
    stopped_s: float


class EngineWeights:
    """The weights of one in-process vLLM engine."""

    def __init__(self, engine: Any, location: StoreLocation, cache_dir: str | Path) -> None:
        """
        Args:
            engine: an `LLMEngine` built after `prepare_vllm()` with
                `weight_transfer_config={"backend": BACKEND}`.
            cache_dir: folder of this host for anchor files.

        Raises:
            PolicyError: the engine was built without our backend, or packed its weights away.
        """
        self._engine = engine
        found = engine.collective_rpc(_transfer_of)
        if len(found) != 1 or found[0] is None or not hasattr(found[0], "prefetch"):
            raise PolicyError(
                "the engine has no Kindling weight transfer in this process; build it after "
                f"prepare_vllm(), with one worker and weight_transfer_config={{'backend': "
                f"{BACKEND!r}}}"
            )
        self._transfer: KindlingWeightTransferEngine = found[0]
        info = {
            "endpoint": location.endpoint,
            "bucket": location.bucket,
            "cache_dir": str(cache_dir),
        }
        engine.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": info})

    @property
    def state(self) -> State:
        """What the engine holds: `Nothing`, `Holds` or `HalfApplied`."""
        return self._transfer.state

    @property
    def usable(self) -> bool:
        """Whether the engine holds one whole version; serve nothing otherwise."""
        return isinstance(self.state, Holds)

    @property
    def version(self) -> int | None:
        """The version held, None where not usable."""
        return self.state.ref.version if isinstance(self.state, Holds) else None

    def holds(self, run: str, version: int) -> bool:
        state = self.state
        return isinstance(state, Holds) and (state.run, state.ref.version) == (run, version)

    @property
    def anchor_loads(self) -> int:
        """Anchor objects downloaded by this engine's subscriber so far."""
        subscriber = self._transfer.subscriber
        return subscriber.anchor_loads if subscriber else 0

    @property
    def bytes_downloaded(self) -> int:
        """Bytes of anchors and deltas downloaded so far."""
        subscriber = self._transfer.subscriber
        return subscriber.bytes_downloaded if subscriber else 0

    def newest(self, run: str) -> int | None:
        """The run's newest published version."""
        return self._transfer._subscriber().newest(run)

    def prefetch(self, run: str, version: int) -> None:
        """Download and verify a version while the engine goes on; any thread may call it.

        Raises:
            IntegrityError, StoreError: as `Subscriber.fetch`; the engine is untouched.
        """
        self._transfer.prefetch(run, version)

    def apply(self, run: str, version: int, *, reset_prefix_cache: bool = True) -> Applied:
        """Bring the engine to a version; call it between two engine steps, from their thread.

        Args:
            reset_prefix_cache: False where requests salt the cache by version.

        Raises:
            IntegrityError, StoreError: the version could not be had; the engine is untouched.
            PolicyError: requests are running that the reset would leave with a stale cache, or
                the model cannot be mapped.
        """
        if reset_prefix_cache and self._engine.has_unfinished_requests():
            raise PolicyError(
                "requests are running: finish them before the weights change, or salt their cache "
                "by version and pass reset_prefix_cache=False"
            )
        began = time.perf_counter()
        update = self._transfer.pending(run, version) or self._transfer.prefetch(run, version)
        fetched = time.perf_counter()
        self._engine.collective_rpc("start_weight_update")
        info = {"run": run, "version": version}
        self._engine.collective_rpc("update_weights", kwargs={"update_info": info})
        self._engine.collective_rpc("finish_weight_update")
        self._engine.set_weight_version(f"{run}/{version}")
        if reset_prefix_cache and not self._engine.reset_prefix_cache():
            raise PolicyError("vLLM did not reset its prefix cache; stale entries remain")
        done = time.perf_counter()
        return Applied(run, version, update.kind, update.changed, fetched - began, done - fetched)

    def gather(self) -> dict[str, Bits]:
        """The checkpoint's flat patterns as the engine holds them now: to compare digests."""
        return self._transfer.gather()


def _transfer_of(worker: Any) -> Any:
    return worker.weight_transfer_engine
