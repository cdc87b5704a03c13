"""What a run reads: questions, passages, policy and prompts, all checked before anything starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.config import TrainConfig
from tasks.data.hotpotqa import Questions, load_questions, split_held_out
from tasks.data.order import batch
from tasks.data.questions import Passage, Question, pool
from tasks.errors import DataError
from tasks.retrieval.bm25 import build, index_key
from tasks.retrieval.stored import is_stored, store_index
from tasks.rollout.protocol import SearchProtocol
from tasks.store import ObjectStore
from tasks.training.policy import load_tokenizer, resolve_model_dir


@dataclass(frozen=True)
class Inputs:
    """Checked inputs of a run. The corpus is the pooled passages of all its questions."""

    config: TrainConfig
    train: Questions
    held_out: tuple[Question, ...]
    passages: tuple[Passage, ...]
    model_dir: Path
    tokenizer: Any
    index_key: str


def load_inputs(config: TrainConfig, cache_dir: Path) -> Inputs:
    """Reads and checks everything a run needs that is not a service.

    Raises:
        DataError: a dataset is unreadable, empty or laid out wrongly, or a held-out question is
            also trained on.
        PolicyError: the model folder is incomplete, its tokenizer has no chat template where one
            is needed, or a prompt is too long.
    """
    model_dir = resolve_model_dir(config.model.path, cache_dir / "models")
    tokenizer: Any = load_tokenizer(model_dir, config.model.chat)
    train, held_out = _questions(config)
    _check_prompts(SearchProtocol(tokenizer, config.model, config.rollout), config, train, held_out)
    passages = pool([*train, *held_out])
    key = index_key(passages, config.retrieval.k1, config.retrieval.b)
    return Inputs(config, train, held_out, passages, model_dir, tokenizer, key)


def ensure_index(inputs: Inputs, store: ObjectStore) -> bool:
    """Builds and stores the BM25 index where the store lacks it; True if it was built."""
    if is_stored(store, inputs.index_key):
        return False
    retrieval = inputs.config.retrieval
    store_index(store, build(inputs.passages, retrieval.k1, retrieval.b))
    return True


def _questions(config: TrainConfig) -> tuple[Questions, tuple[Question, ...]]:
    data = config.data
    train = load_questions(data.train)
    if data.held_out == "split":
        train, held_out = split_held_out(train, data.held_out_questions)
        return train, tuple(held_out)
    held_out = tuple(load_questions(data.held_out)[: data.held_out_questions])
    trained = {question.id for question in train}
    both = next((question.id for question in held_out if question.id in trained), None)
    if both is not None:
        raise DataError(
            f"question {both!r} of data.held_out {data.held_out!r} is also in data.train "
            f"{data.train!r}; an evaluation on it would measure memory: name other questions"
        )
    return train, held_out


def _check_prompts(
    protocol: SearchProtocol,
    config: TrainConfig,
    train: Sequence[Question],
    held_out: Sequence[Question],
) -> None:
    """Encodes the prompt of every question this run will ask."""
    rollout = config.rollout
    steps = range(config.training.steps)
    size = rollout.questions_per_step
    asked = {i for step in steps for i in batch(len(train), config.seed, step, size)}
    for index in sorted(asked):
        protocol.prompt(train[index].question)
    for question in held_out:
        protocol.prompt(question.question)
