"""Byte counts as people write them: `192KB`, `192KiB` and `196608` are the same number.

KB = 1024 bytes, as in NVIDIA's shared-memory tables (CUDA Programming Guide, "Technical Specifications per
Compute Capability"), so KB and KiB mean the same here. A fraction is refused rather than rounded: the
budget decides the bytes of a package.
"""

from __future__ import annotations

import operator
import re
from typing import SupportsIndex

from .errors import RequestError

UNITS = {"": 1, "B": 1, "KB": 1024, "KIB": 1024, "MB": 1024**2, "MIB": 1024**2}
# The largest budget that is taken: more than any fast memory has. Planners try tiles one by one: it bounds their time.
LARGEST_BYTES = 1024**3
MOST_DIGITS = 40
_SIZE = re.compile(r"([0-9]+)\s*([A-Za-z]*)")
_EXAMPLES = "write a whole number of bytes (196608) or of KB (192KB = 192KiB = 196608 bytes)"


def parse_bytes(text: str, option: str = "--sram") -> int:
    """The byte count that `text` means.

    Raises: RequestError for anything but a positive whole number with an optional unit of UNITS
        (any case).
    """
    stripped = text.strip()
    match = _SIZE.fullmatch(stripped)
    if match is None or match.group(2).upper() not in UNITS:
        raise RequestError(f"{option} {text}: not a size", _EXAMPLES)
    count = _integer(match.group(1), option) * UNITS[match.group(2).upper()]
    if count == 0:
        raise RequestError(f"{option} {text}: the fast memory must hold something", _EXAMPLES)
    return count


def format_bytes(count: int) -> str:
    """The shortest spelling that parse_bytes reads back: 196608 -> "192KB", 1000 -> "1000"."""
    return f"{count // 1024}KB" if count % 1024 == 0 else str(count)


def whole_number(value: SupportsIndex | str, what: str) -> int:
    """`value` as a plain int: a NumPy integer or a 0-dim tensor of integers must not leak into a key.

    Raises: RequestError for a float, a bool or text that is not a whole number.
    """
    if isinstance(value, str):
        if re.fullmatch(r"[+-]?[0-9]+", value.strip()):
            return _integer(value.strip(), what)
    elif not isinstance(value, bool):
        try:
            return int(operator.index(value))
        except TypeError:
            pass
    raise RequestError(f"{what} {value}: not a whole number")


def _integer(digits: str, what: str) -> int:
    """int(digits), which Python itself refuses for thousands of digits."""
    if len(digits) > MOST_DIGITS:
        raise RequestError(f"{what} {digits[:MOST_DIGITS]}...: a number of {len(digits)} characters is too large")
    return int(digits)
