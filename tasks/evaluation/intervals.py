"""Confidence intervals of proportions and means."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist, fmean, stdev
from typing import TypeAlias

Interval: TypeAlias = tuple[float, float]


def wilson(successes: int, trials: int, confidence: float = 0.95) -> Interval:
    """Wilson's score interval of a proportion, (low, high) within [0, 1].

    Unlike the normal approximation it keeps its coverage near 0 and 1, where a policy starts and
    ends. Source: E. B. Wilson, "Probable inference, the law of succession, and statistical
    inference", JASA 22 (1927) 209-212; recommended by Brown, Cai and DasGupta, "Interval estimation
    for a binomial proportion", Statistical Science 16 (2001) 101-133.

    Trials must be independent: several samples of one question are not, see `wilson_of_means`.

    Raises:
        ValueError: no trials, successes outside [0, trials], or confidence outside (0, 1).
    """
    if trials < 1 or not 0 <= successes <= trials:
        raise ValueError(
            f"{successes} successes of {trials} trials, expected 0 <= successes <= trials >= 1"
        )
    return _score_interval(successes / trials, trials, confidence)


def wilson_of_means(means_N: Sequence[float], samples: int, confidence: float = 0.95) -> Interval:
    """Wilson's interval where each of N questions was tried `samples` times, (low, high).

    Samples of one question are alike, so N x samples trials are worth fewer. The interval is
    Wilson's for the effective number of trials n = p (1 - p) / Var(p), between N (the samples of a
    question all agree, or all of them are equal) and N x samples (they are independent); with one
    sample it is `wilson`. Source: the design effect of Kish, "Survey Sampling" (1965) chapter 8, in
    Wilson's formula: Dean and Pagano, "Evaluating confidence interval methods for binomial
    proportions in clustered surveys", J. Survey Statistics and Methodology 3 (2015) 484-503.

    Args:
        means_N: each question's share of successes, in [0, 1].

    Raises:
        ValueError: no questions, no samples, a share outside [0, 1], or a bad confidence.
    """
    if samples < 1 or not all(0 <= mean <= 1 for mean in means_N):
        raise ValueError(f"{samples} samples a question, expected >= 1, and shares in [0, 1]")
    count = len(means_N)
    if count == 0:
        raise ValueError("no questions, expected at least one")
    share = math.fsum(means_N) / count
    variance = math.fsum((mean - share) ** 2 for mean in means_N) / count**2
    trials = count * samples
    if variance > 0:
        trials = share * (1 - share) / variance
    elif share in (0.0, 1.0):
        trials = count  # all alike: nothing shows that the samples are independent
    return _score_interval(share, min(max(trials, count), count * samples), confidence)


def t_interval(values_N: Sequence[float], confidence: float = 0.95) -> Interval | None:
    """Student's t interval of a mean, mean -+ t s / sqrt(N), for few runs with different seeds.

    It supposes that the N values are independent and about normal. None for fewer than two.
    Source: Student, "The probable error of a mean", Biometrika 6 (1908) 1-25.

    Raises:
        ValueError: confidence outside (0, 1).
    """
    if len(values_N) < 2:
        return None
    half = t_quantile((1 + confidence) / 2, len(values_N) - 1)
    half *= stdev(values_N) / math.sqrt(len(values_N))
    return fmean(values_N) - half, fmean(values_N) + half


def t_quantile(probability: float, degrees: int) -> float:
    """The value that Student's t with so many degrees of freedom stays below with `probability`.

    Found by bisection of its distribution function, which is a finite sum for whole degrees:
    Abramowitz and Stegun, "Handbook of Mathematical Functions" (1964), 26.7.3 and 26.7.4.

    Raises:
        ValueError: degrees < 1, or probability outside (0, 1).
    """
    if degrees < 1 or not 0 < probability < 1:
        raise ValueError(f"probability {probability}, degrees {degrees}: expected (0, 1) and >= 1")
    if probability < 0.5:
        return -t_quantile(1 - probability, degrees)
    low, high = 0.0, math.pi / 2
    for _ in range(100):  # halves the angle's range to below a float's precision
        middle = (low + high) / 2
        if (1 + _t_central(middle, degrees)) / 2 < probability:
            low = middle
        else:
            high = middle
    return math.tan(low) * math.sqrt(degrees)


def _t_central(angle: float, degrees: int) -> float:
    """P(|t| < tan(angle) sqrt(degrees))."""
    sine, cosine = math.sin(angle), math.cos(angle)
    term, total = (1.0 if degrees % 2 == 0 else cosine), 0.0
    for n in range(1 if degrees % 2 == 0 else 2, degrees, 2):
        total += term
        term *= cosine * cosine * n / (n + 1)
    if degrees % 2 == 0:
        return sine * total
    return 2 / math.pi * (angle + (sine * total if degrees > 1 else 0.0))


def _score_interval(share: float, trials: float, confidence: float) -> Interval:
    """Wilson's formula; the number of trials need not be whole."""
    if not 0 < confidence < 1:
        raise ValueError(f"confidence is {confidence}, expected a number between 0 and 1")
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    spread = z * z / trials
    centre = (share + spread / 2) / (1 + spread)
    half = z * math.sqrt((share * (1 - share) + spread / 4) / trials) / (1 + spread)
    # Exact at the ends, where rounding would leave 1e-17.
    return (0.0 if share == 0 else centre - half), (1.0 if share == 1 else centre + half)
