"""The span by membership oracle: hit-and-run in the convex body.

Section 5 of the paper: all that is used of the body is the answer to "is this point inside?".
Many chains walk at once; their covariance shapes the next directions (which keeps a long thin
body from being walked sideways), and its leading principal directions are the hull's.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .._forward import Array

# Halvings of a chord: its ends are known to 2^-12 of the bracket, far less than a step is random by.
_BISECTIONS = 12
_DOUBLINGS = 40
# A body may be unbounded where no row says anything; every pattern is hard long before.
_FARTHEST = 1e6


def _reach(inside: Callable[[Array], Array], points: Array, directions: Array, scale: float) -> Array:
    """Return how far each chain can go from its point along its direction."""
    low, high = np.zeros(len(points)), np.full(len(points), scale)
    for _ in range(_DOUBLINGS):
        still = inside(points + high[:, None] * directions) & (high < _FARTHEST)
        if not still.any():
            break
        low = np.where(still, high, low)
        high = np.where(still, 2.0 * high, high)
    for _ in range(_BISECTIONS):
        middle = 0.5 * (low + high)
        still = inside(points + middle[:, None] * directions)
        low, high = np.where(still, middle, low), np.where(still, high, middle)
    return low


def hit_and_run(
    inside: Callable[[Array], Array],
    start: Array,
    *,
    n_chains: int,
    n_steps: int,
    n_rounds: int,
    generator: np.random.Generator,
) -> Array:
    """Return points spread over a body, shape (n_chains * n_steps, D), from its last round.

    Parameters
    ----------
    inside : callable
        Takes points (n, D), returns n booleans: the membership oracle.
    start : ndarray of shape (D,)
        A point inside.
    n_chains, n_steps, n_rounds : int
        Chains side by side, steps of each in a round, and rounds. After a round the covariance
        of its points shapes the directions of the next.
    generator : numpy.random.Generator
    """
    dimension = len(start)
    points = np.tile(start, (n_chains, 1))
    shape = np.eye(dimension)
    visited = np.empty((n_steps, n_chains, dimension))
    scale = 1.0
    for _ in range(n_rounds):
        for step in range(n_steps):
            directions = generator.standard_normal((n_chains, dimension)) @ shape
            forward = _reach(inside, points, directions, scale)
            backward = _reach(inside, points, -directions, scale)
            share = generator.uniform(size=n_chains)
            points = points + (share * (forward + backward) - backward)[:, None] * directions
            scale = max(float(np.median(forward + backward)), 1e-12)
            visited[step] = points
        covariance = np.cov(visited.reshape(-1, dimension), rowvar=False)
        values, vectors = np.linalg.eigh(np.atleast_2d(covariance))
        shape = np.sqrt(np.maximum(values, 1e-12 * max(values[-1], 1e-300)))[:, None] * vectors.T
    return visited.reshape(-1, dimension)
