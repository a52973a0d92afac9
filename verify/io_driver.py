"""Launch each shape once on the GPU, in order: what `verify.io_ncu` runs under the profiler.

    python -m verify.io_driver CALLS.json

CALLS.json is a list of {"folder", "dtype", "d", "dv", "shape"}; shape as `io_calls.describe` gives it. Each call
launches one kernel of ours, whatever else torch launches between them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from verify import io_calls, packages
from verify.guarded_problems import Problem


def problem_of(shape: dict[str, Any]) -> Problem:
    """The problem that `io_calls.describe` described."""
    words: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in shape.items()}
    return Problem(**words)


def main() -> None:
    import torch

    calls = json.loads(Path(sys.argv[1]).read_text())
    with torch.no_grad():
        for one in calls:
            attn = packages.load(one["folder"])
            case = io_calls.case(problem_of(one["shape"]), one["dtype"], d=one["d"], dv=one["dv"])
            words = case.tensors("cuda")
            attn.attention(words.pop("q"), words.pop("k"), words.pop("v"), return_lse=True, **words)
        torch.cuda.synchronize()
    print(f"launched {len(calls)}")


if __name__ == "__main__":
    main()
