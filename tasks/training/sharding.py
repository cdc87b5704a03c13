"""One policy spread over the ranks of the default process group, with FSDP2."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import MethodType
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.initialization import no_init_weights

from tasks.training.checkpoint import Range
from tasks.training.policy import has_plain_head, token_logprobs

Score = Callable[..., tuple[Tensor, Tensor]]


class ShardedPolicy:
    """A causal LM whose parameters, gradients and optimizer state are cut over the ranks.

    Parameters have Hugging Face names; tied ones appear once, under the name of the first.
    """

    def __init__(self, model: PreTrainedModel, device: torch.device, trainable: bool) -> None:
        """Shard a whole model that is on the CPU, in place; every rank of the group calls this.

        Args:
            model: parameters in the dtype they are to be kept in: float32 masters where trainable.
            device: of this rank.
            trainable: whether gradients are wanted.
        """
        # Tried now: it runs modules outside FSDP's hooks.
        self.plain_head = has_plain_head(model)
        model.requires_grad_(trainable).eval()
        if trainable and device.type == "cuda":
            # 16k tokens of a 3B model would keep 60 GB of activations; recomputed, 3 GB.
            model.gradient_checkpointing_enable({"use_reentrant": False})
            _without_dropout(model).train()
        self.device = device
        self.group = dist.group.WORLD
        self.world, self.rank = dist.get_world_size(), dist.get_rank()
        mesh = init_device_mesh(device.type, (self.world,))
        self.model = _shard(model, mesh, device)

    @property
    def score(self) -> Score:
        """`token_logprobs` of this model (without its first argument), inside FSDP's hooks."""
        return self.model.score_tokens  # type: ignore[return-value]

    def parameters(self) -> Iterator[tuple[str, DTensor]]:
        for name, parameter in self.model.named_parameters():
            yield name, cast(DTensor, parameter)

    def local(self) -> dict[str, Tensor]:
        """This rank's rows of every parameter: views of the live memory, detached."""
        return {name: local_rows(parameter) for name, parameter in self.parameters()}

    def ranges(self) -> dict[str, Range]:
        return {name: self.range_of(tuple(p.shape)) for name, p in self.parameters()}

    def range_of(self, shape: tuple[int, ...]) -> Range:
        """FSDP2 cuts dimension 0 like `torch.chunk`; the last ranks may have fewer rows or none."""
        rows = shape[0]
        chunk = -(-rows // self.world)
        row_size = int(torch.Size(shape[1:]).numel())
        first, last = min(self.rank * chunk, rows), min((self.rank + 1) * chunk, rows)
        return Range(shape, first * row_size, last * row_size)

    def full_tensors(self, dtype: torch.dtype = torch.bfloat16) -> Iterator[tuple[str, Tensor]]:
        """Every parameter whole, one at a time, on every rank.

        Each item is a collective: all ranks must run through the iterator, to its end. The
        tensors are copies, also where one rank holds everything.
        """
        for name, parameter in self.parameters():
            yield name, cast(DTensor, parameter.detach().to(dtype, copy=True)).full_tensor()

    @torch.no_grad()
    def load_local(self, rows: dict[str, Tensor]) -> None:
        """Overwrite this rank's rows, in the shapes of `local`, any float dtype."""
        for name, own in self.local().items():
            own.copy_(rows[name])


def local_rows(tensor: Tensor) -> Tensor:
    """This rank's rows of a sharded parameter, gradient or moment; shares its memory."""
    return cast(DTensor, tensor.detach()).to_local()


def is_bf16(model: nn.Module) -> bool:
    """Whether bf16 holds every parameter exactly."""
    return all(torch.equal(p, p.bfloat16().float()) for p in model.parameters())


def cast_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast the parameters alone: `model.to` would round the rotary frequencies as well."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def rebuild(
    folder: Path,
    rows: dict[str, Tensor],
    device: torch.device,
    trainable: bool,
    plain_head: bool,
) -> ShardedPolicy:
    """The policy again on a new process group of the same size, weights from this rank's rows.

    Only the folder's config.json is read: memory the constructor leaves unwritten costs nothing,
    and then each rank fills its own rows.

    Args:
        rows: as `ShardedPolicy.local` gave them.
        plain_head: what `has_plain_head` said of the model before; asked of memory that nobody
            has written it would answer at random.
    """
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.tie_weights()  # part of the initialisation that was skipped
    if not trainable:
        cast_parameters(model, next(iter(rows.values())).dtype)
    model._kindling_plain_head = plain_head
    policy = ShardedPolicy(model, device, trainable)
    policy.load_local(rows)
    return policy


def _shard(model: PreTrainedModel, mesh: DeviceMesh, device: torch.device) -> PreTrainedModel:
    # FSDP casts to param_dtype before it gathers: bf16 forward from float32 masters on GPUs;
    # CPUs without bf16 instructions are many times slower in bf16, so float32 there. Gradients
    # are summed in float32 always.
    compute = torch.bfloat16 if device.type == "cuda" else torch.float32
    precision = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    blocks = set(model._no_split_modules or ())
    for module in list(model.modules()):
        if type(module).__name__ in blocks:
            fully_shard(module, mesh=mesh, mp_policy=precision)
    fully_shard(model, mesh=mesh, mp_policy=precision)
    model.score_tokens = MethodType(token_logprobs, model)  # type: ignore[assignment]
    register_fsdp_forward_method(model, "score_tokens")
    return model


def _without_dropout(model: PreTrainedModel) -> PreTrainedModel:
    """Training mode is needed for activation checkpointing; its randomness is not wanted."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0  # type: ignore[assignment]
    return model
