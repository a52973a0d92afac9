"""What each command of `python -m verify` parses and prints, by topic; `verify.__main__` lists them."""

import os

# Set before NumPy is imported. The oracle's matrices are small: threads of the BLAS cost more than they give. Kernels
# use torch's threads.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
