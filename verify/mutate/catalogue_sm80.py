"""The catalogue of seeded bugs, in the emitted mma.sync kernel (forward_sm80.cu); bf16 unless a mutant says fp16.

Numbers are those of the catalogue; a letter marks variants. A row of S lies in four lanes, and a fragment that all of
them hold is eight keys; "half of the lanes" is a shuffle that is left out.
"""

from __future__ import annotations

from verify.mutate.mutant import NOT_YET, Inapplicable, Mutant

_FILE = "csrc/forward_sm80.cu"

_O = "        o[i][n][2 * h] *= alpha;\n        o[i][n][2 * h + 1] *= alpha;\n"
_L = "l[i][h] = fmaf(l[i][h], alpha, sum);"
_ALPHA = "ex2_approx_ftz((m[i][h] - shift) * scale_log2)"
_M0 = "m[i][h] = kNegInf, l[i][h] = valid"
_MASK = "s[i][n][e] = kNegInf;"
_LEFT = "(p.causal ? min(keys, row + 1 + p.delta) : keys)"
_SEES = "min(keys, row + 1 + p.delta)"
_SUM = "sum += s[i][n][e];"
_MAX = "for (int n = 0; n < kBc / 8; ++n) m_new ="
_SCORE = "fmaf(s[i][n][e], scale_log2, -shift_log2)"
_EXP2 = f"ex2_approx_ftz({_SCORE})"
_PACK = "Element::pack(p[i][2 * c + e / 2][2 * (e % 2)], p[i][2 * c + e / 2][2 * (e % 2) + 1])"
_ACCUMULATE = "accumulate<Element>(o, s, smem + kVAt, lane_v);\n"
_EVERY_O = (
    "    for (int i = 0; i < kM; ++i)\n      for (int n = 0; n < kDvPad / 8; ++n)\n        for (int e = 0; e < 4; ++e)"
)
_TILES = "(seen_by_one + kBc - 1) / kBc"
_SCALE = "static_cast<float>(args->scale * 1.4426950408889634)"
_INVERSE = "l_row == 0.f ? 0.f : 1.f / l_row;"
_LSE = "l_row == 0.f ? kNegInf : fmaf(m[i][h], p.scale, logf(l_row))"
_STORED = "Element::pack(o[i][n][2 * h] * inverse, o[i][n][2 * h + 1] * inverse)"
_LOAD_V = "load_tile<kBc, kDv, kPanelDv>(smem + kVAt, v, p.v_step, keys - j * kBc);"
_LENGTH = "p.key_lengths ? ld_global_s64(p.key_lengths + tile.batch) : p.nk;"
_FIRST_KEY = "n == 0 && e % 2 == 0 && threadIdx.x % 4 == 0"


def _bits(x: str, keep: int) -> str:
    """The float `x` rounded to `keep` bits, ties away from zero."""
    lost = 24 - keep
    return f"__builtin_bit_cast(float, (__builtin_bit_cast(int, float({x})) + {1 << (lost - 1)}) & {-(1 << lost)})"


def _cut(x: str, keep: int = 8) -> str:
    """The float `x` truncated to `keep` bits."""
    return f"__builtin_bit_cast(float, __builtin_bit_cast(int, float({x})) & {-(1 << (24 - keep))})"


def _packed(change: str) -> str:
    """The packing of two weights, each changed: {0} stands for the weight."""
    low, high = "p[i][2 * c + e / 2][2 * (e % 2)]", "p[i][2 * c + e / 2][2 * (e % 2) + 1]"
    return f"Element::pack({change.replace('{0}', low)}, {change.replace('{0}', high)})"


MUTANTS = (
    Mutant("o_not_rescaled", "O is not multiplied by alpha", _O, "", _FILE, number="1", probe="rising maximum"),
    Mutant("last_columns_not_rescaled", "the rescale misses the last 8 columns",
           "for (int n = 0; n < kDvPad / 8; ++n) {\n" + _O, "for (int n = 0; n < kDv / 8 - 1; ++n) {\n" + _O, _FILE,
           number="2", probe="rising maximum"),
    Mutant("first_rows_rescaled", "only rows 0 to 15 of a warp are rescaled", _O, _O.replace("*=", "*= i ? 1.f :"),
           _FILE, number="3", probe="rising maximum"),
    Mutant("upper_rows_not_rescaled", "rows 8 to 15 of each m16 tile are not rescaled", _O,
           _O.replace("*=", "*= h ? 1.f :"), _FILE, number="3b", probe="rising maximum"),
    Mutant("o_rescaled_late", "O is rescaled after P V was added", _O, "", _FILE, number="4", probe="one key",
           more=(("const float alpha = ", "const float alpha = late[i][h] = "),
                 ("void softmax(Scores& s,", "void softmax(Rows& late, Scores& s,"),
                 ("softmax(s, o, m, l, p.scale_log2);", "Rows late;\n    softmax(late, s, o, m, l, p.scale_log2);"),
                 (_ACCUMULATE, _ACCUMULATE + _EVERY_O + " o[i][n][e] *= late[i][e / 2];\n"))),
    Mutant("l_not_rescaled", "l is not multiplied by alpha", _L, "l[i][h] += sum;", _FILE, number="5",
           probe="rising maximum"),
    Mutant("alpha_inverted", "alpha = exp(m_new - m_old)", _ALPHA, "ex2_approx_ftz((shift - m[i][h]) * scale_log2)",
           _FILE, number="6", probe="rising maximum"),
    Mutant("alpha_without_scale", "alpha of unscaled maxima", _ALPHA,
           "ex2_approx_ftz((m[i][h] - shift) * 1.44269504f)", _FILE, number="7", probe="rising maximum"),
    Mutant("m_starts_at_zero", "m = 0 before the first key", _M0, "m[i][h] = 0.f, l[i][h] = valid", _FILE, number="8",
           probe="far below zero"),
    Mutant("m_starts_at_flt_min", "m = FLT_MIN, the smallest positive number", _M0,
           "m[i][h] = 0x1p-126f, l[i][h] = valid", _FILE, number="9", probe="far below zero"),
    Mutant("finite_sentinel", "-5e4 stands for -inf, in the mask", _MASK, "s[i][n][e] = -5e4f;", _FILE, number="10",
           probe="causal tall"),
    Mutant("finite_m", "-5e4 stands for -inf, in m", _M0, "m[i][h] = -5e4f, l[i][h] = valid", _FILE, number="10b",
           probe="deep logits"),
    Mutant("mask_adds", "the mask adds -1e4", _MASK, "s[i][n][e] -= 1e4f;", _FILE, number="11", probe="causal tall"),
    Mutant("mask_after_maximum", "the maximum is taken over masked keys too",
           "__device__ __forceinline__ void softmax(Scores& s,",
           "__device__ __forceinline__ void softmax(Rows& top, Scores& s,", _FILE, number="12",
           probe="masked keys above",
           more=(("float m_new = m[i][h];", "float m_new = fmaxf(m[i][h], top[i][h]);"),
                 ("softmax(s, o, m, l, p.scale_log2);", "softmax(top, s, o, m, l, p.scale_log2);"),
                 ("    if (j >= whole_tiles) {  //",
                  "    Rows top;\n    for (int i = 0; i < kM; ++i)\n      for (int h = 0; h < 2; ++h) {\n"
                  "        top[i][h] = kNegInf;\n        for (int n = 0; n < kBc / 8; ++n)\n"
                  "          top[i][h] = fmaxf(top[i][h], fmaxf(s[i][n][2 * h], s[i][n][2 * h + 1]));\n      }\n"
                  "    if (j >= whole_tiles) {  //"))),
    Mutant("masked_keys_in_l", "masked keys are counted in l", _SUM, "sum += s[i][n][e] == 0.f ? 1.f : s[i][n][e];",
           _FILE, number="13", probe="causal square"),
    Mutant("masked_keys_in_o", "masked keys enter P V", _PACK, _packed("({0} == 0.f ? 1.f : {0})"), _FILE, number="14",
           probe="causal square"),
    Mutant("max_of_one_lane", "the maximum is that of two lanes of four", "m_new = fmaxf(m_new, shfl_xor(m_new, 2));",
           "", _FILE, number="15", probe="causal square"),
    Mutant("max_of_first_half", "the maximum misses half of the keys", _MAX, _MAX.replace("kBc / 8", "kBc / 16"), _FILE,
           number="15b", probe="maximum in the second half"),
    Mutant("max_of_second_half", "the maximum misses the other half", _MAX, _MAX.replace("n = 0", "n = kBc / 16"),
           _FILE, number="16", probe="maximum in the first half"),
    Mutant("m_of_this_tile", "m is the tile's maximum", "float m_new = m[i][h];", "float m_new = kNegInf;", _FILE,
           number="17", probe="falling maximum"),
    Mutant("m_stale", "m stays what the first tile left", "m[i][h] = m_new;",
           "if (m[i][h] == kNegInf) m[i][h] = m_new;", _FILE, number="18", probe="rising maximum"),
    Mutant("inf_unguarded", "-inf - (-inf) in a row without keys", "m_new == kNegInf ? 0.f : m_new;", "m_new;", _FILE,
           number="19", probe="causal tall"),
    Mutant("empty_row_unguarded", "0 / 0 in a row without keys", _INVERSE, "1.f / l_row;", _FILE, number="20",
           probe="no keys"),
    Mutant("nan_row_counts_as_empty", "a row with a NaN sum counts as empty", _INVERSE,
           "l_row > 0.f ? 1.f / l_row : 0.f;", _FILE, number="20b", probe="special/nan_in_a_query",
           equivalent="O of such a row is NaN already, and NaN times 0 is NaN"),
    Mutant("empty_row_mean", "the mask puts the lowest float: rows without keys get a mean of V", _MASK,
           "s[i][n][e] = -3e38f;", _FILE, number="21", probe="causal tall"),
    Mutant("causal_strict", "a row does not see its own key", _SEES, "min(keys, row + p.delta)", _FILE, number="22",
           probe="causal square"),
    Mutant("causal_one_too_many", "a row sees one future key", _SEES, "min(keys, row + 2 + p.delta)", _FILE,
           number="23", probe="causal square"),
    Mutant("causal_top_left", "both alignments are top-left", "args->causal == kBottomRight ? p.nk - p.nq : 0", "0",
           _FILE, number="24", probe="causal wide"),
    Mutant("causal_by_tile", "a row sees all of the tile with its last key", _SEES,
           "min(keys, (row + p.delta + kBc) / kBc * kBc)", _FILE, number="25", probe="causal square"),
    Mutant("diagonal_tile_whole", "the tile of the diagonal counts as whole", "redux_max_s32(seen_by_all / kBc)",
           "redux_max_s32((seen_by_all + kBc - 1) / kBc)", _FILE, number="25b", probe="causal square"),
    Mutant("causal_missing", "no causal mask", "p.causal ? ", "false ? ", _FILE, number="26", places=4,
           probe="causal square"),
    Mutant("last_tile_skipped", "a last partial tile is skipped", _TILES, "seen_by_one / kBc", _FILE, number="28",
           probe="one key"),
    Mutant("tail_mask_missing", "keys beyond the last are seen", "if (j >= whole_tiles) {", "if (false) {", _FILE,
           number="29", probe="one key"),
    Mutant("key_lengths_ignored", "keys beyond the length are read", _LENGTH, "p.nk;", _FILE, number="29b",
           probe="key lengths"),
    Mutant("last_key_dropped", "the last key is never seen", _LENGTH, _LENGTH.replace("p.nk;", "p.nk - (p.nk > 0);"),
           _FILE, number="30", probe="one key"),
    Mutant("tail_key_admitted", "a key beyond the last is seen", "8 * n + e % 2 >= left", "8 * n + e % 2 > left", _FILE,
           number="31", probe="one key"),
    Mutant("v_tail_not_cleared", "rows beyond the last key are read", "const bool exists = r < rows_left && ",
           "const bool exists = ", _FILE, number="32", probe="key lengths"),
    Mutant("br_and_bc_swapped", "as many query tiles as tiles of Bc rows would be", "(p.nq + kBr - 1) / kBr",
           "(p.nq + kBc - 1) / kBc", _FILE, number="33", probe="whole tiles",
           equivalent="Bc < Br here: the blocks that are too many find no row, read nothing and write nothing"),
    Mutant("key_tiles_of_br", "as many key tiles as tiles of Br keys would be", _TILES, "(seen_by_one + kBr - 1) / kBr",
           _FILE, number="33b", probe="whole tiles"),
    Mutant("first_tile_skipped", "the first tile is skipped", "softmax(s, o, m, l, p.scale_log2);",
           "if (j) softmax(s, o, m, l, p.scale_log2);", _FILE, number="34", probe="one key",
           more=((_ACCUMULATE, f"if (j) {_ACCUMULATE}"),)),
    Mutant("v_stale", "V of the tile before", "v += p.v_tile;", "if (j) v += p.v_tile;", _FILE, number="35",
           probe="ragged tail"),
    Mutant("last_rows_of_v_stale", "the last 8 keys of V are those of the tile before", _LOAD_V,
           _LOAD_V.replace("keys - j * kBc", "min(keys - j * kBc, kBc - 8)"), _FILE, number="36",
           probe="rising maximum"),
    Mutant("last_rows_of_k_lost", "the last 8 keys of K are not there", "p.k_step, keys);",
           "p.k_step, min(keys, kBc - 8));", _FILE, number="37", probe="whole tiles"),
    Mutant("last_dims_dropped", "the last step of Q K^T is left out", "pass < kDPad / 16; pass += kStepsAtOnce",
           "pass < kDPad / 16 - kStepsAtOnce; pass += kStepsAtOnce", _FILE, number="38", probe="one key"),
    Mutant("step_counted_twice", "one product of Q K^T counts twice", "Element::mma(s[i][2 * n], a[i], b[0], b[1]);",
           "Element::mma(s[i][2 * n], a[i], b[0], b[1]);\n          Element::mma(s[i][2 * n], a[i], b[0], b[1]);",
           _FILE, number="39", probe="one key"),
    Mutant("fragments_swapped", "the two halves of K's fragment change places",
           "Element::mma(s[i][2 * n], a[i], b[0], b[1]);", "Element::mma(s[i][2 * n], a[i], b[1], b[0]);", _FILE,
           number="39b", probe="one key"),
    Mutant("scale_missing", "scores are not scaled", _SCALE, "1.44269504f", _FILE, number="40", probe="causal square"),
    Mutant("scale_inverse_d", "1 / d for 1 / sqrt(d)", _SCALE, "1.44269504f / kD", _FILE, number="40b",
           probe="causal square"),
    Mutant("scale_squared", "the scale counts twice", _SCALE, f"{_SCALE} * static_cast<float>(args->scale)", _FILE,
           number="40c", probe="causal square"),
    Mutant("scale_of_padded_d", "1 / sqrt of the padded d", _SCALE,
           f"{_SCALE} * static_cast<float>(__builtin_sqrt(double(kD) / kDPad))", _FILE, number="41",
           probe="causal square"),
    Mutant("scale_in_bf16", "the scale is rounded to bf16", _SCALE, f"1.44269504f * {_bits('args->scale', 8)}", _FILE,
           number="42", probe="causal square"),
    Mutant("log2e_missing", "exp2 of a natural exponent", _SCALE, "static_cast<float>(args->scale)", _FILE,
           number="43", probe="causal square"),
    Mutant("log2e_short", "log2(e) with five digits", _SCALE, _SCALE.replace("1.4426950408889634", "1.4427"), _FILE,
           number="44", probe="two levels"),
    Mutant("q_scaled_in_bf16", "Q is scaled and rounded to bf16 first", "      uint32_t a[kM][4];\n#pragma unroll\n"
           "      for (int i = 0; i < kM; ++i) ldmatrix_x4(a[i], block_at<kBr, kPanelD>(q_pass, lane_q, i, step));\n",
           "      uint32_t a[kM][4];\n      for (int i = 0; i < kM; ++i) {\n"
           "        ldmatrix_x4(a[i], block_at<kBr, kPanelD>(q_pass, lane_q, i, step));\n"
           "        for (int e = 0; e < 4; ++e)\n"
           "          a[i][e] = Element::pack(0.2041f * __builtin_bit_cast(float, a[i][e] << 16),\n"
           "                                  0.2041f * __builtin_bit_cast(float, a[i][e] & 0xffff0000));\n      }\n",
           _FILE, number="45", probe="causal square",
           more=((_SCALE, f"{_SCALE} / 0.2041f"), ("fmaf(m[i][h], p.scale,", "fmaf(m[i][h], p.scale / 0.2041f,"))),
    Mutant("scores_in_bf16", "S is rounded to bf16", _SCORE, f"fmaf({_bits('s[i][n][e]', 8)}, scale_log2, -shift_log2)",
           _FILE, number="46", probe="causal square"),
    Mutant("exp2_cubic", "exp2 by a cubic polynomial", "#include \"ptx_sm80.cuh\"\n",
           "#include \"ptx_sm80.cuh\"\n\nstatic inline float exp2_cubic(float t) {\n"
           "  if (!(t > -126.f)) return t == t ? 0.f : t;\n  const float f = t - floorf(t);\n"
           "  const float p = 1.f + f * (0.6951786f + f * (0.2261797f + f * 0.0782455f));\n"
           "  return ldexpf(p, static_cast<int>(floorf(t)));\n}\n", _FILE, number="48", probe="whole tiles",
           more=((_EXP2, f"exp2_cubic({_SCORE})"),)),
    Mutant("exponent_in_bf16", "the argument of exp2 is rounded to bf16", _EXP2, f"ex2_approx_ftz({_bits(_SCORE, 8)})",
           _FILE, number="49", probe="whole tiles"),
    Mutant("l_in_bf16", "l is kept in bf16", _L, f"l[i][h] = {_bits('fmaf(l[i][h], alpha, sum)', 8)};", _FILE,
           number="50", probe="whole tiles"),
    Mutant("l_in_fp16", "l is kept with 11 bits", _L, f"l[i][h] = {_bits('fmaf(l[i][h], alpha, sum)', 11)};", _FILE,
           number="51", probe="whole tiles"),
    Mutant("l_of_half", "l is that of two lanes of four", "return partial + shfl_xor(partial, 2);", "return partial;",
           _FILE, number="52", probe="whole tiles"),
    Mutant("first_key_twice_in_l", "the first key counts twice in l", _SUM,
           f"sum += {_FIRST_KEY} ? 2.f * s[i][n][e] : s[i][n][e];", _FILE, number="53", probe="one key"),
    Mutant("l_of_rounded_p", "l sums weights rounded to bf16", _SUM, f"sum += {_bits('s[i][n][e]', 8)};", _FILE,
           number="54", probe="whole tiles"),
    Mutant("l_of_the_tile_before", "O is divided by l before the last tile", "finish<Element>(p, smem, o, m, l);",
           "finish<Element>(p, smem, o, m, before);", _FILE, number="55", probe="ragged tail",
           more=(("  Rows m, l;\n", "  Rows m, l, before = {};\n"),
                 ("softmax(s, o, m, l, p.scale_log2);",
                  "for (int i = 0; i < kM; ++i)\n      for (int h = 0; h < 2; ++h) before[i][h] = l[i][h];\n"
                  "    softmax(s, o, m, l, p.scale_log2);"))),
    Mutant("l_missing", "O is not divided by l", _INVERSE, "l_row == 0.f ? 0.f : 1.f;", _FILE, number="56",
           probe="whole tiles"),
    Mutant("reciprocal_short", "1 / l with 12 bits", _INVERSE, f"l_row == 0.f ? 0.f : {_bits('1.f / l_row', 12)};",
           _FILE, number="57", probe="rounded weights"),
    Mutant("p_rounded_twice", "P goes to fp16 by way of bf16", _PACK, _packed(_bits("{0}", 8)), _FILE, number="58",
           dtype="fp16", probe="rounded weights"),
    Mutant("p_in_bf16", "P in bf16 for fp16, truncated", _PACK, _packed(_cut("{0}")), _FILE, number="59", dtype="fp16",
           probe="rounded weights"),
    Mutant("p_with_4_bits", "P keeps 4 bits", _PACK, _packed(_bits("{0}", 4)), _FILE, number="60",
           probe="rounded weights"),
    Mutant("o_in_bf16", "O is rounded to bf16 after every tile", _ACCUMULATE,
           _ACCUMULATE + _EVERY_O + f" o[i][n][e] = {_bits('o[i][n][e]', 8)};\n", _FILE, number="61", probe="drift"),
    Mutant("p_truncated", "P is truncated", _PACK, _packed(_cut("{0}")), _FILE, number="62", probe="rounded weights"),
    Mutant("output_truncated", "O is truncated to bf16", _STORED,
           f"Element::pack({_cut('o[i][n][2 * h] * inverse')}, {_cut('o[i][n][2 * h + 1] * inverse')})", _FILE,
           number="63", probe="whole tiles"),
    Mutant("output_truncated_fp16", "O is truncated to fp16", _STORED,
           f"Element::pack({_cut('o[i][n][2 * h] * inverse', 11)}, {_cut('o[i][n][2 * h + 1] * inverse', 11)})", _FILE,
           number="63b", dtype="fp16", probe="whole tiles"),
    Mutant("o_not_cleared", "O starts as what was there", "for (int e = 0; e < 4; ++e) o[i][n][e] = 0.f;",
           "for (int e = 0; e < 4; ++e) o[i][n][e] = __builtin_nanf(\"\");", _FILE, number="65", probe="one key"),
    Mutant("l_starts_at_one", "l = 1 before the first key", "l[i][h] = valid ? 0.f", "l[i][h] = valid ? 1.f", _FILE,
           number="66", probe="no keys",
           equivalent="alpha = ex2(-inf) = 0 at the first tile; without keys O = 0 / 4 and LSE = -inf + ln 4"),
    Mutant("lse_base_2", "LSE in base 2", _LSE,
           _LSE.replace("fmaf(m[i][h], p.scale, logf(l_row))", "1.44269504f * fmaf(m[i][h], p.scale, logf(l_row))"),
           _FILE, number="70", probe="one key"),
    Mutant("lse_without_m", "LSE lacks the maximum", _LSE, "l_row == 0.f ? kNegInf : logf(l_row)", _FILE, number="70b",
           probe="one key"),
    Mutant("lse_without_scale", "LSE takes the unscaled maximum", _LSE, _LSE.replace("p.scale", "1.f"), _FILE,
           number="70c", probe="one key"),
    Mutant("lse_log2_of_l", "LSE = m + log2(l)", _LSE, _LSE.replace("logf", "log2f"), _FILE, number="70d",
           probe="whole tiles"),
    Mutant("lse_of_empty_plus_inf", "LSE = +inf in a row without keys", _LSE, _LSE.replace("kNegInf", "-kNegInf"),
           _FILE, number="71", probe="no keys"),
    Mutant("lse_of_empty_zero", "LSE = 0 in a row without keys", _LSE, _LSE.replace("kNegInf", "0.f"), _FILE,
           number="71b", probe="no keys"),
    Mutant("lost_row_passes_for_empty", "a row whose weights all vanished passes for one without keys",
           "sum < kLeastSum && m[i][h] != kNegInf ? __builtin_nanf(\"\") : sum", "sum", _FILE, number="71c",
           probe="lost rows"),
    Mutant("heads_interleaved", "query head h reads K/V head h mod Hkv", "tile.head / p.group;",
           "tile.head % (p.hq / p.group);", _FILE, number="72", probe="heads in groups"),
    Mutant("v_of_another_head", "V's head stride is K's", "kv_head * p.v_stride[1]", "kv_head * p.k_stride[1]", _FILE,
           number="73", probe="heads in groups"),
    Mutant("lse_transposed", "LSE of a head goes where the head from the other end belongs",
           "static_cast<int64_t>(tile.bh) * p.nq + tile.row0", "static_cast<int64_t>(p.heads - 1 - tile.bh) * p.nq + "
           "tile.row0", _FILE, number="74", probe="one key"),
)  # fmt: skip

INAPPLICABLE = (
    Inapplicable("47", "TF32 used for float32 inputs", "the kernel takes 16-bit inputs only"),
    Inapplicable("64", "P not rounded", "an operand of mma.m16n8k16 has 16 bits"),
    *NOT_YET,
)
