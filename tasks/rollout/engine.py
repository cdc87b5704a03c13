"""The warm vLLM engine, stepped by the agent loop in the same process.

The engine starts with random weights and serves nothing of its own: versions, the base included,
come through the store (`tasks.weights`). float32 on CPUs (bf16 values are exact in it, and it is
4-10 times faster there), bfloat16 on GPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from tasks.config import TrainConfig
from tasks.rollout.protocol import STOP_TAGS

if TYPE_CHECKING:
    from vllm import SamplingParams


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a unit's tokens are drawn; temperature 0 is greedy."""

    temperature: float
    top_p: float


@dataclass(frozen=True, slots=True)
class Request:
    """One turn of one trajectory: sample at most `max_tokens` ids after `prompt_ids`."""

    request_id: str
    prompt_ids: list[int]
    max_tokens: int
    seed: int
    sampling: Sampling


@dataclass(frozen=True, slots=True)
class Completion:
    """Sampled ids, their log-probabilities at the sampling temperature, and their text (cut after
    the stop tag, also when the last id goes on beyond it)."""

    request_id: str
    ids: list[int]
    logprobs: list[float]
    text: str


class Engine(Protocol):
    """What the agent loop needs; the no-op engines of benches and tests are the other kind."""

    def add(self, request: Request) -> None: ...

    def step(self) -> Sequence[Completion]: ...

    def abort(self, request_ids: Sequence[str]) -> None: ...


class VllmEngine:
    """vLLM's `LLMEngine` in this process.

    `load_format` "dummy" starts with random weights, "auto" loads `model_dir`.
    """

    def __init__(
        self, model_dir: Path, config: TrainConfig, load_format: Literal["dummy", "auto"] = "dummy"
    ) -> None:
        from tasks.weights.transfer import BACKEND, prepare_vllm

        prepare_vllm()
        import torch
        from vllm import LLMEngine
        from vllm.config import WeightTransferConfig
        from vllm.engine.arg_utils import EngineArgs

        self._prompts: dict[str, list[int]] = {}
        on_gpu = torch.cuda.is_available()
        where: dict[str, Any] = (
            {}
            if on_gpu
            else {
                # A seeded request in a chunked prefill raises on CPUs.
                "enable_chunked_prefill": False,
                "max_num_batched_tokens": max(config.model.context, 8192),
                "kv_cache_memory_bytes": int(config.rollout.kv_cache_gib * 2**30),
                "enforce_eager": True,
            }
        )
        self.llm = LLMEngine.from_engine_args(
            EngineArgs(
                model=str(model_dir),
                dtype="bfloat16" if on_gpu else "float32",
                load_format=load_format,
                max_model_len=config.model.context,
                max_num_seqs=config.rollout.max_sequences,
                enable_prefix_caching=True,
                # The default returns log-probabilities before temperature and top-p.
                logprobs_mode="processed_logprobs",
                distributed_executor_backend="uni",
                weight_transfer_config=WeightTransferConfig(backend=BACKEND),
                disable_log_stats=True,
                **where,
            )
        )

    def add(self, request: Request) -> None:
        from vllm.inputs import TokensPrompt

        prompt = TokensPrompt(prompt_token_ids=request.prompt_ids)
        self.llm.add_request(request.request_id, prompt, sampling_params(request))
        self._prompts[request.request_id] = request.prompt_ids

    def step(self) -> list[Completion]:
        return [
            _completion(output, self._prompts.pop(output.request_id))
            for output in self.llm.step()
            if output.finished and output.request_id in self._prompts
        ]

    def abort(self, request_ids: Sequence[str]) -> None:
        self.llm.abort_request(list(request_ids))
        for request_id in request_ids:
            self._prompts.pop(request_id, None)

    def close(self) -> None:
        """Gives up the model, the cache and what else the engine holds of the device."""
        self.llm.engine_core.shutdown()

    def reset_prefix_cache(self) -> None:
        """Forgets keys and values of older weights; only between units, with nothing running."""
        reset = self.llm.reset_prefix_cache()
        assert reset, "the prefix cache can be reset only when no request runs"


def sampling_params(request: Request) -> SamplingParams:
    """vLLM's parameters of a request."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    greedy = request.sampling.temperature == 0
    return SamplingParams(
        temperature=request.sampling.temperature,
        top_p=request.sampling.top_p,
        seed=None if greedy else request.seed,
        max_tokens=request.max_tokens,
        stop=list(STOP_TAGS),
        include_stop_str_in_output=True,
        # 0: the sampled token's own, and no others.
        logprobs=0,
        flat_logprobs=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_special_tokens=False,
    )


def _completion(output: Any, prompt_ids: list[int]) -> Completion:
    assert list(output.prompt_token_ids) == prompt_ids, (
        "the engine went on from the ids it was given"
    )
    sampled = output.outputs[0]
    ids = list(sampled.token_ids)
    logprobs = list(sampled.logprobs.logprobs)
    assert len(ids) == len(logprobs), "one log-probability a sampled id"
    assert list(sampled.logprobs.token_ids) == ids, "log-probabilities belong to the sampled ids"
    return Completion(output.request_id, ids, logprobs, sampled.text)
