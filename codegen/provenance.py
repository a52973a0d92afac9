"""The lines with which every emitted file opens: where it comes from and what it was planned to cost."""

from __future__ import annotations

from collections.abc import Iterable

from . import __version__
from .plan import Variant

TEMPLATE_DIGEST_CHARS = 16


def header(*, command: str, variants: Iterable[Variant], flops: int, templates_digest: str) -> list[str]:
    """Comment lines without their comment mark: the command, the plans of the file's kernels, the digest.

    command: the canonical one, not the one typed. `variants` is empty for a file that holds no kernel; flops are those
    of its kernels, per pair of a row and a key.
    """
    lines = [
        f"Emitted by tileproof {__version__}: {command}",
        "Do not edit: `codegen --check` compares it with a regeneration.",
    ]
    for v in variants:
        lines.append(f"{v.label} {v.dtype}: Br={v.plan.br} Bc={v.plan.bc}, {fast_memory(v)}")
    if variants:
        lines.append(f"FLOPs per head without a mask: {flops} * Nq * Nk")
    lines.append(f"Templates: sha256 {templates_digest[:TEMPLATE_DIGEST_CHARS]}")
    return lines


def fast_memory(variant: Variant) -> str:
    """ "180224 bytes of fast memory (Q tile 32768, K and V stages 147456)"."""
    parts = ", ".join(f"{p.name} {p.bytes}" for p in variant.plan.memory)
    return f"{variant.plan.fast_memory_bytes} bytes of fast memory ({parts})"
