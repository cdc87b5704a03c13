"""What both sides of the codec remember of how each value has moved since the last anchor, or since
its publisher took the run over.

One byte a value, `level << 2 | moved << 1 | down`:

    level  of the velocity's magnitude, 0..63: 0 is none, L is 2**((L - 13) / 3) units in the last
           place a step
    moved  whether the value changed in the last step
    down   whether the velocity points down

The velocity is an exponential average, v <- (v + d) / 2, where d is the signed distance of a step
in units in the last place of the value at that time, 0 where nothing changed. For all values that
do not change this takes 12 off the byte, stopping at 0, after `moved` is cleared: one pass at the
speed of memory. Exactly: v, and the bounds between levels, are integers in 2**-10 units, V(L) =
floor(2**(10 + (L - 13) / 3) + 1/2) and B(L) = floor(2**(10 + (L - 13.5) / 3) + 1/2); a changed
value gets |v| = floor(|+-V(level) + d * 2**10| / 2), the largest L with B(L) <= |v| (0 where there
is none), and down only where L > 0. The velocity used is the one before the step.

Publisher and readers advance it by the same deltas, so it is never sent. It starts at zero with
every anchor: a reader that begins there needs no past. It does so, too, before the first delta of a
publisher that took the run over (a gang that formed anew) and has no past itself. It costs a byte a
value of host memory on each trainer rank (for its own rows) and once on each rollout host.
"""

from __future__ import annotations

import numpy as np

from tasks.weights import kernels
from tasks.weights.bits import Bits


def no_history(count: int) -> Bits:
    """The history of `count` values at its beginning, uint8."""
    return np.zeros(count, np.uint8)


def advance(history: Bits, old: Bits, indices: Bits, values: Bits) -> None:
    """Brings the history past a step, in place.

    Args:
        old: the pattern before the step, shape (n,).
        indices, values: what the step changed, see `codec.Change`.
    """
    sign = 0x8000 if old.itemsize == 2 else 0x80000000
    kernels.advance(history, old, indices, values, sign)
