"""Is the difference between two evaluations more than the questions that were drawn?

Both evaluations answer the same questions, so they are compared question by question: how hard a
question is cancels. The unit is the question; with k samples of each, its value is their mean.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from tasks.evaluation.intervals import Interval

RESAMPLES = 10_000
# Numbers drawn at a time: 32 MB, whatever the number of questions.
_BLOCK = 4_000_000


@dataclass(frozen=True, slots=True)
class Difference:
    """Mean of `first - second` over the questions, its interval, and a two-sided p-value."""

    mean: float
    interval: Interval
    p_value: float
    questions: int


def paired_bootstrap(
    first_N: ArrayLike,
    second_N: ArrayLike,
    seed: int = 0,
    resamples: int = RESAMPLES,
    confidence: float = 0.95,
) -> Difference:
    """Compares two evaluations of the same N questions.

    The interval is the percentile bootstrap of the mean paired difference, questions drawn with
    replacement: Efron and Tibshirani, "An Introduction to the Bootstrap" (1993) chapter 13; for
    language systems Koehn, "Statistical significance tests for machine translation evaluation"
    (EMNLP 2004). The p-value is of the paired randomisation test, which turns the sign of each
    question's difference by a coin: exact at any N, where the bootstrap's own p-value claims far
    too much for a few questions that all agree (Noreen 1989; Smucker, Allan and Carterette, CIKM
    2007). It is at least 1 / (resamples + 1). Below some fifty questions the interval is a little
    narrow, so that it may exclude 0 at a p above 0.05: believe the p-value.

    Args:
        first_N, second_N: a value a question (exact match as 0 or 1, F1, or a mean over samples),
            float [N], in the same order of questions.

    Raises:
        ValueError: the two differ in length, are not one-dimensional, have fewer than two
            questions, or hold a value that is not finite.
    """
    first, second = np.asarray(first_N, np.float64), np.asarray(second_N, np.float64)
    if first.ndim != 1 or first.shape != second.shape or len(first) < 2:
        raise ValueError(
            f"values of shapes {first.shape} and {second.shape}, expected the same N >= 2 questions"
        )
    difference_N = first - second
    interval = bootstrap_mean(difference_N, seed, resamples, confidence)
    observed = float(difference_N.mean())
    # Differences are multiples of 1/k: sums that are equal must compare equal.
    as_far = np.abs(_flipped_means(difference_N, seed, resamples)) >= abs(observed) - 1e-12
    p_value = (1 + int(as_far.sum())) / (resamples + 1)
    return Difference(observed, interval, p_value, len(difference_N))


def bootstrap_mean(
    values_N: ArrayLike, seed: int = 0, resamples: int = RESAMPLES, confidence: float = 0.95
) -> Interval:
    """Percentile bootstrap interval of a mean over questions (F1, say, which is no proportion).

    How often each *distinct* value is drawn is multinomial, so that is what is drawn: the same
    distribution as questions with replacement, and for exact match two numbers in place of N.

    Values that are all equal give an interval of no width: no resample can show what was not seen
    (Wilson's interval of exact match can).

    Raises:
        ValueError: no values, or one that is not finite.
    """
    values = np.asarray(values_N, np.float64)
    if values.ndim != 1 or len(values) == 0 or not np.isfinite(values).all():
        raise ValueError(f"values of shape {values.shape}, expected N >= 1 finite ones")
    distinct_D, counts_D = np.unique(values.round(12), return_counts=True)
    rng = np.random.default_rng(seed)
    means = [
        rng.multinomial(len(values), counts_D / len(values), rows) @ distinct_D / len(values)
        for rows in _blocks(resamples, len(distinct_D))
    ]
    tail = (1 - confidence) / 2
    low, high = np.quantile(np.concatenate(means), [tail, 1 - tail])
    return float(low), float(high)


def _flipped_means(difference_N: np.ndarray, seed: int, resamples: int) -> np.ndarray:
    """Means of the differences, each with a random sign; [resamples].

    Of m differences of one size, a binomial number stays positive.
    """
    sizes_D, counts_D = np.unique(np.abs(difference_N).round(12), return_counts=True)
    rng = np.random.default_rng((seed, 1))  # another stream than the resamples'
    means = [
        (2 * rng.binomial(counts_D, 0.5, (rows, len(sizes_D))) - counts_D)
        @ sizes_D
        / len(difference_N)
        for rows in _blocks(resamples, len(sizes_D))
    ]
    return np.concatenate(means)


def _blocks(resamples: int, count: int) -> Iterator[int]:
    """How many resamples to draw at a time."""
    most = max(1, _BLOCK // count)
    for start in range(0, resamples, most):
        yield min(most, resamples - start)
