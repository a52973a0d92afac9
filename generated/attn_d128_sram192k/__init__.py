# Emitted by tileproof 0.1.0: codegen --sram 192KB --d 128
# Do not edit: `codegen --check` compares it with a regeneration.
# Templates: sha256 a89ac0a16a604604
"""Exact attention kernels for d=128, dv=128, planned for 196608 bytes of fast memory.

    from attn_d128_sram192k import attention

    o = attention(q, k, v, causal=True)       # q (B,Hq,Nq,d), k (B,Hkv,Nk,d), v (B,Hkv,Nk,dv) -> (B,Hq,Nq,dv)

The kernels are compiled on first use and cached (see build.py). This does it ahead of time:

    python -m attn_d128_sram192k build

The results are differentiable by q, k and v (on cpu and cuda tensors), so models that use it train.
"""

import sys

from .build import BuildError, build

# The command above compiles, for which it need not wait until torch is imported. While Python looks for the module of
# -m, which imports this one, argv[0] is "-m"; the word before the arguments is the module's name.
if sys.argv[:1] != ["-m"] or sys.orig_argv[-len(sys.argv) :][:1] != [__name__]:
    from .op import attention, isas, path
else:

    def __getattr__(name: str) -> object:
        """What others take from here in the command's process, such as a package that this one lies in."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from . import op

        return getattr(op, name)


__all__ = ["BuildError", "attention", "build", "isas", "path"]
