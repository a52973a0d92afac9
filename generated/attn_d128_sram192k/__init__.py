# Emitted by tileproof 0.1.0: codegen --sram 192KB --d 128
# Do not edit: `codegen --check` compares it with a regeneration.
# Templates: sha256 2f014014d576efee
"""Exact attention kernels for d=128, dv=128, planned for 196608 bytes of fast memory.

    from attn_d128_sram192k import attention

    o = attention(q, k, v, causal=True)       # q (B,Hq,Nq,d), k (B,Hkv,Nk,d), v (B,Hkv,Nk,dv) -> (B,Hq,Nq,dv)

The kernels are compiled on first use and cached (see build.py). This does it ahead of time:

    python -m attn_d128_sram192k build

There is no backward yet: a call that would need one raises NotImplementedError.
"""

from .build import BuildError, build
from .op import attention, isas, path

__all__ = ["BuildError", "attention", "build", "isas", "path"]
