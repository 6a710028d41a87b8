"""Hit-and-run on bodies whose covariance is known."""

import numpy as np
import pytest

from sklearn_mhal.stages._oracle import hit_and_run


def walk(inside, dimension, *, start=None, n_rounds=6, seed=0):
    return hit_and_run(
        inside,
        np.zeros(dimension) if start is None else start,
        n_chains=4 * dimension,
        n_steps=40,
        n_rounds=n_rounds,
        generator=np.random.default_rng(seed),
    )


def box(sides):
    return lambda points: (np.abs(points) <= np.asarray(sides) / 2).all(axis=1)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_uniform_in_a_box(seed):
    sides = np.array([1.0, 2.0, 10.0, 30.0])
    points = walk(box(sides), 4, seed=seed)
    assert points.shape == (16 * 40, 4) and box(sides)(points).all()
    # 640 points that remember about ten steps: a standard error of an eighth on a variance.
    np.testing.assert_allclose(points.var(axis=0), sides**2 / 12, rtol=0.4)
    np.testing.assert_allclose(points.mean(axis=0) / sides, 0.0, atol=0.12)
    correlation = np.corrcoef(points, rowvar=False) - np.eye(4)
    assert np.abs(correlation).max() < 0.4


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_uniform_in_a_turned_ellipsoid_far_from_zero(seed):
    rng = np.random.default_rng(seed)
    axes = np.linalg.qr(rng.standard_normal((5, 5)))[0]
    lengths = np.array([0.1, 0.2, 0.3, 1.0, 20.0])
    centre = 100 * rng.standard_normal(5)

    def inside(points):
        return (((points - centre) @ axes / lengths) ** 2).sum(axis=1) <= 1.0

    points = walk(inside, 5, start=centre, seed=seed)
    assert inside(points).all()
    # The covariance of a uniform ball in d dimensions is 1 / (d + 2).
    spread = ((points - points.mean(axis=0)) @ axes).var(axis=0)
    np.testing.assert_allclose(spread, lengths**2 / 7, rtol=0.5)
    longest = np.linalg.eigh(np.cov(points, rowvar=False))[1][:, -1]
    assert abs(longest @ axes[:, -1]) > 0.999


def test_a_start_in_a_corner_is_left():
    points = walk(box([2.0, 2.0]), 2, start=np.array([0.999, -0.999]))
    np.testing.assert_allclose(points.mean(axis=0), 0.0, atol=0.25)


def test_the_body_is_only_asked_for_membership():
    asked = []

    def inside(points):
        asked.append(points.shape)
        return np.linalg.norm(points, axis=1) <= 1.0

    walk(inside, 3, n_rounds=1)
    assert set(asked) == {(12, 3)}


def test_a_single_point_and_one_dimension():
    nowhere = walk(lambda points: (points == 0.0).all(axis=1), 2)
    np.testing.assert_allclose(nowhere, 0.0, atol=1e-10)
    line = walk(box([3.0]), 1)
    assert np.abs(line).max() <= 1.5 and line.var() == pytest.approx(9 / 12, rel=0.4)


def test_unbounded_body_ends():
    points = walk(lambda points: points[:, 0] >= -1.0, 2, n_rounds=2)
    assert np.isfinite(points).all()


def test_one_round_of_a_long_body_has_not_seen_its_length():
    """The case that must fail: shaping the directions is what the further rounds are for."""
    sides = np.array([1.0] * 9 + [100.0])
    first = walk(box(sides), 10, n_rounds=1)[:, -1].var()
    last = walk(box(sides), 10, n_rounds=8)[:, -1].var()
    expected = 100.0**2 / 12
    assert first < 0.1 * expected and last == pytest.approx(expected, rel=0.5)


def test_seeded():
    np.testing.assert_array_equal(walk(box([1.0, 2.0]), 2), walk(box([1.0, 2.0]), 2))
    assert not np.array_equal(walk(box([1.0, 2.0]), 2), walk(box([1.0, 2.0]), 2, seed=1))
