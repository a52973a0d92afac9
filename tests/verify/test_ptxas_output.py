"""What ptxas and cuobjdump print, read and judged: from recorded text, so it needs neither."""

from __future__ import annotations

import pytest

from verify import ptxas_output
from verify.ptxas_output import Limits

LIMITS = Limits(threads=256, shared_bytes=131072, plan="128 x 192")
CLEAN = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_ZN12_6kernelINS_7Float16EEE' for 'sm_80'
ptxas info    : Function properties for _ZN12_6kernelINS_7Float16EEE
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 240 registers, used 1 barriers, 576 bytes cmem[0]
ptxas info    : Compile time = 190.573 ms
ptxas info    : Compiling entry function '_ZN12_6kernelINS_8BFloat16EEE' for 'sm_90'
ptxas info    : Function properties for _ZN12_6kernelINS_8BFloat16EEE
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 242 registers, used 1 barriers
"""
NO_FRAME = "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads"


def findings(said, limits=LIMITS):
    return [text for kernel in ptxas_output.kernels(said, limits) for text in kernel.findings]


def test_a_clean_report_gives_figures_and_no_finding():
    first, second = ptxas_output.kernels(CLEAN, LIMITS)
    assert (first.arch, first.registers, first.allowed, first.static_shared_bytes) == ("sm_80", 240, 255, 0)
    assert (second.arch, second.registers) == ("sm_90", 242)
    assert findings(CLEAN) == [] and ptxas_output.messages(CLEAN) == []


@pytest.mark.parametrize(
    "old, new, kind, says",
    [
        (NO_FRAME, "72 bytes stack frame, 64 bytes spill stores, 60 bytes spill loads", "spill",
         "64 bytes stored and 60 loaded at 240 registers, although the planner's rule accepts 128 x 192"),
        (NO_FRAME, "0 bytes stack frame, 0 bytes spill stores, 4 bytes spill loads", "spill", "4 loaded"),
        (NO_FRAME, "256 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads", "local memory", "256 bytes"),
        ("576 bytes cmem[0]", "16 bytes smem, 576 bytes cmem[0]", "shared memory", "16 static bytes"),
        (f"{NO_FRAME}\nptxas info    : Used 240", f"{NO_FRAME}\nptxas info    : Used 256", "registers", "256 used"),
        (f"{NO_FRAME}\n", "\n", "unread", "did not say"),
        ("ptxas info    : Used 240 registers", "nothing", "unread", "did not say"),
    ],
)  # fmt: skip
def test_each_fault_of_a_kernel_is_one_finding(old, new, kind, says):
    found = findings(CLEAN.replace(old, new, 1))
    assert len(found) == 1 and found[0].startswith(f"{kind}: ") and says in found[0]


def test_a_function_that_was_not_inlined_counts_with_its_kernel():
    frame = NO_FRAME.replace("0 bytes stack", "8 bytes stack")
    helper = f"ptxas info    : Function properties for _helper\n    {frame}\n"
    said = CLEAN.replace("ptxas info    : Used 240", helper + "ptxas info    : Used 240")
    assert [text.split(":")[0] for text in findings(said)] == ["local memory"]


@pytest.mark.parametrize(
    "line, kind",
    [
        ("ptxas info    : (C7515) Potential Performance Loss: wgmma.mma_async instructions are serialized due to "
         "non wgmma instructions defining accumulator registers", "advisory"),
        ("ptxas info    : (C7508) Potential Performance Loss: 'setmaxnreg' ignored", "advisory"),
        ("ptxas warning : Value of threads per SM is out of range", "warning"),
        ('forward.cu(12): warning #177-D: variable "x" was declared but never referenced', "warning"),
    ],
)  # fmt: skip
def test_advisories_and_warnings_are_findings(line, kind):
    found = ptxas_output.messages(CLEAN + line + "\n" + line + "\n")
    assert found == [f"{kind}: {line}"]


TEXT = "constexpr int kSharedBytes = 131072;\n  config.dynamicSmemBytes = kSharedBytes;\n"


@pytest.mark.parametrize(
    "old, new, says",
    [
        ("131072", "131088", "kSharedBytes is 131088, the plan has 131072"),
        ("constexpr int kSharedBytes = 131072;", "", "kSharedBytes is nothing"),
        (TEXT, TEXT + "constexpr int kSharedBytes = 131072;", "131072, 131072"),
        ("= kSharedBytes;", "= kSharedBytes / 2;", "launched with kSharedBytes / 2"),
        ("config.dynamicSmemBytes = kSharedBytes;", "", "launched with none"),
    ],
)
def test_shared_memory_of_the_text_is_the_plans(old, new, says):
    assert ptxas_output.shared_memory(TEXT, LIMITS, ["sm_80"]) == []
    found = ptxas_output.shared_memory(TEXT.replace(old, new, 1), LIMITS, ["sm_80"])
    assert len(found) == 1 and says in found[0]


def test_shared_memory_beyond_the_block_is_a_finding():
    text = TEXT.replace("131072", "200000")
    limits = Limits(threads=256, shared_bytes=200000, plan="p")
    assert ptxas_output.shared_memory(text, limits, ["sm_90a"]) == []
    (found,) = ptxas_output.shared_memory(text, limits, ["sm_80"])
    assert "a block on sm_80 at most 166912" in found


@pytest.mark.parametrize("threads, allowed", [(32, 255), (128, 255), (256, 255), (384, 168), (512, 128)])
def test_registers_allowed_follow_from_the_block(threads, allowed):
    assert Limits(threads=threads, shared_bytes=0, plan="p").registers("sm_90a") == allowed


SASS = """
Fatbin elf code:
================
arch = sm_80

	code for sm_80
		Function : _kernel
        /*0000*/                   MOV R1, c[0x0][0x28] ;
        /*0010*/              @!P1 LDGSTS.E.BYPASS.128 [R3+0x8000], [R4.64] ;
        /*0020*/                   HMMA.16816.F32.BF16 R4, R8, R12, R4 ;
        /*0030*/                   HMMA.16816.F32.BF16 R4, R8, R12, R4 ;
        /*10040*/            @!UP0 BAR.SYNC 0x0 ;
        /*10050*/                  STL [R1], R2 ;

arch = sm_90

		Function : _kernel
        /*0000*/                   LDSM.16.M88.4 R4, [R2] ;
"""


def test_instructions_are_counted_per_function_and_architecture():
    assert ptxas_output.instructions(SASS) == {
        ("sm_80", "_kernel"): {"HMMA": 2, "LDGSTS": 1, "BAR": 1, "STL": 1},
        ("sm_90", "_kernel"): {"LDSM": 1},
    }


def test_names_become_readable():
    hidden = "(anonymous namespace)::"
    said = f"void {hidden}attention_forward_d64<{hidden}Float16>({hidden}Params)"
    assert ptxas_output.short(said) == "attention_forward_d64<Float16>"
