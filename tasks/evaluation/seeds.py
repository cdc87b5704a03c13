"""Several runs of one recipe that differ in their seed: means, intervals, differences.

An interval here is Student's t over the seeds: what another seed might have given. The intervals of
one run's evaluation (`tasks.evaluation.breakdown`) are about the questions instead.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean

from tasks.evaluation.breakdown import MODES, Mode
from tasks.evaluation.intervals import Interval, t_interval
from tasks.metrics import Evaluation

DEFAULT = "default"
"""The recipe as it is, to which variants are compared."""


@dataclass(frozen=True, slots=True)
class SeedRun:
    """One run of a sweep; one that failed says why and has no evaluations."""

    variant: str
    seed: int
    seconds: float
    run: str = ""
    evaluations: tuple[Evaluation, ...] = ()
    error: str = ""


@dataclass(frozen=True, slots=True)
class Spread:
    """A value over seeds: mean, 95 % t interval (None below two seeds), and each seed's.

    The interval of a share is cut to [0, 1]: with two or three seeds it may reach beyond.
    """

    mean: float
    interval: Interval | None
    values: tuple[float, ...]

    def text(self, sign: str = "") -> str:
        """For a human: `0.831 [0.790, 0.872]`."""
        if self.interval is None:
            return f"{self.mean:{sign}.3f}"
        low, high = self.interval
        return f"{self.mean:{sign}.3f} [{low:{sign}.3f}, {high:{sign}.3f}]"


@dataclass(frozen=True, slots=True)
class StepRow:
    """Held-out exact match of a variant after `step` steps: of all questions, and by kind."""

    variant: str
    step: int
    seeds: int
    exact_match: dict[tuple[Mode, str], Spread]


@dataclass(frozen=True, slots=True)
class VariantRow:
    """A variant at its last evaluation, with its difference to the default, seed by seed.

    versus: None for the default itself, or without a seed that both have finished.
    """

    variant: str
    step: int
    seeds: int
    exact_match: dict[Mode, Spread]
    versus: dict[Mode, Spread] | None
    seconds: float


def spread(values: Sequence[float], share: bool = True) -> Spread:
    """Of one value a seed.

    Args:
        share: they are shares, in [0, 1]; a difference of shares is none.
    """
    found = t_interval(values)
    if found is not None and share:
        found = max(found[0], 0.0), min(found[1], 1.0)
    return Spread(fmean(values), found, tuple(values))


def step_rows(runs: Sequence[SeedRun]) -> list[StepRow]:
    """A row a variant and evaluated step, over the seeds that were evaluated there."""
    rows = []
    for variant, done in _by_variant(runs):
        steps = sorted({e.step for run in done for e in run.evaluations})
        for step in steps:
            found = [e for run in done if (e := _at(run, step)) is not None]
            values: dict[tuple[Mode, str], list[float]] = {}
            for evaluation in found:
                for row in evaluation.rows:
                    if row.by in ("all", "kind"):
                        values.setdefault((row.mode, row.label), []).append(row.exact_match)
            cells = {key: spread(of) for key, of in values.items()}
            rows.append(StepRow(variant, step, len(found), cells))
    return rows


def variant_rows(runs: Sequence[SeedRun]) -> list[VariantRow]:
    """A row a variant, the default's first."""
    done_by = dict(_by_variant(runs))
    base = {run.seed: _last(run) for run in done_by.get(DEFAULT, [])}
    rows = []
    for variant, done in done_by.items():
        last = [_last(run) for run in done]
        shared = [(_last(run), base[run.seed]) for run in done if run.seed in base]
        versus: dict[Mode, Spread] | None = None
        if variant != DEFAULT and shared:
            versus = {
                mode: spread(
                    [_em(mine, mode) - _em(other, mode) for mine, other in shared], share=False
                )
                for mode in MODES
            }
        rows.append(
            VariantRow(
                variant,
                max(e.step for e in last),
                len(done),
                {mode: spread([_em(e, mode) for e in last]) for mode in MODES},
                versus,
                fmean(run.seconds for run in done),
            )
        )
    return rows


def to_json(runs: Sequence[SeedRun]) -> bytes:
    """For the store: every run with its evaluations."""
    return json.dumps([asdict(run) for run in runs], indent=1).encode()


def _by_variant(runs: Sequence[SeedRun]) -> Iterator[tuple[str, list[SeedRun]]]:
    """Variants in order of appearance with their runs that succeeded, if any."""
    for variant in dict.fromkeys(run.variant for run in runs):
        done = [run for run in runs if run.variant == variant and run.evaluations]
        if done:
            yield variant, done


def _at(run: SeedRun, step: int) -> Evaluation | None:
    return next((e for e in reversed(run.evaluations) if e.step == step), None)


def _last(run: SeedRun) -> Evaluation:
    return run.evaluations[-1]


def _em(evaluation: Evaluation, mode: Mode) -> float:
    return getattr(evaluation, mode).exact_match
