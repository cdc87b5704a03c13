"""Demonstrations, the warm start, and the tiny policy that ships."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from tasks.config import TrainConfig, WarmStartConfig, resolve
from tasks.data.hotpotqa import load_questions
from tasks.data.questions import pool
from tasks.errors import ConfigError
from tasks.retrieval.bm25 import build
from tasks.rollout.protocol import SearchProtocol
from tasks.training import tiny_policy
from tasks.training.demonstrations import Corpus, Demonstrator, demonstrations
from tasks.training.policy import count_parameters
from tasks.training.warm_start import PROVENANCE, policy_key, settings_of, warm_start

pytestmark = [pytest.mark.fast, pytest.mark.timeout(180)]

SHIPPED = Path(__file__).resolve().parent.parent / "deployments" / "policies" / "tiny"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny_policy.build_tokenizer()


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    questions = list(load_questions("miniature:held_out"))
    return Corpus(questions, build(pool(questions), 1.2, 0.75))


def config(**warm: Any) -> TrainConfig:
    return resolve("tiny", {"model": {"warm_start": {"demonstrations": 40, **warm}}})


def protocol(tokenizer: Any) -> SearchProtocol:
    made = config()
    return SearchProtocol(tokenizer, made.model, made.rollout)


def spoken(tokenizer: Any, demonstration: Any) -> str:
    return tokenizer.decode(demonstration.ids[demonstration.loss_mask])


def test_a_good_demonstration_searches_the_gold_titles_and_answers(
    tokenizer: Any, corpus: Corpus
) -> None:
    play = Demonstrator(protocol(tokenizer), corpus.retriever, 3, 512)
    for question in corpus.questions[:50]:
        made = play.good(question)
        assert made is not None
        first, second = question.gold_titles
        wanted = (
            f"<search> {first}</search><search> {second}</search>"
            f"<answer> {question.answers[0]}</answer>"
        )
        assert spoken(tokenizer, made) == wanted
        whole = tokenizer.decode(made.ids)
        assert question.question in whole
        assert whole.count("<information>") == 2


def test_bad_demonstrations_are_fluent_and_mostly_wrong(tokenizer: Any, corpus: Corpus) -> None:
    play = Demonstrator(protocol(tokenizer), corpus.retriever, 3, 512)
    rng = random.Random(0)
    right = 0
    for question in corpus.questions[:200]:
        made = play.bad(question, rng)
        assert made is not None
        said = spoken(tokenizer, made)
        assert said.count("<answer>") == said.count("</answer>") == 1
        right += f"<answer> {question.answers[0]}</answer>" in said
    assert right < 30


def test_one_that_outgrows_the_context_is_left_out(tokenizer: Any, corpus: Corpus) -> None:
    play = Demonstrator(protocol(tokenizer), corpus.retriever, 3, 64)
    assert play.good(corpus.questions[0]) is None
    short = resolve(
        "tiny",
        {
            "model": {"context": 100, "warm_start": {"demonstrations": 4}},
            "rollout": {"max_prompt_tokens": 99},
        },
    )
    model = tiny_policy.build_model(tokenizer, 0)
    with pytest.raises(ConfigError, match="none of 4 demonstrations"):
        warm_start(short, model, tokenizer, corpus, lambda *_: None)


def test_good_first_then_the_mixture(tokenizer: Any, corpus: Corpus) -> None:
    made = config(demonstrations=60, good_first=20, good_share=0.01)
    shown = demonstrations(protocol(tokenizer), made, settings_of(made), corpus)
    wanted = [f"<answer> {q.answers[0]}</answer>" for q in corpus.questions]
    good = [wanted[i] in spoken(tokenizer, d) for i, d in enumerate(shown)]
    assert all(good[:20])
    assert sum(good[20:]) < 15


def test_worlds_are_all_used_and_never_the_runs_own(tokenizer: Any, corpus: Corpus) -> None:
    made = config(demonstrations=30, worlds=3)
    shown = demonstrations(protocol(tokenizer), made, settings_of(made), corpus)
    assert len(shown) == 30
    assert len({spoken(tokenizer, d) for d in shown}) > 25


def test_fine_tuning_lowers_the_loss_and_says_what_it_did(tokenizer: Any, corpus: Corpus) -> None:
    made = config(demonstrations=120, learning_rate=3e-3, induction_steps=2, batch_size=8)
    model = tiny_policy.build_model(tokenizer, 0)
    losses: list[float] = []
    provenance = warm_start(
        made, model, tokenizer, corpus, lambda step, steps, loss: losses.append(loss)
    )
    assert len(losses) == provenance["steps"] == 2 + 15
    assert losses[-1] < losses[2] - 1
    assert provenance["settings"] == settings_of(made).model_dump()
    json.dumps(provenance)


def test_the_policys_name_depends_on_all_that_makes_it() -> None:
    one = config()
    assert policy_key(one, "base", "index") == policy_key(config(), "base", "index")
    others = [
        policy_key(config(good_share=0.5), "base", "index"),
        policy_key(one, "other", "index"),
        policy_key(one, "base", "other"),
        policy_key(resolve("tiny", {**one.model_dump(), "seed": 5}), "base", "index"),
    ]
    assert len({policy_key(one, "base", "index"), *others}) == 5


def test_settings_are_needed() -> None:
    with pytest.raises(ConfigError, match="warm_start is not set"):
        settings_of(resolve("tiny"))
    assert WarmStartConfig.model_validate({"demonstrations": 1}).good_share == 1.0


def test_induction_batches_predict_only_what_was_seen(tokenizer: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    ids_BT, mask_BT = tiny_policy.induction_batch(len(tokenizer), 8, 72, generator)
    for ids, mask in zip(ids_BT.tolist(), mask_BT.tolist(), strict=True):
        for position in range(72):
            if mask[position]:
                assert ids[position] in ids[:position]


def test_the_shipped_policy_is_what_it_should_be(tokenizer: Any) -> None:
    files = [path for path in SHIPPED.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 4_000_000
    provenance = json.loads((SHIPPED / PROVENANCE).read_text())
    assert provenance["base"] == "new"
    assert WarmStartConfig.model_validate(provenance["settings"]).worlds > 0
    with safe_open(SHIPPED / "model.safetensors", "pt") as weights:
        assert {weights.get_tensor(name).dtype for name in weights.keys()}  # noqa: SIM118 == {torch.bfloat16}
    assert 500_000 <= count_parameters(tiny_policy.build_model(tokenizer, 0)) <= 1_900_000
    shipped = json.loads((SHIPPED / "tokenizer.json").read_text())["model"]["vocab"]
    assert shipped.items() <= tokenizer.get_vocab().items(), "made by the code as it is"
