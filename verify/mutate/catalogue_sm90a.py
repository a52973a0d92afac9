"""The catalogue of seeded bugs, in the emitted wgmma kernel (forward_sm90a*.cu and what it includes), bf16 or as said.

Numbers are those of the catalogue; a letter marks variants. A lane has s[i] of row i / 2 % 2 of its two, and of key
8 (i / 4) + i % 2 after its first; the four lanes of a quad share the rows, so "half of the lanes" is a shuffle that is
left out. Key tiles come in descending order: the first tile is the last one.
"""

from __future__ import annotations

from verify.mutate.catalogue_sm80 import _bits, _cut
from verify.mutate.mutant import NOT_YET, Inapplicable, Mutant

_KERNEL, _SOFTMAX = "csrc/forward_sm90a", "csrc/softmax_sm90a.cuh"
_TILES, _OUTPUT = "csrc/tiles_sm90a.cuh", "csrc/output_sm90a.cuh"

_O = "o[i] *= alpha[i / 2 % 2];"
_L = "l[h] = fmaf(l[h], alpha[h], sum[h]);"
_ALPHA = "ex2_approx_ftz((m - shift) * scale_log2)"
_M0 = "m[0] = m[1] = kNegInf;"
_L0 = 'l[0] = l[1] = tile.keys < 0 ? __builtin_nanf("") : 0.f;'
_MASK = "s[i] = kNegInf;"
_SUM = "sum[h] += s[i];"
_SCORE = "fmaf(s[i], scale_log2, -shift_log2[h])"
_EXP2 = f"ex2_approx_ftz({_SCORE})"
_PACK = "Element::pack(s[8 * step + 2 * i], s[8 * step + 2 * i + 1])"
_SEES = "min(keys, row + 1 + p.delta)"
_LAST_TILE = "(max(seen_by<kCausal>(p, min(end, p.nq) - 1, keys), 1) - 1) / kBc;"
_WHOLE = "max(seen_by<kCausal>(p, row0, tile.keys), 0) / kBc;"
_LENGTH = "p.key_lengths ? ld_global_s64(p.key_lengths + batch) : p.nk;"
_SCALE = "static_cast<float>(args.scale * 1.4426950408889634)"
_INVERSE = "sum == 0.f ? 0.f : rcp_approx_ftz(sum);"
_LSE = "sum == 0.f ? kNegInf : fmaf(m[h], p.scale, kLn2 * lg2_approx_ftz(sum))"
_STORED = "Element::pack(o[at] * inverse[h], o[at + 1] * inverse[h])"
_RESCALE = "      rescale<kLazy>(o, alpha);\n"
_QK = "Element::qk(s, q_tile + column_step<64, kPanelD>(step), k_tile + column_step<kBc, kPanelD>(step), step > 0);"
_PV = "step > 0 ? 1 : accumulate);"
_HALF_A, _HALF_B = "for (int i = 8; i < kCount; i += 8)", "for (int i = 0; i < kCount; i += 4) most"
_FIRST_A = "float_as_s32(s[2 * h]), float_as_s32(s[2 * h + 4])"
_FIRST_B = "float_as_s32(s[2 * h + 1]), float_as_s32(s[2 * h + 5])"
_FIRST_KEY = "i / 4 == 0 && i % 2 == 0 && threadIdx.x % 4 == 0"


def _packed(change: str) -> str:
    """The packing of two weights, each changed: {0} stands for the weight."""
    low, high = "s[8 * step + 2 * i]", "s[8 * step + 2 * i + 1]"
    return f"Element::pack({change.replace('{0}', low)}, {change.replace('{0}', high)})"


def _second_half(text: str) -> str:
    return text.replace("s[2 * h", "s[kCount / 2 + 2 * h")


MUTANTS = (
    Mutant("o_not_rescaled", "O is not multiplied by alpha", _O, ";", _SOFTMAX, number="1", probe="rising maximum"),
    Mutant("last_columns_not_rescaled", "the rescale misses the last 8 columns", _O, f"if (i / 4 != 4) {_O}", _SOFTMAX,
           number="2", probe="rising maximum"),
    Mutant("upper_rows_not_rescaled", "rows 8 to 15 of each warp are not rescaled", _O, f"if (i / 2 % 2 == 0) {_O}",
           _SOFTMAX, number="3", probe="rising maximum"),
    Mutant("o_rescaled_late", "O is multiplied by the alpha of the tile before", _RESCALE,
           "      rescale<kLazy>(o, late);\n      late[0] = alpha[0], late[1] = alpha[1];\n", _KERNEL, number="4",
           probe="rising maximum", more=(("  Rows m, l, alpha;\n", "  Rows m, l, alpha, late = {1.f, 1.f};\n"),)),
    Mutant("l_not_rescaled", "l is not multiplied by alpha", _L, "l[h] += sum[h];", _SOFTMAX, number="5",
           probe="rising maximum"),
    Mutant("alpha_inverted", "alpha = exp(m_new - m_old)", _ALPHA, "ex2_approx_ftz((shift - m) * scale_log2)",
           _SOFTMAX, number="6", probe="rising maximum"),
    Mutant("alpha_without_scale", "alpha of unscaled maxima", _ALPHA, "ex2_approx_ftz((m - shift) * 1.44269504f)",
           _SOFTMAX, number="7", probe="rising maximum"),
    Mutant("m_starts_at_zero", "m = 0 before the first key", _M0, "m[0] = m[1] = 0.f;", _KERNEL, number="8",
           probe="far below zero"),
    Mutant("m_starts_at_flt_min", "m = FLT_MIN, the smallest positive number", _M0, "m[0] = m[1] = 0x1p-126f;",
           _KERNEL, number="9", probe="far below zero"),
    Mutant("finite_sentinel", "-5e4 stands for -inf, in the mask", _MASK, "s[i] = -5e4f;", _SOFTMAX, number="10",
           probe="causal tall"),
    Mutant("finite_m", "-5e4 stands for -inf, in m", _M0, "m[0] = m[1] = -5e4f;", _KERNEL, number="10b",
           probe="deep logits"),
    Mutant("mask_adds", "the mask adds -1e4", _MASK, "s[i] -= 1e4f;", _SOFTMAX, number="11", probe="causal tall"),
    Mutant("mask_after_maximum", "the maximum is taken over masked keys too", "    mask(s, left);\n",
           "    for (int i = 0; i < kBc / 2; ++i) m[i / 2 % 2] = fmaxf(m[i / 2 % 2], s[i]);\n    mask(s, left);\n",
           _KERNEL, number="12", probe="masked keys above"),
    Mutant("masked_keys_in_l", "masked keys are counted in l", _SUM, "sum[h] += s[i] == 0.f ? 1.f : s[i];", _SOFTMAX,
           number="13", probe="causal square"),
    Mutant("masked_keys_in_o", "masked keys enter P V", _PACK, _packed("({0} == 0.f ? 1.f : {0})"), _KERNEL,
           number="14", probe="causal square"),
    Mutant("max_of_one_lane", "the maximum is that of two lanes of four",
           "    top[h][0] = max(top[h][0], static_cast<int32_t>(shfl_xor_b32(top[h][0], 2)));\n", "", _SOFTMAX,
           number="15", probe="causal square", more=(("      most = fmaxf(most, shfl_xor(most, 2));\n", ""),)),
    Mutant("max_of_first_half", "the maximum misses half of the keys", _HALF_A, _HALF_A.replace("kCount", "kCount / 2"),
           _SOFTMAX, number="15b", probe="maximum in the second half",
           more=((_HALF_B, _HALF_B.replace("kCount", "kCount / 2")),)),
    Mutant("max_of_second_half", "the maximum misses the other half", _HALF_A, _HALF_A.replace("i = 8",
           "i = kCount / 2 + 8"), _SOFTMAX, number="16", probe="maximum in the first half",
           more=((_HALF_B, _HALF_B.replace("i = 0", "i = kCount / 2")), (_FIRST_A, _second_half(_FIRST_A)),
                 (_FIRST_B, _second_half(_FIRST_B)))),
    Mutant("m_of_this_tile", "m is the tile's maximum", "max3_s32(float_as_s32(m[h]), float_as_s32(s[2 * h])",
           "max3_s32(float_as_s32(s[2 * h]), float_as_s32(s[2 * h])", _SOFTMAX, number="17", probe="falling maximum",
           more=(("float most = m[h];", "float most = kNegInf;"),)),
    Mutant("m_stale", "m stays what the first tile left", "  m = top;\n", "  if (m == kNegInf) m = top;\n", _SOFTMAX,
           number="18", probe="rising maximum"),
    Mutant("inf_unguarded", "-inf - (-inf) in a row without keys", "kMayBeEmpty && top == kNegInf ? 0.f : top;",
           "top;", _SOFTMAX, number="19", probe="causal tall"),
    Mutant("empty_row_unguarded", "0 / 0 in a row without keys", _INVERSE, "rcp_approx_ftz(sum);", _OUTPUT,
           number="20", probe="no keys"),
    Mutant("empty_row_mean", "the mask puts the lowest float: rows without keys get a mean of V", _MASK,
           "s[i] = -3e38f;", _SOFTMAX, number="21", probe="causal tall"),
    Mutant("causal_strict", "a row does not see its own key", _SEES, "min(keys, row + p.delta)", _TILES, number="22",
           probe="causal square"),
    Mutant("causal_one_too_many", "a row sees one future key", _SEES, "min(keys, row + 2 + p.delta)", _TILES,
           number="23", probe="causal square"),
    Mutant("causal_top_left", "both alignments are top-left", "kBottomRight ? p.nk - static_cast<int>(asked->Nq) : 0",
           "kBottomRight ? 0 : 0", _KERNEL, number="24", probe="causal wide"),
    Mutant("causal_by_tile", "a row sees all of the tile with its last key", _SEES,
           "min(keys, (row + p.delta + kBc) / kBc * kBc)", _TILES, number="25", probe="causal square"),
    Mutant("diagonal_tile_whole", "tiles that the diagonal cuts count as whole", "if (kMasked) mask_tile();", "",
           _KERNEL, number="25b", probe="three query tiles"),
    Mutant("causal_missing", "no causal mask", f"kCausal ? {_SEES} : keys;", "keys;", _TILES, number="26",
           probe="causal square"),
    Mutant("last_tile_skipped", "a last partial tile is skipped", _LAST_TILE,
           "max(seen_by<kCausal>(p, min(end, p.nq) - 1, keys) / kBc, 1) - 1;", _TILES, number="28",
           probe="ragged tail"),
    Mutant("tail_mask_missing", "keys beyond the last are seen", "if (kCausal || j >= unmasked) {", "if (kCausal) {",
           _KERNEL, number="29", probe="one key"),
    Mutant("key_lengths_ignored", "keys beyond the length are used", _LENGTH, "p.nk;", _TILES, number="29b",
           probe="key lengths"),
    Mutant("last_key_dropped", "the last key is never seen", _LENGTH, _LENGTH.replace("p.nk;", "p.nk - (p.nk > 0);"),
           _TILES, number="30", probe="one key"),
    Mutant("tail_key_admitted", "a key beyond the last is seen", "i / 4 * 8 + i % 2 >= left",
           "i / 4 * 8 + i % 2 > left", _SOFTMAX, number="31", probe="one key"),
    Mutant("v_tail_not_cleared", "V beyond a key length meets weights of 0",
           "row0 == 0 && exist < kBc && tile.keys < p.nk;", "false;", _TILES, number="32", probe="key lengths"),
    Mutant("key_tiles_of_br", "as many key tiles as tiles of Br keys would be", _LAST_TILE,
           _LAST_TILE.replace("kBc", "kBr"), _TILES, number="33", probe="whole tiles"),
    Mutant("first_tile_skipped", "the keys of tile 0 are not seen", "    mask(s, left);\n",
           "    mask(s, left);\n    if (j == 0) mask(s, {0, 0});\n", _KERNEL, number="34", probe="one key"),
    Mutant("v_stale", "V of the tile before", "v_tiles + v.stage * (kVBytes >> 4)", "v_tiles + (v.stage ^ 1) * "
           "(kVBytes >> 4)", _KERNEL, number="35", probe="ragged tail"),
    Mutant("last_rows_of_v_lost", "the last 8 keys of each V tile are zeros", "const int exist = tile.keys - j * kBc;",
           "const int exist = min(tile.keys - j * kBc, kBc - 8);", _TILES, number="36", probe="whole tiles",
           more=(("row0 == 0 && exist < kBc && tile.keys < p.nk;", "row0 == 0;"),)),
    Mutant("k_of_other_keys", "K of the keys that are 8 further on", "map, full, c, row0 + j * kBc, head",
           "map, full, c, row0 + j * kBc + 8, head", _TILES, number="37", probe="whole tiles"),
    Mutant("last_dims_dropped", "the last step of Q K^T is left out", f"step < kDPad / 16; ++step)\n      {_QK}",
           f"step < kDPad / 16 - 1; ++step)\n      {_QK}", _KERNEL, number="38", probe="one key"),
    Mutant("step_counted_twice", "the first 16 dims of Q K^T count twice", _QK,
           "for (int n = 0; n < 1 + (step == 0); ++n) " + _QK.replace("step > 0", "step + n > 0"), _KERNEL,
           number="39", probe="one key"),
    Mutant("scale_missing", "scores are not scaled", _SCALE, "1.44269504f", _KERNEL, number="40",
           probe="causal square"),
    Mutant("scale_inverse_d", "1 / d for 1 / sqrt(d)", _SCALE, "1.44269504f / kD", _KERNEL, number="40b",
           probe="causal square"),
    Mutant("scale_squared", "the scale counts twice", _SCALE, f"{_SCALE} * static_cast<float>(args.scale)", _KERNEL,
           number="40c", probe="causal square"),
    Mutant("scale_of_padded_d", "1 / sqrt of the padded d", _SCALE,
           f"{_SCALE} * static_cast<float>(__builtin_sqrt(double(kD) / kDPad))", _KERNEL, number="41",
           probe="causal square"),
    Mutant("scale_in_bf16", "the scale is rounded to bf16", _SCALE, f"1.44269504f * {_bits('args.scale', 8)}", _KERNEL,
           number="42", probe="causal square"),
    Mutant("log2e_missing", "exp2 of a natural exponent", _SCALE, "static_cast<float>(args.scale)", _KERNEL,
           number="43", probe="causal square"),
    Mutant("log2e_short", "log2(e) with five digits", _SCALE, _SCALE.replace("1.4426950408889634", "1.4427"), _KERNEL,
           number="44", probe="two levels"),
    Mutant("scores_in_bf16", "S is rounded to bf16", _SCORE, _SCORE.replace("s[i]", _bits("s[i]", 8)), _SOFTMAX,
           number="46", probe="causal square"),
    Mutant("exp2_cubic", "exp2 by a cubic polynomial", "namespace {\n\nusing Rows",
           "namespace {\n\nstatic inline float exp2_cubic(float t) {\n"
           "  if (!(t > -126.f)) return t == t ? 0.f : t;\n  const float f = t - floorf(t);\n"
           "  const float p = 1.f + f * (0.6951786f + f * (0.2261797f + f * 0.0782455f));\n"
           "  return ldexpf(p, static_cast<int>(floorf(t)));\n}\n\nusing Rows", _SOFTMAX, number="48",
           probe="whole tiles", more=((_EXP2, f"exp2_cubic({_SCORE})"),)),
    Mutant("exponent_in_bf16", "the argument of exp2 is rounded to bf16", _EXP2, f"ex2_approx_ftz({_bits(_SCORE, 8)})",
           _SOFTMAX, number="49", probe="whole tiles"),
    Mutant("l_in_bf16", "l is kept in bf16", _L, f"l[h] = {_bits('fmaf(l[h], alpha[h], sum[h])', 8)};", _SOFTMAX,
           number="50", probe="whole tiles"),
    Mutant("l_in_fp16", "l is kept with 11 bits", _L, f"l[h] = {_bits('fmaf(l[h], alpha[h], sum[h])', 11)};",
           _SOFTMAX, number="51", probe="whole tiles"),
    Mutant("l_of_half", "l is that of two lanes of four", "    sum += shfl_xor(sum, 2);\n", "", _OUTPUT, number="52",
           probe="whole tiles"),
    Mutant("first_key_twice_in_l", "the first key of a tile counts twice in l", _SUM,
           f"sum[h] += {_FIRST_KEY} ? 2.f * s[i] : s[i];", _SOFTMAX, number="53", probe="one key"),
    Mutant("l_of_rounded_p", "l sums weights rounded to bf16", _SUM, f"sum[h] += {_bits('s[i]', 8)};", _SOFTMAX,
           number="54", probe="whole tiles"),
    Mutant("l_of_the_tile_before", "O is divided by l before the last tile", "m, l, inverse);", "m, before, inverse);",
           _KERNEL, number="55", places=2, probe="ragged tail",
           more=(("  Rows m, l, alpha;\n", "  Rows m, l, alpha, before = {0.f, 0.f};\n"),
                 ("if (kMasked) mask_tile();", "before[0] = l[0], before[1] = l[1];\n"
                  "      if (kMasked) mask_tile();"))),
    Mutant("l_missing", "O is not divided by l", _INVERSE, "sum == 0.f ? 0.f : 1.f;", _OUTPUT, number="56",
           probe="whole tiles"),
    Mutant("reciprocal_short", "1 / l with 12 bits", _INVERSE, f"sum == 0.f ? 0.f : {_bits('1.f / sum', 12)};",
           _OUTPUT, number="57", probe="rounded weights"),
    Mutant("p_rounded_twice", "P goes to fp16 by way of bf16", _PACK, _packed(_bits("{0}", 8)), _KERNEL, number="58",
           dtype="fp16", probe="rounded weights"),
    Mutant("p_in_bf16", "P in bf16 for fp16, truncated", _PACK, _packed(_cut("{0}")), _KERNEL, number="59",
           dtype="fp16", probe="rounded weights"),
    Mutant("p_with_4_bits", "P keeps 4 bits", _PACK, _packed(_bits("{0}", 4)), _KERNEL, number="60",
           probe="rounded weights"),
    Mutant("o_in_bf16", "O is rounded to bf16 after every tile", _RESCALE,
           f"{_RESCALE}      for (int i = 0; i < kDvPad / 2; ++i) o[i] = {_bits('o[i]', 8)};\n", _KERNEL, number="61",
           probe="drift"),
    Mutant("p_truncated", "P is truncated", _PACK, _packed(_cut("{0}")), _KERNEL, number="62",
           probe="rounded weights"),
    Mutant("output_truncated", "O is truncated to bf16", _STORED,
           f"Element::pack({_cut('o[at] * inverse[h]')}, {_cut('o[at + 1] * inverse[h]')})", _OUTPUT, number="63",
           probe="whole tiles"),
    Mutant("o_not_cleared", "O of a query tile starts as that of the one before", _PV, "1);", _KERNEL, number="65",
           probe="three query tiles"),
    Mutant("l_starts_at_one", "l = 1 before the first key", _L0, _L0.replace("0.f", "1.f"), _KERNEL, number="66",
           probe="no keys", equivalent="alpha = ex2(-inf) = 0 at the first tile, which every row has"),
    Mutant("lse_base_2", "LSE in base 2", _LSE, _LSE.replace("fmaf(", "1.44269504f * fmaf("), _OUTPUT, number="70",
           probe="one key"),
    Mutant("lse_without_m", "LSE lacks the maximum", _LSE, "sum == 0.f ? kNegInf : kLn2 * lg2_approx_ftz(sum)",
           _OUTPUT, number="70b", probe="one key"),
    Mutant("lse_without_scale", "LSE takes the unscaled maximum", _LSE, _LSE.replace("p.scale", "1.f"), _OUTPUT,
           number="70c", probe="one key"),
    Mutant("lse_log2_of_l", "LSE = m + log2(l)", _LSE, _LSE.replace("kLn2 * ", ""), _OUTPUT, number="70d",
           probe="whole tiles"),
    Mutant("lse_of_empty_plus_inf", "LSE = +inf in a row without keys", _LSE, _LSE.replace("kNegInf", "-kNegInf"),
           _OUTPUT, number="71", probe="no keys"),
    Mutant("lse_of_empty_zero", "LSE = 0 in a row without keys", _LSE, _LSE.replace("kNegInf", "0.f"), _OUTPUT,
           number="71b", probe="no keys"),
    Mutant("lost_row_passes_for_empty", "a row whose weights all vanished passes for one without keys",
           'if (sum < kLeastSum && m[h] != kNegInf) sum = __builtin_nanf("");', "", _OUTPUT, number="71c",
           probe="lost rows"),
    Mutant("heads_interleaved", "query head h reads K head h mod Hkv", "const int head = tile.head / p.group, row0 = "
           "first_key_row<kCausal>(p, tile);\n#pragma unroll 1\n    for (int j = last_key_tile<kCausal>(p, tile.row0 + "
           "kBr, tile.keys); j >= 0; --j) {\n      const uint32_t full = smem + kKFull",
           "const int head = tile.head % (p.hq / p.group), row0 = first_key_row<kCausal>(p, tile);\n#pragma unroll 1\n"
           "    for (int j = last_key_tile<kCausal>(p, tile.row0 + kBr, tile.keys); j >= 0; --j) {\n      "
           "const uint32_t full = smem + kKFull", _TILES, number="72", probe="heads in groups, causal"),
    Mutant("v_of_another_head", "V's strides are K's", "args.v_stride, kBc", "args.k_stride, kBc", _KERNEL,
           number="73", probe="heads in groups"),
    Mutant("lse_transposed", "LSE of a head goes where the head from the other end belongs",
           "(tile.batch * p.hq + tile.head) * p.nq", "(tile.batch * p.hq + p.hq - 1 - tile.head) * p.nq", _OUTPUT,
           number="74", probe="one key"),
)  # fmt: skip

INAPPLICABLE = (
    Inapplicable("45", "Q pre-scaled and rounded to bf16", "Q goes from memory to the matrix unit by TMA, untouched"),
    Inapplicable("47", "TF32 used for float32 inputs", "the kernel takes 16-bit inputs only"),
    Inapplicable("64", "P not rounded", "an operand of wgmma has 16 bits"),
    *NOT_YET,
)
