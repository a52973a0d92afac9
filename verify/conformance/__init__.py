"""Primitive conformance: every wrapper of inline PTX against the PTX ISA and against vectors recorded on a GPU.

A case (case.py) is one launch of a probe kernel (verify/probes/primitives/*.cu): its inputs, and what
verify/emulator/isa.py says of its outputs. The same case runs on a GPU (verify/record.py, which stores the outputs in
tests/data/) and in the emulator (tests/emulator/test_conformance_*.py).

Holds always: inputs are a function of the case alone, the same on every machine and NumPy version.
"""
