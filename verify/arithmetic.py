"""How each kernel path rounds: one row of constants per arithmetic model, from which the bounds are computed.

A model states what a path may do, not what it happens to do: every constant is an upper limit. Constants that a
device decides (block length and fraction bits of a matrix unit, the error of exp2 and log) can be replaced by
calibrated ones from `calibration/<model>.<device>.json`; the values here are the documented or worst ones.

Sources: matrix units truncate, see Fasi, Higham, Mikaitis, Pranesh (PeerJ CS 7:e330, 2021); Khattak and Mikaitis
(arXiv:2512.07004); AMX rounds to nearest in two chains per block of 32 (Intel SDM, TDPBF16PS pseudocode). exp2 and
log of CUDA: CUDA C++ Programming Guide, "Intrinsic Functions". Vector exp2 of the CPU paths: exhaustive test.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from verify.formats import FORMATS

CALIBRATION = Path(__file__).parent / "calibration"
PRODUCTS = ("fma", "muladd", "amx", "block")


def gamma(n: Any, unit: float) -> Any:
    """(1 + unit)**n - 1 for a number or an array n: the relative error that n roundings can make."""
    return np.expm1(np.asarray(n, dtype=np.float64) * math.log1p(unit))


@dataclass(frozen=True, kw_only=True)
class ArithmeticModel:
    """Limits of one path for one input dtype. `_unit` are relative, `_tiny` absolute, both per rounding."""

    name: str
    dtype: str  # of Q, K and V
    working: str = "float32"  # format of S, m, l and the O accumulator
    # --- products
    product: str = "fma"
    block: int = 1  # products per step of a matrix unit
    fraction_bits: int = 0  # "block" only: bits kept below the largest addend
    s_steps: int = 1  # matrix-unit steps per block for S and for O: plane products
    o_steps: int = 1
    magnitude: float = 1.0  # sum over planes of |a||b| is at most this times |a||b|
    dropped: float = 0.0  # relative size of plane products that P V leaves out
    operation_tiny: float = 2.0**-150  # absolute error of one operation when its result is subnormal
    flushes_operands: bool = False  # subnormal operands of a product count as 0
    # --- weights
    scale_roundings: int = 3  # of scale * log2 e: scale, constant, product
    exponent_roundings: int = 1  # roundings of size |s| or |m| in S c - m c: 1 fused, 2 separate
    exp2_error: float = 2.0**-22
    exp2_flush: float = 2.0**-126  # results below this may be 0
    lag_log2: float = 0.0  # the reference may trail the maximum by this much, base 2
    lag_per_row: bool = True  # a row moves its reference only when its own maximum asks for it
    ascending: bool = True  # key tiles in the order of the keys
    # --- P and output
    p_format: str | None = None  # None: P stays in the working format
    p_unit: float = 0.0
    p_tiny: float = 0.0
    final_roundings: int = 4  # 1/l (an approximation within 2 ulp) and the product
    out_format: str | None = None  # None: O is stored in the working format
    # --- LSE
    log_tiny: float = 2.0**-21
    log_error: float = 2.0**-22

    def __post_init__(self) -> None:
        if self.product not in PRODUCTS:
            raise ValueError(f"product {self.product!r} is not one of {PRODUCTS}")
        if self.lag_log2 < 0 or self.block < 1 or self.exp2_error <= 0:
            raise ValueError(f"{self.name}: lag_log2, block and exp2_error must be positive")

    @property
    def unit(self) -> float:
        """Unit roundoff of the working format."""
        return FORMATS[self.working].unit

    @property
    def lag(self) -> float:
        """How far the reference may trail the maximum, natural units."""
        return self.lag_log2 * math.log(2.0)

    @property
    def step_unit(self) -> float:
        """Relative error of one accumulation step against |c| + sum |ab|.

        "block": the largest addend loses nothing, each of the `block` others less than 2**-F of it, and truncation
        to 24 bits costs 2**-23.
        """
        if self.product != "block":
            return self.unit
        return (1 + 2.0**-23) * (1 + self.block * 2.0**-self.fraction_bits) - 1

    def steps(self, n: Any, planes: int = 1) -> Any:
        """Roundings on the longest path of an n-term dot product that starts from an accumulator."""
        n = np.asarray(n)
        if self.product == "fma":
            return n
        if self.product == "muladd":
            return n + 1
        blocks = -(-n // self.block) * planes
        if self.product == "amx":
            # Inside a block: two chains of block/2, then their sum; then one addition to the accumulator.
            return blocks + (self.block // 2 + 1)
        return blocks

    def dot(self, n: Any, planes: int = 1) -> Any:
        """g with |computed - exact| <= g sum|a||b| for n terms, underflow aside."""
        return gamma(self.steps(n, planes), self.step_unit) * self.magnitude

    def dot_probable(self, n: Any, confidence: float, planes: int = 1) -> tuple[Any, Any]:
        """(bias, random): the linear part that truncation keeps, and the part that grows like a square root."""
        steps = self.steps(n, planes)
        if self.product == "block":
            half = self.step_unit / 2 * self.magnitude
            return steps * half, confidence * np.sqrt(steps) * half
        return 0.0 * steps, confidence * np.sqrt(steps) * self.unit * self.magnitude


_COMMON_64: dict[str, Any] = {
    "working": "float64",
    "operation_tiny": 2.0**-1074,
    "exp2_error": 2.0**-52,
    "exp2_flush": 2.0**-1022,
    "log_tiny": 2.0**-52,
    "log_error": 2.0**-51,
}
# The log of the CPU paths is the C library's, within 4 ulp.
_CPU_32: dict[str, Any] = {"exp2_error": 2.0**-22, "log_tiny": 2.0**-24, "log_error": 2.0**-22}
_ALL_32 = ("float32", "bf16", "fp16")

# name -> (dtypes, constants)
MODELS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "fma_f32": (_ALL_32, {**_CPU_32, "product": "fma"}),
    "muladd_f32": (_ALL_32, {**_CPU_32, "product": "muladd", "exponent_roundings": 2}),
    "fma_f64": (("float64",), {**_COMMON_64, "product": "fma"}),
    "muladd_f64": (("float64",), {**_COMMON_64, "product": "muladd", "exponent_roundings": 2}),
    "amx_bf16": (
        ("bf16",),
        {
            **_CPU_32,
            "product": "amx",
            "block": 32,
            "operation_tiny": 2.0**-126,
            "flushes_operands": True,
            "exp2_error": 3.7e-6,
            "lag_log2": 8.0,
            "lag_per_row": False,
            "p_format": "bf16",
            "p_tiny": 2.0**-126,
        },
    ),
    # fp16 as two bf16 planes, x = x0 + x1 exactly. S takes 4 plane products, O takes 3 and leaves out p1 v1.
    # |x0| <= (1 + 2^-8)|x| and |x1| <= 2^-8 |x|; P keeps two planes, 2^-16 relative.
    "amx_fp16_planes": (
        ("fp16",),
        {
            **_CPU_32,
            "product": "amx",
            "block": 32,
            "s_steps": 4,
            "o_steps": 3,
            "magnitude": (1 + 2.0**-7) ** 2,
            "dropped": 2.0**-16 * (1 + 2.0**-8),
            "operation_tiny": 2.0**-126,
            "exp2_error": 2.0**-22,
            "lag_log2": 8.0,
            "lag_per_row": False,
            "p_format": "bf16 planes",
            "p_unit": 2.0**-16,
            "p_tiny": 2.0**-125,
        },
    ),
    # Ampere has block 8 and 24 bits, Hopper block 16 and 25 bits. block * 2**-bits is equal, and 8 takes more steps.
    "mma_sm80": (
        ("bf16", "fp16"),
        {"product": "block", "block": 8, "fraction_bits": 24, "operation_tiny": 2.0**-126, "p_format": "dtype"},
    ),
}


def model(name: str, dtype: str, *, debug: bool = False, device: str | None = None, **facts: Any) -> ArithmeticModel:
    """The model of a path.

    Args:
        name: a row of MODELS; what `attn.path()` reports as "arithmetic".
        dtype: of the inputs; O has the same unless `debug`, where it stays in the working format.
        device: a calibration file `calibration/<name>.<device>.json` replaces constants, if there is one.
        facts: the plan's figures. Those named like a field of ArithmeticModel (lag_log2) win over the calibration;
            the others do not round and are passed over.
    Raises:
        ValueError: unknown name, a dtype that the model does not take, or a calibration with an unknown constant.
    """
    if name not in MODELS:
        raise ValueError(f"arithmetic model {name!r} is not one of {', '.join(MODELS)}")
    dtypes, constants = MODELS[name]
    if dtype not in dtypes:
        raise ValueError(f"{name} takes {', '.join(dtypes)}, not {dtype}")
    values: dict[str, Any] = dict(constants)
    values.update(calibrated(name, device))
    known = {f.name for f in fields(ArithmeticModel)}
    if set(values) - known:
        raise ValueError(f"{name}: no such constant: {', '.join(sorted(set(values) - known))}")
    values.update({key: value for key, value in facts.items() if key in known})
    if values.get("p_format") == "dtype":
        values["p_format"] = dtype
    p = FORMATS.get(values.get("p_format") or "")
    if p is not None:
        values.setdefault("p_unit", p.unit)
        values.setdefault("p_tiny", p.half_subnormal)
    out = None if debug or dtype in ("float32", "float64") else dtype
    return replace(ArithmeticModel(name=name, dtype=dtype, out_format=out), **values)


def calibrated(name: str, device: str | None) -> dict[str, Any]:
    """Constants measured on a device, {} where nothing was measured."""
    if device is None:
        return {}
    path = CALIBRATION / f"{name}.{device}.json"
    if not path.exists():
        return {}
    record = json.loads(path.read_text())
    if record.get("arithmetic") != name or record.get("device") != device:
        raise ValueError(f"{path.name} describes {record.get('arithmetic')} on {record.get('device')}")
    return dict(record["constants"])
