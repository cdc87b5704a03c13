"""Demonstrations, the warm start, and the tiny policy that ships."""

from __future__ import annotations

import gzip
import json
import random
import shutil
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoTokenizer

from tasks.config import TrainConfig, WarmStartConfig
from tasks.data.hotpotqa import load_questions
from tasks.data.questions import pool
from tasks.errors import ConfigError
from tasks.presets import resolve
from tasks.retrieval.bm25 import build
from tasks.retrieval.retriever import Bm25Retriever
from tasks.rollout.protocol import SearchProtocol
from tasks.training import tiny_policy
from tasks.training.demonstrations import Corpus, Demonstrator, demonstrations
from tasks.training.policy import SMOLLM2, count_parameters, load_tokenizer
from tasks.training.provenance import digest_of_model
from tasks.training.sft import sft_step
from tasks.training.warm_start import (
    PROVENANCE,
    demonstrations_of,
    policy_key,
    settings_of,
    warm_start,
)

pytestmark = [pytest.mark.fast, pytest.mark.timeout(180)]

SHARED = Path(__file__).resolve().parents[2] / "shared"
SHIPPED = Path(__file__).resolve().parent.parent / "deployments" / "policies" / "tiny"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny_policy.build_tokenizer()


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    questions = list(load_questions("miniature:held_out"))
    return Corpus(questions, Bm25Retriever(build(pool(questions), 1.2, 0.75)))


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
    play = Demonstrator(protocol(tokenizer), corpus.retriever, config())
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


@pytest.mark.parametrize("loaded", ["qwen", "smollm2"])
def test_real_questions_in_the_tokens_of_real_policies(loaded: str, tmp_path: Path) -> None:
    """Neither tokenizer has tokens for the tags."""
    path = SHARED / "data" / "hotpotqa_train.jsonl"
    if not path.exists():
        pytest.skip(f"{path} is absent")
    made = resolve("smollm2", {"data": {"train": str(path)}})
    real: Any = _qwen(tmp_path) if loaded == "qwen" else _smollm2()
    play = SearchProtocol(real, made.model, made.rollout)
    questions = load_questions(str(path))[:60]
    retriever = Bm25Retriever(build(pool(questions), 1.2, 0.75))
    demonstrator = Demonstrator(play, retriever, made)
    shown, found = 0, 0
    for question in questions:
        one = demonstrator.good(question)
        if one is None:
            continue
        shown += 1
        titles = question.gold_titles
        actions = [f"<search> {title}</search>" for title in titles]
        assert spoken(real, one) == f"{''.join(actions)}<answer> {question.answers[0]}</answer>"
        prompt = play.prompt(question.question)
        assert one.ids[: len(prompt)].tolist() == prompt
        assert not one.loss_mask[: len(prompt)].any()
        hidden = real.decode(one.ids[~one.loss_mask])
        assert hidden.count("</information>") == len(titles)
        assert len(one.ids) <= made.model.context
        found += sum(f"(Title: {title})" in hidden for title in titles) / len(titles)
    assert shown >= 58
    assert found / shown > 0.9, "a search for a title finds its passage"


def _qwen(folder: Path) -> Any:
    packed = SHARED / "tokenizers" / "qwen2.5"
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(packed / name, folder)
    unpacked = gzip.decompress((packed / "tokenizer.json.gz").read_bytes())
    (folder / "tokenizer.json").write_bytes(unpacked)
    return load_tokenizer(folder, chat=True)


def _smollm2() -> Any:
    spec = find_spec(SMOLLM2.replace("-", "_"))
    if spec is None or spec.origin is None:
        pytest.skip(f"{SMOLLM2} is not installed")
    (file,) = Path(spec.origin).parent.glob("*.gguf")
    return AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)


def test_bad_demonstrations_are_fluent_and_mostly_wrong(tokenizer: Any, corpus: Corpus) -> None:
    play = Demonstrator(protocol(tokenizer), corpus.retriever, config())
    rng = random.Random(0)
    right = 0
    for question in corpus.questions[:200]:
        made = play.bad(question, rng)
        assert made is not None
        said = spoken(tokenizer, made)
        assert said.count("<answer>") == said.count("</answer>") == 1
        right += f"<answer> {question.answers[0]}</answer>" in said
    assert right < 30


@pytest.mark.parametrize(
    "limits",
    [
        {"model": {"context": 64}, "rollout": {"max_prompt_tokens": 63}},
        {"rollout": {"max_search_turns": 1}},
        {"rollout": {"max_new_tokens": 3}},
    ],
)
def test_what_a_run_would_not_allow_is_left_out(
    tokenizer: Any, corpus: Corpus, limits: dict[str, Any]
) -> None:
    model = {**limits.get("model", {}), "warm_start": {"demonstrations": 4}}
    short = resolve("tiny", {**limits, "model": model})
    play = Demonstrator(protocol(tokenizer), corpus.retriever, short)
    assert play.good(corpus.questions[0]) is None
    with pytest.raises(ConfigError, match="none of 4 demonstrations"):
        demonstrations_of(short, tokenizer, corpus)


def test_a_question_without_supporting_facts_and_titles_that_find_nothing(
    tokenizer: Any, corpus: Corpus
) -> None:
    play = Demonstrator(protocol(tokenizer), corpus.retriever, config())
    bare = replace(corpus.questions[0], gold_titles=())
    assert play.good(bare) is None
    assert all(play.bad(bare, random.Random(i)) is None for i in range(20))
    unknown = replace(corpus.questions[0], gold_titles=("!!!", " "), rationale="")
    assert "<search> !!!</search>" in spoken(tokenizer, play.good(unknown))
    for i in range(20):
        assert "</answer>" in spoken(tokenizer, play.bad(unknown, random.Random(i)))


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
    shown = demonstrations_of(made, tokenizer, corpus)
    came = warm_start(
        made, model, shown, len(tokenizer), lambda step, steps, loss: losses.append(loss)
    )
    assert len(losses) == came["steps"] == 2 + 15
    assert losses[-1] < losses[2] - 1
    assert (came["first_loss"], came["final_loss"]) == (losses[0], losses[-1])
    assert (came["demonstrations"], came["left_out"]) == (120, 0)
    assert json.loads(json.dumps(came)) == came


def thinking(**warm: Any) -> TrainConfig:
    settings = {"demonstrations": 40, **warm}
    rollout = {"max_new_tokens": 64}
    return resolve("tiny", {"model": {"warm_start": settings}, "rollout": rollout})


@pytest.mark.parametrize("think", ["comparison", "always"])
def test_how_the_answer_follows_is_noted_before_it(
    tokenizer: Any, corpus: Corpus, think: str
) -> None:
    play = Demonstrator(protocol(tokenizer), corpus.retriever, thinking(think=think))
    seen = set()
    for question in corpus.questions[:50]:
        said = spoken(tokenizer, play.good(question))
        first, second = question.gold_titles
        note = f"<think> {question.rationale}</think>"
        if question.kind != "comparison" and think == "comparison":
            note = ""
        reading = play.reading(question)
        assert (reading is not None) == bool(note)
        if reading is not None:
            answer = f"<answer> {question.answers[0]}</answer>"
            _, colon, concluded = note.rpartition(":")
            assert spoken(tokenizer, reading) == (concluded if colon else "") + answer
            assert tokenizer.decode(reading.ids).endswith(note + answer)
        assert said == (
            f"<search> {first}</search><search> {second}</search>"
            f"{note}<answer> {question.answers[0]}</answer>"
        )
        seen.add((question.kind, bool(note)))
    assert seen == {("comparison", True), ("bridge", think == "always")}


def test_a_note_needs_room_in_a_turn_and_something_to_say(tokenizer: Any, corpus: Corpus) -> None:
    short = thinking(think="always").model_dump() | {"rollout": {"max_new_tokens": 24}}
    play = Demonstrator(protocol(tokenizer), corpus.retriever, resolve("tiny", short))
    bridge = next(question for question in corpus.questions if question.kind == "bridge")
    assert play.good(bridge) is None, "24 tokens hold no two sentences"
    play = Demonstrator(protocol(tokenizer), corpus.retriever, thinking(think="always"))
    assert "<think>" not in spoken(tokenizer, play.good(replace(bridge, rationale="")))


def test_the_miniatures_worlds_say_how_an_answer_follows(tokenizer: Any, corpus: Corpus) -> None:
    made = thinking(think="comparison", worlds=2)
    said = [spoken(tokenizer, one) for one in demonstrations_of(made, tokenizer, corpus)]
    noted = [text.partition("<think> ")[2] for text in said if "<think>" in text]
    assert len(said) == 40
    assert len(noted) > 10
    assert all(len(text.partition("</think>")[0].split(", ")) == 2 for text in noted), noted[0]


def test_readings_come_first_and_then_every_third_batch(tokenizer: Any, corpus: Corpus) -> None:
    made = thinking(think="comparison", readings=100)
    shown = demonstrations_of(made, tokenizer, corpus)
    searched = ["<search>" in spoken(tokenizer, one) for one in shown]
    # 40 in batches of 8: two, one of readings, two, one of readings, and the last; none of both.
    assert searched == [False] * 104 + ([True] * 16 + [False] * 8) * 2 + [True] * 8
    assert [one.is_reading for one in shown] == [not one for one in searched]
    bridges = [question for question in corpus.questions if question.kind == "bridge"]
    assert len(demonstrations_of(made, tokenizer, replace(corpus, questions=bridges))) == 40
    with pytest.raises(ConfigError, match=r"readings is 1 with think = 'never'"):
        config(readings=1)


def test_the_policys_name_depends_on_all_that_makes_it() -> None:
    one = config()
    assert policy_key(one, "base", "index", b"") == policy_key(config(), "base", "index", b"")
    of_a_file = config(trajectories="a.jsonl")
    assert policy_key(of_a_file, "base", "index", b"x") == policy_key(
        config(trajectories="moved.jsonl"), "base", "index", b"x"
    )
    others = [
        policy_key(of_a_file, "base", "index", b"x"),
        policy_key(of_a_file, "base", "index", b"y"),
        policy_key(config(good_share=0.5), "base", "index", b""),
        policy_key(one, "other", "index", b""),
        policy_key(one, "base", "other", b""),
        policy_key(resolve("tiny", {**one.model_dump(), "seed": 5}), "base", "index", b""),
    ]
    assert len({policy_key(one, "base", "index", b""), *others}) == 7


def test_another_recipe_makes_another_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    before = policy_key(config(), "base", "index", b"")
    monkeypatch.setattr("tasks.training.warm_start._RECIPE", 0)
    assert policy_key(config(), "base", "index", b"") != before


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "chat_template.jinja"])
def test_a_model_is_known_by_all_that_it_says_with(tmp_path: Path, name: str) -> None:
    folder = Path(shutil.copytree(SHIPPED, tmp_path / "copy"))
    assert digest_of_model(folder) == digest_of_model(SHIPPED)
    with (folder / name).open("ab") as file:
        file.write(b" ")
    assert digest_of_model(folder) != digest_of_model(SHIPPED)


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
    assert provenance["base"] == "tiny-new"
    made, played = TrainConfig.model_validate(provenance["config"]), resolve("tiny")
    assert made.model.warm_start is not None
    assert made.model.warm_start.worlds > 0
    assert made.retrieval == played.retrieval, "it knows answers of this many passages"
    assert made.rollout == played.rollout
    with safe_open(SHIPPED / "model.safetensors", "pt") as weights:
        dtypes = {weights.get_tensor(name).dtype for name in weights.keys()}  # noqa: SIM118
    assert dtypes == {torch.bfloat16}
    assert 500_000 <= count_parameters(tiny_policy.build_model(tokenizer, 0)) <= 1_900_000
    shipped = json.loads((SHIPPED / "tokenizer.json").read_text())["model"]["vocab"]
    assert shipped.items() <= tokenizer.get_vocab().items(), "made by the code as it is"


@pytest.mark.parametrize("kind", ["prompt", "observation", "corrective", "padding"])
def test_the_loss_is_on_the_policys_tokens_alone(tokenizer: Any, corpus: Corpus, kind: str) -> None:
    """Against the model's own logits; with one more token class in it, the loss is another."""
    play = Demonstrator(protocol(tokenizer), corpus.retriever, config())
    good = play.good(corpus.questions[0])
    corrected = next(
        made
        for i in range(100)
        if (made := play.bad(corpus.questions[1], random.Random(i))) is not None
        and "previous action is invalid" in tokenizer.decode(made.ids)
    )
    assert good is not None
    ids_BT, mask_BT = padded([good, corrected], tokenizer.eos_token_id)
    model = tiny_policy.build_model(tokenizer, 0)
    with torch.no_grad():
        logprobs_BTV = model(input_ids=ids_BT).logits.log_softmax(-1)[:, :-1]
    nll_BT = -logprobs_BTV.gather(-1, ids_BT[:, 1:, None])[..., 0]
    sgd = torch.optim.SGD(model.parameters(), 1e-3)
    loss = sft_step(model, sgd, ids_BT, mask_BT)["loss"]
    assert loss == pytest.approx(nll_BT[mask_BT[:, 1:]].mean().item(), rel=1e-5)

    lengths = [len(good.ids), len(corrected.ids)]
    first = [int(mask.int().argmax()) for mask in mask_BT]
    columns = torch.arange(ids_BT.shape[1])
    more_BT = mask_BT.clone()
    for row, (length, start) in enumerate(zip(lengths, first, strict=True)):
        between = (columns >= start) & (columns < length)
        more_BT[row] |= {
            "prompt": columns < start,
            "observation": between if row == 0 else torch.zeros_like(between),
            "corrective": between if row == 1 else torch.zeros_like(between),
            "padding": columns >= length,
        }[kind]
    assert int(more_BT.sum()) > int(mask_BT.sum())
    assert loss != pytest.approx(nll_BT[more_BT[:, 1:]].mean().item(), rel=1e-4)


def padded(made: list[Any], filler: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Padded with the end-of-sequence token, which the policy also says."""
    length = max(len(one.ids) for one in made) + 3
    ids_BT = torch.full((len(made), length), filler)
    mask_BT = torch.zeros(len(made), length, dtype=torch.bool)
    for row, one in enumerate(made):
        ids_BT[row, : len(one.ids)] = torch.from_numpy(one.ids)
        mask_BT[row, : len(one.ids)] = torch.from_numpy(one.loss_mask)
    return ids_BT, mask_BT
