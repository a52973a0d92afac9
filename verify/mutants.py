"""Break the fuzzed code on purpose, one named change at a time, and see whether fuzzing notices.

A mutant is a textual replacement in an emitted package (which is then sealed with a digest of its own, built and
fuzzed like any other) or in the source of the reference. A replacement that changes nothing is an error: a mutant
that equals the original proves nothing.

Each mutant is a bug that somebody once had; the names follow the catalogue of seeded bugs.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path as Folder
from types import ModuleType
from typing import Any

from codegen import emit as writer
from codegen import package as rendered
from codegen.problem import Problem
from spec import flash2
from verify import fuzz, packages, tiles
from verify.devices import Device
from verify.progress import Step, silent


@dataclass(frozen=True)
class Mutant:
    """`old` -> `new` in every place of every file of the package whose name starts with `file`."""

    name: str
    what: str
    old: str
    new: str
    file: str = "csrc/"

    def apply(self, files: Mapping[str, bytes]) -> dict[str, bytes]:
        """The mutated package, sealed again.

        Raises: ValueError when no file changes.
        """
        changed = {
            path: data.replace(self.old.encode(), self.new.encode()) if path.startswith(self.file) else data
            for path, data in files.items()
        }
        if changed == dict(files):
            raise ValueError(f"mutant {self.name}: {self.old!r} is nowhere under {self.file}")
        return seal(changed)


# For the vector kernels of the CPU, in the order of the algorithm.
CPU = (
    Mutant("m_starts_at_zero", "m = 0 before the first key", "w.m[p][r] = -(Scalar)__builtin_inf();", "w.m[p][r] = 0;"),
    Mutant(
        "o_not_rescaled", "O is not multiplied by alpha", "sum = sum * alpha[n] + acc[c][n];", "sum = sum + acc[c][n];"
    ),
    Mutant("l_not_rescaled", "l is not multiplied by alpha", "l = l * alpha[n] + sum[n];", "l = l + sum[n];"),
    Mutant("alpha_inverted", "alpha = exp(m_new - m_old)", "(m - base[n], scale_log2)", "(base[n] - m, scale_log2)"),
    Mutant(
        "log2e_missing", "exp2 of a natural exponent", "__builtin_fma(a.scale, kLog2e, a.scale * kLog2eTail)", "a.scale"
    ),
    Mutant(
        "log2e_short",
        "log2(e) with five digits",
        "__builtin_fma(a.scale, kLog2e, a.scale * kLog2eTail)",
        "a.scale * 1.4427",
    ),
    Mutant("last_key_dropped", "the last key is never seen", ": a.Nk;", ": a.Nk - (a.Nk > 0);"),
    Mutant(
        "key_lengths_ignored",
        "keys beyond the length are read",
        "a.key_lengths ? a.key_lengths[tile.batch]",
        "false ? 0",
    ),
    Mutant("causal_strict", "a row does not see its own key", "i + shift + 1)", "i + shift)"),
    Mutant("causal_one_too_many", "a row sees one future key", "i + shift + 1)", "i + shift + 2)"),
    Mutant("causal_top_left", "both alignments are top-left", "a.causal == kBottomRight ? a.Nk - a.Nq : 0", "0"),
    Mutant(
        "mask_one_too_many",
        "a partial group admits a key",
        "> (Integer)(j + g - keys.shared)",
        ">= (Integer)(j + g - keys.shared)",
    ),
    Mutant(
        "heads_interleaved",
        "query head h reads K/V head h mod Hkv",
        "tile.head = tile.kv_head * t.group + first",
        "tile.head = tile.kv_head + first * a.Hkv",
    ),
    Mutant(
        "v_of_another_head", "V's head stride is K's", "tile.kv_head * a.v_stride[1]", "tile.kv_head * a.k_stride[1]"
    ),
    Mutant("empty_row_unguarded", "0 / 0 in a row without keys", "square[i] = sum == 0 ? Vector{} : square[i];", ""),
    Mutant("lse_without_scale", "LSE takes the unscaled maximum", "m[r] * a.scale + ", "m[r] + "),
    Mutant("lse_base_2", "LSE in base 2", "__builtin_log(", "__builtin_log2("),
)

# For the bf16 kernel on the matrix unit.
AMX = (
    Mutant(
        "o_not_rescaled",
        "O is not multiplied by alpha",
        "_mm512_store_ps(o, _mm512_mul_ps(_mm512_load_ps(o), alpha[h]));",
        "",
    ),
    Mutant(
        "l_not_rescaled",
        "l is not multiplied by alpha",
        "_mm512_store_ps(state.l + 16 * h, _mm512_mul_ps(_mm512_load_ps(state.l + 16 * h), alpha[h]));",
        "",
    ),
    Mutant(
        "l_of_rounded_p_not_rescaled",
        "the sum that divides O is not multiplied by alpha",
        "_mm512_mul_ps(_mm512_load_ps(p.l_rounded + 16 * h), alpha[h])",
        "_mm512_load_ps(p.l_rounded + 16 * h)",
    ),
    Mutant("tail_key_admitted", "a key beyond the last is seen", "j >= keys ? 16 :", "j > keys ? 16 :"),
    Mutant("causal_one_too_many", "a row sees one future key", "j - diagonal - 16 * h)", "j - diagonal - 1 - 16 * h)"),
    Mutant("causal_second_half", "rows 16.. are masked like rows 0..", "j - diagonal - 16 * h)", "j - diagonal)"),
    Mutant("heads_interleaved", "query head h reads K/V head h mod Hkv", "hkv = h / (a.Hq / a.Hkv)", "hkv = h % a.Hkv"),
    Mutant(
        "lse_without_l",
        "LSE lacks the logarithm of l's fraction",
        "_mm512_getmant_ps(l,",
        "_mm512_getmant_ps(_mm512_set1_ps(1.0f),",
    ),
    Mutant(
        "p_columns_swapped", "even and odd keys of a pair change places", "pair_bf16(even, odd)", "pair_bf16(odd, even)"
    ),
)

# For spec/flash2.py.
SPEC = (
    Mutant("o_not_rescaled", "O is not multiplied by alpha", "alpha[:, None] * Oi + PVij", "Oi + PVij"),
    Mutant(
        "o_divided_by_alpha", "diag(alpha)^-1, as the paper prints it", "alpha[:, None] * Oi", "Oi / alpha[:, None]"
    ),
    Mutant("l_not_rescaled", "l is not multiplied by alpha", "alpha * li + Pij.sum(axis=1)", "li + Pij.sum(axis=1)"),
    Mutant("m_of_this_tile", "m is the tile's maximum", "np.maximum(mi, Sij.max(axis=1))", "Sij.max(axis=1)"),
    Mutant(
        "m_starts_at_zero",
        "m = 0 before the first key",
        "np.full(br_i, -np.inf, head.dtype)",
        "np.zeros(br_i, head.dtype)",
    ),
    Mutant(
        "inf_unguarded", "-inf - (-inf) in a row without keys", "finite_or_zero(mi_new)[:, None]", "mi_new[:, None]"
    ),
    Mutant(
        "mask_ignored",
        "partial tiles are not masked",
        "head.scores(rows, cols, visible)",
        "head.scores(rows, cols, None)",
    ),
    Mutant("last_key_dropped", "the last key is never seen", "tiles(stop, bc, start)", "tiles(stop - 1, bc, start)"),
    Mutant("l_divides_twice", "O is divided by l twice", "divide_rows(Oi, li)", "divide_rows(divide_rows(Oi, li), li)"),
    Mutant("lse_without_l", "LSE = m", "log_sum(mi, li)", "log_sum(mi, np.minimum(li, 1.0))"),
)


@dataclass(frozen=True)
class Hunt:
    """Whether fuzzing found one mutant."""

    name: str
    of: str  # "cpu", "cpu amx" or "spec"
    what: str
    examples: int
    first_failure: int | None
    message: str | None

    @property
    def found(self) -> bool:
        return self.first_failure is not None

    def describe(self) -> dict[str, Any]:
        return {**vars(self), "found": self.found}


def seal(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """`files` with the digests of their own content in place of the stated ones, everywhere."""
    stated = rendered.read_plan(files[rendered.PLAN_FILE])["digest"]
    new = rendered.content_digest(files)
    short = stated[: rendered.DIGEST_CHARS].encode()
    sealed = {
        path: data.replace(stated.encode(), new.encode()).replace(short, new[: rendered.DIGEST_CHARS].encode())
        for path, data in files.items()
    }
    plan = json.loads(sealed[rendered.PLAN_FILE])
    plan["files"] = {path: hashlib.sha256(sealed[path]).hexdigest() for path in plan["files"]}
    sealed[rendered.PLAN_FILE] = (json.dumps(plan, indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode()
    return sealed


def package(mutant: Mutant, problem: Problem) -> Folder:
    """The mutated package of a request, written into the cache."""
    files = mutant.apply(rendered.render_package(problem))
    digest = rendered.read_plan(files[rendered.PLAN_FILE])["digest"]
    return writer.write_files(files, packages.cache() / "mutants" / digest[: rendered.DIGEST_CHARS])


def host(dtype: str = "float32") -> Problem:
    """The package that the CPU mutants live in: small tiles, d != dv, neither a power of two."""
    tile = {"br": 32, "bc": 16} if dtype == "float32" else {"br": 64, "bc": 32}
    return packages.request(sram="192KB", d=24, dv=40, dtypes=(dtype,), archs=("cpu",), **tile)


def hunt_cpu(mutant: Mutant, device: Device, *, examples: int, seed: int) -> Hunt:
    """Fuzz one mutated CPU package until something fails."""
    of, dtype = ("cpu amx", "bf16") if mutant in AMX else ("cpu", "float32")
    folder = package(mutant, host(dtype))
    outcome = fuzz.fuzz_package(folder, device, examples=examples, seed=seed, most=100, shrink=False)
    return Hunt(mutant.name, of, mutant.what, outcome.examples, outcome.first_failure, outcome.failure)


def hunt_spec(mutant: Mutant, *, examples: int, seed: int) -> Hunt:
    """Fuzz the reference with one change in its source until something fails."""
    broken = reference(mutant)

    def attention(*args: Any, **words: Any) -> Any:
        return tiles.attention(*args, forward=broken.forward, **words)

    outcome = fuzz.fuzz_spec(examples=examples, seed=seed, reference=attention, shrink=False)
    return Hunt(mutant.name, "spec", mutant.what, outcome.examples, outcome.first_failure, outcome.failure)


def reference(mutant: Mutant) -> ModuleType:
    """spec.flash2 with the change made, as a module of its own.

    Raises: ValueError when the source does not change.
    """
    source = inspect.getsource(flash2)
    changed = source.replace(mutant.old, mutant.new)
    if changed == source:
        raise ValueError(f"mutant {mutant.name}: {mutant.old!r} is nowhere in spec/flash2.py")
    module = ModuleType(f"spec_flash2_{mutant.name}")
    sys.modules[module.__name__] = module  # dataclasses and pickling look a module up by its name
    exec(compile(changed, module.__name__, "exec"), module.__dict__)
    return module


def hunt_all(device: Device, *, examples: int, seed: int, step: Step = silent) -> list[Hunt]:
    """Every mutant of the reference; on a CPU, those of its kernels too, of the matrix unit's where it has one."""
    found = []
    for mutant in SPEC:
        found.append(hunt_spec(mutant, examples=examples, seed=seed))
        step(note=f"spec {mutant.name}")
    if device.name != "cpu":
        return found
    has_amx = "amx" in packages.load(packages.emit(host("bf16"))).isas("bf16")
    for mutant in (*CPU, *(AMX if has_amx else ())):
        found.append(hunt_cpu(mutant, device, examples=examples, seed=seed))
        step(note=f"cpu {mutant.name}")
    return found
