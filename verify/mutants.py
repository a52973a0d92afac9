"""Break the fuzzed code on purpose, one named change at a time, and see whether fuzzing notices.

The mutants are some of those of `verify.mutate`. Here random problems must find them, with no probe made for them: it
is the fuzzer that is tested. A mutated package is sealed with a digest of its own, built and fuzzed like any other.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path as Folder
from typing import Any

from codegen import emit as writer
from codegen import package as rendered
from codegen.problem import Problem
from verify import fuzz, packages, tiles
from verify.devices import Device
from verify.mutate import catalogue_amx, catalogue_cpu, catalogue_spec
from verify.mutate.mutant import Mutant, named
from verify.mutate.reference import copy_of_spec
from verify.progress import Step, silent

# Of the vector kernels of the CPU, in the order of the algorithm.
CPU = named(
    catalogue_cpu.MUTANTS, "m_starts_at_zero", "o_not_rescaled", "l_not_rescaled", "alpha_inverted", "log2e_missing",
    "log2e_short", "last_key_dropped", "key_lengths_ignored", "causal_strict", "causal_one_too_many", "causal_top_left",
    "mask_one_too_many", "heads_interleaved", "v_of_another_head", "empty_row_unguarded", "lse_without_scale",
    "lse_log2_of_l",
)  # fmt: skip

# Of the bf16 kernel on the matrix unit.
AMX = named(
    catalogue_amx.MUTANTS, "o_not_rescaled", "l_not_rescaled", "l_of_rounded_p_not_rescaled", "tail_key_admitted",
    "causal_one_too_many", "causal_second_half", "heads_interleaved", "lse_without_l", "p_columns_swapped",
)  # fmt: skip

# Of spec/flash2.py.
SPEC = named(
    catalogue_spec.MUTANTS, "o_not_rescaled", "o_divided_by_alpha", "l_not_rescaled", "m_of_this_tile",
    "m_starts_at_zero", "inf_unguarded", "mask_ignored", "last_key_dropped", "l_divides_twice", "lse_without_l",
)  # fmt: skip


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


def package(mutant: Mutant, problem: Problem) -> Folder:
    """The mutated package of a request, written into the cache."""
    files = mutant.apply(rendered.render_package(problem))
    digest = rendered.read_plan(files[rendered.PLAN_FILE])["digest"]
    return writer.write_files(files, packages.cache() / "mutants" / digest[: rendered.DIGEST_CHARS])


def host(dtype: str = "float32") -> Problem:
    """The package that the CPU mutants of the forward pass live in: small tiles, d != dv, neither a power of two."""
    tile = {"br": 32, "bc": 16} if dtype == "float32" else {"br": 64, "bc": 32}
    return packages.request(sram="192KB", d=24, dv=40, dtypes=(dtype,), archs=("cpu",), backward=False, **tile)


def hunt_cpu(mutant: Mutant, device: Device, *, examples: int, seed: int) -> Hunt:
    """Fuzz one mutated CPU package until something fails."""
    of, dtype = ("cpu amx", "bf16") if mutant in AMX else ("cpu", "float32")
    folder = package(mutant, host(dtype))
    outcome = fuzz.fuzz_package(folder, device, examples=examples, seed=seed, most=100, shrink=False)
    return Hunt(mutant.name, of, mutant.what, outcome.examples, outcome.first_failure, outcome.failure)


def hunt_spec(mutant: Mutant, *, examples: int, seed: int) -> Hunt:
    """Fuzz the reference with one change in its source until something fails."""
    with copy_of_spec(mutant) as broken:

        def attention(*args: Any, **words: Any) -> Any:
            return tiles.attention(*args, forward=broken.flash2.forward, **words)

        outcome = fuzz.fuzz_spec(examples=examples, seed=seed, reference=attention, shrink=False)
    return Hunt(mutant.name, "spec", mutant.what, outcome.examples, outcome.first_failure, outcome.failure)


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
