"""How each kernel path rounds: one row of constants per arithmetic model, from which the bounds are computed.

A model states what a path may do, not what it happens to do: every constant is an upper limit. Constants that a
device decides (block length and fraction bits of a matrix unit, the error of exp2 and log) can be replaced by
calibrated ones from `calibration/<model>.<device>.json`; the values here are the documented or worst ones.

Sources: matrix units truncate, see Fasi, Higham, Mikaitis, Pranesh (PeerJ CS 7:e330, 2021); Khattak and Mikaitis
(arXiv:2512.07004); AMX rounds to nearest in two chains per block of 32 (Intel SDM, TDPBF16PS pseudocode). exp2 and
log of CUDA: CUDA C++ Programming Guide, "Intrinsic Functions". Vector exp2 of the CPU paths: exhaustive test.
torch's own kernel on a CPU: its source, named at its rows.
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
    score_roundings: int = 0  # of a score beside those of its sum
    s_planes: int = 1  # plane products per block of S, and of O
    o_planes: int = 1
    magnitude: float = 1.0  # sum over planes of |a||b| is at most this times |a||b|
    dropped: float = 0.0  # relative size of plane products that P V leaves out
    operation_tiny: float = 2.0**-150  # absolute error of one operation when its result is subnormal
    flushes_operands: bool = False  # subnormal operands of a product count as 0
    # --- sums over key tiles
    o_restarts: bool = False  # O of a tile is summed from 0 and added to O alpha at the end
    l_restarts: bool = False  # so is l
    l_lanes: int = 1  # partial sums of l that share a tile's keys evenly
    # --- weights
    scale_roundings: int = 1  # of c = scale * log2 e
    gap_roundings: int = 1  # roundings of size |s - m| in the exponents of a weight and of the alphas after it
    m_roundings: int = 0  # roundings of size |m|: fl(m c) is subtracted in place of m c
    top_roundings: int = 0  # roundings of size |m| that keep the largest weight of a tile from being exactly 1
    exp2_error: float = 2.0**-22
    exp2_flush: float = 2.0**-126  # results below this may be 0
    lag_log2: float = 0.0  # the reference may trail the maximum by this much, base 2
    most_weight: float = (
        0.0  # or until the weights of a tile of bc keys sum to more than most_weight bc; 0: no such rule
    )
    lag_per_row: bool = True  # a row moves its reference only when its own maximum asks for it
    last_tile_first: bool = False  # key tiles come in descending order
    rescales_exactly: bool = False  # alpha is a power of two
    # --- P and output
    p_format: str | None = None  # None: P stays in the working format
    p_unit: float = 0.0
    p_tiny: float = 0.0
    l_of_rounded_p: bool = False  # O is divided by a sum of the rounded weights (LSE is not made from it)
    final_roundings: int = 2  # of o * (1 / l)
    out_format: str | None = None  # None: O is stored in the working format
    # --- LSE = m scale + ln l
    lse_shares_c: bool = False  # m is kept in units of c, so that an error of c acts on s and not on s - m
    lse_m_unit: float = 0.0  # relative error of the term m scale
    log_tiny: float = 0.0  # absolute and relative error of ln l
    log_error: float = 2.0**-22

    def __post_init__(self) -> None:
        if self.product not in PRODUCTS:
            raise ValueError(f"product {self.product!r} is not one of {PRODUCTS}")
        if (
            min(self.lag_log2, self.most_weight) < 0
            or self.block < 1
            or self.l_lanes < 1
            or not 0 < self.exp2_error < 0.5
        ):
            raise ValueError(f"{self.name}: lag_log2, block, l_lanes or exp2_error out of range")

    @property
    def unit(self) -> float:
        """Unit roundoff of the working format."""
        return FORMATS[self.working].unit

    @property
    def lag(self) -> float:
        """How far the reference may trail the maximum, natural units."""
        return self.lag_log2 * math.log(2.0)

    def at(self, bc: int) -> ArithmeticModel:
        """The same with the lag that tiles of bc keys allow: one weight is at most the sum that moves the reference."""
        if self.most_weight == 0.0:
            return self
        # The sum is a computed one: 2^0.01 covers its rounding.
        return replace(self, lag_log2=math.log2(self.most_weight * bc) + 0.01, most_weight=0.0)

    @property
    def step_unit(self) -> float:
        """Relative error of one accumulation step against |c| + sum |ab|.

        "block": the largest addend loses nothing, each of the `block` others less than 2**-F of it, and truncation
        to 24 bits costs 2**-23.
        """
        if self.product != "block":
            return self.unit
        return (1 + 2.0**-23) * (1 + self.block * 2.0**-self.fraction_bits) - 1

    def score_sum(self, d: int) -> Sum:
        """Roundings of a score: d products summed from 0."""
        if self.product in ("fma", "muladd"):
            return Sum(self, d + (self.product == "muladd"), self.score_roundings)
        return Sum(self, -(-d // self.block) * self.s_planes + self._inside, self.score_roundings)

    def o_sum(self, counts: np.ndarray, bc: int, rescales: np.ndarray) -> Sum:
        """Roundings of O before the division. counts (R, T): visible keys per tile; rescales (R,): alphas not 1.

        A masked key adds an exact 0, so no more than the visible keys of a tile round.
        """
        live = (counts > 0).sum(axis=1)
        alphas = 0 if self.rescales_exactly else rescales
        if self.product in ("fma", "muladd"):
            if not self.o_restarts:
                return Sum(self, counts.sum(axis=1) + (self.product == "muladd"), alphas)
            inside = counts.max(axis=1, initial=0) + (self.product == "muladd")
            return Sum(self, inside, live + (alphas if self.product == "muladd" else 0))
        blocks = np.minimum(counts, -(-bc // self.block)).sum(axis=1) * self.o_planes
        return Sum(self, blocks + self._inside, alphas)

    def l_roundings(self, counts: np.ndarray, bc: int, rescales: np.ndarray, *, rounded: bool = False) -> np.ndarray:
        """Roundings of l (of the sum of rounded weights, if so asked), arguments as in o_sum."""
        live = (counts > 0).sum(axis=1)
        lanes = 1 if rounded else self.l_lanes
        per_lane = np.minimum(counts, -(-bc // lanes))
        alphas = 0 if self.rescales_exactly else rescales
        if self.l_restarts:
            inside = per_lane.max(axis=1, initial=0)
            return inside + live + (lanes - 1).bit_length() + (0 if self.product == "fma" else alphas)
        return per_lane.sum(axis=1) + (live if lanes > 1 else 0) + alphas + 1

    @property
    def _inside(self) -> int:
        """Roundings inside one AMX block: two chains of half a block, then their sum."""
        return self.block // 2 + 1 if self.product == "amx" else 0


@dataclass(frozen=True)
class Sum:
    """How a sum of products rounds: `steps` accumulation steps and `extra` plain roundings on the longest path."""

    model: ArithmeticModel
    steps: Any
    extra: Any = 0

    @property
    def g(self) -> Any:
        """|computed - exact| <= g sum|a||b|, underflow aside."""
        steps = gamma(self.steps, self.model.step_unit)
        return ((1 + steps) * (1 + gamma(self.extra, self.model.unit)) - 1) * self.model.magnitude

    def g_probable(self, confidence: float) -> tuple[Any, Any]:
        """(bias, random): the linear part that truncation keeps, and the part that grows like a square root."""
        m = self.model
        half = m.step_unit / 2 if m.product == "block" else 0.0
        each = half if m.product == "block" else m.unit
        random = np.sqrt(np.asarray(self.steps) * each**2 + np.asarray(self.extra) * m.unit**2)
        return np.asarray(self.steps) * half * m.magnitude, confidence * random * m.magnitude


# Vector kernels of the CPU (codegen/templates/cpu/simd.h.j2): s - m is rounded, then multiplied by c; O and l of a
# tile start from 0; m scale + ln l is evaluated in float64. Results of exp2 whose exponent rounds to below -125 are 0.
# exp2 in units of u: polynomial 0.38, last step 1 (0.71 at r = -1/2), the step before 0.35, those before 0.05, r 0.17:
# at most 1.7 at any one r. Without FMA the products add 0.4.
_VECTOR: dict[str, Any] = {"o_restarts": True, "l_restarts": True}
_VECTOR_32: dict[str, Any] = {
    **_VECTOR,
    "exp2_error": 2 * 2.0**-24,
    "exp2_flush": 2.0**-125,
    "lse_m_unit": 2.0**-50,
    "log_tiny": 2.0**-50,
    "log_error": 2.0**-50,
}
_VECTOR_64: dict[str, Any] = {
    **_VECTOR,
    "working": "float64",
    "operation_tiny": 2.0**-1074,
    "exp2_error": 2 * 2.0**-53,
    "exp2_flush": 2.0**-1021,
    "lse_m_unit": 2.0**-53,
    "log_error": 2.0**-51,
}
# AMX kernels (codegen/templates/cpu/forward_amx.h.j2): the reference is a whole number in base 2. It is moved, for 32
# rows together, when the weights of a tile sum to more than 4 bc; alpha is a power of two.
_AMX: dict[str, Any] = {
    "product": "amx",
    "block": 32,
    "operation_tiny": 2.0**-126,
    "flushes_operands": True,
    "l_restarts": True,
    "l_lanes": 2,
    "top_roundings": 1,
    "most_weight": 4.0,
    "lag_per_row": False,
    "rescales_exactly": True,
    "lse_shares_c": True,
    "lse_m_unit": 2.0**-48,
    "log_tiny": 2.0**-22,
    "log_error": 2.0**-40,
}
# Tensor-core kernels: fma(s, c, -fl(m c)); four lanes share the keys of a row; logf within 1 ulp.
_TENSOR: dict[str, Any] = {
    "product": "block",
    "operation_tiny": 2.0**-126,
    "l_restarts": True,
    "l_lanes": 4,
    "gap_roundings": 2,
    "m_roundings": 1,
    "top_roundings": 1,
    "p_format": "dtype",
    "lse_m_unit": 2.0**-24,
    "log_tiny": 2.0**-22,
    "log_error": 2.0**-22,
}
# torch's attention on x86-64, a peer of the benchmark. Sources: pytorch,
# aten/src/ATen/native/cpu/FlashAttentionKernel.cpp (cpu_flash_attention) and native/CPUBlas.cpp;
# cpu/vec/vec512/vec512_float.h as torch 2.14 installs it. The BLAS library sums products in the working format in an
# order that it chooses: "muladd" counts the longest path of any order. AMX, where the library takes it, flushes. S is
# multiplied by the rounded scale. l is a sum of the weights before they are rounded to 16 bits, O one of those after:
# the roundings of P do not cancel in O / l. O and l stay in the working format between blocks of keys. exp(s - m) takes
# a rounded log2 e or ln 2, and rounds the argument's product and its remainder.
_TORCH: dict[str, Any] = {
    "product": "muladd",
    "score_roundings": 1,
    "scale_roundings": 2,
    "gap_roundings": 3,
    "lse_shares_c": True,
}
# 16 bits: fexp_u20 makes the bits of a float32 of (s - m) log2 e less a cubic. The cubic is at most 1.066e-4 off; the
# float32 that becomes the bits lies below 2^30, and its rounding is 2^-18 of the weight; the roundings of the cubic are
# less than 2^-22 together. The largest weight is not 1: torch's LSE of one key is 5.3e-5 low.
TORCH_FEXP_ERROR = 1.066e-4 + 2.0**-18 + 2.0**-22
# float32: exp_u20, a polynomial of degree 5 on |r| <= ln 2 / 2. In units of u: the polynomial 1.55, its roundings 1.4,
# r 0.25, ln 2 0.35. Where its exponent is -126 the result is 0.
TORCH_EXP_ERROR = 4 * 2.0**-24
# A kernel with "lazy_rescale" in its plan moves a row's reference when (m_new - m) c exceeds 8; it computes that with
# three roundings.
LAZY_LOG2 = 8.0
LAZY_LAG_LOG2 = LAZY_LOG2 * (1 + 2.0**-22)
_ALL_32 = ("float32", "bf16", "fp16")
# AMX kernels, polynomials on [0, 1): their own error 2.902e-6 (9.38e-8) and at most 1.7 u of rounding.
# tests/cpu/test_amx_exp2.py tries every float32.
EXP2_ERROR_OF_DEGREE = {4: 3.01e-6, 5: 2.0e-7}

# name -> (dtypes, constants)
MODELS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "fma_f32": (_ALL_32, {**_VECTOR_32, "product": "fma"}),
    "muladd_f32": (_ALL_32, {**_VECTOR_32, "product": "muladd", "gap_roundings": 2, "exp2_error": 2.5 * 2.0**-24}),
    "fma_f64": (("float64",), {**_VECTOR_64, "product": "fma"}),
    "muladd_f64": (("float64",), {**_VECTOR_64, "product": "muladd", "gap_roundings": 2, "exp2_error": 2.5 * 2.0**-53}),
    # NumPy: the scale goes into the scores, exp and log are within 4 ulp; any order of summation.
    "numpy_f64": (
        ("float64",),
        {
            **_VECTOR_64,
            "product": "muladd",
            "score_roundings": 1,
            "scale_roundings": 0,
            "exp2_error": 8 * 2.0**-53,
            "exp2_flush": 2.0**-1022,
            "log_error": 8 * 2.0**-53,
        },
    ),
    "amx_bf16": (
        ("bf16",),
        {
            **_AMX,
            "exp2_error": EXP2_ERROR_OF_DEGREE[4],
            "p_format": "bf16",
            "p_tiny": 2.0**-126,
            "l_of_rounded_p": True,
        },
    ),
    # fp16 as two bf16 planes, x = x0 + x1 exactly. S takes 4 plane products, O takes 3 and leaves out p1 v1.
    # |x0| <= (1 + 2^-8)|x| and |x1| <= 2^-8 |x|; P keeps two planes, 2^-16 relative.
    "amx_fp16_planes": (
        ("fp16",),
        {
            **_AMX,
            "exp2_error": EXP2_ERROR_OF_DEGREE[5],
            "s_planes": 4,
            "o_planes": 3,
            "magnitude": (1 + 2.0**-7) ** 2,
            "dropped": 2.0**-16 * (1 + 2.0**-8),
            "p_format": "bf16 planes",
            "p_unit": 2.0**-16,
            "p_tiny": 2.0**-125,
        },
    ),
    "torch_16": (
        ("bf16", "fp16"),
        {
            **_TORCH,
            "operation_tiny": 2.0**-126,
            "flushes_operands": True,
            "exp2_error": TORCH_FEXP_ERROR,
            "p_format": "dtype",
            "log_error": 2.0**-23,  # logf within 1 ulp
        },
    ),
    "torch_f32": (
        ("float32",),
        {**_TORCH, "exp2_error": TORCH_EXP_ERROR, "exp2_flush": 2.0**-125, "log_error": 2.0**-23},
    ),
    # exp of Sleef and log are within 1 ulp.
    "torch_f64": (
        ("float64",),
        {
            **_TORCH,
            "working": "float64",
            "operation_tiny": 2.0**-1074,
            "scale_roundings": 1,
            "gap_roundings": 1,
            "exp2_error": 2.0**-52,
            "exp2_flush": 2.0**-1022,
            "log_error": 2.0**-52,
        },
    ),
    # mma.sync (codegen/templates/sm80). Ampere has block 8 and 24 bits, Hopper block 16 and 25 bits: block * 2**-bits
    # is equal, and 8 takes more steps.
    "mma_sm80": (("bf16", "fp16"), {**_TENSOR, "block": 8, "fraction_bits": 24}),
    # wgmma (codegen/templates/sm90a), which only compute capability 9.0 has: it sums as the mma.sync there does. The
    # row maximum is taken over bit patterns as integers: it is exact. Key tiles come in descending order. 1 / l is
    # rcp.approx, within 1 ulp: as much as 2 roundings. ln l is a product with lg2.approx, which is within 2^-22,
    # absolute on (1/2, 2) and relative elsewhere.
    "wgmma_sm90a": (
        ("bf16", "fp16"),
        {
            **_TENSOR,
            "block": 16,
            "fraction_bits": 25,
            "last_tile_first": True,
            "final_roundings": 3,
            "log_error": 2.0**-22 + 2.0**-23,
        },
    ),
}


def model(name: str, dtype: str, /, *, debug: bool = False, device: str | None = None, **plan: Any) -> ArithmeticModel:
    """The model of a path.

    Args:
        name: a row of MODELS; what `attn.path()` reports as "arithmetic".
        dtype: of the inputs; O has the same unless `debug`, where it stays in the working format.
        device: a calibration file `calibration/<name>.<device>.json` replaces constants, if there is one.
        plan: the plan's figures. `exp_degree` decides the error of exp2, `lazy_rescale` the lag of the reference; one
            that is named like a field of ArithmeticModel replaces it; the others do not round.
    Raises:
        ValueError: unknown name, a dtype that the model does not take, an unknown constant in plan or calibration.
    """
    if name not in MODELS:
        raise ValueError(f"arithmetic model {name!r} is not one of {', '.join(MODELS)}")
    dtypes, constants = MODELS[name]
    if dtype not in dtypes:
        raise ValueError(f"{name} takes {', '.join(dtypes)}, not {dtype}")
    values: dict[str, Any] = {**constants, **calibrated(name, device)}
    known = {f.name for f in fields(ArithmeticModel)}
    if set(values) - known:
        raise ValueError(f"{name}: no such constant: {', '.join(sorted(set(values) - known))}")
    values.update({key: value for key, value in plan.items() if key in known})
    if "exp_degree" in plan:
        if plan["exp_degree"] not in EXP2_ERROR_OF_DEGREE:
            raise ValueError(f"{name}: no error is known for an exp2 polynomial of degree {plan['exp_degree']}")
        values["exp2_error"] = EXP2_ERROR_OF_DEGREE[plan["exp_degree"]]
    if plan.get("lazy_rescale"):
        values["lag_log2"] = LAZY_LAG_LOG2
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
