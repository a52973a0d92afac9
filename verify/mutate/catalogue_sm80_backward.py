"""The catalogue of seeded backward bugs, in the emitted mma.sync kernels (backward_*sm80*), bf16 or as a mutant says.

Numbers are those of the catalogue; a letter marks variants, and a mutant without a number is not in it. dQ has two
kernels: key_tiles adds it to memory beside dK and dV, query_tiles sums it in a fixed order; "in order" is the latter.
"""

from __future__ import annotations

from verify.mutate.catalogue_sm80 import _bits, _cut
from verify.mutate.mutant import Inapplicable, Mutant

_FILE = "csrc/backward_"  # the kernels' file and the headers that are parts of it

_DS = "s[i][n][e] * (dp[i][n][e] - d);"
_WEIGHT = "ex2_approx_ftz(fmaf(s[i][n][e], p.scale_log2, -lse_log2[i][e / 2]))"
_DS_IN_ORDER = f"{_WEIGHT} * (dp[i][n][e] - d[i][e / 2]);"
_ROW_D = "st_global_f32(row + 1, empty ? 0.f : sum);"
_DQ_SCALE, _DQ_SCALE_IN_ORDER = "min(kBr, p.nq - row0), p.scale,", "min(kQueryBr, p.nq - row0), p.scale,"
_DK_SCALE, _DV_SCALE = "dk, warp_key, part, end, p.scale,", "dv, warp_key, part, end, 1.f,"
_LSE = "lse * 1.44269504f"
_SCALE_LOG2 = "static_cast<float>(args->scale * 1.4426950408889634)"
_LIMIT = "i >= p.nq ? 0 : p.causal ? min(keys, i + 1 + p.delta) : keys;"
_MASK = "s[i][n][e] = 0.f, dp[i][n][e] = 0.f;"
_LENGTH = "p.key_lengths ? ld_global_s64(p.key_lengths + batch) : p.nk;"
_STEPS = "(p.row_tiles - first_tile) * p.group);"
_KEY_TILES = "(max(limit_of(p, last_row, keys), 0) + kQueryBc - 1) / kQueryBc);"
_STEP = "const int stage = step % kStages, row0 = tile * kBr;"
_STEP_IN_ORDER = "const int stage = j % kQueryStages;\n"
_ADD = "red_add_f32(sums + sum_at(first + n, i, e), dq[i][2 * n + e / 4][e % 4]);"
_ADD_IN_ORDER = "dq, kDPad / 16, own(ds16), [&](auto& r, int n, int c) { k.b(r, n, c); });\n"
_ROUND = "Element::pack(x[i][n][2 * h], x[i][n][2 * h + 1])"
_EMPTY = "empty ? kInf : lse == kInf"


def _rounded(array: str, tiles: str, columns: str) -> str:
    """C++ that rounds every element of an accumulator to bf16."""
    return (
        f"    for (int i = 0; i < {tiles}; ++i)\n      for (int n = 0; n < {columns}; ++n)\n"
        f"        for (int e = 0; e < 4; ++e) {array}[i][n][e] = {_bits(f'{array}[i][n][e]', 8)};\n"
    )


MUTANTS = (
    Mutant("d_missing", "D is not subtracted", _DS, "s[i][n][e] * dp[i][n][e];", _FILE, number="B1", probe="one key"),
    Mutant("d_missing_in_order", "D is not subtracted, in order", _DS_IN_ORDER, f"{_WEIGHT} * dp[i][n][e];", _FILE,
           number="B1b", probe="one key, in order"),
    Mutant("d_scaled", "D is multiplied by the scale", _ROW_D, _ROW_D.replace("sum", "sum * p.scale"), _FILE,
           number="B1c", probe="one key"),
    Mutant("d_of_half_the_columns", "D sums half of the lanes", "for (int step = 1; step < 8; step *= 2) sum",
           "for (int step = 1; step < 4; step *= 2) sum", _FILE, number="B1d", probe="one key"),
    Mutant("d_of_another_row", "D with the O of the row before", "ld_global_b128(x, o + i * p.o_stride[2]",
           "ld_global_b128(x, o + (i > 0 ? i - 1 : 0) * p.o_stride[2]", _FILE, number="B1e", probe="one key"),
    Mutant("parenthesis", "dS = P dP - D", _DS, "s[i][n][e] * dp[i][n][e] - d;", _FILE, number="B2",
           probe="causal square"),
    Mutant("parenthesis_in_order", "dS = P dP - D, in order", _DS_IN_ORDER,
           f"{_WEIGHT} * dp[i][n][e] - d[i][e / 2];", _FILE, number="B2b", probe="causal square, in order"),
    Mutant("d_added", "dS = P (dP + D)", _DS, _DS.replace(" - ", " + "), _FILE, number="B2c", probe="one key"),
    Mutant("d_in_bf16", "D is rounded to bf16", _ROW_D, _ROW_D.replace("sum", _bits("sum", 8)), _FILE, number="B3",
           probe="one key"),
    Mutant("dq_scale_missing", "dQ is not scaled", _DQ_SCALE, _DQ_SCALE.replace("p.scale", "1.f"), _FILE, number="B4",
           probe="causal square"),
    Mutant("dq_scale_missing_in_order", "dQ is not scaled, in order", _DQ_SCALE_IN_ORDER,
           _DQ_SCALE_IN_ORDER.replace("p.scale", "1.f"), _FILE, number="B4b", probe="causal square, in order"),
    Mutant("dq_scale_twice", "dQ is scaled twice", _DQ_SCALE, _DQ_SCALE.replace("p.scale", "p.scale * p.scale"),
           _FILE, number="B4c", probe="causal square"),
    Mutant("dk_scale_missing", "dK is not scaled", _DK_SCALE, _DK_SCALE.replace("p.scale", "1.f"), _FILE, number="B5",
           probe="causal square"),
    Mutant("dk_log2e", "dK has an extra log2(e)", _DK_SCALE, _DK_SCALE.replace("p.scale", "p.scale_log2"), _FILE,
           number="B5b", probe="causal square"),
    Mutant("dv_scaled", "dV is scaled too", _DV_SCALE, _DV_SCALE.replace("1.f", "p.scale"), _FILE, number="B5c",
           probe="one key"),
    Mutant("dv_of_ds", "dV is summed from dS", "dv, columns_v, own(p16),", "dv, columns_v, own(ds16),", _FILE,
           number="B6", probe="one key"),
    Mutant("dv_of_ds_of_others", "dV is summed from dS of the neighbouring warps",
           "p_shared.a(r, key + i, from + c)", "ds_shared.a(r, key + i, from + c)", _FILE, number="B6b",
           probe="whole tiles"),
    Mutant("dk_of_p", "dK is summed from P", "dk, columns_d, own(ds16),", "dk, columns_d, own(p16),", _FILE,
           number="B6c", probe="one key"),
    Mutant("dq_of_p", "dQ is summed from P", "ds_shared.at(r, dq_row + i, c)",
           "p_shared.at(r, dq_row + i, c)", _FILE, number="B6d", probe="one key"),
    Mutant("dq_of_p_in_order", "dQ is summed from P, in order", _DS_IN_ORDER, f"{_WEIGHT};", _FILE, number="B6e",
           probe="one key, in order"),
    Mutant("lse_base_2", "LSE is taken for one in base 2", _LSE, "lse", _FILE, number="B7", probe="one key"),
    Mutant("lse_missing", "P is not normalised", _LSE, "0.f * lse", _FILE, number="B7b", probe="one key"),
    Mutant("log2e_missing", "S in base e, exp2 in base 2", _SCALE_LOG2, "static_cast<float>(args->scale)", _FILE,
           number="B7c", probe="causal square"),
    Mutant("log2e_short", "log2(e) with five digits, for LSE", _LSE, "lse * 1.4427f", _FILE, number="B7d",
           probe="large LSE"),
    Mutant("lse_of_another_head", "LSE of the first head", "p.lse + batch * p.lse_stride[0] + head * p.lse_stride[1]",
           "p.lse + batch * p.lse_stride[0]", _FILE, number="B7e", probe="heads in groups"),
    Mutant("causal_missing", "no causal mask", _LIMIT, "i >= p.nq ? 0 : keys;", _FILE, number="B8",
           probe="causal square"),
    Mutant("causal_top_left", "both alignments are top-left", "kBottomRight ? p.nk - p.nq : 0;",
           "kBottomRight ? 0 : 0;", _FILE, number="B8b", probe="causal wide"),
    Mutant("causal_one_too_many", "a row sees one future key", _LIMIT, _LIMIT.replace("i + 1", "i + 2"), _FILE,
           number="B8c", probe="causal square"),
    Mutant("causal_strict", "a row does not see its own key", _LIMIT, _LIMIT.replace("i + 1", "i"), _FILE,
           number="B8d", probe="causal square"),
    Mutant("p_not_masked", "P of hidden pairs counts", _MASK, "dp[i][n][e] = 0.f;", _FILE, number="B8e",
           probe="causal square"),
    Mutant("ds_not_masked", "dS of hidden pairs counts", _MASK, "s[i][n][e] = 0.f;", _FILE, number="B8f",
           probe="causal square"),
    Mutant("diagonal_missing", "a tile that the diagonal cuts is not masked", "limit_of(p, row0, keys) < key0 + kBc)",
           "limit_of(p, row0, keys) < key0)", _FILE, number="B8g", probe="causal square"),
    Mutant("diagonal_missing_in_order", "a tile that the diagonal cuts is not masked, in order",
           "if (j >= whole_tiles) {", "if (j > whole_tiles) {", _FILE, number="B8h", probe="causal square, in order"),
    Mutant("key_lengths_ignored", "keys beyond the length count", _LENGTH, "p.nk;", _FILE, number="B8i",
           probe="key lengths"),
    Mutant("first_row_late", "the first row that sees a key is left out", "max(key0 - p.delta, 0) : 0;",
           "max(key0 - p.delta, 0) + 1 : 0;", _FILE, number="B8j", probe="causal square"),
    Mutant("last_rows_lost", "the last query tile of all heads is lost", _STEPS, f"{_STEPS[:-2]} - 1);", _FILE,
           number="B9", probe="whole tiles"),
    Mutant("rows_of_others_lost", "the rows of a neighbouring warp are lost", "other < kRowWarps; ++other",
           "other < kRowWarps - 1; ++other", _FILE, number="B9b", probe="whole tiles"),
    Mutant("dv_overwritten", "dV of the last query tile alone", _STEP, f"{_STEP}\n    clear(dv);", _FILE,
           number="B9c", probe="whole tiles"),
    Mutant("dk_overwritten", "dK of the last query tile alone", _STEP, f"{_STEP}\n    clear(dk);", _FILE,
           number="B9d", probe="whole tiles"),
    Mutant("last_keys_lost", "a last partial key tile is lost", "redux_max_s32(key0 < keys ?",
           "redux_max_s32(key0 + kBc <= keys ?", _FILE, number="B10", probe="ragged tail"),
    Mutant("last_keys_lost_in_order", "a last partial key tile is lost for dQ, in order", _KEY_TILES,
           _KEY_TILES.replace(" + kQueryBc - 1", ""), _FILE, number="B10b", probe="ragged tail, in order"),
    Mutant("dq_overwritten", "dQ of the last key tile alone", _ADD, _ADD.replace("red_add_f32", "st_global_f32"),
           _FILE, number="B10c", probe="ragged tail"),
    Mutant("dq_overwritten_in_order", "dQ of the last key tile alone, in order", _STEP_IN_ORDER,
           f"{_STEP_IN_ORDER}    clear(dq);\n", _FILE, number="B10d", probe="ragged tail, in order"),
    Mutant("dq_not_cleared", "dQ starts as what was there",
           "st_global_b128(p.sums + static_cast<int64_t>(block) * kTileSums + x, zero);", ";", _FILE, number="B10e",
           probe="one key"),
    Mutant("dq_of_another_head", "dQ of all heads of a group is added to the first",
           "(batch * p.hq + head) * p.row_tiles + tile) * kTileSums;",
           "(batch * p.hq + kv_head * p.group) * p.row_tiles + tile) * kTileSums;", _FILE, number="B10f",
           probe="causal square"),
    Mutant("dq_in_bf16", "what is added to dQ is rounded to bf16", _ADD,
           _ADD.replace("dq[i][2 * n + e / 4][e % 4]", _bits("dq[i][2 * n + e / 4][e % 4]", 8)), _FILE, number="B11",
           probe="drift"),
    Mutant("dq_in_bf16_in_order", "dQ is rounded to bf16 after every key tile, in order", _ADD_IN_ORDER,
           _ADD_IN_ORDER + _rounded("dq", "kQueryM", "kDPad / 8"), _FILE, number="B11b", probe="drift, in order"),
    Mutant("dv_in_bf16", "dV is rounded to bf16 after every query tile", _STEP, f"{_STEP}\n"
           + _rounded("dv", "kM", "2 * kNv"), _FILE, number="B11c", probe="three query tiles"),
    Mutant("operands_truncated", "P and dS are truncated to bf16", _ROUND,
           f"Element::pack({_cut('x[i][n][2 * h]')}, {_cut('x[i][n][2 * h + 1]')})", _FILE, number="B12",
           probe="causal square"),
    Mutant("operands_truncated_fp16", "P and dS are truncated to fp16", _ROUND,
           f"Element::pack({_cut('x[i][n][2 * h]', 11)}, {_cut('x[i][n][2 * h + 1]', 11)})", _FILE, number="B12b",
           dtype="fp16", probe="causal square"),
    Mutant("p_in_bf16", "P and dS in bf16 for fp16", _ROUND,
           f"Element::pack({_bits('x[i][n][2 * h]', 8)}, {_bits('x[i][n][2 * h + 1]', 8)})", _FILE, number="B12c",
           dtype="fp16", probe="causal square"),
    Mutant("output_truncated", "the gradients are truncated to bf16", "Element::pack(low, high)",
           f"Element::pack({_cut('low')}, {_cut('high')})", _FILE, number="B12d", probe="causal square"),
    Mutant("empty_row_unguarded", "an LSE of -inf is used as it is", "const bool empty = lse == -kInf;",
           "const bool empty = false;", _FILE, number="B14", probe="an LSE of -inf"),
    Mutant("empty_row_adds", "rows without a key have LSE = 0", _EMPTY, _EMPTY.replace("kInf :", "0.f :", 1), _FILE,
           number="B14b", probe="an LSE of -inf"),
    Mutant("lost_lse_passes", "an LSE of +inf passes for a row without a key", 'lse == kInf ? __builtin_nanf("") : ',
           "", _FILE, probe="an LSE of +inf"),
    Mutant("head_lost", "a query head of the group is lost", _STEPS, _STEPS.replace("p.group", "1"), _FILE,
           number="B15", probe="causal square"),
    Mutant("heads_interleaved", "query head h belongs to K/V head h mod Hkv",
           "head + (tile + 1 == p.row_tiles);", "head + (tile + 1 == p.row_tiles ? p.hkv : 0);", _FILE, number="B15b",
           probe="heads in groups", more=(("load(0, kv_head * p.group, first_tile)", "load(0, kv_head, first_tile)"),
                                          ("int head = kv_head * p.group,", "int head = kv_head,"))),
    Mutant("heads_interleaved_in_order", "query head h reads K/V head h mod Hkv, in order", "kv_head = head / p.group;",
           "kv_head = head % p.hkv;", _FILE, number="B15c", probe="heads in groups, in order"),
    Mutant("dlse_missing", "the gradient by LSE is left out", "if (p.dlse)\n", "if (false)\n", _FILE, probe="one key"),
    Mutant("dlse_sign", "the gradient by LSE has the wrong sign", "sum -= ld_global_f32(p.dlse",
           "sum += ld_global_f32(p.dlse", _FILE, probe="one key"),
    Mutant("v_of_another_head", "V's head stride is K's", "kv_head * p.v_stride[1] + key0", "kv_head * p.k_stride[1] + "
           "key0", _FILE, places=2, probe="heads in groups"),
    Mutant("q_stale", "Q of the tile before", "q(smem + kQAt + stage * kQStage);",
           "q(smem + kQAt + (stage ^ 1) * kQStage);", _FILE,
           probe="whole tiles"),
    Mutant("last_dims_dropped", "the last 16 dims of Q K^T are left out",
           "multiply<Element, kDPad / 16, kStepsAtOnce>(", "multiply<Element, kDPad / 16 - 1, 1>(", _FILE,
           probe="one key"),
)  # fmt: skip

INAPPLICABLE = (Inapplicable("B13", "dropout mask different or missing", "the kernels have no dropout yet"),)
