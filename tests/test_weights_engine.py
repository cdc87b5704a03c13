"""A real vLLM engine follows versions through our weight-transfer engine, to the bit."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tasks.errors import IntegrityError, PolicyError
from tasks.store import ObjectStore
from tasks.weights import index_map
from tasks.weights.bits import TORCH_DTYPES, from_bits
from tasks.weights.digest import tensor_digest
from tasks.weights.export import export
from tasks.weights.index_map import TensorSpec, check_parameters, learn
from tasks.weights.subscriber import Subscriber
from tasks.weights.transfer import BACKEND, EngineWeights, prepare_vllm, register
from tasks.weights.versions import HalfApplied, Nothing
from tests.weights_helpers import Gang, Weights, perturbed

PROMPT = [3, 17, 91, 4, 4, 250, 8, 1, 77, 30]
TIED = {True: "tied", False: "untied"}


def make_model(folder: Path, tied: bool) -> Weights:
    """A random Qwen2 of two layers with grouped-query attention, saved; its bf16 patterns."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=300,  # not a multiple of vLLM's padding: padded rows exist
        hidden_size=128,  # heads of 32: the smallest that vLLM's CPU attention knows
        intermediate_size=112,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        dtype="bfloat16",
    )
    torch.manual_seed(5 if tied else 6)
    model = Qwen2ForCausalLM(config).bfloat16()
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms, too: nothing is constant
            parameter.copy_(torch.randn(parameter.shape) * 0.2 + (parameter.ndim == 1))
    model.save_pretrained(folder)
    return {
        name: (
            tuple(parameter.shape),
            "bfloat16",
            parameter.detach().reshape(-1).view(torch.int16).numpy().view(np.uint16).copy(),
        )
        for name, parameter in model.named_parameters()
    }


def build_engine(path: Path, load_format: str = "auto", **extra: Any) -> Any:
    from vllm import EngineArgs, LLMEngine

    return LLMEngine.from_engine_args(
        EngineArgs(
            model=str(path),
            dtype="float32",
            load_format=load_format,
            enforce_eager=True,
            enable_chunked_prefill=False,
            skip_tokenizer_init=True,
            distributed_executor_backend="uni",
            max_model_len=128,
            max_num_batched_tokens=256,
            max_num_seqs=4,
            kv_cache_memory_bytes=16 << 20,
            seed=0,
            **extra,
        )
    )


def shut_down(engine: Any) -> None:
    engine.engine_core.shutdown()
    gc.collect()


def logprobs(engine: Any) -> list[dict[int, float]]:
    """Log-probabilities by token: of each prompt position after the first, then greedy ones."""
    from vllm import SamplingParams

    parameters = SamplingParams(
        temperature=0.0, max_tokens=8, prompt_logprobs=3, logprobs=3, detokenize=False
    )
    engine.add_request("r", {"prompt_token_ids": PROMPT}, parameters)
    output: Any = None
    while engine.has_unfinished_requests():
        for step in engine.step():
            output = step
    entries = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
    return [{token: value.logprob for token, value in entry.items()} for entry in entries]


@pytest.fixture(scope="module", autouse=True)
def vllm_ready() -> None:
    from vllm.plugins import load_general_plugins

    load_general_plugins()  # once a process: later it would undo what a test patches
    prepare_vllm()
    register()  # again: does nothing


@pytest.fixture(params=[True, False], ids=TIED.get)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Weights]:
    folder = tmp_path / "model"
    return folder, make_model(folder, request.param)


@pytest.fixture
def engine(model: tuple[Path, Weights]) -> Iterator[Any]:
    made = build_engine(model[0], "dummy", weight_transfer_config={"backend": BACKEND})
    yield made
    shut_down(made)


def parameters_of(engine: Any) -> dict[str, torch.Tensor]:
    return engine.collective_rpc(lambda worker: dict(worker.get_model().named_parameters()))[0]


def model_of(engine: Any) -> Any:
    return engine.collective_rpc(lambda worker: worker.get_model())[0]


def digests(patterns: dict[str, Any]) -> dict[str, str]:
    return {name: tensor_digest(bits) for name, bits in patterns.items()}


def test_engine_follows_every_version(
    engine: Any, model: tuple[Path, Weights], object_store: ObjectStore, tmp_path: Path
) -> None:
    folder, weights = model
    run = f"engine-{tmp_path.name}"
    gang = Gang(object_store, run)
    client = EngineWeights(engine, object_store.location, tmp_path / "cache")
    assert not client.usable
    assert client.state == Nothing()
    kept: list[Any] = []
    for version in range(4):
        gang.publish(weights, "delta" if version else "anchor")
        client.prefetch(run, version)
        applied = client.apply(run, version)
        assert applied.kind == ("delta" if version else "full")
        assert client.holds(run, version)
        expected = {name: tensor_digest(bits) for name, (_, _, bits) in weights.items()}
        assert digests(client.gather()) == expected
        exported = export(object_store, run, version, tmp_path / f"v{version}", folder)
        ours = logprobs(engine)
        fresh = build_engine(exported)
        assert ours == logprobs(fresh)
        loaded = parameters_of(fresh)
        assert all(torch.equal(loaded[n], p) for n, p in parameters_of(engine).items())
        kept.append(fresh)  # shutting one down ends torch.distributed for all in this process
        if version in (0, 3):
            check_transformers(exported, weights, ours)
        weights = perturbed(weights, version, share=[0.0, 0.02, 1.0, 0.5][version])
    assert client.anchor_loads == 1
    for fresh in kept:
        shut_down(fresh)


def check_transformers(exported: Path, weights: Weights, ours: list[dict[int, float]]) -> None:
    """transformers loads the export unchanged and agrees about the prompt."""
    from transformers import AutoModelForCausalLM

    hf = AutoModelForCausalLM.from_pretrained(exported)
    assert hf.dtype == torch.bfloat16
    for name, parameter in hf.named_parameters():
        shape, dtype, bits = weights[name]
        assert torch.equal(parameter, from_bits(bits, dtype, shape))
    with torch.no_grad():
        found = hf.float()(torch.tensor([PROMPT])).logits[0].log_softmax(-1)
    for at, entry in enumerate(ours[: len(PROMPT) - 1]):
        for token, logprob in entry.items():
            assert abs(found[at, token].item() - logprob) < 1e-3


def test_scatter_equals_vllm_loaders(engine: Any, model: tuple[Path, Weights]) -> None:
    """Dense against the model's own load_weights, sparse against vLLM's patch loader."""
    from vllm.model_executor.model_loader.checkpoint_weight_patch import (
        CheckpointWeightPatch,
        load_checkpoint_weight_patches,
    )

    weights = model[1]
    vllm_model, parameters = model_of(engine), parameters_of(engine)
    before = {name: p.detach().clone() for name, p in parameters.items()}
    specs = [TensorSpec(name, shape, dtype) for name, (shape, dtype, _) in weights.items()]
    learned = learn(vllm_model, specs)
    embedding = "model.embed_tokens.weight"
    for name, parameter in parameters.items():
        rows = 300 if name in (embedding, "lm_head.weight") else len(parameter)
        assert torch.equal(parameter[:rows], before[name][:rows])  # learning changes nothing
        assert bool((parameter[rows:] == 0).all())  # but padding
    new = perturbed(weights, 3, share=0.3)
    update = update_between(weights, new)
    vllm_model.load_weights(
        [(name, from_bits(bits, dtype, shape)) for name, (shape, dtype, bits) in weights.items()]
    )
    patches = [
        CheckpointWeightPatch(
            name,
            tensor.shape,
            TORCH_DTYPES[tensor.dtype],
            from_bits(tensor.values, tensor.dtype),
            torch.from_numpy(tensor.indices),
        )
        for name, tensor in update.tensors.items()
    ]
    load_checkpoint_weight_patches(vllm_model, patches)
    oracle = {name: p.detach().clone() for name, p in parameters.items()}
    for parameter in parameters.values():
        parameter.data.fill_(float("nan"))
    learned = learn(vllm_model, specs)  # restores the padding
    learned.scatter(update_between(None, weights), parameters)
    learned.scatter(update, parameters)
    assert all(torch.equal(parameters[name], value) for name, value in oracle.items())
    found = learned.gather(parameters)
    assert all(np.array_equal(found[name], bits) for name, (_, _, bits) in new.items())
    refuse_wrong_engines(vllm_model, specs, parameters)


def refuse_wrong_engines(
    vllm_model: Any, specs: list[TensorSpec], parameters: dict[str, torch.Tensor]
) -> None:
    with pytest.raises(PolicyError, match="come from no"):
        learn(vllm_model, specs[:-1])
    other = [TensorSpec(s.name, s.shape, "float16") for s in specs]
    learn(vllm_model, other)  # float32 holds float16 values, too
    name = specs[0].name
    parameters[name].data[0, 0] = 1 + 2**-20
    with pytest.raises(IntegrityError, match="cannot"):
        learn(vllm_model, specs).gather(parameters)
    with pytest.raises(PolicyError, match="empty"):
        check_parameters({**parameters, "gone": torch.empty(0)})


def update_between(old: Weights | None, new: Weights) -> Any:
    """An update without a store."""
    from types import SimpleNamespace

    from tasks.weights.subscriber import TensorUpdate

    tensors: dict[str, TensorUpdate] = {}
    for name, (shape, dtype, bits) in new.items():
        indices = None if old is None else np.flatnonzero(old[name][2] != bits)
        values = bits if indices is None else bits[indices]
        tensors[name] = TensorUpdate(shape, dtype, indices, values)
    return SimpleNamespace(tensors=tensors)


def test_an_engine_that_packs_its_weights_is_refused(
    object_store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm import _custom_ops

    if not hasattr(torch.ops._C, "create_onednn_mm_handler"):
        pytest.skip("this vLLM was built without oneDNN")
    make_model(tmp_path / "model", tied=True)
    with monkeypatch.context() as patched:
        patched.setattr(_custom_ops, "_supports_onednn", True)
        packed = build_engine(
            tmp_path / "model", "dummy", weight_transfer_config={"backend": BACKEND}
        )
    with pytest.raises(PolicyError, match="prepare_vllm"):
        EngineWeights(packed, object_store.location, tmp_path / "cache")
    shut_down(packed)


def test_an_engine_that_failed_half_way_heals_itself(
    engine: Any,
    model: tuple[Path, Weights],
    object_store: ObjectStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = f"half-{tmp_path.name}"
    weights = model[1]
    gang = Gang(object_store, run)
    gang.publish(weights, "anchor")
    client = EngineWeights(engine, object_store.location, tmp_path / "cache")
    client.apply(run, 0)
    new = perturbed(weights, 1)
    gang.publish(new, "delta")
    original = index_map._put
    calls = 0

    def failing(*args: Any) -> int:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise RuntimeError("out of memory")
        return original(*args)

    with monkeypatch.context() as patched:
        patched.setattr(index_map, "_put", failing)
        with pytest.raises(RuntimeError, match="out of memory"):
            client.apply(run, 1)
    assert client.state == HalfApplied(run, 1)
    assert not client.usable
    assert client.apply(run, 1).kind == "full"
    assert client.usable
    reader = Subscriber(object_store, tmp_path / "cache")
    reader.fetch(run, 1)
    assert digests(client.gather()) == digests(reader.shadow)
    assert client.anchor_loads == 1
