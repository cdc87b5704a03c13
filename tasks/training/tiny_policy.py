"""The tiny policy before it has learned anything: a small Qwen2 and its own tokenizer.

The tokenizer is a byte-level BPE trained on the miniature until nearly every word is one token, so
copying a name is copying two tokens, while any other text still encodes. The protocol's tags are
single tokens here; nothing relies on that (Qwen's tokenizer splits them).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import torch
from tokenizers import (
    Regex,
    Tokenizer,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from transformers import AddedToken, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from tasks.data.miniature import generate
from tasks.rollout.protocol import CORRECTIVE

VOCABULARY = 2048
CONTEXT = 512
TAGS = ("search", "information", "answer", "think")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def _texts() -> Iterator[str]:
    for split in ("train", "held_out"):
        for row in generate(split):
            yield row["question"]
            yield f"<search> {row['answer']}</search>"
            titles, sentences = row["context"]["title"], row["context"]["sentences"]
            for title, parts in zip(titles, sentences, strict=True):
                yield f"Doc 1(Title: {title}) {''.join(parts)}\n"
    yield CORRECTIVE


def build_tokenizer() -> Qwen2Tokenizer:
    """Trains the tokenizer on the miniature (words of both splits: they share them).

    It cuts text as Qwen2's does, digits one by one: transformers gives every model of type qwen2
    that tokenizer class, whatever the folder's own file says, and would cut it otherwise.
    """
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.NFC()
    trained.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|pad|>", "<|end|>", "<|user|>", "<|assistant|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    trained.train_from_iterator(_texts(), trainer)
    learned = json.loads(trained.to_str())["model"]
    merges: Any = [tuple(merge) for merge in learned["merges"]]
    tokenizer = Qwen2Tokenizer(
        vocab=learned["vocab"],
        merges=merges,
        unk_token="<|end|>",
        eos_token="<|end|>",
        pad_token="<|pad|>",
        extra_special_tokens=["<|user|>", "<|assistant|>"],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=CONTEXT,
    )
    tags = [AddedToken(f"<{end}{tag}>", normalized=False) for tag in TAGS for end in ("", "/")]
    tokenizer.add_tokens(tags)
    return tokenizer


def build_model(tokenizer: Qwen2Tokenizer, seed: int) -> Qwen2ForCausalLM:
    """A randomly initialised Qwen2 of about 0.9M parameters, float32."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=-(-len(tokenizer) // 64) * 64,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.backend_tokenizer.token_to_id("<|end|>"),
        pad_token_id=tokenizer.backend_tokenizer.token_to_id("<|pad|>"),
    )
    return Qwen2ForCausalLM(config)


def induction_batch(
    vocabulary: int, rows: int, length: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random sequences that repeat with a random period, and the mask of what can be predicted.

    Teaches copying (induction heads, Olsson et al. 2022) before there is anything to copy.

    Returns:
        ids_BT int64, mask_BT bool: True from the second token of the first repetition on.
    """
    ids_BT = torch.empty((rows, length), dtype=torch.long)
    mask_BT = torch.zeros(rows, length, dtype=torch.bool)
    for row in range(rows):
        period = int(torch.randint(8, length // 2, (), generator=generator))
        span = torch.randint(4, vocabulary, (period,), generator=generator)
        ids_BT[row] = span.repeat(-(-length // period))[:length]
        mask_BT[row, period + 1 :] = True
    return ids_BT, mask_BT
