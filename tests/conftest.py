"""Settings that every test shares."""

import os

# Read when the libraries are first imported. The solver limits its own threads; the rest of
# a test gains nothing from a second one, and two test workers would fight over the cores.
for _pool in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS"):
    os.environ.setdefault(_pool, "1")
os.environ.setdefault("MPLBACKEND", "Agg")

from hypothesis import settings  # noqa: E402

# Timing decides no test, and the same examples are drawn every time.
settings.register_profile("seeded", deadline=None, derandomize=True)
settings.load_profile("seeded")
