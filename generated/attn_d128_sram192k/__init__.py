# Emitted by tileproof 0.1.0: codegen --sram 192KB --d 128
# Do not edit: `codegen --check` compares it with a regeneration.
# Templates: sha256 7d2597a73355c16c
"""Exact attention kernels for d=128, dv=128, planned for 196608 bytes of fast memory.

    from attn_d128_sram192k import attention

    o = attention(q, k, v, causal=True)       # q (B,Hq,Nq,d), k (B,Hkv,Nk,d), v (B,Hkv,Nk,dv) -> (B,Hq,Nq,dv)

The kernels are compiled on first use and cached (see build.py). This does it ahead of time:

    python -m attn_d128_sram192k build

The results are differentiable by q, k and v (on cpu and cuda tensors), so models that use it train.
"""

from .build import BuildError, build
from .op import attention, isas, path

__all__ = ["BuildError", "attention", "build", "isas", "path"]
