"""The catalogue of seeded bugs, in the emitted kernels of the CPU's matrix unit (forward_amx*.h).

Numbers are those of the catalogue; a letter marks variants. The kernel is bf16 unless a mutant says fp16. Here the
reference m is a whole number in base 2 that may trail the maximum, so what the catalogue says of the maximum is true
of the moment when the reference moves, and the scale is in m: an error of it shows in LSE as well.
"""

from __future__ import annotations

from verify.mutate.mutant import NOT_YET, Inapplicable, Mutant

_AMX, _BF16, _FP16 = "csrc/forward_amx.h", "csrc/forward_amx_bf16.h", "csrc/forward_amx_fp16.h"

_O = "_mm512_store_ps(o, _mm512_mul_ps(_mm512_load_ps(o), alpha[h]));"
_L = "_mm512_store_ps(state.l + 16 * h, _mm512_mul_ps(_mm512_load_ps(state.l + 16 * h), alpha[h]));"
_RAISE = "raise_reference(p.state, s, chunks, c, alpha);"
_DOWN = "_mm512_add_ps(_mm512_sub_ps(old, reference(state, h)), _mm512_sub_ps(old_low, low))"
_M0 = "_mm512_store_ps(state.m + r, _mm512_set1_ps(-kInf));"
_HIDE = "_mm512_mask_store_ps(s[j / 16][h][j % 16], blind, _mm512_set1_ps(-kInf));"
_BLIND = "first_lanes(j >= keys ? 16 : j - diagonal - 16 * h)"
_TOP = "for (int j = 0; j < 32 * chunks; ++j) top"
_FULL = "int(max64(0, min64(keys, diagonal + 1)))"
_ADD_EVEN = "even_sum[h] = _mm512_add_ps(even_sum[h], even);"
_PAIR = "pair_bf16(even, odd)"
_LOOP = "j0 < min64(seen, k0 + kL2Keys); j0 += kBc"
_SCALE = "a.scale * 1.44269504088896340736"
_TO_EVEN = "even = exp2_degree4(even);"
_ADD_L = "_mm512_add_ps(_mm512_load_ps(p.state.l + 16 * h), sum[h])"
_SUM = "{_mm512_add_ps(even_sum[0], odd_sum[0]), _mm512_add_ps(even_sum[1], odd_sum[1])}"
_VALUES = "  values(p, s, chunks, v);\n"
_INVERSE = "_mm512_maskz_div_ps(~empty(state, h), _mm512_set1_ps(1.0f), _mm512_load_ps(sum))"
_CLEAR = "memset(&state, 0, sizeof state);"
_LSE_EMPTY = "_mm512_mask_mov_ps(value, empty(state, h), _mm512_set1_ps(-kInf))"
_LSE_M = "log_sum(_mm512_load_ps(state.m + 16 * h), "
_Q = "for (int i = 0; i < 16; ++i) _mm512_store_si512(p.q[t][h][i], r[i]);"
_HALF = "const __m512i half = _mm512_set1_epi32(0x8000);"
_ROWS = "const float* columns = p.state.o[v + i / 8][h][2 * i % 16];\n"


def _bits(x: str, keep: int) -> str:
    """The float32 vector `x` rounded to `keep` bits, ties away from zero."""
    lost = 24 - keep
    up = f"_mm512_add_epi32(_mm512_castps_si512({x}), _mm512_set1_epi32({1 << (lost - 1)}))"
    return f"_mm512_castsi512_ps(_mm512_and_si512({up}, _mm512_set1_epi32({-(1 << lost)})))"


def _cut(x: str) -> str:
    """The float32 vector `x` truncated to bf16."""
    return f"_mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512({x}), _mm512_set1_epi32(-65536)))"


def _every_o(change: str) -> str:
    """A loop over the vectors `o` of the panel's output."""
    return (
        "  for (int t = 0; t < kVTiles; ++t)\n    for (int h = 0; h < 2; ++h)\n      for (int i = 0; i < 16; ++i) {\n"
        f"        float* o = p.state.o[t][h][i];\n        {change}\n      }}\n"
    )


def _weight_one(x: str) -> str:
    """`x` with 1 in place of 0."""
    return f"_mm512_mask_mov_ps({x}, _mm512_cmpeq_ps_mask({x}, _mm512_setzero_ps()), _mm512_set1_ps(1.0f))"


MUTANTS = (
    Mutant("o_not_rescaled", "O is not multiplied by alpha", _O, "", _AMX, number="1",
           probe="rising to a large maximum"),
    Mutant("last_columns_not_rescaled", "the rescale misses the last columns",
           "for (int v = 0; v < kVTiles; ++v)\n      for (int i = 0; i < 16; ++i) {",
           "for (int v = 0; v < kVTiles - 2; ++v)\n      for (int i = 0; i < 16; ++i) {", _AMX, number="2",
           probe="rising to a large maximum"),
    Mutant("first_rows_rescaled", "only rows 0 to 15 are rescaled", _O, f"if (h == 0) {_O}", _AMX, number="3",
           probe="rising maximum"),
    Mutant("o_rescaled_late", "O is rescaled after P V was added", _RAISE,
           "keep(p.state, held);\n      raise_reference(p.state, s, chunks, c, alpha);\n      keep(held, p.state);\n"
           "      after[0] = alpha[0], after[1] = alpha[1];", _BF16, number="4", probe="one key",
           more=((_VALUES, _VALUES + _every_o("_mm512_store_ps(o, _mm512_mul_ps(_mm512_load_ps(o), after[h]));")),
                 ("  ScoreTile(*s)[2] = w.s;\n", "  ScoreTile(*s)[2] = w.s;\n  static State held;\n  __m512 after[2] = "
                  "{_mm512_set1_ps(1.0f), _mm512_set1_ps(1.0f)};\n"),
                 ("// One panel against the `keys`", "inline void keep(const State& from, State& to) { memcpy(to.o, "
                  "from.o, sizeof to.o); }\n\n// One panel against the `keys`"))),
    Mutant("l_not_rescaled", "l is not multiplied by alpha", _L, "", _AMX, number="5",
           probe="rising to a large maximum"),
    Mutant("l_of_rounded_p_not_rescaled", "the sum that divides O is not multiplied by alpha",
           "_mm512_mul_ps(_mm512_load_ps(p.l_rounded + 16 * h), alpha[h])", "_mm512_load_ps(p.l_rounded + 16 * h)",
           _BF16, number="5b", probe="rising to a large maximum"),
    Mutant("alpha_inverted", "alpha = 2^(m_new - m_old)", _DOWN,
           "_mm512_sub_ps(_mm512_setzero_ps(), _mm512_add_ps(_mm512_sub_ps(old, reference(state, h)), "
           "_mm512_sub_ps(old_low, low)))", _AMX, number="6", probe="rising to a large maximum"),
    Mutant("alpha_base_e", "alpha takes natural units for base 2", _DOWN,
           f"_mm512_mul_ps(_mm512_set1_ps(0.6931472f), {_DOWN})", _AMX, number="7", probe="rising maximum"),
    Mutant("m_starts_at_zero", "m = 0 before the first key", _M0, _M0.replace("-kInf", "0.0f"), _AMX, number="8",
           probe="far below zero"),
    Mutant("m_starts_at_flt_min", "m = FLT_MIN, the smallest positive number", _M0,
           _M0.replace("-kInf", "0x1p-126f"), _AMX, number="9", probe="far below zero"),
    Mutant("finite_sentinel", "-5e4 stands for -inf, in the mask", _HIDE, _HIDE.replace("-kInf", "-5e4f"), _AMX,
           number="10", probe="causal tall"),
    Mutant("finite_m", "-5e4 stands for -inf, in m", _M0, _M0.replace("-kInf", "-5e4f"), _AMX, number="10b",
           probe="deep logits"),
    Mutant("mask_adds", "the mask adds -1e4", _HIDE,
           "_mm512_mask_store_ps(s[j / 16][h][j % 16], blind, _mm512_sub_ps(_mm512_load_ps(s[j / 16][h][j % 16]), "
           "_mm512_set1_ps(1e4f)));", _AMX, number="11", probe="causal tall"),
    Mutant("mask_after_maximum", "the maximum is taken over masked keys too",
           "    hide(s, full, keys, diagonal);\n", "", _BF16, number="12", probe="masked keys above",
           more=(("    const bool fits =", "    hide(s, full, keys, diagonal);\n    const bool fits ="),)),
    Mutant("masked_keys_in_l", "masked keys are counted in l", _ADD_EVEN,
           f"even_sum[h] = _mm512_add_ps(even_sum[h], {_weight_one('even')});", _BF16, number="13",
           probe="causal square"),
    Mutant("masked_keys_in_o", "masked keys enter P V", _PAIR, f"pair_bf16({_weight_one('even')}, odd)", _BF16,
           number="14", probe="causal square"),
    Mutant("max_of_first_half", "the maximum misses half of the keys", _TOP, _TOP.replace("32 *", "16 *"), _AMX,
           number="15", probe="maximum in the second half"),
    Mutant("max_of_second_half", "the maximum misses the other half", _TOP, _TOP.replace("j = 0", "j = 16 * chunks"),
           _AMX, number="16", probe="maximum in the first half"),
    Mutant("m_of_this_tile", "the reference moves down to the tile's maximum",
           "m = _mm512_mask_mov_ps(old, above, m);", "", _AMX, number="17",
           probe="falling maximum beside a NaN query"),
    Mutant("m_stale", "the reference stays where the first tile put it", "_mm512_store_ps(state.m + 16 * h, m);",
           "_mm512_mask_store_ps(state.m + 16 * h, _mm512_cmpeq_ps_mask(old, _mm512_set1_ps(-kInf)), m);", _AMX,
           number="18", probe="rising to a large maximum"),
    Mutant("inf_unguarded", "-inf - (-inf) in a row without keys",
           "return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(m, _mm512_set1_ps(-kInf), _CMP_NEQ_UQ), m);", "return m;",
           _AMX, number="19", probe="causal tall"),
    Mutant("empty_row_unguarded", "0 / 0 in a row without keys", _INVERSE,
           _INVERSE.replace("~empty(state, h)", "0xffff"), _AMX, number="20", probe="no keys"),
    Mutant("empty_row_mean", "the mask puts the lowest float: rows without keys get a mean of V", _HIDE,
           _HIDE.replace("-kInf", "-3e38f"), _AMX, number="21", probe="causal tall"),
    Mutant("causal_strict", "a row does not see its own key", _BLIND,
           _BLIND.replace("j - diagonal", "j + 1 - diagonal"), _AMX, number="22", probe="causal square"),
    Mutant("causal_one_too_many", "a row sees one future key", "j - diagonal - 16 * h)", "j - diagonal - 1 - 16 * h)",
           _AMX, number="23", probe="causal square"),
    Mutant("causal_top_left", "both alignments are top-left", "a.causal == kBottomRight ? a.Nk - a.Nq : 0", "0", _AMX,
           number="24", probe="causal wide"),
    Mutant("causal_of_length", "the causal corner is at the key length", "offset = causal_offset(a);",
           "offset = a.causal == kBottomRight ? nk - a.Nq : 0;", _BF16, number="24b", probe="key lengths with causal"),
    Mutant("causal_by_tile", "a row sees all of the tile with its last key", _BLIND, "first_lanes(j >= keys ? 16 : 0)",
           _AMX, number="25", probe="causal square"),
    Mutant("causal_second_half", "rows 16.. are masked like rows 0..", "j - diagonal - 16 * h)", "j - diagonal)", _AMX,
           number="25b", probe="causal square"),
    Mutant("causal_missing", "no causal mask", "a.causal ? ", "false ? ", _BF16, number="26", places=3,
           probe="causal square"),
    Mutant("last_tile_skipped", "a last partial tile is skipped", _LOOP, _LOOP.replace("j0 < ", "j0 + kBc <= "), _BF16,
           number="28", probe="one key"),
    Mutant("tail_mask_missing", "keys beyond the last are seen", "j >= keys ? 16 :", "false ? 16 :", _AMX, number="29",
           probe="one key"),
    Mutant("tail_mask_drops_a_key", "the last key is masked", "j >= keys ? 16 :", "j >= keys - 1 ? 16 :", _AMX,
           number="30", probe="causal square"),
    Mutant("last_key_dropped", "the last key is never seen", "a.key_lengths[b] : a.Nk;",
           "a.key_lengths[b] : a.Nk - (a.Nk > 0);", _AMX, number="30b", probe="one key"),
    Mutant("tail_key_admitted", "a key beyond the last is seen", "j >= keys ? 16 :", "j > keys ? 16 :", _AMX,
           number="31", probe="one key"),
    Mutant("key_lengths_ignored", "keys beyond the length are read", "a.key_lengths ? a.key_lengths[b] : a.Nk", "a.Nk",
           _AMX, number="29b", probe="key lengths"),
    Mutant("v_tail_not_cleared", "V beyond the last key meets weights of 0", "load_columns(v + (2 * j + 1) * stride, "
           "2 * j + 1 < keys, g)", "load_columns(v + (2 * j + 1) * stride, true, g)", _BF16, number="32",
           probe="one key"),
    Mutant("k_tail_not_cleared", "what lies beyond the last key is packed", "j < keys ? load_dims(k + j * stride, t)",
           "true ? load_dims(k + j * stride, t)", _BF16, number="32b", probe="key lengths",
           equivalent="scores of keys beyond the last are replaced by -inf whatever they are, and their V is zero"),
    Mutant("br_and_bc_swapped", "key tiles are Br apart", _LOOP, _LOOP.replace("+= kBc", "+= kBr"), _BF16, number="33",
           probe="whole tiles"),
    Mutant("first_tile_skipped", "the first tile is skipped", "for (int64_t j0 = k0;", "for (int64_t j0 = k0 + kBc;",
           _BF16, number="34", probe="one key"),
    Mutant("v_stale", "V of the tile before", "v + j0 / 32", "v + max64(j0 - kBc, 0) / 32", _BF16, number="35",
           probe="ragged tail"),
    Mutant("last_rows_of_v_stale", "the last 8 keys of V hold the 8 before them",
           "const __m512i even = load_columns(v + 2 * j * stride,",
           "const __m512i even = load_columns(v + (j < 12 ? 2 * j : 2 * j - 8) * stride,", _BF16, number="36",
           probe="rising maximum"),
    Mutant("last_rows_of_k_stale", "the last 8 keys of K hold the 8 before them", "load_dims(k + j * stride, t)",
           "load_dims(k + (j < 24 ? j : j - 8) * stride, t)", _BF16, number="37", probe="whole tiles"),
    Mutant("last_dims_dropped", "the last 8 dims of Q K^T are left out", "t == kDTiles - 1 ? 0xffffff",
           "t == kDTiles - 1 ? 0xffff", _BF16, number="38", probe="one key"),
    Mutant("step_counted_twice", "one product of Q K^T counts twice",
           "    tile_dp_bf16<0, 4, 6>();\n    tile_load<7>(p.q[t][1], 64);",
           "    tile_dp_bf16<0, 4, 6>();\n    tile_dp_bf16<0, 4, 6>();\n    tile_load<7>(p.q[t][1], 64);", _BF16,
           number="39", probe="one key"),
    Mutant("scale_missing", "scores are not scaled", _SCALE, "1.44269504088896340736", _BF16, number="40",
           probe="one key"),
    Mutant("scale_inverse_d", "1 / d for 1 / sqrt(d)", _SCALE, "1.44269504088896340736 / kD", _BF16, number="40b",
           probe="one key"),
    Mutant("scale_squared", "the scale counts twice", _SCALE, f"a.scale * {_SCALE}", _BF16, number="40c",
           probe="one key"),
    Mutant("scale_of_padded_d", "1 / sqrt of d rounded up to 32", _SCALE,
           f"{_SCALE} * __builtin_sqrt(double(kD) / (32 * kDTiles))", _BF16, number="41", probe="one key"),
    Mutant("scale_in_bf16", "the scale is rounded to bf16", _SCALE,
           "__builtin_bit_cast(float, (__builtin_bit_cast(int, float(a.scale)) + 0x8000) & -65536) * "
           "1.44269504088896340736", _BF16, number="42", probe="one key"),
    Mutant("log2e_missing", "2^s of a natural s", _SCALE, "a.scale", _BF16, number="43", probe="one key"),
    Mutant("log2e_short", "log2(e) with five digits", _SCALE, "a.scale * 1.4427", _BF16, number="44",
           probe="huge logits"),
    Mutant("q_scaled_in_bf16", "Q is scaled and rounded to bf16 first", _Q,
           "for (int i = 0; i < 16; ++i) {\n"
           "        const __m512 f = _mm512_set1_ps(0.2041f);\n"
           "        const __m512i half = _mm512_set1_epi32(0x8000), high = _mm512_set1_epi32(-65536);\n"
           "        const __m512 a = _mm512_castsi512_ps(_mm512_slli_epi32(r[i], 16));\n"
           "        const __m512 b = _mm512_castsi512_ps(_mm512_and_si512(r[i], high));\n"
           "        const __m512i x = _mm512_add_epi32(_mm512_castps_si512(_mm512_mul_ps(a, f)), half);\n"
           "        const __m512i y = _mm512_add_epi32(_mm512_castps_si512(_mm512_mul_ps(b, f)), half);\n"
           "        _mm512_store_si512(p.q[t][h][i], _mm512_or_si512(_mm512_srli_epi32(x, 16), "
           "_mm512_and_si512(y, high)));\n      }", _BF16, number="45", probe="one key",
           more=((_SCALE, "a.scale * 1.44269504088896340736 / 0.2041f"),)),
    Mutant("scores_in_bf16", "S is rounded to bf16", "_mm512_fmsub_ps(_mm512_load_ps(keys), c, m[h])",
           f"_mm512_fmsub_ps({_bits('_mm512_load_ps(keys)', 8)}, c, m[h])", _BF16, number="46", probe="causal square"),
    Mutant("exp2_cubic", "2^t by a cubic polynomial", "p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));",
           "p = _mm512_fmadd_ps(_mm512_fmadd_ps(_mm512_fmadd_ps(_mm512_set1_ps(0.0782455f), r, _mm512_set1_ps("
           "0.2261797f)), r, _mm512_set1_ps(0.6951786f)), r, _mm512_set1_ps(1.0f));", _AMX, number="48",
           probe="whole tiles"),
    Mutant("exponent_in_bf16", "the argument of 2^t is rounded to bf16", _TO_EVEN,
           f"even = exp2_degree4({_bits('even', 8)});", _BF16, number="49", probe="whole tiles"),
    Mutant("l_in_bf16", "l is kept in bf16", _ADD_L, _bits(_ADD_L, 8), _BF16, number="50", probe="whole tiles"),
    Mutant("l_in_fp16", "l is kept with 11 bits", _ADD_L, _bits(_ADD_L, 11), _BF16, number="51", probe="whole tiles"),
    Mutant("l_of_half", "l sums every other key", _SUM, "{even_sum[0], even_sum[1]}", _BF16, number="52",
           probe="whole tiles"),
    Mutant("first_key_twice_in_l", "the first key counts twice in l", _ADD_EVEN,
           f"{_ADD_EVEN}\n        if (b + i == 0) {_ADD_EVEN}", _BF16, number="53", probe="one key"),
    Mutant("l_of_rounded_p", "l sums the rounded weights", _ADD_L, _ADD_L.replace(" sum[h]", " rounded_sum[h]"),
           _BF16, number="54", probe="whole tiles"),
    Mutant("l_of_the_tile_before", "O is divided by l before the last tile",
           "    _mm512_store_ps(p.l_rounded + 16 * h, _mm512_add_ps(",
           "    _mm512_store_ps(before[size_t(&p) / sizeof(Panel) % 64] + 16 * h, _mm512_load_ps(p.l_rounded + 16 * h"
           "));\n    _mm512_store_ps(p.l_rounded + 16 * h, _mm512_add_ps(", _BF16, number="55", probe="ragged tail",
           more=(("h, p.l_rounded + 16 * h);", "h, before[size_t(&p) / sizeof(Panel) % 64] + 16 * h);"),
                 ("// P^T = 2^(c S^T - m) in", "alignas(64) float before[64][32];\n\n// P^T = 2^(c S^T - m) in"))),
    Mutant("l_missing", "O is not divided by l", _ROWS, f"{_ROWS}        const __m512 scale = _mm512_set1_ps(1.0f);\n",
           _BF16, number="56", probe="whole tiles"),
    Mutant("reciprocal_short", "1 / l with 12 bits", _INVERSE, _bits(_INVERSE, 12), _AMX, number="57",
           probe="constant values"),
    Mutant("p_in_bf16", "P loses its second plane", "join(even1, odd1)", "_mm512_setzero_si512()", _FP16, number="59",
           dtype="fp16", probe="whole tiles"),
    Mutant("p_with_4_bits", "P keeps 4 bits", _PAIR, f"pair_bf16({_bits('even', 4)}, {_bits('odd', 4)})", _BF16,
           number="60", probe="rounded weights"),
    Mutant("o_in_bf16", "O is rounded to bf16 after every tile", _VALUES,
           _VALUES + _every_o(f"_mm512_store_ps(o, {_bits('_mm512_load_ps(o)', 8)});"), _BF16, number="61",
           probe="drift"),
    Mutant("p_truncated", "P is truncated", _HALF, "const __m512i half = _mm512_setzero_si512();", _BF16, number="62",
           probe="rounded weights"),
    Mutant("output_truncated", "O is truncated to bf16", "_mm512_cvtne2ps_pbh(odd, even)",
           f"_mm512_cvtne2ps_pbh({_cut('odd')}, {_cut('even')})", _BF16, number="63", probe="whole tiles"),
    Mutant("output_truncated_fp16", "O is truncated to fp16", "_mm512_cvtps_ph(even, _MM_FROUND_TO_NEAREST_INT)",
           "_mm512_cvtps_ph(even, _MM_FROUND_TO_ZERO)", _FP16, number="63b", dtype="fp16", probe="whole tiles"),
    Mutant("o_not_cleared", "O starts as what was there: NaN", _CLEAR,
           f"{_CLEAR}\n  memset(state.o, 0xff, sizeof state.o);", _AMX, number="65", probe="one key"),
    Mutant("l_starts_at_one", "l = 1 before the first key", _CLEAR,
           f"{_CLEAR}\n  for (int r = 0; r < 32; ++r) state.l[r] = 1.0f;", _AMX, number="66", probe="no keys"),
    Mutant("lse_base_2", "LSE in base 2", "ln2 = _mm512_set1_ps(0x1.62e43p-1f)", "ln2 = _mm512_set1_ps(1.0f)", _AMX,
           number="70", probe="one key"),
    Mutant("lse_without_m", "LSE lacks the reference", _LSE_M, "log_sum(_mm512_setzero_ps(), ", _AMX,
           number="70b", probe="one key"),
    Mutant("lse_log2_of_l", "LSE = m + log2 of l's fraction", "_mm512_fmadd_ps(p, s, _mm512_mul_ps(lost, ln2))",
           "_mm512_fmadd_ps(p, _mm512_mul_ps(s, _mm512_set1_ps(1.4426950f)), _mm512_mul_ps(lost, ln2))", _AMX,
           number="70d", probe="whole tiles"),
    Mutant("lse_without_l", "LSE lacks the logarithm of l's fraction", "_mm512_getmant_ps(l,",
           "_mm512_getmant_ps(_mm512_set1_ps(1.0f),", _AMX, number="70e", probe="whole tiles"),
    Mutant("lse_of_empty_plus_inf", "LSE = +inf in a row without keys", _LSE_EMPTY, _LSE_EMPTY.replace("-kInf", "kInf"),
           _AMX, number="71", probe="no keys"),
    Mutant("lse_of_empty_zero", "LSE = 0 in a row without keys", _LSE_EMPTY, _LSE_EMPTY.replace("-kInf", "0.0f"), _AMX,
           number="71b", probe="no keys"),
    Mutant("heads_interleaved", "query head h reads K/V head h mod Hkv", "hkv = h / (a.Hq / a.Hkv)", "hkv = h % a.Hkv",
           _BF16, number="72", probe="heads in groups"),
    Mutant("v_of_another_head", "V's head stride is K's", "h * a.v_stride[1]", "h * a.k_stride[1]", _BF16, number="73",
           probe="heads in groups"),
    Mutant("lse_transposed", "LSE of a head goes where the head from the other end belongs",
           "static_cast<float*>(a.lse) + (b * a.Hq + h) * a.Nq",
           "static_cast<float*>(a.lse) + (b * a.Hq + a.Hq - 1 - h) * a.Nq", _BF16, number="74", probe="one key"),
    Mutant("p_columns_swapped", "even and odd keys of a pair change places", _PAIR, "pair_bf16(odd, even)", _BF16,
           number="", probe="causal square"),
    Mutant("low_plane_of_k_lost", "the second plane of K is left out",
           "for (int a = 1; a >= 0; --a)\n#pragma GCC unroll 1",
           "for (int a = 0; a >= 0; --a)\n#pragma GCC unroll 1", _FP16, number="45", dtype="fp16", probe="one key"),
)  # fmt: skip

INAPPLICABLE = (
    Inapplicable("47", "TF32 used for float32 inputs", "the matrix unit takes 16-bit inputs only"),
    Inapplicable("58", "P rounded twice", "bf16 P is rounded once by construction, fp16 P is two exact planes"),
    Inapplicable("64", "P not rounded", "an operand of the matrix unit is bf16"),
    *NOT_YET,
)
