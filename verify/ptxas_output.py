"""What nvcc, ptxas and cuobjdump say of one CUDA unit, read into figures and judged.

Sources: `nvcc -Xptxas -v` (CUDA 13: per entry function a line each for its properties and its resources), and the
advisories C75xx, "Potential Performance Loss", with which ptxas says that it serialises wgmma or ignores setmaxnreg.

Holds always: a kernel that ptxas did not report, or reported without its properties, is an error and not a pass.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from codegen.devices import DEVICES, FEATURE_TARGETS

# SASS mnemonics that a figure is kept of: matrix unit, shared-memory fragments, copies, registers to uniform
# registers, barriers; LDL and STL touch local memory, which no kernel of ours may have.
MNEMONICS = ("HMMA", "HGMMA", "LDSM", "STSM", "LDGSTS", "UTMALDG", "UTMASTG", "R2UR", "BAR", "LDL", "STL")
LOCAL_MNEMONICS = ("LDL", "STL")

_FUNCTION = re.compile(r"ptxas info\s*: Compiling entry function '(?P<name>[^']+)' for '(?P<arch>\w+)'")
_PROPERTIES = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"ptxas info\s*: Used (\d+) registers(?P<rest>.*)")
_STATIC = re.compile(r"(\d+) bytes smem")
_ADVISORY = re.compile(r"\(C75\d\d\)")
_WARNING = re.compile(r"\bwarning\b", re.IGNORECASE)
_SASS_FUNCTION = re.compile(r"^\s*Function : (\S+)", re.MULTILINE)
_SASS_ARCH = re.compile(r"^\s*arch = (sm_\w+)", re.MULTILINE)
_SASS_LINE = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9]*)", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the plan promises of one unit. `_bytes` are bytes."""

    threads: int  # of a block
    shared_bytes: int  # dynamic shared memory: the plan's number
    plan: str  # how a finding calls what the planner accepted: "128 x 192, d=128"

    def registers(self, arch: str) -> int:
        """Registers that a thread may have on `arch` ("sm_90a"): the register file over the block, in units of 8."""
        device = device_of(arch)
        return min(device.registers_per_thread, device.registers_per_block // self.threads // 8 * 8)


@dataclass
class Kernel:
    """One entry function for one architecture."""

    name: str
    arch: str
    registers: int = 0
    allowed: int = 0
    stack_bytes: int = 0
    spill_store_bytes: int = 0
    spill_load_bytes: int = 0
    static_shared_bytes: int = 0
    instructions: dict[str, int] = field(default_factory=dict)  # by mnemonic; empty where there is no cuobjdump
    findings: list[str] = field(default_factory=list)

    def describe(self) -> dict[str, Any]:
        """JSON types."""
        return dict(vars(self))


def device_of(arch: str) -> Any:
    """The row of `codegen.devices` for "sm_80" or "sm_90a"."""
    name = arch.replace("_", "")
    return DEVICES[FEATURE_TARGETS.get(name, name)]


def kernels(said: str, limits: Limits) -> list[Kernel]:
    """Every entry function that ptxas reported in `said`, judged against the plan."""
    found: list[Kernel] = []
    starts = list(_FUNCTION.finditer(said))
    for start, end in zip(starts, [*(s.start() for s in starts[1:]), len(said)], strict=True):
        block = said[start.end() : end]
        kernel = Kernel(start["name"], start["arch"], allowed=limits.registers(start["arch"]))
        properties, used = _PROPERTIES.findall(block), _USED.search(block)
        if properties and used:
            # More than one line of properties: a function that was not inlined, with a frame of its own.
            frames = [[int(n) for n in one] for one in properties]
            kernel.stack_bytes, kernel.spill_store_bytes, kernel.spill_load_bytes = map(sum, zip(*frames, strict=True))
            kernel.registers = int(used[1])
            static = _STATIC.search(used["rest"])
            kernel.static_shared_bytes = int(static[1]) if static else 0
            kernel.findings += _of_kernel(kernel, limits)
        else:
            kernel.findings.append("unread: ptxas did not say what the kernel uses")
        found.append(kernel)
    return found


def _of_kernel(kernel: Kernel, limits: Limits) -> list[str]:
    found = []
    spilled = kernel.spill_store_bytes + kernel.spill_load_bytes
    if spilled:
        found.append(
            f"spill: {kernel.spill_store_bytes} bytes stored and {kernel.spill_load_bytes} loaded at "
            f"{kernel.registers} registers, although the planner's rule accepts {limits.plan}"
        )
    if kernel.stack_bytes and not spilled:
        found.append(f"local memory: a stack frame of {kernel.stack_bytes} bytes; an array is indexed at run time")
    if kernel.static_shared_bytes:
        found.append(
            f"shared memory: {kernel.static_shared_bytes} static bytes beside the plan's {limits.shared_bytes} dynamic"
        )
    if kernel.registers > kernel.allowed:
        found.append(f"registers: {kernel.registers} used, {kernel.allowed} exist for {limits.threads} threads")
    return found


def messages(said: str) -> list[str]:
    """Findings that belong to the unit as a whole: advisories C75xx and every warning."""
    found = []
    for line in said.splitlines():
        if _ADVISORY.search(line):
            found.append(f"advisory: {line.strip()}")
        elif _WARNING.search(line):
            found.append(f"warning: {line.strip()}")
    return list(dict.fromkeys(found))


def shared_memory(text: str, limits: Limits, archs: Sequence[str]) -> list[str]:
    """Findings about the dynamic shared memory that the emitted text asks for: the plan's bytes, once, and launched."""
    stated = [int(n) for n in re.findall(r"\bconstexpr int kSharedBytes = (\d+);", text)]
    found = []
    if stated != [limits.shared_bytes]:
        numbers = ", ".join(map(str, stated)) or "nothing"
        found.append(f"shared memory: kSharedBytes is {numbers}, the plan has {limits.shared_bytes} bytes")
    launched = re.findall(r"\.dynamicSmemBytes = ([^;]+);", text)
    if not launched or any(value.strip() != "kSharedBytes" for value in launched):
        found.append(f"shared memory: launched with {', '.join(launched) or 'none'} instead of kSharedBytes")
    for arch in archs:
        most = device_of(arch).smem_per_block_bytes
        if limits.shared_bytes > most:
            found.append(f"shared memory: the plan has {limits.shared_bytes} bytes, a block on {arch} at most {most}")
    return found


def instructions(sass: str) -> dict[tuple[str, str], dict[str, int]]:
    """(architecture, function) -> how often each of MNEMONICS stands in its code; the text of `cuobjdump -sass`."""
    found = {}
    marks = sorted(
        [(m.start(), "arch", m[1]) for m in _SASS_ARCH.finditer(sass)]
        + [(m.start(), "function", m[1]) for m in _SASS_FUNCTION.finditer(sass)]
    )
    arch = ""
    for (start, kind, name), end in zip(marks, [*(m[0] for m in marks[1:]), len(sass)], strict=True):
        if kind == "arch":
            arch = name
            continue
        counted = Counter(_SASS_LINE.findall(sass, start, end))
        found[arch, name] = {m: counted[m] for m in MNEMONICS if counted[m]}
    return found


def readable(names: Sequence[str]) -> dict[str, str]:
    """Mangled names -> what people call them; unchanged where no demangler is installed."""
    tool = shutil.which("c++filt")
    if tool is None or not names:
        return {name: name for name in names}
    said = subprocess.run([tool], input="\n".join(names), capture_output=True, text=True).stdout.splitlines()
    if len(said) != len(names):
        return {name: name for name in names}
    return {name: short(text) for name, text in zip(names, said, strict=True)}


def short(text: str) -> str:
    """A demangled signature without namespaces, return type and arguments: "attention_forward_d64...<BFloat16>"."""
    text = re.sub(r"\(anonymous namespace\)::|_GLOBAL__N__\w+?_cu_\w{8}(?:_\w+)?::", "", text)
    return text.removeprefix("void ").split("(")[0]
