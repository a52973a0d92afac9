"""What attention is, in three precisions that certify one another. Works on plain arrays only.

`float64` (T0) is fast and carries an a-priori bound on its own error; `balls` (T1, optional python-flint) gives
enclosures; `multiprecision` (T2, mpmath) gives 50 digits and the literal textbook formula. All return a `Reference`.
"""
