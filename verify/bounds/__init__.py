"""Derived error bounds of the tiled kernels: README.md has the derivation, `forward` the entry point."""

from verify.bounds.domain import outside_domain
from verify.bounds.output import ForwardBound, forward
from verify.bounds.prefix import PrefixBound, prefix, seen_by

__all__ = ["ForwardBound", "PrefixBound", "forward", "outside_domain", "prefix", "seen_by"]
