"""What a step was like: numbers of a batch, and the run's history as JSON lines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any

from tasks.evaluation.breakdown import Row
from tasks.evaluation.intervals import Interval
from tasks.rollout.refill import is_uniform
from tasks.rollout.trajectory import GroupSummary


@dataclass(frozen=True, slots=True)
class BatchStats:
    """Means over the trajectories of a batch of groups.

    All groups that were sampled count, also those that are not trained on: else the reward of a
    step that was filled up would be that of questions of middling difficulty.

    uniform_groups: share of groups whose trajectories all have the same reward (no gradient).
    dropped: groups left out: the reward function failed on them, or their unit on every try.
    search_r1: exact match as Search-R1 counts it, for comparison with published runs.
    refilled_groups: further questions asked for, in place of groups that failed and, unless they
        are kept, of uniform ones.
    trained_groups: what the update gets.
    gold_recall: share of the questions' gold titles that an observation showed; None where no
        question names any.
    """

    groups: int
    trajectories: int
    tokens: int
    sampled_tokens: int
    reward: float
    exact_match: float
    f1: float
    answered: float
    truncated: float
    searches: float
    invalid_actions: float
    uniform_groups: float
    dropped: int = 0
    search_r1: float = 0.0
    refilled_groups: int = 0
    trained_groups: int = 0
    gold_recall: float | None = None

    @property
    def valid_actions(self) -> float:
        """Share of the actions that were a search or an answer; 1 where there was none."""
        valid = self.searches + self.answered
        return valid / (valid + self.invalid_actions) if valid + self.invalid_actions else 1.0


def batch_stats(
    groups: Sequence[GroupSummary],
    dropped: int = 0,
    refilled: int = 0,
    trained: int | None = None,
) -> BatchStats:
    """Of the groups sampled; `trained` of them by default all."""
    all_of = [t for group in groups for t in group.trajectories]
    recalls = [t.gold_recall for t in all_of if t.gold_recall is not None]
    return BatchStats(
        groups=len(groups),
        trajectories=len(all_of),
        tokens=sum(t.tokens for t in all_of),
        sampled_tokens=sum(t.sampled_tokens for t in all_of),
        reward=fmean(t.reward for t in all_of),
        exact_match=fmean(t.exact_match for t in all_of),
        f1=fmean(t.f1 for t in all_of),
        answered=fmean(t.end == "answered" for t in all_of),
        truncated=fmean(t.end == "truncated" for t in all_of),
        searches=fmean(t.searches for t in all_of),
        invalid_actions=fmean(t.invalid_actions for t in all_of),
        uniform_groups=fmean(is_uniform(group) for group in groups),
        dropped=dropped,
        search_r1=fmean(t.search_r1 for t in all_of),
        refilled_groups=refilled,
        trained_groups=len(groups) if trained is None else trained,
        gold_recall=fmean(recalls) if recalls else None,
    )


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One line of `metrics.jsonl`. Seconds are wall seconds of the stage; bytes are of the store.

    version: published by this step. update: what the trainer group reports (loss, grad_norm, ...).
    """

    step: int
    version: int
    batch: BatchStats
    update: dict[str, float]
    seconds: dict[str, float]
    delta_bytes: int
    full_bytes: int

    def line(self) -> str:
        """The step for a human, one line."""
        stages = " ".join(f"{name} {value:.1f}s" for name, value in self.seconds.items())
        rate = self.batch.sampled_tokens / max(self.seconds["rollout"], 1e-9)
        return (
            f"step {self.step} v{self.version} reward {self.batch.reward:.3f} "
            f"EM {self.batch.exact_match:.3f} {rate:,.0f} tokens/s | {stages} | "
            f"delta {self.delta_bytes:,} of {self.full_bytes:,} bytes"
        )


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Exact match and F1 on held-out questions, greedy and sampled, with 95 % Wilson intervals.

    questions: that were asked; the modes' own `dropped` are not in their scores.
    rows: the same by kind and level of question, with the rest that was counted.
    """

    version: int
    step: int
    questions: int
    greedy: BatchStats
    sampled: BatchStats
    greedy_interval: Interval
    sampled_interval: Interval
    rows: tuple[Row, ...] = ()
    seconds: float = 0.0

    @property
    def left_out(self) -> str:
        """To be said after the number of questions; empty where all of them were scored."""
        greedy, sampled = self.greedy.dropped, self.sampled.dropped
        if not greedy + sampled:
            return ""
        return f" (less {greedy} greedy and {sampled} sampled on which the reward failed)"

    def line(self) -> str:
        """The evaluation for a human, one line."""
        return (
            f"evaluation v{self.version} on {self.questions} questions{self.left_out}: EM sampled "
            f"{_with(self.sampled.exact_match, self.sampled_interval)}, greedy "
            f"{_with(self.greedy.exact_match, self.greedy_interval)}"
        )


def _with(value: float, interval: tuple[float, float]) -> str:
    return f"{value:.3f} [{interval[0]:.3f}, {interval[1]:.3f}]"


@dataclass(slots=True)
class History:
    """All records of a run, in order."""

    steps: list[StepRecord] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)
    loads: dict[str, int] = field(default_factory=dict)

    def to_jsonl(self) -> bytes:
        """Each record on a line of its own, its kind in `kind`."""
        rows = [{"kind": "step", **asdict(record)} for record in self.steps]
        rows += [{"kind": "evaluation", **asdict(record)} for record in self.evaluations]
        rows.append({"kind": "loads", **self.loads})
        return "".join(json.dumps(row) + "\n" for row in rows).encode()

    def evaluation_at(self, step: int) -> Evaluation | None:
        """The evaluation of the policy that has been trained so many steps."""
        return next((e for e in reversed(self.evaluations) if e.step == step), None)

    def add_step(self, record: StepRecord) -> None:
        """Takes a step's record. One that a resumed run has repeated to the same version stays as
        it was, with the seconds its sampling took; where it came to another version, what was
        recorded from there on belongs to a line that is left."""
        there = next((one for one in self.steps if one.step == record.step), None)
        if there is not None and there.version == record.version:
            return
        self.steps[:] = [one for one in self.steps if one.step < record.step] + [record]
        self.evaluations[:] = [one for one in self.evaluations if one.step <= record.step]

    def add_evaluation(self, record: Evaluation) -> None:
        """Takes an evaluation; it replaces one of the same step."""
        kept = [one for one in self.evaluations if one.step != record.step]
        self.evaluations[:] = sorted([*kept, record], key=lambda one: one.step)

    @staticmethod
    def from_jsonl(data: bytes) -> History:
        """What `to_jsonl` wrote."""
        history = History()
        for line in data.decode().splitlines():
            row = json.loads(line)
            kind = row.pop("kind")
            if kind == "step":
                history.steps.append(StepRecord(**{**row, "batch": BatchStats(**row["batch"])}))
            elif kind == "evaluation":
                history.evaluations.append(_evaluation(row))
        return history


def _evaluation(row: dict[str, Any]) -> Evaluation:
    for name in ("greedy", "sampled"):
        row[name] = BatchStats(**row[name])
        row[f"{name}_interval"] = tuple(row[f"{name}_interval"])
    row["rows"] = tuple(Row.from_dict(one) for one in row.get("rows", ()))
    return Evaluation(**row)
