"""What holds for every test."""

from __future__ import annotations

import os

# One thread each: the tests run in several processes, whose BLAS threads would wait for each other. NumPy reads this
# when it is imported, so nothing above may import it; the workers of pytest-xdist inherit it.
for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")
