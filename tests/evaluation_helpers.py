"""Evaluations and reports made up for tests: hand-made trajectories, with a real tokenizer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from tasks.data.questions import Kind, Question
from tasks.evaluation.breakdown import Mode, breakdown
from tasks.evaluation.outcomes import compare, outcomes
from tasks.evaluation.reader import choose, reading
from tasks.evaluation.report import Report
from tasks.evaluation.scoring import exact_match, f1
from tasks.metrics import Evaluation, History, StepRecord, batch_stats
from tasks.presets import resolve
from tasks.rollout.trajectory import Group, GroupSummary, Trajectory, Turn, summarise
from tasks.training.policy import load_tokenizer

TINY = Path(__file__).resolve().parent.parent / "deployments" / "policies" / "tiny"


@cache
def tokenizer() -> Any:
    return load_tokenizer(TINY, True)


def question(
    number: int, kind: Kind = "bridge", level: str = "hard", gold: str = "1942"
) -> Question:
    film = f"The Quiet Harbor {number}"
    text = f"In which year was the director of {film} born?"
    return Question(f"q{number}", text, (gold,), kind, level, (), (film, "Ada Brandt"), "")


def trajectory(
    asked: Question,
    answer: str | None,
    seen: str = "Doc 1(Title: Ada Brandt) Ada Brandt was born in Port Ardin in 1942.",
    found: Sequence[str] = ("Ada Brandt",),
    said: str = "<think> I need the director. </think>",
) -> Trajectory:
    """One search whose result is `seen`, then an answer, or an invalid action where it is None."""
    encode = tokenizer().encode
    parts = [
        (encode(f"<|im_start|>user\n{asked.question}<|im_end|>\n<|im_start|>assistant\n"), False),
        (encode(f"{said}<search> {asked.gold_titles[0]} </search>"), True),
        (encode(f"\n\n<information>{seen}\n</information>\n\n"), False),
        (encode("I do not know." if answer is None else f"<answer> {answer} </answer>"), True),
    ]
    ids = np.array([i for part, _ in parts for i in part], np.int32)
    mask = np.array([own for part, own in parts for _ in part], bool)
    ends = np.cumsum([len(part) for part, _ in parts]).tolist()
    spread = -(np.abs(np.sin(np.arange(len(ids)) * 1.7)) ** 6) * 6
    score = 0.0 if answer is None else float(exact_match(answer, asked.answers))
    return Trajectory(
        ids=ids,
        loss_mask=mask,
        logprobs=np.where(mask, spread, 0).astype(np.float32),
        versions=np.where(mask, 10, -1).astype(np.int32),
        prompt_tokens=ends[0],
        turns=(
            Turn("search", ends[0], ends[1], ends[2], asked.gold_titles[0], ("Elsewhere",)),
            Turn("invalid" if answer is None else "answer", ends[2], ends[3], ends[3]),
        ),
        end="out_of_turns" if answer is None else "answered",
        answer=answer,
        exact_match=bool(score),
        f1=0.0 if answer is None else f1(answer, asked.answers),
        reward=score,
        gold_titles=asked.gold_titles,
        gold_found=tuple(found),
    )


def group(asked: Question, *trajectories: Trajectory) -> Group:
    return Group(f"unit-{asked.id}", asked.id, trajectories)


def summary(made: Group) -> GroupSummary:
    summaries = tuple(summarise(t) for t in made.trajectories)
    return GroupSummary(made.unit_id, made.question_id, made.unit_id, "worker", 10, 1.0, summaries)


def evaluation(
    asked: Sequence[Question], groups: dict[Mode, list[Group]], version: int = 30, step: int = 30
) -> tuple[Evaluation, dict[Mode, list[GroupSummary]]]:
    found: dict[Mode, list[GroupSummary]] = {m: [summary(g) for g in groups[m]] for m in groups}
    rows = {mode: breakdown(mode, of, asked) for mode, of in found.items()}
    made = Evaluation(
        version=version,
        step=step,
        questions=len(asked),
        greedy=batch_stats(found["greedy"]),
        sampled=batch_stats(found["sampled"]),
        greedy_interval=rows["greedy"][0].exact_match_interval,
        sampled_interval=rows["sampled"][0].exact_match_interval,
        rows=(*rows["greedy"], *rows["sampled"]),
    )
    return made, found


def history(steps: int, last: Evaluation) -> History:
    """A run that got better: smooth curves, evaluated every five steps."""
    made = History()
    for step in range(steps):
        done = step / max(1, steps - 1)
        wave = 0.03 * math.sin(step * 1.3)
        batch = replace(
            last.sampled,
            groups=24,
            trajectories=192,
            tokens=int(192 * (190 - 40 * done)),
            sampled_tokens=int(192 * (52 - 14 * done)),
            reward=0.2 + 0.65 * done + wave,
            exact_match=0.2 + 0.65 * done + wave,
            answered=0.7 + 0.3 * done,
            searches=1.1 + 0.8 * done,
            invalid_actions=0.4 * (1 - done),
            gold_recall=0.5 + 0.45 * done,
        )
        update = {
            "grad_norm": 0.2 + wave,
            "entropy": 0.9 - 0.5 * done + wave,
            "mismatch_kl": 1e-5 * (1 + math.sin(step)),
            "mismatch_max": 4e-4 * (1.5 + math.cos(step)),
        }
        seconds = {"rollout": 3 + wave * 9, "update": 5.1 - wave * 5, "publish": 0.2}
        made.steps.append(
            StepRecord(step, step + 1, batch, update, seconds, 160_000 + 900 * step, 1_430_000)
        )
    for step in range(0, steps + 1, 5):
        em = 0.2 + 0.65 * step / max(1, steps)
        made.evaluations.append(
            replace(
                last,
                step=step,
                version=step,
                sampled=replace(last.sampled, exact_match=em),
                greedy=replace(last.greedy, exact_match=em + 0.04),
                sampled_interval=(em - 0.04, em + 0.04),
                greedy_interval=(em, em + 0.08),
            )
        )
    made.evaluations[-1] = last
    return made


def report(count: int = 24, seen: str | None = None, said: str | None = None) -> Report:
    """A report over `count` questions, two thirds of them answered rightly."""
    kinds: tuple[Kind, ...] = ("bridge", "comparison")
    levels = ("easy", "medium", "hard")
    asked = [question(i, kinds[i % 4 == 3], levels[i % 3]) for i in range(count)]
    texts = {key: value for key, value in {"seen": seen, "said": said}.items() if value is not None}
    answers = ["1942", "born in 1942", "1942", None, "1942", "1942"]

    def groups(shift: int) -> list[Group]:
        return [
            group(one, trajectory(one, answers[(i + shift) % 6], **texts))
            for i, one in enumerate(asked)
        ]

    made: dict[Mode, list[Group]] = {"greedy": groups(0), "sampled": groups(1)}
    last, found = evaluation(asked, made)
    worse: dict[Mode, list[GroupSummary]] = {
        mode: [summary(group(q, trajectory(q, answers[i % 4]))) for i, q in enumerate(asked)]
        for mode in made
    }
    ids = [q.id for q in asked]
    place = {one: i for i, one in enumerate(ids)}
    readings = [
        reading(
            c.mode,
            asked[place[c.group.question_id]],
            made[c.mode][place[c.group.question_id]],
            c.number,
            tokenizer(),
            resolve("tiny").rollout,
        )
        for c in choose(found)
    ]
    past = history(30, last)
    return Report(
        name="tiny-20260101-120000-ab12",
        config=resolve("tiny"),
        history=past,
        evaluation=last,
        readings=readings,
        comparisons=compare(outcomes(found, ids), outcomes(worse, ids)) if count > 1 else (),
        against=past.evaluations[0] if count > 1 else None,
    )
