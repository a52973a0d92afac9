"""Loops over key tiles read from machine code: the shortest way through them is counted, and a wrong number noticed."""

from codegen import problem
from codegen.plans import sm90a
from verify import ptxas_loops, ptxas_sm90a

# A kernel in miniature: two products before the loop, two in it, two after it. In it: a wait that repeats itself, a
# maximum that is taken anew where it is negative (the branch to 0x0b0), a rescaling that is passed over (to 0x110).
CODE = """
	code for sm_90a
		Function : _Z9miniatureI8BFloat16ELb0EEvv
        /*0000*/                   HGMMA.64x16x16.F32.BF16 R24, gdesc[UR8], RZ, !UPT ;
        /*0010*/                   HGMMA.64x16x16.F32.BF16 R24, gdesc[UR8], R24, gsb0 ;
        /*0020*/                   R2UR UR4, R2 ;
        /*0030*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4+0x38020], R18 ;
        /*0040*/              @!P0 BRA 0x30 ;
        /*0050*/                   HGMMA.64x16x16.F32.BF16 R24, gdesc[UR8], RZ, !UPT ;
        /*0060*/                   HGMMA.64x16x16.F32.BF16 R24, R8, gdesc[UR8].tnspB, R24, gsb0 ;
        /*0070*/               @P1 BRA 0xb0 ;
        /*0080*/                   FMUL R1, R1, R2 ;
        /*0090*/                   MUFU.EX2 R1, R1 ;
        /*00a0*/                   BRA 0xe0 ;
        /*00b0*/                   FMNMX R1, R1, R2, !PT ;
        /*00c0*/                   FSEL R1, R1, RZ, P2 ;
        /*00d0*/                   MUFU.EX2 R1, R1 ;
        /*00e0*/              @!P3 BRA 0x110 ;
        /*00f0*/                   FMUL R24, R24, R1 ;
        /*0100*/                   FMUL R25, R25, R1 ;
        /*0110*/                   F2FP.BF16.F32.PACK_AB R8, R9, R8 ;
        /*0120*/               @P4 BRA P5, 0x20 ;
        /*0130*/                   HGMMA.64x16x16.F32.BF16 R24, gdesc[UR8], RZ, !UPT ;
        /*0140*/                   HGMMA.64x16x16.F32.BF16 R24, R8, gdesc[UR8].tnspB, R24, gsb0 ;
        /*0150*/                   EXIT ;
"""


def test_the_shortest_way_through_a_loop_is_counted():
    ((name, code),) = ptxas_loops.functions(CODE).items()
    assert name == "_Z9miniatureI8BFloat16ELb0EEvv" and ptxas_loops.products(code) == 6
    (loop,) = ptxas_loops.over_key_tiles(code, 2)
    assert loop.describe() == {
        "instructions": 12, "length": 17, "HGMMA": 2, "R2UR": 1, "MUFU": 1, "FMUL": 1, "F2FP": 1,
    }  # fmt: skip
    assert ptxas_loops.over_key_tiles(code, 3) == []


def test_a_way_that_leaves_out_products_is_not_taken():
    """The branch over the rescaling, led back before the products and past them."""
    (code,) = ptxas_loops.functions(CODE.replace("@P1 BRA 0xb0", "NOP").replace("/*0040*/              @!P0 BRA 0x30",
        "/*0040*/              @!P0 BRA 0x110")).values()  # fmt: skip
    (loop,) = ptxas_loops.over_key_tiles(code, 2)
    assert loop.counts["HGMMA"] == 2


def small():
    asked = problem.make(sram_bytes=2**20, d=16, archs=["sm80"])
    plan = sm90a.make_plan(asked, 64, 16, (2, 2), causal="full")
    assert plan is not None and ptxas_sm90a.products_of_a_step(plan) == 2
    return plan


def test_the_products_of_a_plan_are_found_and_others_noticed():
    made, findings = ptxas_sm90a.judge(small(), CODE)
    assert findings == [] and [(k["mask"], k["products"], k["expected"]) for k in made] == [("full", 6, 6)]
    again = "        /*0150*/                   HGMMA.64x16x16.F32.BF16 R24, gdesc[UR8], RZ, !UPT ;\n"
    _, findings = ptxas_sm90a.judge(small(), CODE.replace("        /*0150*/                   EXIT ;\n", again))
    assert findings == ["full: 7 products, the algorithm has 6"]
    _, findings = ptxas_sm90a.judge(small(), CODE.replace("@P4 BRA P5, 0x20", "@P4 BRA P5, 0x60"))
    assert findings == ["full: 0 loops of 2 products, the plan has 1"]
    _, findings = ptxas_sm90a.judge(small(), CODE.replace("ELb0E", "ELb1E"))
    assert findings[-1] == "kernels: causal, the plan has full"


def test_default_plans_and_candidates_are_asked_for_once_each():
    found = ptxas_sm90a.chosen([(64, 64), (128, 128)], [(64, 64)])
    assert len({one.plan for one in found}) == len(found) == len({one.name for one in found})
    assert {one.source for one in found} >= {"codegen 192KB", "tune"}
    assert {one.plan.d for one in found if one.source == "tune"} == {64}
