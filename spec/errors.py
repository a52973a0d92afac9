"""Errors of the specification: each is a mistake in a request, and each message says which."""

from __future__ import annotations


class SpecError(ValueError):
    """Base of every error that this package raises on purpose."""


class ShapeError(SpecError):
    """Arrays whose shapes do not belong together."""


class ScaleError(SpecError):
    """A scale or soft cap outside (0, inf): the running maximum needs a positive, finite factor."""


class MaskError(SpecError):
    """A mask that is malformed, or that was made for another problem size."""


class DropoutError(SpecError):
    """A dropout probability outside [0, 1], or a counter outside its range."""


class TileError(SpecError):
    """A tile size below 1, or a fast memory in which no tile fits."""


class FormatError(SpecError):
    """An unknown number format."""


class InvariantError(AssertionError):
    """The state after a tile breaks an invariant: a bug in the algorithm, never in the request."""
