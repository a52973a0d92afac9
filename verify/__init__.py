"""The judge: oracle, error bounds, fuzzing, certificates, benchmarks. See README.md for the order to read it in.

Importing `verify` imports nothing else: the oracle must stay usable without torch, hypothesis or a compiler.
"""
