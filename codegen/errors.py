"""Errors that the command turns into a message on stderr and an exit code."""

from __future__ import annotations


class TileproofError(Exception):
    """Base of every error that is the user's business: printed without a traceback."""

    exit_code = 2

    def __init__(self, message: str, *hints: str):
        """`message` says what was asked; each hint is one line: what is possible, what to try."""
        super().__init__("\n".join((message, *("  " + h for h in hints))))


class RequestError(TileproofError):
    """The request cannot be met, whatever the machine (exit 2)."""


class PlanError(RequestError):
    """A tile plan breaks a rule of its target."""


class CheckFailed(TileproofError):
    """A check did not hold: a package is stale, a certificate is missing (exit 1)."""

    exit_code = 1


class ToolError(TileproofError):
    """A tool that we need (compiler, file system) failed (exit 1)."""

    exit_code = 1
