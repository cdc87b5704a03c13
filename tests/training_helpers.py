"""What the training tests share: a random tiny policy on disk, random trajectories and groups."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from tasks.rollout.trajectory import End, Group, GroupSummary, Trajectory, summarise

VOCABULARY = 61


def tiny_config(**changes: object) -> Qwen2Config:
    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
    }
    return Qwen2Config(**{**settings, **changes})


def tiny_model(seed: int = 0, **changes: object) -> Qwen2ForCausalLM:
    """Random weights on the bf16 grid, large enough that logits differ clearly."""
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(tiny_config(**changes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
            parameter.copy_(parameter.bfloat16().float())
    return model


def save_tiny_policy(folder: Path, seed: int = 0, chat: bool = True, **changes: object) -> Path:
    """A whole policy folder: bf16 safetensors, config, tokenizer (with a chat template or not)."""
    model = tiny_model(seed, **changes)
    nn.Module.to(model, torch.bfloat16)
    model.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", eos_token="w1")
    if chat:
        tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    return folder


def make_trajectory(
    tokens: int, seed: int, reward: float = 0.0, end: End = "answered"
) -> Trajectory:
    """Prompt, sampled, observed and sampled tokens, in that order; log-probabilities made up."""
    rng = np.random.default_rng(seed)
    mask = np.zeros(tokens, np.bool_)
    mask[tokens // 4 :] = True
    mask[tokens // 2 : tokens // 2 + tokens // 8] = False
    logprobs = np.where(mask, -rng.uniform(3.0, 5.0, tokens), 0).astype(np.float32)
    return Trajectory(
        ids=rng.integers(2, VOCABULARY, tokens, dtype=np.int32),
        loss_mask=mask,
        logprobs=logprobs,
        versions=np.where(mask, 0, -1).astype(np.int32),
        prompt_tokens=tokens // 4,
        turns=(),
        end=end,
        answer=None,
        exact_match=False,
        f1=0.0,
        reward=reward,
    )


Batch = tuple[list[Group], list[GroupSummary]]


def make_batch(groups: int, size: int, seed: int = 0) -> Batch:
    """Groups of trajectories of 8-40 tokens with random rewards, and their summaries. The second of
    every group ran out of room."""
    rng = np.random.default_rng(seed)
    made = [
        Group(
            unit_id=f"u{g}",
            question_id=f"q{g}",
            trajectories=tuple(
                make_trajectory(
                    int(rng.integers(8, 41)),
                    int(rng.integers(1 << 30)),
                    float(rng.integers(0, 2)),
                    "truncated" if t == 1 else "answered",
                )
                for t in range(size)
            ),
        )
        for g in range(groups)
    ]
    return made, [summary_of(group) for group in made]


def summary_of(group: Group) -> GroupSummary:
    return GroupSummary(
        unit_id=group.unit_id,
        question_id=group.question_id,
        key=f"groups/{group.unit_id}",
        worker="worker",
        version=0,
        seconds=0.0,
        trajectories=tuple(summarise(t) for t in group.trajectories),
    )


def reordered(batch: Batch, order: int) -> Batch:
    """The same groups and trajectories in another order; 0 leaves them as they are."""
    if order == 0:
        return batch
    rng = np.random.default_rng(order)
    made = [
        replace(
            batch[0][g],
            trajectories=tuple(
                batch[0][g].trajectories[t] for t in rng.permutation(len(batch[0][g].trajectories))
            ),
        )
        for g in rng.permutation(len(batch[0]))
    ]
    return made, [summary_of(group) for group in made]
