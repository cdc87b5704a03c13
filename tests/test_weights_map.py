"""The index map on small modules whose loaders slice, transpose, pad, or misbehave."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tasks.errors import PolicyError
from tasks.weights.bits import Bits, from_bits
from tasks.weights.index_map import TensorSpec, learn
from tasks.weights.update import TensorUpdate
from tests.weights_helpers import perturbed, random_weights

pytestmark = pytest.mark.fast

SHAPES: dict[str, Any] = {
    "q": ((6, 4), "bfloat16"),
    "k": ((2, 4), "bfloat16"),
    "conv": ((3, 5, 2), "bfloat16"),
    "head": ((7, 4), "bfloat16"),
    "scale": ((), "bfloat16"),
}
SPECS = [TensorSpec(name, shape, dtype) for name, (shape, dtype) in SHAPES.items()]

Loader = Callable[[Any, torch.Tensor], Any]


class Engine(nn.Module):
    """Fused rows, a permuted tensor, columns interleaved over two parameters, padded rows."""

    def __init__(self, **loaders: Loader) -> None:
        super().__init__()
        for name, shape in {
            "qk": (8, 4),
            "conv": (2, 5, 3),
            "left": (7, 2),
            "right": (9, 2),
            "scale": (1,),
        }.items():
            setattr(self, name, nn.Parameter(torch.randn(shape), requires_grad=False))
        self.loaders: dict[str, Loader] = {
            "q": lambda m, t: m.qk.data[:6].copy_(t),
            "k": lambda m, t: m.qk.data.narrow(0, 6, 2).copy_(t),
            "conv": lambda m, t: m.conv.data.copy_(t.permute(2, 1, 0)),
            "head": _load_head,
            "scale": lambda m, t: m.scale.data.copy_(t.view(1)),
            **loaders,
        }

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            self.loaders[name](self, tensor)


def _load_head(engine: Any, tensor: torch.Tensor) -> None:
    engine.left.data.copy_(tensor[:, ::2])
    engine.right[:7].data.copy_(tensor[:, 1::2])
    engine.right[7:].data.fill_(0)


def as_update(old: Any, new: Any) -> Any:
    tensors: dict[str, TensorUpdate] = {}
    for name, (shape, dtype, bits) in new.items():
        indices: Bits | None = None if old is None else np.flatnonzero(old[name][2] != bits)
        values = bits if indices is None else bits[indices]
        tensors[name] = TensorUpdate(shape, dtype, indices, values)
    return SimpleNamespace(tensors=tensors)


def test_scatter_equals_the_loader_and_gather_inverts_it() -> None:
    engine, oracle = Engine(), Engine()
    before = {name: p.detach().clone() for name, p in engine.named_parameters()}
    learned = learn(engine, SPECS)
    parameters = dict(engine.named_parameters())
    before["right"][7:] = 0
    assert all(torch.equal(parameters[name], value) for name, value in before.items())
    weights = random_weights(1, SHAPES)
    held: Any = None
    for step in range(4):
        learned.scatter(as_update(held, weights), parameters)
        oracle.load_weights((n, from_bits(b, d, s)) for n, (s, d, b) in weights.items())
        for name, value in oracle.named_parameters():
            assert torch.equal(parameters[name], value)
        found = learned.gather(parameters)
        assert all(np.array_equal(found[n], bits) for n, (_, _, bits) in weights.items())
        held, weights = weights, perturbed(weights, step, share=[0.3, 1.0, 0.05, 0.0][step])


@pytest.mark.parametrize(
    ("loaders", "message"),
    [
        ({"q": lambda m, t: m.qk.data[:6].copy_(t * 2)}, "computes something from q"),
        ({"q": lambda m, t: m.qk.data[:6].add_(t)}, "only copy"),
        ({"q": lambda m, t: m.qk.data[:5].copy_(t[:5])}, "4 of 24 values of q reach no"),
        ({"k": lambda m, t: m.qk.data[:2].copy_(t)}, "several checkpoint values"),
        ({"k": lambda m, t: None}, "8 of 8 values of k reach no"),
    ],
)
def test_loaders_that_cannot_be_mapped_are_refused(loaders: Any, message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        learn(Engine(**loaders), SPECS)


def test_engines_of_another_shape_or_dtype_are_refused() -> None:
    with pytest.raises(PolicyError, match="come from no"):
        learn(Engine(), SPECS[1:])
    with pytest.raises(PolicyError, match="exactly"):
        learn(Engine().half(), SPECS)
    learn(Engine().bfloat16(), SPECS)
    partial = Engine(q=lambda m, t: m.qk.data[:6].copy_(t), head=_load_head)
    assert learn(partial, SPECS, complete=False).specs.keys() == SHAPES.keys()
