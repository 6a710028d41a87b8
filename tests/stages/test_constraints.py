"""What certified rows say: the ellipsoid of interior rows, the half-spaces of vertex rows."""

import numpy as np
import pytest
from bank import draw_examples, head_vectors

from sklearn_mhal.stages._agreement import Rows, fit_patterns, load_rows
from sklearn_mhal.stages._constraints import half_spaces, interior_ellipsoid, with_constant

N, K, D, D_OUT = 400, 3, 3, 4


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def one_head_rows(rng, scale=1.0, affine=False, n=N):
    """Rows of a single head, so that every row is an exact equation, and the head's vector."""
    tokens = rng.standard_normal((n, K, D))
    total = rng.standard_normal((D, D_OUT))
    head = scale * rng.standard_normal((D + affine, D))
    queries = np.concatenate([tokens, np.ones((n, K, int(affine)))], axis=2)
    logits = queries @ head @ tokens.transpose(0, 2, 1)
    patterns = np.exp(logits - logits.max(axis=2, keepdims=True))
    patterns /= patterns.sum(axis=2, keepdims=True)
    return Rows(tokens, patterns @ tokens @ total, np.ones(n)), total, head.ravel()


class TestEllipsoid:
    @pytest.mark.parametrize("affine", [False, True])
    def test_one_head_is_its_centre(self, rng, affine):
        rows, total, head = one_head_rows(rng, affine=affine)
        fit = fit_patterns(rows, total)
        ellipsoid = interior_ellipsoid(rows, fit, fit.patterns.min(axis=2) > 0.02, D + affine)
        # Patterns of 1e-13 accuracy through logarithms of numbers down to 0.02.
        np.testing.assert_allclose(ellipsoid.centre, head, atol=1e-9)
        assert ellipsoid.slack < 1e-5 and ellipsoid.eigenvalues[0] > 1e-3

    def test_moments_are_sums_over_rows(self, rng):
        rows, total, _ = one_head_rows(rng, n=20)
        rows = Rows(rows.tokens, rows.labels, rng.uniform(0.5, 2.0, 20))
        fit = fit_patterns(rows, total)
        inner = fit.patterns.min(axis=2) > 0.02
        ellipsoid = interior_ellipsoid(rows, fit, inner, D)
        expected, mass = np.zeros((D * D, D * D)), 0.0
        for s, a in zip(*np.nonzero(inner), strict=True):
            pattern, tokens = fit.patterns[s, a], rows.tokens[s]
            for b in range(K):
                # All rows are exact here, so they are equally sure and none contradicts another.
                normal = np.outer(tokens[a], tokens[b] - pattern @ tokens).ravel()
                expected += rows.weights[s] * pattern[b] * np.outer(normal, normal)
            mass += rows.weights[s]
        moment = (ellipsoid.eigenvectors * ellipsoid.eigenvalues) @ ellipsoid.eigenvectors.T
        np.testing.assert_allclose(moment, expected / mass, atol=1e-4 * np.abs(moment).max())

    def test_wrong_rows_are_found_out(self, rng):
        """A few rows that contradict the rest are weighted away."""
        rows, total, head = one_head_rows(rng)
        fit = fit_patterns(rows, total)
        inner = fit.patterns.min(axis=2) > 0.02
        wrong = inner & (rng.uniform(size=inner.shape) < 0.05)
        fit.patterns[wrong] = fit.patterns[wrong][:, ::-1]
        ellipsoid = interior_ellipsoid(rows, fit, inner, D)
        # Least squares alone would be a tenth off.
        assert np.linalg.norm(ellipsoid.centre - head) < 0.03 * np.linalg.norm(head)

    def test_many_wrong_rows_are_not(self, rng):
        """The case that must fail: when half the rows are wrong the others are the outliers."""
        rows, total, head = one_head_rows(rng)
        fit = fit_patterns(rows, total)
        inner = fit.patterns.min(axis=2) > 0.02
        wrong = inner & (rng.uniform(size=inner.shape) < 0.6)
        fit.patterns[wrong] = fit.patterns[wrong][:, ::-1]
        ellipsoid = interior_ellipsoid(rows, fit, inner, D)
        assert np.linalg.norm(ellipsoid.centre - head) > 0.3 * np.linalg.norm(head)

    def test_few_rows_leave_the_slack_that_their_residuals_allow(self):
        """With fewer equations than unknowns nothing contradicts, which must not mean certainty."""
        examples, layer = draw_examples(2, 3, 8, 4.0, 2000, 0)
        rows = load_rows(examples)
        fit = fit_patterns(rows, layer.projection.sum(axis=0) / examples.units.label_scale)
        eligible = fit.determined[:, None] & (fit.patterns.min(axis=2) > 0.02) & (fit.error < 0.02)
        few = eligible & (np.cumsum(eligible).reshape(eligible.shape) <= 10)
        ellipsoid = interior_ellipsoid(rows, fit, few, 8)
        offsets = (head_vectors(examples, layer) - ellipsoid.centre) @ ellipsoid.eigenvectors
        apart = np.sqrt(offsets**2 @ ellipsoid.eigenvalues)
        assert 0.1 < ellipsoid.slack < 10.0 and (apart < 2 * ellipsoid.slack).all()

    def test_no_rows(self, rng):
        rows, total, _ = one_head_rows(rng)
        fit = fit_patterns(rows, total)
        ellipsoid = interior_ellipsoid(rows, fit, np.zeros((N, K), dtype=bool), D)
        assert not ellipsoid.centre.any() and not ellipsoid.eigenvalues.any()


class TestHalfSpaces:
    @pytest.mark.parametrize("affine", [False, True])
    def test_one_head_keeps_them_with_just_the_margin(self, rng, affine):
        rows, total, head = one_head_rows(rng, scale=4.0, affine=affine)
        fit = fit_patterns(rows, total)
        outer = fit.patterns.max(axis=2) > 0.98
        queries, gaps, margins = half_spaces(rows, fit, outer, D + affine, 0.5)
        scores = np.einsum("hp,pd,hd->h", queries, head.reshape(-1, D), gaps)
        assert len(margins) == 16 * D * (D + affine) and (np.diff(margins) <= 0).all()
        assert (scores >= margins).all()
        # What is promised is what is measured, less the margin, where rounding does not show.
        soft = margins < 20
        np.testing.assert_allclose(scores[soft] - margins[soft], 0.5, atol=0.02)

    def test_residual_is_granted_to_every_token(self, rng):
        rows, total, _ = one_head_rows(rng, scale=4.0)
        noisy = Rows(rows.tokens, rows.labels + 0.01 * rng.standard_normal(rows.labels.shape), rows.weights)
        every = np.ones((N, K), dtype=bool)
        exact, loose = (half_spaces(r, fit_patterns(r, total), every, D, 0.0)[2] for r in (rows, noisy))
        # Noise of 1e-2 leaves log-odds of about five at most, and the exact rows ran to dozens.
        assert exact.max() > 20 > 10 > loose.max()

    def test_useless_rows_are_dropped(self, rng):
        rows, total, _ = one_head_rows(rng, scale=4.0)
        tokens = rows.tokens.copy()
        tokens[:, 1] = tokens[:, 0]
        tokens[:10, 2] = 0.0
        same = Rows(tokens, rows.labels, rows.weights)
        fit = fit_patterns(same, total)
        queries, gaps, margins = half_spaces(same, fit, np.ones((N, K), dtype=bool), D, 0.0)
        assert np.abs(gaps).max(axis=1, initial=np.inf).all() and np.abs(queries).max(axis=1).all()
        assert (margins >= 0.5).all()

    def test_no_rows(self, rng):
        rows, total, _ = one_head_rows(rng)
        fit = fit_patterns(rows, total)
        queries, gaps, margins = half_spaces(rows, fit, np.zeros((N, K), dtype=bool), D, 1.0)
        assert queries.shape == gaps.shape == (0, D) and margins.shape == (0,)


def test_with_constant(rng):
    queries = rng.standard_normal((5, D))
    assert with_constant(queries, D) is queries
    np.testing.assert_array_equal(with_constant(queries, D + 1)[:, -1], 1.0)
