"""The C entry points of emitted kernels, for every caller that goes round torch's binding: their arguments in ctypes.

The structures are those of the emitted csrc/forward.h and csrc/backward.h, field by field;
tests/verify/test_sanitize.py compares the offsets with a compiler's.
"""

from __future__ import annotations

import ctypes

DTYPE_CODES = {"bf16": 2, "fp16": 3}  # of enum DType, those that a CUDA kernel takes


class ForwardArgs(ctypes.Structure):
    """`ForwardArgs` of the emitted csrc/forward.h; the debug form's fields come last and do not disturb the other."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "o", "lse")),
        *((name, ctypes.c_int64) for name in ("B", "Hq", "Hkv", "Nq", "Nk")),
        *((f"{name}_stride", ctypes.c_int64 * 3) for name in ("q", "k", "v", "o")),
        ("key_lengths", ctypes.c_void_p),
        ("scale", ctypes.c_double),
        ("causal", ctypes.c_int),
        ("trace", ctypes.c_void_p),
        ("trace_tiles", ctypes.c_int64),
    )


BACKWARD_TENSORS = ("q", "k", "v", "o", "lse", "dout", "dlse", "dq", "dk", "dv")


class BackwardArgs(ctypes.Structure):
    """`BackwardArgs` of the emitted csrc/backward.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in BACKWARD_TENSORS),
        *((name, ctypes.c_int64) for name in ("B", "Hq", "Hkv", "Nq", "Nk")),
        *((f"{name}_stride", ctypes.c_int64 * (4 if name == "dout" else 3)) for name in BACKWARD_TENSORS),
        ("key_lengths", ctypes.c_void_p),
        ("scale", ctypes.c_double),
        ("causal", ctypes.c_int),
        ("deterministic", ctypes.c_int),
    )
