"""What is true: attention algorithms line by line in NumPy, masks, tile rule, slow-memory counts, invariants.

Every function works on one head: q (Nq, d), k (Nk, d), v (Nk, dv), float64 unless asked otherwise. The order in which
to read the modules, and what may be changed safely, is in README.md.
"""
