"""Sampled tokens a second of the agent loop, over those of the bare engine given the same requests.

    python -m tests.bench.rollout [--json FILE] [--repeats 3]

One process, the tiny policy, its vLLM engine and a BM25 index over the miniature's passages. The
agent loop plays enough units for twice `max_num_seqs` trajectories in flight, through a wrapper
that writes down every request and how many ids came back. The bare engine is then given those
requests at once, before its first step: the same prompt ids, seeds, stop strings and
log-probabilities, each to its recorded length (`max_tokens`, `ignore_eos`). What the loop adds
(parsing, retrieval, observations, arrays) and what it loses (a turn waits for the one before) are
both in the ratio. The prefix cache is reset before each timed pass; passes alternate, and medians
are compared.

Also what seeds, stop strings and log-probabilities each cost the bare engine.

Measured on 2 cores of an Intel Xeon, otherwise idle (2026-12-06): 2,971 tokens a second of 3,256,
0.91. Of the bare engine's time seeds cost 5 %, stop strings 2 %, log-probabilities 8 %.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from infra.cluster import worker_environment
from infra.processes import ROOT, child_environment
from tasks.config import TrainConfig
from tasks.inputs import Inputs, load_inputs
from tasks.presets import resolve
from tasks.retrieval.bm25 import build
from tasks.retrieval.retriever import Bm25Retriever
from tasks.rollout.agent import AgentLoop, Sampled, Unit
from tasks.rollout.batches import train_units
from tasks.rollout.engine import Completion, Request, VllmEngine
from tasks.rollout.protocol import STOP_TAGS, SearchProtocol
from tests.bench import report

if TYPE_CHECKING:
    from vllm import RequestOutput

THREADS = 2


@dataclass(frozen=True)
class Recorded:
    """A request the agent loop made, and the ids it got for it."""

    request: Request
    count: int


class RecordingEngine:
    """Passes everything on, and writes it down."""

    def __init__(self, engine: VllmEngine) -> None:
        self._engine = engine
        self._asked: dict[str, Request] = {}
        self.recorded: list[Recorded] = []

    def add(self, request: Request) -> None:
        self._asked[request.request_id] = request
        self._engine.add(request)

    def step(self) -> Sequence[Completion]:
        completions = self._engine.step()
        for made in completions:
            self.recorded.append(Recorded(self._asked.pop(made.request_id), len(made.ids)))
        return completions

    def abort(self, request_ids: Sequence[str]) -> None:
        self._engine.abort(request_ids)


@dataclass(frozen=True)
class Timed:
    tokens: int
    seconds: float

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def _agent_pass(loop: AgentLoop, recorder: RecordingEngine, units: Sequence[Unit]) -> Timed:
    recorder.recorded = []
    began = time.perf_counter()
    for unit in units:
        loop.submit(unit)
    groups = []
    while loop.active:
        for outcome in loop.step():
            assert isinstance(outcome, Sampled), outcome
            groups.append(outcome.group)
    seconds = time.perf_counter() - began
    sampled = sum(t.sampled_tokens for group in groups for t in group.trajectories)
    assert sampled == sum(r.count for r in recorder.recorded)
    return Timed(sampled, seconds)


def _bare_pass(engine: VllmEngine, requests: Sequence[Recorded], **changes: Any) -> Timed:
    """All requests at once, with the parameters `VllmEngine.add` gives them, but for `changes`."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt
    from vllm.sampling_params import RequestOutputKind

    made = []
    for number, recorded in enumerate(requests):
        asked = recorded.request
        wanted: dict[str, Any] = {
            "temperature": asked.sampling.temperature,
            "top_p": asked.sampling.top_p,
            "seed": asked.seed,
            "max_tokens": recorded.count,
            "ignore_eos": True,
            "stop": list(STOP_TAGS),
            "include_stop_str_in_output": True,
            "logprobs": 0,
            "flat_logprobs": True,
            "output_kind": RequestOutputKind.FINAL_ONLY,
            "skip_special_tokens": False,
        }
        prompt = TokensPrompt(prompt_token_ids=asked.prompt_ids)
        made.append((f"bare/{number}", prompt, SamplingParams(**{**wanted, **changes})))
    began = time.perf_counter()
    for request in made:
        engine.llm.add_request(*request)
    tokens = 0
    while engine.llm.has_unfinished_requests():
        for output in engine.llm.step():
            if output.finished:
                tokens += len(cast("RequestOutput", output).outputs[0].token_ids)
    return Timed(tokens, time.perf_counter() - began)


def _config(policy: str, max_sequences: int) -> TrainConfig:
    units = -(-2 * max_sequences // 8)
    return resolve(
        "tiny",
        {
            "model": {"path": policy},
            "rollout": {
                "max_sequences": max_sequences,
                "questions_per_step": units,
                "group_size": 8,
            },
        },
    )


def _agent(inputs: Inputs, engine: RecordingEngine) -> AgentLoop:
    config = inputs.config
    retrieval = config.retrieval
    return AgentLoop(
        engine,
        SearchProtocol(inputs.tokenizer, config.model, config.rollout),
        Bm25Retriever(build(inputs.passages, retrieval.k1, retrieval.b)),
        config.rollout,
        config.model.context,
        retrieval.top_k,
    )


def _compare(engine: VllmEngine, inputs: Inputs, repeats: int, profile: bool) -> dict[str, Any]:
    recorder = RecordingEngine(engine)
    loop = _agent(inputs, recorder)
    units = train_units(inputs.train, inputs.config, 0, 0)
    _agent_pass(loop, recorder, units)
    _bare_pass(engine, recorder.recorded[:64])
    agent_rates, bare_rates = [], []
    for number in range(repeats):
        engine.reset_prefix_cache()
        timed = _agent_pass(loop, recorder, units)
        engine.reset_prefix_cache()
        bare = _bare_pass(engine, recorder.recorded)
        assert bare.tokens >= 0.95 * timed.tokens, "the same requests give about the same tokens"
        agent_rates.append(timed.rate)
        bare_rates.append(bare.rate)
        units = [replace(unit, unit_id=f"{unit.unit_id}-{number}") for unit in units]
    if profile:
        _profile(engine, loop, recorder, units)
    rows = [["agent loop", median(agent_rates)], ["bare engine", median(bare_rates)]]
    requests = recorder.recorded
    lengths = [len(r.request.prompt_ids) for r in requests]
    title = (
        f"{len(units) * 8} trajectories, {len(requests)} requests, mean prompt "
        f"{sum(lengths) / len(lengths):.0f}, mean output "
        f"{sum(r.count for r in requests) / len(requests):.1f} tokens; {report.machine()}"
    )
    report.show(title, ["", "sampled tokens/s (median)"], rows)
    return {
        "agent_loop_over_engine": median(agent_rates) / median(bare_rates),
        "agent_tokens_per_s": median(agent_rates),
        "engine_tokens_per_s": median(bare_rates),
        **_costs(engine, requests, repeats),
    }


def _costs(engine: VllmEngine, requests: Sequence[Recorded], repeats: int) -> dict[str, float]:
    """The bare engine with all of them, and without each. Without seeds other ids are sampled, and
    stop strings end some requests early: rates count the tokens that came."""
    without: dict[str, dict[str, Any]] = {
        "all": {},
        "seeds": {"seed": None},
        "stop strings": {"stop": None, "include_stop_str_in_output": False},
        "log-probabilities": {"logprobs": None, "flat_logprobs": False},
    }
    rates: dict[str, list[float]] = {name: [] for name in without}
    for _ in range(repeats):
        for name, changes in without.items():
            engine.reset_prefix_cache()
            rates[name].append(_bare_pass(engine, requests, **changes).rate)
    whole = median(rates["all"])
    cost = {name: 1 - whole / median(rates[name]) for name in without if name != "all"}
    rows = [[name, median(rates[name]), f"{value:.1%}"] for name, value in cost.items()]
    columns = ["bare engine without", "tokens/s", "they cost"]
    report.show(f"with all of them: {whole:.4g} tokens/s", columns, rows)
    return {f"{name.replace(' ', '_').replace('-', '_')}_cost": v for name, v in cost.items()}


def _profile(
    engine: VllmEngine, loop: AgentLoop, recorder: RecordingEngine, units: Sequence[Unit]
) -> None:
    import cProfile
    import pstats

    engine.reset_prefix_cache()
    profiler = cProfile.Profile()
    profiler.enable()
    _agent_pass(loop, recorder, units)
    profiler.disable()
    pstats.Stats(profiler).sort_stats("cumulative").print_stats(60)


def main(
    json: Annotated[Path | None, typer.Option(help="Also write the last line here.")] = None,
    policy: Annotated[str, typer.Option(help="Policy folder.")] = "deployments/policies/tiny",
    repeats: Annotated[int, typer.Option(help="Timed passes of each.")] = 3,
    max_sequences: Annotated[int, typer.Option(help="Sequences decoded at once.")] = 192,
    profile: Annotated[bool, typer.Option(help="Profile one agent pass.")] = False,
) -> None:
    """Measures and prints; see the module."""
    wanted = {**worker_environment(THREADS, None), "VLLM_LOGGING_LEVEL": "WARNING"}
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        # OpenMP read its variables when torch was imported above: again, as a worker starts.
        command = [sys.executable, "-m", "tests.bench.rollout", *sys.argv[1:]]
        os.execve(sys.executable, command, child_environment(wanted))
    os.chdir(ROOT)
    with tempfile.TemporaryDirectory(prefix="kindling-bench-") as folder:
        inputs = load_inputs(_config(policy, max_sequences), Path(folder))
        engine = VllmEngine(inputs.model_dir, inputs.config, load_format="auto")
        figures = _compare(engine, inputs, repeats, profile)
    report.finish(figures, json)


if __name__ == "__main__":
    typer.run(main)
