"""What is asked of three gradients: numbers within the stage-wise bound, and NaN where it belongs.

Stage-wise: the exact gradients at the O and LSE that the kernel read (float64 oracle), so that the forward pass and its
bound play no part.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from verify.bounds.backward_output import BackwardBound
from verify.cases import GRADIENTS, Array, Mask
from verify.compare import ratio
from verify.mutate.kill import BOUND, SPECIAL, Kill
from verify.oracle.backward_reference import Gradients


def wrong(
    probe: str,
    got: Mapping[str, Array],
    exact: Gradients,
    bound: BackwardBound,
    *,
    may_be_nan: Mapping[str, Mask] | None = None,
    where: str = "",
) -> Kill | None:
    """The worst element that is not what it has to be, or None.

    Args:
        got: 2-D arrays by name, those that were wanted.
        may_be_nan: where a NaN is as good as the number, by output: 0 times what a hidden pair's row holds.
    """
    worst: Kill | None = None
    for output in filter(got.__contains__, GRADIENTS):
        have, want = got[output], getattr(exact, output)
        room = getattr(bound, output) + getattr(exact, f"{output}_err")
        lost = np.isnan(want)
        if np.isfinite(have[lost]).any():
            at = tuple(map(int, np.argwhere(lost & np.isfinite(have))[0]))
            return Kill(SPECIAL, probe, None, f"{output}{where}{list(at)}: got {have[at]}, must be NaN or an infinity")
        if may_be_nan is not None and output in may_be_nan:
            lost = lost | (may_be_nan[output] & np.isnan(have))
        with np.errstate(invalid="ignore"):
            r = np.where(lost, 0.0, ratio(have, want, room))
        if r.max(initial=0.0) > 1 and (worst is None or worst.ratio is None or r.max() > worst.ratio):
            at = tuple(map(int, np.unravel_index(int(r.argmax()), r.shape)))
            text = f"{output}{where}{list(at)}: got {have[at]}, want {want[at]}, bound {room[at]:.3e}"
            worst = Kill(BOUND, probe, float(r[at]), text)
    return worst
