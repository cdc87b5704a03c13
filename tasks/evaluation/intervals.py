"""Confidence intervals of proportions."""

from __future__ import annotations

import math
from statistics import NormalDist


def wilson(successes: int, trials: int, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval of a proportion, (low, high) within [0, 1].

    Unlike the normal approximation it keeps its coverage near 0 and 1, where a policy starts and
    ends. Source: E. B. Wilson, "Probable inference, the law of succession, and statistical
    inference", JASA 22 (1927) 209-212; recommended by Brown, Cai and DasGupta, "Interval estimation
    for a binomial proportion", Statistical Science 16 (2001) 101-133.

    Trials must be independent: several samples of one question are not, so give it questions.

    Raises:
        ValueError: no trials, successes outside [0, trials], or confidence outside (0, 1).
    """
    if trials < 1 or not 0 <= successes <= trials:
        raise ValueError(
            f"{successes} successes of {trials} trials, expected 0 <= successes <= trials >= 1"
        )
    if not 0 < confidence < 1:
        raise ValueError(f"confidence is {confidence}, expected a number between 0 and 1")
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    share, spread = successes / trials, z * z / trials
    centre = (share + spread / 2) / (1 + spread)
    half = z * math.sqrt((share * (1 - share) + spread / 4) / trials) / (1 + spread)
    # Exact at the ends, where rounding would leave 1e-17.
    low = 0.0 if successes == 0 else centre - half
    high = 1.0 if successes == trials else centre + half
    return low, high
