"""The map from checkpoint tensors to a vLLM model's parameters, learned once from its own loaders.

`learn` runs the model's `load_weights` over tagged tensors of the checkpoint's shapes, one at a
time, and intercepts every `copy_` (nothing is copied, the engine's weights stay as they are, and
the tagged tensors' memory is never touched): source and destination views say which block goes
where, through fused qkv and gate_up, tied embeddings and tensor-parallel slices alike. One that
computes something on the way is refused. Afterwards `scatter` writes absolute values straight
through the map and `gather` reads them back.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tasks.errors import IntegrityError, PolicyError
from tasks.weights.bits import TORCH_DTYPES, Bits, DtypeName, from_bits, numel, to_bits
from tasks.weights.regions import Region
from tasks.weights.update import Update

_COPY = torch.ops.aten.copy_.default
_FILLS = (torch.ops.aten.fill_.Scalar, torch.ops.aten.fill_.Tensor, torch.ops.aten.zero_.default)


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """A checkpoint tensor: its Hugging Face name, full shape and dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: DtypeName


@dataclasses.dataclass(frozen=True)
class IndexMap:
    """Where every value of every checkpoint tensor lies in the engine."""

    specs: Mapping[str, TensorSpec]
    regions: Mapping[str, tuple[Region, ...]]

    def scatter(self, update: Update, parameters: Mapping[str, torch.Tensor]) -> int:
        """Write an update's absolute values; the number of values written.

        Not atomic: where it raises, the parameters are half written.

        Args:
            parameters: the model's `named_parameters`, of the checkpoint's dtype or float32.

        Raises:
            IntegrityError: the update holds a tensor that the map does not know in this shape.
        """
        written = 0
        with torch.no_grad():
            for name, tensor in update.tensors.items():
                spec = self.specs.get(name)
                if spec is None or (spec.shape, spec.dtype) != (tensor.shape, tensor.dtype):
                    raise IntegrityError(
                        f"the update's {name} {tensor.dtype}{list(tensor.shape)} is not a tensor "
                        "that this engine was mapped for"
                    )
                values = from_bits(np.ascontiguousarray(tensor.values), spec.dtype)
                for region in self.regions[name]:
                    storage = _storage(parameters[region.parameter])
                    if tensor.indices is None:
                        region.view(storage).copy_(region.source_view(values))
                        written += numel(region.size)
                    else:
                        written += _put(region, storage, tensor.indices, values)
        return written

    def gather(self, parameters: Mapping[str, torch.Tensor]) -> dict[str, Bits]:
        """The checkpoint's flat patterns as the engine holds them: the inverse of `scatter`.

        Raises:
            IntegrityError: a float32 engine holds a value that the checkpoint's dtype cannot, or
                two copies of one checkpoint value differ.
        """
        found: dict[str, Bits] = {}
        with torch.no_grad():
            for name, spec in self.specs.items():
                flat = torch.zeros(numel(spec.shape), dtype=TORCH_DTYPES[spec.dtype])
                seen = torch.zeros(flat.shape, dtype=torch.bool)
                for region in self.regions[name]:
                    block = region.view(_storage(parameters[region.parameter])).to("cpu")
                    exact = block.to(flat.dtype)
                    if not torch.equal(exact.to(block.dtype), block):
                        raise IntegrityError(
                            f"{region.parameter} holds values that {name} in {spec.dtype} cannot"
                        )
                    target, known = region.source_view(flat), region.source_view(seen)
                    if not torch.equal(target[known], exact[known]):
                        raise IntegrityError(f"the engine's copies of {name} differ")
                    target.copy_(exact)
                    known.fill_(True)
                found[name] = to_bits(flat)
        return found


def check_parameters(parameters: Mapping[str, torch.Tensor]) -> None:
    """That no parameter was emptied: CPU kernels may pack weights away, out of anyone's reach.

    Raises:
        PolicyError: names the empty parameters.
    """
    empty = [name for name, parameter in parameters.items() if not parameter.numel()]
    if empty:
        raise PolicyError(
            f"{len(empty)} engine parameters are empty, such as {empty[0]}: vLLM packed them and "
            "freed the originals, updates cannot reach them; call "
            "tasks.weights.transfer.prepare_vllm() before the engine is built, and use float32 "
            "engines on CPUs"
        )


def learn(model: Any, specs: Sequence[TensorSpec], *, complete: bool = True) -> IndexMap:
    """The map of a loaded vLLM model.

    Values that only padding holds (vocabulary rows beyond the checkpoint's) get what the loader
    fills them with, as after a load; nothing else of the engine changes.

    Args:
        model: the engine's module, with `load_weights` and `named_parameters`.
        specs: every tensor of the checkpoint.
        complete: every checkpoint value must reach the engine; False for a tensor-parallel rank,
            which holds a slice.

    Raises:
        PolicyError: an empty parameter, a loader that computes, a checkpoint value that reaches
            nothing, a parameter value that nothing reaches or two checkpoint values do, or an
            engine dtype that does not hold the checkpoint's values exactly.
    """
    parameters = dict(model.named_parameters())
    check_parameters(parameters)
    recorder = _Recorder(parameters)
    device = next(iter(parameters.values())).device
    regions: dict[str, tuple[Region, ...]] = {}
    with torch.no_grad():
        for spec in specs:
            tagged = torch.empty(spec.shape, dtype=TORCH_DTYPES[spec.dtype], device=device)
            with recorder.loading(spec, tagged):
                model.load_weights([(spec.name, tagged)])
            regions[spec.name] = tuple(dict.fromkeys(recorder.copies))
            del tagged
            if complete:
                _check_reached(spec, regions[spec.name])
            _check_exact(spec, regions[spec.name], parameters)
        _check_covered(parameters, regions, recorder.fills)
    return IndexMap({spec.name: spec for spec in specs}, regions)


class _Recorder(TorchDispatchMode):
    """Sees every write into an engine parameter while a loader runs, and carries none out."""

    def __init__(self, parameters: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self._owners = {_storage_id(parameter): name for name, parameter in parameters.items()}
        self._spec: TensorSpec | None = None
        self._tagged = 0
        self.copies: list[Region] = []
        self.fills: list[tuple[Region, float]] = []

    def loading(self, spec: TensorSpec, tagged: torch.Tensor) -> _Recorder:
        """The mode to enter around the loader of one tagged tensor."""
        self._spec, self._tagged, self.copies = spec, _storage_id(tagged), []
        return self

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        target = args[0] if args and isinstance(args[0], torch.Tensor) else None
        owner = None
        if target is not None and func._schema.is_mutable:
            owner = self._owners.get(_storage_id(target))
        if owner is None or target is None:
            return func(*args, **(kwargs or {}))
        name = self._spec.name if self._spec else "?"
        if func is _COPY and isinstance(args[1], torch.Tensor):
            source = args[1]
            if _storage_id(source) != self._tagged:
                raise PolicyError(
                    f"vLLM's loader computes something from {name} before it writes {owner}: its "
                    "values cannot be scattered. Kindling needs loaders that only copy"
                )
            self.copies.append(_region(owner, target, source.expand(target.shape)))
        elif func in _FILLS:
            value = args[1] if len(args) > 1 else 0.0
            self.fills.append((_region(owner, target, target), float(value)))
        else:
            raise PolicyError(
                f"vLLM's loader writes {owner} by {func} while it loads {name}; Kindling needs "
                "loaders that only copy"
            )
        return target


def _region(owner: str, target: torch.Tensor, source: torch.Tensor) -> Region:
    return Region(
        owner,
        tuple(target.shape),
        int(target.storage_offset()),
        tuple(target.stride()),
        int(source.storage_offset()),
        tuple(source.stride()),
    ).simplified()


def _storage_id(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _storage(parameter: torch.Tensor) -> torch.Tensor:
    """All values of the storage that a parameter lies in, flat."""
    data = parameter.detach()
    count = data.untyped_storage().nbytes() // data.element_size()
    return data.as_strided((count,), (1,), 0)


def _put(region: Region, storage: torch.Tensor, indices: Bits, values: torch.Tensor) -> int:
    part, positions = region.locate(indices)
    if not positions.size:
        return 0
    chosen = values[part] if isinstance(part, slice) else values[torch.from_numpy(part)]
    where = torch.from_numpy(positions).to(storage.device)
    storage[where] = chosen.to(device=storage.device, dtype=storage.dtype)
    return positions.size


def _check_reached(spec: TensorSpec, regions: Sequence[Region]) -> None:
    if _tiles(
        [(r.source_offset, r.size[0]) for r in regions if r.source_stride == (1,)],
        numel(spec.shape),
    ):
        return
    flat = torch.zeros(numel(spec.shape), dtype=torch.bool)
    for region in regions:
        region.source_view(flat).fill_(True)
    missing = int((~flat).sum())
    if missing:
        raise PolicyError(
            f"{missing} of {flat.numel()} values of {spec.name} reach no engine parameter; the "
            "engine was built for another model, or its loader skips this tensor"
        )


def _tiles(ranges: list[tuple[int, int]], total: int) -> bool:
    """Whether flat (start, length) ranges cover 0..total exactly once: the usual case, in no time.

    Where they do not, a mask of all values says what is wrong.
    """
    at = 0
    for start, length in sorted(ranges):
        if start != at:
            return False
        at += length
    return at == total


def _check_exact(
    spec: TensorSpec, regions: Sequence[Region], parameters: Mapping[str, torch.Tensor]
) -> None:
    for region in regions:
        dtype = parameters[region.parameter].dtype
        if dtype not in (TORCH_DTYPES[spec.dtype], torch.float32):
            raise PolicyError(
                f"the engine holds {region.parameter} as {dtype}, which does not hold {spec.name} "
                f"({spec.dtype}) exactly; build it with dtype={spec.dtype!r} or 'float32'"
            )


def _check_covered(
    parameters: Mapping[str, torch.Tensor],
    regions: Mapping[str, Sequence[Region]],
    fills: Sequence[tuple[Region, float]],
) -> None:
    """Every parameter value comes from one checkpoint value, or is padding: then it is filled."""
    blocks = [region for held in regions.values() for region in held]
    for name, parameter in parameters.items():
        storage = _storage(parameter)
        held = [region for region in blocks if region.parameter == name]
        flat = [(region.offset, region.size[0]) for region in held if region.stride == (1,)]
        if len(flat) == len(held) and _tiles(flat, storage.numel()):
            continue
        counts = torch.zeros(storage.shape, dtype=torch.uint8, device=storage.device)
        for region in held:
            region.view(counts).add_(1)
        if bool((counts > 1).any()):
            raise PolicyError(
                f"several checkpoint values are loaded into the same places of {name}; publish "
                "tied tensors under their canonical name alone"
            )
        for region, value in fills:
            if region.parameter == name:
                padding = region.view(counts) == 0
                region.view(storage).masked_fill_(padding, value)
                region.view(counts).masked_fill_(padding, 1)
        own = counts.as_strided(parameter.shape, parameter.stride(), parameter.storage_offset())
        if not bool(own.all()):
            raise PolicyError(
                f"{int((own == 0).sum())} values of engine parameter {name} come from no "
                "checkpoint tensor; the manifest lacks a tensor that this engine needs"
            )
