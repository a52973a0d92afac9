"""Ten kernels broken on purpose by somebody who had not read the emulator: each report names the line and the reason.

Each fault is one replacement in the text of a kernel that is clean as it is: the emitted sm_80 forward, or the forward
in the shape of FlashAttention-3 of `kernels/`. The line that a sentence must name is searched for in the broken text.
The README of the emulator shows the ten sentences; `python -m tests.emulator.test_broken_kernels` writes them there.
"""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest

from tests.emulator import hopper
from verify import emulator as emulator_package
from verify import packages, report
from verify.emulator import build
from verify.emulator.emulator import SCHEDULES, Emulator, FindingError, Run, guarded
from verify.entry_points import DTYPE_CODES, ForwardArgs

README = Path(emulator_package.__file__).parent / "README.md"
RESULTS = README.parent.parent / "results"
BLOCK = re.compile(r"(?<=<!-- ten broken kernels -->\n).*?(?=<!-- end of ten broken kernels -->)", re.DOTALL)
PADDING = 8  # elements between two rows of O: a wrong stride shows


@dataclass(frozen=True)
class Broken:
    name: str
    kernel: str  # "sm80" or "hopper"
    old: str
    new: str
    kind: str
    at: tuple[str, ...]  # the sentence names the line of each; in the broken text
    reason: str  # a part of the sentence


BROKEN = (
    Broken(
        "missing wait", "sm80",
        "    cp_async_wait<0>();\n    __syncthreads();  // Vj is there",
        "    __syncthreads();  // Vj is there",
        "race", ("ldmatrix_x4_trans(b", "load_tile<kBc, kDv, kPanelDv>(smem + kVAt"), "nothing waited for it",
    ),
    Broken(
        "early release", "hopper",
        "    wgmma_wait<0>();\n    pin(x);\n    if (lane == 0) mbarrier_arrive(smem + kEmptyK + 8 * s);\n",
        "    if (lane == 0) mbarrier_arrive(smem + kEmptyK + 8 * s);\n    wgmma_wait<0>();\n    pin(x);\n",
        "race", ("tma_load_3d(smem + kK", "wgmma_m64n64k16_bf16_ss"), "nothing orders the two",
    ),
    Broken(
        "wrong parity", "hopper",
        "mbarrier_wait(smem + kFullV + 8 * s, ring.parity);",
        "mbarrier_wait(smem + kFullV + 8 * s, ring.parity ^ 1);",
        "deadlock", ("ring.parity ^ 1",), "phase 0 has ended, so parity 1 waits and parity 0 would pass",
    ),
    Broken(
        "wrong expected bytes", "hopper",
        "mbarrier_arrive_expect_tx(smem + kFullV + 8 * s, kTileBytes);",
        "mbarrier_arrive_expect_tx(smem + kFullV + 8 * s, kTileBytes / 2);",
        "deadlock", ("kTileBytes / 2",), "8192 landed, but 4096 were expected at",
    ),
    Broken(
        "off-by-one row bound", "sm80",
        "p.v_step, keys - j * kBc);",
        "p.v_step, keys + 1 - j * kBc);",
        "global-out-of-bounds", ("keys + 1",), " behind the end of 'v'",
    ),
    Broken(
        "uninitialised tile", "sm80",
        "    load_tile<kBr, kD, kPanelD>(smem + kQAt, q, kStep<kPanelD> * p.q_stride[2], p.nq - row0);\n",
        "",
        "uninitialised-read", ("ldmatrix_x4(a[i]", "scores<Element>(s, smem + kQAt"), "which nobody has written",
    ),
    Broken(
        "divergent shuffle", "sm80",
        "const float sum = row_sum(l[i][h]),",
        "const float sum = row < rows ? row_sum(l[i][h]) : 0.f,",
        "deadlock", ("row < rows ? row_sum",), "warp 0 misses lanes 24-31, of which lane 24 is in __syncthreads",
    ),
    Broken(
        "missing proxy fence", "hopper",
        "  fence_proxy_async();\n",
        "",
        "missing-proxy-fence", ("tma_store_3d(&map_o", "stmatrix_x4(q_tile"), "no fence.proxy.async lies between",
    ),
    Broken(
        "buffer overrun", "sm80",
        "r < kRows; r += kRowStep,",
        "r <= kRows; r += kRowStep,",
        "race", ("load_tile<kBr, kD, kPanelD>(smem + kQAt", "(smem + kKAt, k, p.k_step, keys)"), "two copies overlap",
    ),
    Broken(
        "wrong stride", "sm80",
        "st_global_b128(out + row * p.o_stride[2]",
        "st_global_b128(out + row * 2 * kDv",
        "written-outside", ("row * 2 * kDv",), "which is no element of the output",
    ),
)  # fmt: skip


@lru_cache(maxsize=1)
def emitted() -> Path:
    """The emitted sm_80 forward: two warps, one K/V buffer."""
    asked = packages.request(sram="64KB", d=64, archs=("sm80",), dtypes=("bf16",), br=64, bc=32)
    return packages.emit(asked) / "csrc" / "forward_sm80.cu"


def source(kernel: str) -> Path:
    return emitted() if kernel == "sm80" else hopper.KERNELS / "hopper_forward_d64.cu"


def broken_text(fault: Broken) -> str:
    text = source(fault.kernel).read_text()
    assert text.count(fault.old) == 1, f"{fault.name}: the kernel has changed"
    return text.replace(fault.old, fault.new)


def run(kernel: str, text: str, schedule=SCHEDULES[0]) -> Run:
    path = source(kernel)
    includes = [path.parent] if kernel == "sm80" else [path.parent, hopper.headers()]
    emulator = Emulator(build.library(text, includes=includes, name=path.name))
    emulator.configure(schedule)
    return (run_sm80 if kernel == "sm80" else run_hopper)(emulator)


def arrays(emulator: Emulator, heads: int, nq: int, nk: int, padding: int = 0):
    """q, k, v, o, lse, registered: normal inputs, outputs to be written once."""
    rng = np.random.default_rng(0)
    made = {name: guarded((heads, n, 64), np.uint16) for name, n in (("q", nq), ("k", nk), ("v", nk))}
    for name, array in made.items():
        array[...] = hopper.to_bf16(rng.standard_normal(array.shape).astype(np.float32))
        emulator.register(name, array)
    made["o"] = guarded((heads, nq, 64 + padding), np.uint16)[..., :64]
    made["lse"] = guarded((heads, nq), np.float32)
    for name in ("o", "lse"):
        emulator.register(name, made[name], once=True)
    return made


def run_sm80(emulator: Emulator, heads: int = 2, nq: int = 70, nk: int = 100) -> Run:
    made = arrays(emulator, heads, nq, nk, PADDING)
    args = ForwardArgs(B=1, Hq=heads, Hkv=heads, Nq=nq, Nk=nk, scale=0.125)
    for name, array in made.items():
        setattr(args, name, array.ctypes.data)
        if name != "lse":
            getattr(args, f"{name}_stride")[:] = [heads * array.strides[0] // 2, *(s // 2 for s in array.strides[:2])]
    return emulator.launch("attention_forward_sm80", ctypes.byref(args), DTYPE_CODES["bf16"], None)


def run_hopper(emulator: Emulator, heads: int = 2, nq: int = 150, nk: int = 300) -> Run:
    made = arrays(emulator, heads, nq, nk)
    return emulator.launch("hopper_forward_d64", *made.values(), heads, nq, nk, ctypes.c_float(0.125), 0, None)


def line_of(text: str, part: str) -> int:
    """The number of the only line that contains `part`."""
    (number,) = [number for number, line in enumerate(text.splitlines(), 1) if part in line]
    return number


def lines_named(sentence: str) -> set[tuple[str, int]]:
    """The (file, line) in a sentence: "a.cuh:3", "(called at b.cu:4, :5)"."""
    found, file = set(), ""
    for place in re.finditer(r"(?P<file>[\w.]*):(?P<line>\d+)\b", sentence):
        file = place["file"] or file
        found.add((file, int(place["line"])))
    return found


@pytest.mark.parametrize("kernel", ["sm80", "hopper"])
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: s.name)
def test_the_kernel_as_it_is_has_no_finding(kernel, schedule):
    run(kernel, source(kernel).read_text(), schedule).check()


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: s.name)
@pytest.mark.parametrize("fault", BROKEN, ids=[fault.name.replace(" ", "-") for fault in BROKEN])
def test_the_report_names_the_line_and_the_reason(fault, schedule):
    text = broken_text(fault)
    (finding,) = run(fault.kernel, text, schedule).findings
    assert finding.kind == fault.kind, finding.sentence
    assert fault.reason in finding.sentence and "\n" not in finding.sentence, finding.sentence
    file = source(fault.kernel).name
    wanted = {(file, line_of(text, part)) for part in fault.at}
    assert wanted <= lines_named(finding.sentence), (wanted, finding.sentence)


def markdown() -> str:
    """The ten in the README: the change, and what the emulator says in its first schedule."""
    items = []
    for number, fault in enumerate(BROKEN, 1):
        (finding,) = run(fault.kernel, broken_text(fault)).findings
        items.append(f"{number}. **{fault.name}** ({change(fault)})\n   > {finding.sentence}\n")
    return "\n" + "\n".join(items)


def change(fault: Broken) -> str:
    """What was replaced, in words where lines moved."""
    old, new = (" ".join(re.sub(r"//.*", "", text).split()) for text in (fault.old, fault.new))
    if not new:
        return f"without `{old}`"
    if old.endswith(new):
        return f"without `{old.removesuffix(new).strip()}`"
    return f"`{old}` → `{new}`"


def test_the_readme_shows_what_the_emulator_says():
    (shown,) = BLOCK.findall(README.read_text())
    assert shown == markdown(), "run: python -m tests.emulator.test_broken_kernels"


def test_the_example_of_the_readme_runs(tmp_path, monkeypatch, capsys):
    text = README.read_text()
    kernel, program, printed = (
        re.search(rf"```{mark}\n(.*?)```", text, re.DOTALL)[1] for mark in ("cuda", "python", "text")
    )
    (tmp_path / "reverse.cu").write_text(kernel)
    monkeypatch.chdir(tmp_path)
    exec(compile(program, "README.md", "exec"), {})
    assert capsys.readouterr().out == printed
    (tmp_path / "reverse.cu").write_text(kernel.replace("  cp_async_wait<0>();\n", ""))
    with pytest.raises(FindingError) as raised:
        exec(compile(program, "README.md", "exec"), {})
    assert f"`{raised.value}`" in " ".join(text.split())


def test_the_readme_lists_every_kind_of_finding():
    table = README.read_text().split("## What it finds")[1].split("\n## ")[0]
    cells = [row.split("|")[1] for row in table.splitlines() if row.startswith("| `")]
    listed = [kind for cell in cells for kind in re.findall("`(.*?)`", cell)]
    sources = [path.read_text() for path in (README.parent / "src").glob("*.cpp")]
    made = {kind for text in sources for kind in re.findall(r'\b(?:finding|fatal)\(\s*"([\w-]+)"', text)}
    assert sorted(listed) == sorted({*made, "host-error"})


def test_the_figures_of_the_readme_are_those_of_the_result_file():
    assert not report.refresh(README, RESULTS, write=False), "run: python -m verify report"


if __name__ == "__main__":
    README.write_text(BLOCK.sub(lambda _: markdown(), README.read_text()))
