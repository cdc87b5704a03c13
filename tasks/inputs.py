"""What a run reads: questions, passages, policy and prompts, all checked before anything starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.config import DataConfig, TrainConfig
from tasks.data.hotpotqa import Questions, load_questions, split_held_out
from tasks.data.order import batch
from tasks.data.questions import Passage, Question, pool
from tasks.errors import DataError
from tasks.retrieval.bm25 import build, index_key
from tasks.retrieval.http_client import check_retriever
from tasks.retrieval.stored import is_stored, store_index
from tasks.rollout.batches import check_streams
from tasks.rollout.protocol import SearchProtocol
from tasks.rollout.reward import check_reward
from tasks.store import ObjectStore
from tasks.training.demonstrations import chosen_questions
from tasks.training.policy import load_tokenizer, resolve_model_dir
from tasks.training.trajectory_file import parse_trajectories, read_file


@dataclass(frozen=True)
class Inputs:
    """Checked inputs of a run. The corpus is the pooled passages of all its questions; with
    retrieval.url it is served elsewhere, and passages and index_key are empty and None.

    trajectories: the file model.warm_start.trajectories, if there is one.
    """

    config: TrainConfig
    train: Questions
    held_out: tuple[Question, ...]
    passages: tuple[Passage, ...]
    model_dir: Path
    tokenizer: Any
    index_key: str | None
    trajectories: bytes = b""


def load_inputs(config: TrainConfig, cache_dir: Path) -> Inputs:
    """Reads and checks everything a run needs that it does not start itself.

    Raises:
        ConfigError: the reward cannot be used, or the run is longer than its random streams.
        DataError: a dataset or a file of demonstrations is unreadable, empty or laid out wrongly,
            or a held-out question is also trained on.
        PolicyError: the model folder is incomplete, its tokenizer has no chat template where one
            is needed, or a prompt is too long.
        RetrieverError: there is none at retrieval.url.
    """
    check_reward(config)
    model_dir = resolve_model_dir(config.model.path, cache_dir / "models")
    tokenizer: Any = load_tokenizer(model_dir, config.model.chat)
    train, held_out = _questions(config)
    check_streams(config, len(held_out))
    protocol = SearchProtocol(tokenizer, config.model, config.rollout)
    _check_prompts(protocol, config, train, held_out)
    trajectories = _check_demonstrations(protocol, config, train)
    passages: tuple[Passage, ...] = ()
    key = None
    if config.retrieval.url is None:
        passages = pool([*train, *held_out])
        key = index_key(passages, config.retrieval.k1, config.retrieval.b)
    check_retriever(config.retrieval)
    return Inputs(config, train, held_out, passages, model_dir, tokenizer, key, trajectories)


def ensure_index(inputs: Inputs, store: ObjectStore) -> bool:
    """Builds and stores the BM25 index where one is needed and not there; True if it was built."""
    if inputs.index_key is None or is_stored(store, inputs.index_key):
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
    check_unseen(held_out, train, "data.train")
    return train, held_out


def trained_on(data: DataConfig) -> Questions:
    """The questions that a run with these settings learns from.

    Raises:
        DataError: as `load_questions`; or none are left.
    """
    train = load_questions(data.train)
    if data.held_out == "split":
        train, _ = split_held_out(train, data.held_out_questions)
    return train


def check_unseen(held_out: Sequence[Question], train: Sequence[Question], where: str) -> None:
    """
    Args:
        where: what those are trained on by.

    Raises:
        DataError: a held-out question is among those trained on.
    """
    trained = {question.id for question in train}
    both = [question.id for question in held_out if question.id in trained]
    if both:
        raise DataError(
            f"{len(both)} of {len(held_out)} held-out questions, {both[0]!r} first, are also "
            f"trained on ({where}); an evaluation on them would measure memory: name others in "
            "data.held_out"
        )


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


def _check_demonstrations(protocol: SearchProtocol, config: TrainConfig, train: Questions) -> bytes:
    """Reads the file of demonstrations, or encodes the prompts of those that will be built."""
    settings = config.model.warm_start
    if settings is None:
        return b""
    if settings.trajectories is not None:
        data = read_file(settings.trajectories)
        parse_trajectories(data, settings.trajectories, protocol, config)
        return data
    for question in chosen_questions(train, settings, config.seed) if not settings.worlds else ():
        protocol.prompt(question.question)
    return b""
