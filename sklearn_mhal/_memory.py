"""How many samples one pass may hold at a time."""

from __future__ import annotations

from sklearn import get_config

# Small products leave the cache when a chunk grows past a few megabytes, so a chunk is
# kept well below the working memory a user allows; measured flat between 2 and 16 MiB.
_CACHE_FRIENDLY_MIB = 8.0


def samples_per_chunk(bytes_per_sample: int, n_samples: int, *, mib: float = _CACHE_FRIENDLY_MIB) -> int:
    """Return how many samples fit in `mib`, or in scikit-learn's ``working_memory`` setting if that is less.

    At least one.
    """
    mib = min(float(get_config()["working_memory"]), mib)
    return int(max(1, min(n_samples, mib * 2**20 // bytes_per_sample)))
