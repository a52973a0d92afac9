"""Mutation testing: one bug at a time is seeded into `spec` and into emitted kernels, and must be noticed.

`mutant.py` says what a mutant is; `catalogue_*.py` are the bugs in the arithmetic, `sync.py` finds the synchronisation
statements of a CUDA text; `probes.py` holds the problems on which they show; `targets.py` builds and judges what was
changed; `run.py` and `command.py` are the command.
"""
