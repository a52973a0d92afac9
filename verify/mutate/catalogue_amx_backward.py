"""The catalogue of seeded backward bugs, in the emitted kernel of the CPU's matrix unit (backward_amx_bf16.h); bf16.

Numbers are those of the catalogue; a letter marks variants, and a mutant without a number is not in it. A lane is a
query row in S, dP and dQ, and a column in dK and dV. What the kernel shares with the vector kernels (the tiles of rows,
their turns, the causal mask) is broken there as well.
"""

from __future__ import annotations

from verify.mutate.catalogue_cpu_backward import (
    CAUSAL_MISSING,
    CAUSAL_ONE_TOO_MANY,
    CAUSAL_STRICT,
    CAUSAL_TOP_LEFT,
    GROUP_STARTS_AGAIN,
    HEAD_LOST,
    HEADS_INTERLEAVED,
    KEY_LENGTHS_IGNORED,
    LAST_ROWS_LOST,
    UNSEEN_NOT_WRITTEN,
)
from verify.mutate.mutant import Inapplicable, Mutant

_FILE = "csrc/backward_amx_bf16.h"

_D = "float d = row_sum(w.rows[r], element<const uint16_t>(a.o, a.o_stride, task.batch, task.head, row));"
_LSE = "__builtin_fma((double)lse, kLog2e, lse * kLog2eTail)"
_SCALE_LOG2 = "__builtin_fma(a.scale, kLog2e, a.scale * kLog2eTail)"
_AWAY = "_mm512_sub_ps(_mm512_load_ps(w.dp[tile][h][key]), d[h])"
_DS = f"ds[h] = _mm512_maskz_mul_ps(present, weight[h], {_AWAY});"
_DQ_SCALE = "_mm512_mul_ps(_mm512_castsi512_ps(r[i]), scale)"
_DK_SCALE = "finish<kD, kDTiles>(dk, a.scale,"
_DV_SCALE = "finish<kDv, kVDTiles>(dv, 1,"
_ADD_DV = "add_rows<kVDTiles>(w.panel, first, panels, &Panel::p, &Panel::dout_pairs,"
_ADD_DK = "add_rows<kDTiles>(w.panel, first, panels, &Panel::ds, &Panel::q_pairs,"
_KEYS = "for (int64_t key = 0; key < end; key += kBc) {\n      const int64_t count = smaller(end - key, kBc);"
_PACK_DS = "gradient[odd] = (__m512i)_mm512_cvtne2ps_pbh(ds[1], ds[0]);"
_PACK_P = "_mm512_store_si512(p.p[b][i / 8][key], (__m512i)_mm512_cvtne2ps_pbh(weight[1], weight[0]));"
_STORE = "(__m256i)_mm512_cvtneps_pbh(x)"
_DQ_STORES = "    tile_store<3>(p.dq[g + 1][1]);\n  }\n}"
_SUM_STORES = "    tile_store_rows<3>(bottom + 16, kPitch);\n  }\n}"


def _cut(x: str, bits: str = "0xffff0000") -> str:
    """The floats `x` without their lower bits: bf16 truncated."""
    return f"_mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512({x}), _mm512_set1_epi32({bits})))"


def _bf16(x: str) -> str:
    """The floats `x` rounded to bf16, ties away from zero."""
    added = f"_mm512_add_epi32(_mm512_castps_si512({x}), _mm512_set1_epi32(0x8000))"
    return f"_mm512_castsi512_ps(_mm512_and_si512({added}, _mm512_set1_epi32(0xffff0000)))"


MUTANTS = (
    Mutant("d_missing", "D is not subtracted", _AWAY, "_mm512_load_ps(w.dp[tile][h][key])", _FILE, number="B1",
           probe="one key"),
    Mutant("d_scaled", "D is multiplied by the scale", _D, f"{_D} d *= a.scale;", _FILE, number="B1b",
           probe="one key"),
    Mutant("d_of_half_the_columns", "D sums half of the columns", "for (int t = 0; t < 32 * kVDTiles; t += 16) {\n"
           "    const __m512i a", "for (int t = 0; t < 16 * kVDTiles; t += 16) {\n    const __m512i a", _FILE,
           number="B1c", probe="one key"),
    Mutant("d_of_another_row", "D of the row before", _D, _D.replace("head, row)", "head, row > 0 ? row - 1 : 0)"),
           _FILE, number="B1d", probe="one key"),
    Mutant("parenthesis", "dS = P dP - D", _DS,
           "ds[h] = _mm512_maskz_sub_ps(present, _mm512_mul_ps(weight[h], _mm512_load_ps(w.dp[tile][h][key])), d[h]);",
           _FILE, number="B2", probe="causal square"),
    Mutant("d_added", "dS = P (dP + D)", _AWAY, _AWAY.replace("sub", "add"), _FILE, number="B2b", probe="one key"),
    Mutant("d_in_bf16", "D is rounded to bf16", "d[h] = _mm512_load_ps(p.d + 16 * h);",
           f"d[h] = {_bf16('_mm512_load_ps(p.d + 16 * h)')};", _FILE, number="B3", probe="one key"),
    Mutant("dq_scale_missing", "dQ is not scaled", _DQ_SCALE, "_mm512_castsi512_ps(r[i])", _FILE, number="B4",
           probe="causal square"),
    Mutant("dq_scale_twice", "dQ is scaled twice", _DQ_SCALE, f"_mm512_mul_ps({_DQ_SCALE}, scale)", _FILE,
           number="B4b", probe="causal square"),
    Mutant("dk_scale_missing", "dK is not scaled", _DK_SCALE, _DK_SCALE.replace("a.scale", "1"), _FILE, number="B5",
           probe="causal square"),
    Mutant("dk_log2e", "dK has an extra log2(e)", _DK_SCALE, _DK_SCALE.replace("a.scale", "a.scale * kLog2e"), _FILE,
           number="B5b", probe="causal square"),
    Mutant("dv_scaled", "dV is scaled too", _DV_SCALE, _DV_SCALE.replace("1", "a.scale"), _FILE, number="B5c",
           probe="one key"),
    Mutant("dv_of_ds", "dV is summed from dS", _ADD_DV, _ADD_DV.replace("Panel::p,", "Panel::ds,"), _FILE,
           number="B6", probe="one key"),
    Mutant("dk_of_p", "dK is summed from P", _ADD_DK, _ADD_DK.replace("Panel::ds,", "Panel::p,"), _FILE, number="B6b",
           probe="one key"),
    Mutant("dq_of_p", "dQ is summed from P", "interleave(gradient[0], gradient[1], low, high);",
           "interleave(_mm512_load_si512(p.p[b][i / 8][2 * i % 16]), _mm512_load_si512(p.p[b][i / 8][2 * i % 16 + 1])"
           ", low, high);", _FILE, number="B6c", probe="one key"),
    Mutant("dp_of_q", "dP = V Q^T", "product<kVDTiles>(w.chunk[b].v, p.dout,", "product<1>(w.chunk[b].v, p.q,", _FILE,
           number="B6d", probe="one key"),
    Mutant("lse_base_2", "LSE is taken for one in base 2", _LSE, "lse", _FILE, number="B7", probe="one key"),
    Mutant("lse_missing", "P is not normalised", _LSE, "0 * lse", _FILE, number="B7b", probe="one key"),
    Mutant("log2e_missing", "S in base e, exp2 in base 2", _SCALE_LOG2, "a.scale", _FILE, number="B7c",
           probe="causal square"),
    Mutant("log2e_short", "log2(e) with five digits, for LSE", _LSE, "lse * 1.4427", _FILE, number="B7d",
           probe="large LSE"),
    CAUSAL_MISSING,
    CAUSAL_TOP_LEFT,
    CAUSAL_ONE_TOO_MANY,
    CAUSAL_STRICT,
    Mutant("diagonal_missing", "tiles on the diagonal are not masked", "hide(w.s, full, keys, diagonal);",
           "hide(w.s, keys, keys, kBc);", _FILE, number="B8e", probe="causal square"),
    Mutant("diagonal_one_too_many", "a row on the diagonal sees one future key",
           "task.row + 32 * p + c.causal_shift() - key;", "task.row + 32 * p + c.causal_shift() - key + 1;", _FILE,
           number="B8f", probe="causal square"),
    Mutant("full_too_many", "a row more of a tile counts as unmasked", "smaller(task.sees[32 * p] - key, keys), 0);",
           "smaller(task.sees[32 * p + 1] - key, keys), 0);", _FILE, number="B8g", probe="causal square"),
    Mutant("tail_missing", "keys beyond the last count", "hide(w.s, full, keys, diagonal);",
           "hide(w.s, full, (keys + 31) / 32 * 32, diagonal);", _FILE, number="B8h",
           probe="key lengths"),
    KEY_LENGTHS_IGNORED,
    LAST_ROWS_LOST,
    Mutant("last_panel_lost", "the last panel is lost for dK and dV", "for (int p = first; p < panels; ++p) {\n"
           "      tile_load<4>((panel[p].*weight)", "for (int p = first; p + 1 < panels || p == 0; ++p) {\n"
           "      tile_load<4>((panel[p].*weight)", _FILE, number="B9b", probe="whole tiles"),
    Mutant("first_panel_lost", "dK and dV begin one panel late", "sees[32 * first + 31] <= key + 32 * b) ++first;",
           "sees[32 * first + 31] <= key + 32 * b) ++first;\n    first = first + 1 < panels ? first + 1 : first;",
           _FILE, number="B9c", probe="whole tiles"),
    Mutant("dv_not_cleared", "dV starts as what was there", "if (dv) memset(dv, 0,", "if (false) memset(dv, 0,",
           _FILE, number="B9d", probe="one key"),
    Mutant("cleared_by_every_tile", "every query tile clears dK and dV", "if (turn.is_first) {", "if (true) {", _FILE,
           number="B9e", probe="whole tiles"),
    Mutant("half_of_dk_stale", "half of the rows of a key tile are not loaded", "tile_load<5>((panel[p].*weight)[b][1]",
           "tile_load<5>((panel[p].*weight)[b][0]", _FILE, number="B9f", probe="whole tiles"),
    UNSEEN_NOT_WRITTEN,
    Mutant("last_keys_lost", "the last block of keys is lost", _KEYS, _KEYS.replace("key < end;",
           "key < end - (end > kBc ? kBc : 0);"), _FILE, number="B10", probe="ragged tail"),
    Mutant("dq_overwritten", "dQ of the last block of keys alone", "tile_load<0>(p.dq[g][0], 64);", "tile_zero<0>();",
           _FILE, number="B10b", probe="ragged tail"),
    Mutant("dq_not_cleared", "dQ of a tile starts as that of the one before", "memset(p.dq, 0, sizeof p.dq);", "",
           _FILE, number="B10c", probe="whole tiles"),
    Mutant("dq_second_keys_lost", "the second chunk of a block is lost for dQ",
           "if (wants_dq) add_to_dq(p, w, chunks);", "if (wants_dq) add_to_dq(p, w, 1);", _FILE, number="B10d",
           probe="whole tiles"),
    Mutant("dq_in_bf16", "dQ is rounded to bf16 after every block", _DQ_STORES,
           _DQ_STORES[: -len("  }\n}")] + "    for (int i = 0; i < 64; ++i) {\n      float* x = (float*)p.dq[g] + 16 "
           f"* i;\n      _mm512_store_ps(x, {_bf16('_mm512_load_ps(x)')});\n    }}\n  }}\n}}", _FILE, number="B11",
           probe="drift"),
    Mutant("sums_in_bf16", "dK and dV are rounded to bf16 after every tile", _SUM_STORES,
           _SUM_STORES[: -len("  }\n}")] + "    for (int j = 0; j < 32; ++j)\n      for (int t = 0; t < 32; t += 16) {"
           f"\n        float* x = (float*)(top + j * 32 * kTiles + t);\n        _mm512_storeu_ps(x, "
           f"{_bf16('_mm512_loadu_ps(x)')});\n      }}\n  }}\n}}", _FILE, number="B11b", probe="whole tiles"),
    Mutant("p_truncated", "P is truncated to bf16", _PACK_P, _PACK_P.replace("weight[1], weight[0]",
           f"{_cut('weight[1]')}, {_cut('weight[0]')}"), _FILE, number="B12", probe="causal square"),
    Mutant("ds_truncated", "dS is truncated to bf16", _PACK_DS, _PACK_DS.replace("ds[1], ds[0]",
           f"{_cut('ds[1]')}, {_cut('ds[0]')}"), _FILE, number="B12b", probe="causal square"),
    Mutant("output_truncated", "the gradients are truncated to bf16", _STORE, _STORE.replace("(x)", f"({_cut('x')})"),
           _FILE, number="B12c", probe="causal square"),
    Mutant("empty_row_unguarded", "rows without a key are read, and their LSE of -inf", "if (lse == -kInf) continue;",
           "", _FILE, number="B14", probe="rows without a key"),
    Mutant("empty_row_adds", "rows without a key have LSE = 0", "p.shift[r] = kInf;\n    p.d[r] = 0;",
           "p.shift[r] = 0;\n    p.d[r] = 0;", _FILE, number="B14b", probe="rows without a key"),
    Mutant("lost_lse_passes", "an LSE of +inf passes for a row without a key",
           'shift == kInf ? __builtin_nanf("") : canonical(shift);', "canonical(shift);", _FILE,
           probe="an LSE of +inf"),
    HEAD_LOST,
    HEADS_INTERLEAVED,
    GROUP_STARTS_AGAIN,
    Mutant("dlse_missing", "the gradient by LSE is left out", "if (a.dlse) d -=", "if (false) d -=", _FILE,
           probe="one key"),
    Mutant("dlse_sign", "the gradient by LSE has the wrong sign", "if (a.dlse) d -=", "if (a.dlse) d +=", _FILE,
           probe="one key"),
    Mutant("v_of_another_head", "V's head stride is K's", "a.v, a.v_stride, task.batch, task.kv_head, 0)",
           "a.v, a.k_stride, task.batch, task.kv_head, 0)", _FILE, probe="heads in groups"),
    Mutant("dout_taken_for_rows", "dO is read as if its columns were neighbours", "if (step == 1) {", "if (true) {",
           _FILE, probe="strided"),
    Mutant("last_dims_dropped", "the last 32 columns of dP are left out", "product<kVDTiles>(w.chunk[b].v, p.dout,",
           "product<kVDTiles - 1>(w.chunk[b].v, p.dout,", _FILE, probe="one key"),
    Mutant("p_columns_swapped", "the two rows of a word change places", "interleave(even, odd, low[i], high[i]);",
           "interleave(odd, even, low[i], high[i]);", _FILE, probe="causal square"),
    Mutant("infinite_key", "an infinite key is multiplied by a weight of 0",
           "pack_pairs<kDTiles, true, true>(w.rows, out.k_columns);",
           "pack_pairs<kDTiles, false, true>(w.rows, out.k_columns);", _FILE, probe="scores of -inf"),
)  # fmt: skip

INAPPLICABLE = (Inapplicable("B13", "dropout mask different or missing", "the kernel has no dropout yet"),)
