"""The catalogue of seeded backward bugs, in `spec`: FlashAttention-2 (Algorithm 2) and FlashAttention-1 (Algorithm 4).

Numbers are those of the catalogue; a letter marks variants, and a mutant without a number is not in it.
"""

from __future__ import annotations

from verify.mutate.catalogue_spec import FLASH1, FLASH2, HEAD
from verify.mutate.mutant import Inapplicable, Mutant

_D = "D = (dO * O).sum(axis=1) - dLSE  # L4"
_P = "Pij = select(np.exp(Sij - Li[:, None]), visible)  # L11"
_DV = "dV[cols] += sum_over_visible(times(Pij, Zij).T, dOi, seen_by)  # L12"
_DP = "dPij = times(dOi @ Vj.T, Zij)  # L13"
_DS = "dSij = select(Pij * (dPij - Di[:, None]), visible)  # L14"
_DQ = "dQ[rows] += head.scale * sum_over_visible(dSij, Kj, visible)  # L15"
_DK = "dK[cols] += head.scale * sum_over_visible(dSij.T, Qi, seen_by)  # L16"
_S = "Sij = head.scores(rows, cols, visible)  # L10"
_L = "L = np.where(np.isneginf(L), np.inf, L)  # an empty row: P = exp(-inf) = 0"
_ROWS, _KEYS = "in tiles(head.nq, br):  # L8", "in tiles(head.nk, bc):  # L5"
# `visible` of Algorithm 2; the forward pass has the same line before V is read.
_VISIBLE = "visible = head.visible(rows, cols, tile)\n            seen_by"


def _bf16(what: str) -> str:
    return f'Rounding(p="bf16").of_p({what})'


MUTANTS = (
    Mutant("d_missing", "D is not subtracted", _D, "D = -dLSE  # L4", FLASH2, number="B1", probe="one key"),
    Mutant("d_scaled", "D is multiplied by the scale", _D, _D.replace("(dO * O)", "head.scale * (dO * O)"), FLASH2,
           number="B1b", probe="one key"),
    Mutant("d_of_half_the_columns", "D sums half of the columns", _D, _D.replace("(dO * O)", "(dO * O)[:, ::2]"),
           FLASH2, number="B1c", probe="one key"),
    Mutant("d_of_another_row", "D of the row before", "L[rows], D[rows]", "L[rows], np.roll(D, 1)[rows]", FLASH2,
           number="B1d", probe="causal square"),
    Mutant("parenthesis", "dS = P dP - D", _DS, "dSij = select(Pij * dPij - Di[:, None], visible)  # L14", FLASH2,
           number="B2", probe="causal square"),
    Mutant("d_added", "dS = P (dP + D)", _DS, _DS.replace("dPij - Di", "dPij + Di"), FLASH2, number="B2b",
           probe="one key"),
    Mutant("d_in_bf16", "D is rounded to bf16", _D, f"D = {_bf16('(dO * O).sum(axis=1)')} - dLSE  # L4", FLASH2,
           number="B3", probe="one key"),
    Mutant("d_in_float32", "D is summed in float32", _D, _D.replace("(dO * O)", "(dO * O).astype(np.float32)"), FLASH2,
           number="B3b", probe="one key"),
    Mutant("dq_scale_missing", "dQ is not scaled", _DQ, _DQ.replace("head.scale * ", ""), FLASH2, number="B4",
           probe="causal square"),
    Mutant("dq_scale_twice", "dQ is scaled twice", _DQ, _DQ.replace("head.scale", "head.scale**2"), FLASH2,
           number="B4b", probe="causal square"),
    Mutant("dk_scale_missing", "dK is not scaled", _DK, _DK.replace("head.scale * ", ""), FLASH2, number="B5",
           probe="causal square"),
    Mutant("dk_log2e", "dK has an extra log2(e)", _DK, _DK.replace("head.scale", "1.4426950408889634 * head.scale"),
           FLASH2, number="B5b", probe="causal square"),
    Mutant("dk_scale_twice", "dK is scaled twice", _DK, _DK.replace("head.scale", "head.scale**2"), FLASH2,
           number="B5c", probe="causal square"),
    Mutant("dv_of_ds", "dV is summed from dS", _DV,
           "dV[cols] += sum_over_visible(select(Pij * (dOi @ Vj.T - Di[:, None]), visible).T, dOi, seen_by)  # L12",
           FLASH2, number="B6", probe="one key"),
    Mutant("dk_of_p", "dK is summed from P", _DK, _DK.replace("dSij.T", "Pij.T"), FLASH2, number="B6b",
           probe="one key"),
    Mutant("dq_of_p", "dQ is summed from P", _DQ, _DQ.replace("dSij", "Pij"), FLASH2, number="B6c", probe="one key"),
    Mutant("dp_of_o", "dP = O V^T", _DP, _DP.replace("dOi", "O[rows]"), FLASH2, number="B6d", probe="one key"),
    Mutant("dv_of_o", "dV is summed with O", _DV, _DV.replace("dOi", "O[rows]"), FLASH2, number="B6e",
           probe="one key"),
    Mutant("lse_base_2", "LSE is taken for one in base 2", _P, _P.replace("Li[:, None]", "Li[:, None] / np.log(2.0)"),
           FLASH2, number="B7", probe="one key"),
    Mutant("lse_missing", "P is not normalised", _P, "Pij = select(np.exp(Sij), visible)  # L11", FLASH2, number="B7b",
           probe="one key"),
    Mutant("exp_base_2", "P = 2^(S - LSE)", _P, _P.replace("np.exp", "np.exp2"), FLASH2, number="B7c",
           probe="causal square"),
    Mutant("scale_missing_in_p", "P of scores without scale", _S, _S.replace(")  #", ") / head.scale  #"), FLASH2,
           number="B7d", probe="one key"),
    Mutant("mask_missing", "no mask", _VISIBLE, _VISIBLE.replace("head.visible(rows, cols, tile)", "None"), FLASH2,
           number="B8", probe="causal square"),
    Mutant("mask_of_scores_missing", "scores are not masked", _S, _S.replace("visible", "None"), FLASH2, number="B8b",
           probe="causal square", equivalent="P and dS are selected by the same mask, so masked scores never count"),
    Mutant("mask_of_p_missing", "P is not selected", _P, "Pij = np.exp(Sij - Li[:, None])  # L11", FLASH2,
           number="B8c", probe="causal square",
           equivalent="a masked score is -inf, and exp(-inf - LSE) is 0; an empty row has L = +inf"),
    Mutant("mask_of_ds_missing", "dS is not selected", _DS, "dSij = Pij * (dPij - Di[:, None])  # L14", FLASH2,
           number="B8d", probe="NaN beyond the last key"),
    Mutant("causal_top_left", "both alignments are top-left", "nk - nq if align == BOTTOM_RIGHT else 0", "0",
           "spec/masks.py", number="B8e", probe="causal wide"),
    Mutant("window_too_wide", "the window has one key too many", "-min(self.left, _FAR)", "-min(self.left + 1, _FAR)",
           "spec/masks.py", number="B8f", probe="window of 3"),
    Mutant("window_missing", "the window is open to the left", "-min(self.left, _FAR)", "-_FAR", "spec/masks.py",
           number="B8g", probe="window of 3"),
    Mutant("causal_one_too_many", "a row sees one future key", "return -_FAR, 0", "return -_FAR, 1", "spec/masks.py",
           number="B8h", probe="causal square"),
    Mutant("causal_strict", "a row does not see its own key", "return -_FAR, 0", "return -_FAR, -1", "spec/masks.py",
           number="B8i", probe="causal square"),
    Mutant("last_rows_lost", "the last query tile is lost", _ROWS,
           "in list(tiles(head.nq, br))[: -1 if head.nq > br else None]:  # L8", FLASH2, number="B9",
           probe="whole tiles"),
    Mutant("last_row_lost", "the last row is lost", _ROWS, "in tiles(head.nq - 1, br):  # L8", FLASH2, number="B9b",
           probe="one key"),
    Mutant("dv_overwritten", "dV of the last query tile alone", _DV, _DV.replace("+=", "="), FLASH2, number="B9c",
           probe="whole tiles"),
    Mutant("dk_overwritten", "dK of the last query tile alone", _DK, _DK.replace("+=", "="), FLASH2, number="B9d",
           probe="whole tiles"),
    Mutant("last_keys_lost", "the last key tile is lost", _KEYS,
           "in list(tiles(head.nk, bc))[: -1 if head.nk > bc else None]:  # L5", FLASH2, number="B10",
           probe="ragged tail"),
    Mutant("dq_overwritten", "dQ of the last key tile alone", _DQ, _DQ.replace("+=", "="), FLASH2, number="B10b",
           probe="ragged tail"),
    Mutant("dq_of_the_key_tile", "dQ is added to the rows of the key tile", _DQ,
           _DQ.replace("dQ[rows] +=", "dQ[: rows.stop - rows.start] +="), FLASH2, number="B10c", probe="ragged tail"),
    Mutant("dq_in_bf16", "dQ is rounded to bf16 after every tile", _DQ,
           f"{_DQ}\n            dQ[rows] = {_bf16('dQ[rows]')}", FLASH2, number="B11", probe="causal square"),
    Mutant("p_in_bf16", "P is rounded to bf16", _P, f"{_P}\n            Pij = {_bf16('Pij')}", FLASH2, number="B12",
           probe="causal square"),
    Mutant("ds_in_bf16", "dS is rounded to bf16", _DS, f"{_DS}\n            dSij = {_bf16('dSij')}", FLASH2,
           number="B12b", probe="causal square"),
    Mutant("dropout_missing_in_dp", "dP does not know of dropout", _DP, "dPij = dOi @ Vj.T  # L13", FLASH2,
           number="B13", probe="dropout"),
    Mutant("dropout_missing_in_dv", "dV does not know of dropout", _DV, _DV.replace("times(Pij, Zij)", "Pij"), FLASH2,
           number="B13b", probe="dropout"),
    Mutant("dropout_repeats", "every query tile drops the same places", "head.z(rows, cols)\n            dV",
           "head.z(slice(0, rows.stop - rows.start), cols)\n            dV", FLASH2, number="B13c", probe="dropout"),
    Mutant("dropout_transposed", "rows and keys change places in the dropout mask", "self.dropout.z(i, j)",
           "self.dropout.z(j, i)", HEAD, number="B13d", probe="dropout"),
    Mutant("dropout_scale_missing_in_dv", "kept weights are not scaled up in dV", _DV,
           _DV.replace("times(Pij, Zij)", "times(Pij, None if Zij is None else np.sign(Zij))"), FLASH2, number="B13e",
           probe="dropout"),
    Mutant("dropout_scale_missing", "kept weights are not scaled up", "2**32 / self.threshold if", "1.0 if",
           "spec/dropout.py", number="B13f", probe="dropout"),
    Mutant("dropout_in_d", "dS = Z P (dP - D)", _DS, _DS.replace("Pij *", "times(Pij, Zij) *"), FLASH2, number="B13g",
           probe="dropout"),
    Mutant("empty_row_unguarded", "exp(-inf + inf) in a row without keys", _L, "L = L * 1.0", FLASH2, number="B14",
           probe="rows without a key",
           equivalent="spec selects P and dS by the mask, and a row whose LSE is -inf has no visible pair"),
    Mutant("empty_row_unguarded_in_sums", "rows without a key add 0 * NaN", "total = w[:, finite] @ x[finite]",
           "return w @ x", HEAD, number="B14b", probe="rows without a key"),
    Mutant("dlse_missing", "the gradient by LSE is left out", _D, "D = (dO * O).sum(axis=1)  # L4", FLASH2,
           probe="causal square"),
    Mutant("dlse_sign", "the gradient by LSE has the wrong sign", _D, _D.replace("- dLSE", "+ dLSE"), FLASH2,
           probe="causal square"),
    Mutant("dlse_in_dp", "dLSE is added to dS and not to dP", _DS,
           "dSij = select(Pij * (dPij - (Di + dLSE[rows])[:, None]) + dLSE[rows][:, None], visible)  # L14", FLASH2,
           probe="causal square"),
    Mutant("k_of_the_tile_before", "K of the tile before", "Kj, Vj = head.k[cols], head.v[cols]  # L6",
           "Kj, Vj = head.k[max(cols.start - bc, 0) :][: cols.stop - cols.start], head.v[cols]  # L6", FLASH2,
           probe="ragged tail"),
    Mutant("v_of_the_tile_before", "V of the tile before", "Kj, Vj = head.k[cols], head.v[cols]  # L6",
           "Kj, Vj = head.k[cols], head.v[max(cols.start - bc, 0) :][: cols.stop - cols.start]  # L6", FLASH2,
           probe="ragged tail"),
    # FlashAttention-1 normalises by its saved statistics.
    Mutant("fa1_l_missing", "FlashAttention-1: P is not divided by l", ", li), visible)  # L13",
           ", np.ones_like(li)), visible)  # L13", FLASH1, number="B7", probe="FA-1: causal square"),
    Mutant("fa1_m_missing", "FlashAttention-1: m is not subtracted", "np.exp(Sij - finite_or_zero(mi)[:, None]), li)",
           "np.exp(Sij), li)", FLASH1, number="B7b", probe="FA-1: causal square"),
    Mutant("fa1_d_missing", "FlashAttention-1: D is not subtracted", "Di = (dOi * Oi).sum(axis=1) - dLSE[rows]",
           "Di = -dLSE[rows]", FLASH1, number="B1", probe="FA-1: causal square"),
    Mutant("fa1_parenthesis", "FlashAttention-1: dS = P dP - D", "Pij * (dPij - Di[:, None]), visible)  # L20",
           "Pij * dPij - Di[:, None], visible)  # L20", FLASH1, number="B2", probe="FA-1: causal square"),
    Mutant("fa1_dlse_missing", "FlashAttention-1: the gradient by LSE is left out", "sum(axis=1) - dLSE[rows]  # L19",
           "sum(axis=1)  # L19", FLASH1, probe="FA-1: causal square"),
    Mutant("fa1_dq_scale_missing", "FlashAttention-1: dQ is not scaled", "head.scale * sum_over_visible(dSij, Kj",
           "sum_over_visible(dSij, Kj", FLASH1, number="B4", probe="FA-1: causal square"),
    Mutant("fa1_dk_scale_missing", "FlashAttention-1: dK is not scaled", "head.scale * sum_over_visible(dSij.T",
           "sum_over_visible(dSij.T", FLASH1, number="B5", probe="FA-1: causal square"),
    Mutant("fa1_dk_of_p", "FlashAttention-1: dK is summed from P", "sum_over_visible(dSij.T, Qi",
           "sum_over_visible(Pij.T, Qi", FLASH1, number="B6b", probe="FA-1: causal square"),
    Mutant("fa1_dq_overwritten", "FlashAttention-1: dQ of the last key tile alone", "dQ[rows] += head.scale",
           "dQ[rows] = head.scale", FLASH1, number="B10b", probe="FA-1: many tiles"),
    Mutant("fa1_dropout_missing_in_dv", "FlashAttention-1: dV does not know of dropout", "times(Pij, Zij).T",
           "Pij.T", FLASH1, number="B13b", probe="FA-1: dropout"),
)  # fmt: skip

INAPPLICABLE = (Inapplicable("B15", "one head's dK lost", "spec is one head"),)
