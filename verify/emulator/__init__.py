"""A CPU emulator for emitted CUDA kernels: the same text, run thread by thread, checked and counted."""
