"""The catalogue of seeded backward bugs, in the emitted vector kernels of the CPU (backward_simd.h and what it uses).

Numbers are those of the catalogue; a letter marks variants, and a mutant without a number is not in it. A lane is a
query row in S, dP and dQ, and a column in dK and dV; float32 unless a mutant says otherwise.
"""

from __future__ import annotations

from verify.mutate.mutant import Inapplicable, Mutant

_ROWS, _BLOCK, _SUMS = "csrc/backward_simd.h", "csrc/backward_simd_block.h", "csrc/backward_simd_sums.h"
_TASKS, _STORAGE = "csrc/backward_tasks.h", "csrc/storage_simd.h"

_AWAY = "acc[g][n] - *(const Vector*)&panel.d[n * kLanes]"
_D = "d = row_sum(w.dout_rows[r], element<const Element>(a.o, a.o_stride, tile.batch, tile.head, row));"
_SUM = "sum += load_vector<Part>(dout + t) * load_vector<Part>(values + t);"
_LSE = "__builtin_fma((double)lse, kLog2e, lse * kLog2eTail)"
_SCALE_LOG2 = "__builtin_fma(a.scale, kLog2e, a.scale * kLog2eTail)"
_DQ_SCALE = "&dq[at + i][r] * scale;"
_DK_SCALE = "finish<kD>(dk, dk_pitch, a.scale,"
_DV = "DV{w.p, w.dout_rows, tile.rows,"
_DK = "DK{w.ds, w.q_rows, tile.rows,"
_ADD_DQ = "*(Vector*)&dq[column + c][n * kLanes] += acc[c][n];"
_ADD_KV = "store_vector(at, load_vector<Vector>(at) + acc[g][n]);"
_EXP2 = "score = exp2_shifted<Scalar, kLanes>(score, scale_log2, *(const Vector*)&panel.shift[n * kLanes]);"
_STORE_DS = "select<kMasked>(panel, j + g - keys.shared, n, gradient, 0);"
_MASK = "&panel.limit[n * kLanes] > (Integer)key"
_SHIFT = "return a.causal == kBottomRight ? a.Nk - a.Nq : 0;"
_SEES = "tile.row + smaller(r, tile.rows - 1) + c.causal_shift() + 1;"
_EMPTY = "if (spare || lse == -(Scalar)__builtin_inf()) {"
_KEYS = "for (int64_t key = 0; key < end; key += Plan::kBc) {"
_FROM_ROW = "int64_t from = first + key > 0 ? first + key : 0; from < rows;"
_LENGTH = "return a.key_lengths ? a.key_lengths[batch] : a.Nk;"


def _bits(x: str, keep: int) -> str:
    """The float32 vector `x` rounded to `keep` bits, ties away from zero."""
    lost = 24 - keep
    return f"(Vector)((((Index)({x})) + {1 << (lost - 1)}) & {-(1 << lost)})"


def _cut(x: str, keep: int) -> str:
    """The float32 vector `x` truncated to `keep` bits."""
    return f"(Vector)(((Index)({x})) & {-(1 << (24 - keep))})"


def _scalar_bits(x: str, keep: int) -> str:
    lost = 24 - keep
    return f"__builtin_bit_cast(float, (__builtin_bit_cast(int, (float)({x})) + {1 << (lost - 1)}) & {-(1 << lost)})"


# Of how the work is cut up: the kernel of the matrix unit has them as well.
CAUSAL_MISSING = Mutant(
    "causal_missing", "no causal mask", "tile.sees[r] = a.causal == kFull ? length :",
    "tile.sees[r] = true ? length :", _TASKS, number="B8", probe="causal square",
)  # fmt: skip
CAUSAL_TOP_LEFT = Mutant(
    "causal_top_left", "both alignments are top-left", _SHIFT, "return 0;", _TASKS, number="B8b",
    probe="causal wide",
)  # fmt: skip
CAUSAL_ONE_TOO_MANY = Mutant(
    "causal_one_too_many", "a row sees one future key", _SEES, _SEES.replace("+ 1;", "+ 2;"), _TASKS,
    number="B8c", probe="causal square",
)  # fmt: skip
CAUSAL_STRICT = Mutant(
    "causal_strict", "a row does not see its own key", _SEES, _SEES.replace(" + 1;", ";"), _TASKS,
    number="B8d", probe="causal square",
)  # fmt: skip
KEY_LENGTHS_IGNORED = Mutant(
    "key_lengths_ignored", "keys beyond the length count", _LENGTH, "return a.Nk;", _TASKS, number="B8i",
    probe="key lengths",
)  # fmt: skip
LAST_ROWS_LOST = Mutant(
    "last_rows_lost", "the last query tile is lost", "row_tiles = (a.Nq + kBr - 1) / kBr;",
    "row_tiles = larger((a.Nq + kBr - 1) / kBr - 1, 1);", _TASKS, number="B9", probe="whole tiles",
)  # fmt: skip
UNSEEN_NOT_WRITTEN = Mutant(
    "unseen_keys_not_written", "dK and dV of keys that no row sees are not written",
    "clear_unseen(c, pair);", "", _TASKS, number="B9g", probe="causal top left",
)  # fmt: skip
HEAD_LOST = Mutant(
    "head_lost", "a query head of the group is lost", "tiles = group * row_tiles;", "tiles = row_tiles;",
    _TASKS, number="B15", probe="causal square",
)  # fmt: skip
HEADS_INTERLEAVED = Mutant(
    "heads_interleaved", "query head h belongs to K/V head h mod Hkv",
    "tile.head = tile.kv_head * c.group + number / c.row_tiles;",
    "tile.head = tile.kv_head + number / c.row_tiles * a.Hkv;", _TASKS, number="B15b", probe="heads in groups",
)  # fmt: skip
GROUP_STARTS_AGAIN = Mutant(
    "group_starts_again", "every query head clears dK and dV", "mine == 0, mine + 1",
    "mine % adding == 0, mine + 1", _TASKS, number="B15c", probe="causal square",
)  # fmt: skip

MUTANTS = (
    Mutant("d_missing", "D is not subtracted", _AWAY, "acc[g][n]", _BLOCK, number="B1", probe="one key"),
    Mutant("d_scaled", "D is multiplied by the scale", _AWAY,
           "acc[g][n] - *(const Vector*)&panel.d[n * kLanes] * (Scalar)0.2041241452", _BLOCK, number="B1b",
           probe="one key"),
    Mutant("d_of_half_the_columns", "D sums half of the columns", "t < kDv; t += kPart) sum +=",
           "t < kDv / 2; t += kPart) sum +=", _ROWS, number="B1c", probe="one key"),
    Mutant("d_of_another_row", "D of the row before", f"  {_D}", f"  {_D}".replace("tile.head, row)", "tile.head, "
           "row > 0 ? row - 1 : 0)"), _ROWS, number="B1d", probe="one key"),
    Mutant("d_of_dout", "D = rowsum(dO o dO)", _SUM, _SUM.replace("values", "dout"), _ROWS, number="B1e",
           probe="one key"),
    Mutant("parenthesis", "dS = P dP - D", "*(const Vector*)&p[j + g][n * kLanes] * away",
           "*(const Vector*)&p[j + g][n * kLanes] * acc[g][n] - *(const Vector*)&panel.d[n * kLanes]", _BLOCK,
           number="B2", probe="causal square"),
    Mutant("d_added", "dS = P (dP + D)", _AWAY, _AWAY.replace(" - ", " + "), _BLOCK, number="B2b", probe="one key"),
    Mutant("d_in_bf16", "D is rounded to bf16", _D, _D + f" d = {_scalar_bits('d', 8)};", _ROWS, number="B3",
           probe="one key"),
    Mutant("dq_scale_missing", "dQ is not scaled", _DQ_SCALE, "&dq[at + i][r];", _ROWS, number="B4",
           probe="causal square"),
    Mutant("dq_scale_twice", "dQ is scaled twice", _DQ_SCALE, "&dq[at + i][r] * scale * scale;", _ROWS, number="B4b",
           probe="causal square"),
    Mutant("dq_scale_of_width", "1 / sqrt(d) for the scale that was asked for", _DQ_SCALE,
           "&dq[at + i][r] * (Scalar)0.2041241452;", _ROWS, number="B4c", probe="a scale of 0.1"),
    Mutant("dk_scale_missing", "dK is not scaled", _DK_SCALE, "finish<kD>(dk, dk_pitch, 1,", _ROWS, number="B5",
           probe="causal square"),
    Mutant("dk_log2e", "dK has an extra log2(e)", _DK_SCALE, "finish<kD>(dk, dk_pitch, a.scale * kLog2e,", _ROWS,
           number="B5b", probe="causal square"),
    Mutant("dk_scaled_per_tile", "dK is scaled after every query tile", "if (turn.is_last) {\n      if (dk)",
           "if (true) {\n      if (dk)", _ROWS, number="B5c", probe="three query tiles"),
    Mutant("dv_scaled", "dV is scaled too", "finish<kDv>(dv, dv_pitch, 1,", "finish<kDv>(dv, dv_pitch, a.scale,",
           _ROWS, number="B5d", dtype="bf16", probe="one key"),
    Mutant("dv_of_ds", "dV is summed from dS", _DV, _DV.replace("w.p", "w.ds"), _ROWS, number="B6", probe="one key"),
    Mutant("dk_of_p", "dK is summed from P", _DK, _DK.replace("w.ds", "w.p"), _ROWS, number="B6b", probe="one key"),
    Mutant("dq_of_p", "dQ is summed from P", "add_to_dq<true>(keys, column, ds,", "add_to_dq<true>(keys, column, p,",
           _BLOCK, number="B6c", probe="one key"),
    Mutant("dp_of_q", "dP = V times another panel", "keys.v_pitch, panel.dout, acc)",
           "keys.v_pitch, panel.q, acc)", _BLOCK, number="B6d", probe="one key"),
    Mutant("lse_base_2", "LSE is taken for one in base 2", _LSE, "lse", _ROWS, number="B7", probe="one key"),
    Mutant("lse_missing", "P is not normalised", _LSE, "0 * lse", _ROWS, number="B7b", probe="one key"),
    Mutant("lse_of_another_head", "LSE of the first query head", "a.lse, a.lse_stride, tile.batch, tile.head, row)",
           "a.lse, a.lse_stride, tile.batch, 0, row)", _ROWS, number="B7c", probe="heads in groups"),
    Mutant("log2e_missing", "S in base e, exp2 in base 2", _SCALE_LOG2, "a.scale", _ROWS, number="B7d",
           probe="causal square"),
    Mutant("log2e_short", "log2(e) with five digits, for LSE", _LSE, "lse * 1.4427", _ROWS, number="B7e",
           probe="large LSE"),
    Mutant("lse_in_float32", "LSE log2(e) with one rounding more", _LSE,
           "(Scalar)lse * (Scalar)kLog2e", _ROWS, number="B7f", probe="large LSE",
           equivalent="log2(e) in float32 is off by 2^-26.2 of it, a fourth of the rounding that the model counts"),
    CAUSAL_MISSING,
    CAUSAL_TOP_LEFT,
    CAUSAL_ONE_TOO_MANY,
    CAUSAL_STRICT,
    Mutant("mask_one_too_many", "a partial group admits a key", _MASK, _MASK.replace(">", ">="), _BLOCK, number="B8e",
           probe="causal square"),
    Mutant("mask_missing", "partial groups of keys are not masked", "return sees ? visible :",
           "return true ? visible :", _BLOCK, number="B8f", probe="causal square"),
    Mutant("ds_not_masked", "dS is not masked", _STORE_DS, "gradient;", _BLOCK, number="B8g",
           probe="NaN in V"),
    Mutant("causal_by_tile", "a row sees all of the block with its last key", "larger(smaller(length, causal), 0);",
           "larger(smaller(length, (causal + kBc - 1) / kBc * kBc), 0);", _TASKS, number="B8h", probe="causal square"),
    KEY_LENGTHS_IGNORED,
    Mutant("causal_of_length", "the causal corner is at the key length",
           "+ c.causal_shift() + 1;", "+ (a.causal == kBottomRight ? length - a.Nq : 0) + 1;", _TASKS, number="B8j",
           probe="key lengths with causal"),
    LAST_ROWS_LOST,
    Mutant("last_row_lost", "a row is not summed over", "r < end; r++", "r + 1 < end; r++", _SUMS, number="B9b",
           probe="one key"),
    Mutant("rows_start_late", "sums over rows start one late", _FROM_ROW,
           "int64_t from = first + key > 0 ? first + key + 1 : 0; from < rows;", _SUMS, number="B9c",
           probe="causal square"),
    Mutant("dkv_overwritten", "dK and dV of the last query tile alone", _ADD_KV, "store_vector(at, acc[g][n]);",
           _SUMS, number="B9d", probe="whole tiles"),
    Mutant("not_cleared", "dK and dV start as what was there", "if (turn.is_first) {", "if (false) {", _ROWS,
           number="B9e", probe="one key"),
    Mutant("cleared_by_every_tile", "every query tile clears dK and dV", "if (turn.is_first) {", "if (true) {", _ROWS,
           number="B9f", probe="whole tiles"),
    UNSEEN_NOT_WRITTEN,
    Mutant("last_keys_lost", "the last block of keys is lost", _KEYS,
           "for (int64_t key = 0; key < end - (end > Plan::kBc ? Plan::kBc : 0); key += Plan::kBc) {", _ROWS,
           number="B10", probe="ragged tail"),
    Mutant("last_key_lost", "the last key of a block is lost for dQ", "for (int64_t j = 0; j < keys.count; j++) {\n"
           "      Vector gradient", "for (int64_t j = 0; j < keys.count - 1; j++) {\n      Vector gradient", _BLOCK,
           number="B10b", probe="causal square"),
    Mutant("dq_overwritten", "dQ of the last block of keys alone", _ADD_DQ, _ADD_DQ.replace("+=", "="), _BLOCK,
           number="B10c", probe="ragged tail"),
    Mutant("dq_not_cleared", "dQ of a tile starts as that of the one before", "memset(w.dq[p], 0, sizeof w.dq[p]);",
           "", _ROWS, number="B10d", probe="ragged tail"),
    Mutant("dq_rows_swapped", "dQ of the first panel is stored for all", "store_dq(c, tile, p, w.dq[p]);",
           "store_dq(c, tile, p, w.dq[0]);", _ROWS, number="B10e", probe="whole tiles"),
    Mutant("dq_in_bf16", "dQ is rounded to bf16 after every block", _ADD_DQ,
           _ADD_DQ.replace("+= acc[c][n]", "= " + _bits("*(Vector*)&dq[column + c][n * kLanes] + acc[c][n]", 8)),
           _BLOCK, number="B11", probe="drift"),
    Mutant("dq_in_bf16_for_bf16", "dQ is rounded to bf16 after every block of a bf16 kernel", _ADD_DQ,
           _ADD_DQ.replace("+= acc[c][n]", "= " + _bits("*(Vector*)&dq[column + c][n * kLanes] + acc[c][n]", 8)),
           _BLOCK, number="B11b", dtype="bf16", probe="drift"),
    Mutant("dkv_in_bf16", "dK and dV are rounded to bf16 after every tile", _ADD_KV,
           _ADD_KV.replace("load_vector<Vector>(at) + acc[g][n]", "(Vector)((((decltype(acc[g][n] > acc[g][n]))("
           "load_vector<Vector>(at) + acc[g][n])) + 32768) & -65536)"), _SUMS, number="B11c", probe="whole tiles"),
    Mutant("p_in_bf16", "P is rounded to bf16", _EXP2, _EXP2 + f"\n        score = {_bits('score', 8)};", _BLOCK,
           number="B12", probe="causal square"),
    Mutant("ds_truncated", "dS is truncated to bf16", _STORE_DS, _STORE_DS.replace("gradient,", _cut("gradient", 8)
           + ","), _BLOCK, number="B12b", probe="causal square"),
    Mutant("output_truncated", "the gradients are truncated to bf16", "bits + 0x7fff + (bits >> 16 & 1);", "bits;",
           _STORAGE, number="B12c", dtype="bf16", probe="causal square"),
    Mutant("empty_row_unguarded", "rows without a key are read, and their LSE of -inf", _EMPTY, "if (spare) {", _ROWS,
           number="B14", probe="scores of -inf"),
    Mutant("empty_row_adds", "rows without a key have LSE = 0", "shift = __builtin_inf();", "shift = 0;", _ROWS,
           number="B14b", probe="scores of -inf"),
    Mutant("lost_lse_passes", "an LSE of +inf passes for a row without a key",
           'if (shift == (Scalar)__builtin_inf()) shift = __builtin_nan("");', "", _ROWS, probe="an LSE of +inf"),
    HEAD_LOST,
    HEADS_INTERLEAVED,
    GROUP_STARTS_AGAIN,
    Mutant("dlse_missing", "the gradient by LSE is left out", "if (a.dlse) d -=", "if (false) d -=", _ROWS,
           probe="one key"),
    Mutant("dlse_sign", "the gradient by LSE has the wrong sign", "if (a.dlse) d -=", "if (a.dlse) d +=", _ROWS,
           probe="one key"),
    Mutant("v_of_another_head", "V's head stride is K's", "a.v, a.v_stride, tile.batch, tile.kv_head, 0)",
           "a.v, a.k_stride, tile.batch, tile.kv_head, 0)", _ROWS, probe="heads in groups"),
    Mutant("dout_taken_for_rows", "dO is read as if its columns were neighbours", "if (a.dout_stride[3] == 1) {",
           "if (true) {", _ROWS, probe="strided"),
    Mutant("later_keys_stale", "keys that only later panels see keep old weights", "if (keys.count < count) {",
           "if (false) {", _ROWS, probe="three query tiles"),
    Mutant("infinite_key", "an infinite key is multiplied by a weight of 0", "if (keys.k_is_finite) {", "if (true) {",
           _BLOCK, probe="scores of -inf"),
    Mutant("weights_wrap", "weights beyond the format wrap around", "n = n > most ? most : n;", "", _BLOCK,
           probe="an LSE of other scores"),
)  # fmt: skip

INAPPLICABLE = (Inapplicable("B13", "dropout mask different or missing", "the kernels have no dropout yet"),)
