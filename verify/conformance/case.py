"""One launch of a probe kernel: what goes in, what the PTX ISA says must come out, and how it is compared."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
SMALLEST_NORMAL = 2.0**-126  # a tensor core may flush a smaller result


@dataclass(frozen=True)
class Input:
    """An array in device memory that the probe reads."""

    array: Array


@dataclass(frozen=True)
class Output:
    """An array in device memory that the probe writes: its name among the results, and what it holds before."""

    name: str
    before: Array


@dataclass(frozen=True)
class Host:
    """A ctypes structure in host memory."""

    structure: Any


class Expected(Protocol):
    """What the ISA says of one output."""

    def differs(self, got: Array) -> Array:
        """Where `got` is not what the ISA allows (boolean, as the output)."""

    def same(self, one: Array, two: Array) -> Array:
        """Where two conforming machines agree as far as the ISA binds both."""


@dataclass(frozen=True)
class Exact:
    """Bit for bit."""

    want: Array

    def differs(self, got: Array) -> Array:
        return _bits(got) != _bits(self.want)

    def same(self, one: Array, two: Array) -> Array:
        return _bits(one) == _bits(two)


@dataclass(frozen=True)
class AnyOrder:
    """The same values, in whatever order the threads came."""

    want: Array

    def differs(self, got: Array) -> Array:
        return np.sort(_bits(got), axis=None) != np.sort(_bits(self.want), axis=None)

    def same(self, one: Array, two: Array) -> Array:
        return np.sort(_bits(one), axis=None) == np.sort(_bits(two), axis=None)


@dataclass(frozen=True)
class Near:
    """Sums of products of a tensor core: within `relative` of |c| + sum |a b| of the exact value."""

    exact: Array
    magnitude: Array
    relative: float

    @property
    def bound(self) -> Array:
        return self.relative * self.magnitude + SMALLEST_NORMAL

    def differs(self, got: Array) -> Array:
        return ~(np.abs(got.astype(np.float64) - self.exact) <= self.bound)

    def same(self, one: Array, two: Array) -> Array:
        return np.abs(one.astype(np.float64) - two.astype(np.float64)) <= 2 * self.bound


@dataclass(frozen=True)
class Allowed:
    """Whatever `allows` says yes to; an allowed value is `relative` or `absolute` off, whichever is more."""

    allows: Callable[[Array], Array]
    relative: float
    absolute: float = 0.0

    def differs(self, got: Array) -> Array:
        return ~self.allows(got)

    def same(self, one: Array, two: Array) -> Array:
        equal = (one == two) | (np.isnan(one) & np.isnan(two))
        larger = np.maximum(np.abs(one), np.abs(two)).astype(np.float64)
        with np.errstate(invalid="ignore"):
            apart = np.abs(one.astype(np.float64) - two.astype(np.float64))
        # One machine may flush a result at the edge of the normal numbers that the other keeps.
        near = apart <= 2 * np.maximum(self.relative * larger, self.absolute)
        return equal | near | (larger <= SMALLEST_NORMAL * (1 + 2 * self.relative))


@dataclass(frozen=True)
class Case:
    """`function` of the probe file `source`, launched with `arguments`; `expected` is computed when asked for.

    Args:
        primitives: the wrappers whose behaviour the case pins down.
        arguments: in the order of the launcher's parameters; scalars as ctypes values.
        expected: what each output must be, given the relative error of a sum of products on the machine at hand.
        faults: the machine stops the kernel; nothing comes out.
    """

    name: str
    source: str
    function: str
    primitives: tuple[str, ...]
    arguments: tuple[Any, ...]
    expected: Callable[[float], Mapping[str, Expected]]
    faults: bool = False

    @property
    def outputs(self) -> tuple[Output, ...]:
        return tuple(a for a in self.arguments if isinstance(a, Output))

    @property
    def digest(self) -> str:
        """Of the inputs, so that a recorded output is never compared with another question's answer."""
        h = hashlib.sha256(f"{self.source}\0{self.function}".encode())
        for argument in self.arguments:
            if isinstance(argument, Input):
                h.update(_plain(argument.array))
            elif isinstance(argument, Output):
                h.update(argument.name.encode() + _plain(argument.before))
            elif isinstance(argument, Host):
                h.update(bytes(argument.structure))
            else:
                h.update(repr(argument.value).encode())
        return h.hexdigest()[:16]

    def misses(self, got: Mapping[str, Array], relative: float) -> list[str]:
        """One sentence per output that is not what the ISA says, with the first element that differs."""
        found = []
        for name, expected in self.expected(relative).items():
            wrong = expected.differs(got[name])
            if wrong.any():
                at = tuple(int(i) for i in np.argwhere(wrong)[0])
                value = got[name].reshape(wrong.shape)[at]
                want = getattr(expected, "want", getattr(expected, "exact", None))
                told = "" if want is None else f", not {want.reshape(wrong.shape)[at]!r}"
                found.append(f"{self.name}: {name}{list(at)} is {value!r}{told} ({int(wrong.sum())} of {wrong.size})")
        return found


def _plain(array: Array) -> bytes:
    return f"{array.dtype.str}{array.shape}".encode() + np.ascontiguousarray(array).tobytes()


def _bits(array: Array) -> Array:
    """Floats as their bit patterns: equal means the same bits, also for NaN and -0."""
    kind = {2: np.uint16, 4: np.uint32, 8: np.uint64}
    return array.view(kind[array.dtype.itemsize]) if array.dtype.kind == "f" else array
