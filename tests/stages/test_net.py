"""The net, the tuples and the refinement in a frame."""

import itertools

import numpy as np
import pytest
from bank import draw_examples, head_vectors

from sklearn_mhal.stages._net import _Tuples, best_tuples, held_out_errors, net_points, refine_in_frame
from sklearn_mhal.stages.span import Frame

D = 6


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def true_frame(examples, layer, rng, *, extra=0):
    """The affine hull of the true heads, with chance directions after its own; and their coordinates."""
    heads = head_vectors(examples, layer)
    origin = heads.mean(axis=0)
    directions = np.vstack([heads[1:] - heads[0], rng.standard_normal((extra, heads.shape[1]))])
    directions = np.linalg.qr(directions.T)[0].T
    frame = Frame("sculpt", origin, directions, True, None)
    return frame, (heads - origin) @ directions.T


class TestNet:
    @pytest.mark.parametrize("r", [1, 2, 5])
    @pytest.mark.parametrize("n_points", [2, 16, 64])
    def test_points(self, rng, r, n_points):
        frame = Frame("sculpt", np.zeros(9), np.eye(9)[:r], True, None)
        points = net_points(frame, n_points=n_points, generator=rng)
        assert points.shape[1] == r and abs(len(points) - n_points) <= 4
        radii = np.linalg.norm(points, axis=1)
        # The origin, and shells out to where patterns are hard.
        assert radii.min() == 0.0
        if n_points > 2:
            assert radii.max() == pytest.approx(12.0)
        assert len(np.unique(points, axis=0)) == len(points)

    def test_one_dimension_is_symmetric_and_seedless(self, rng):
        frame = Frame("sculpt", np.zeros(9), np.eye(9)[:1], True, None)
        points = net_points(frame, n_points=20, generator=rng)
        np.testing.assert_allclose(points, -points[::-1])

    def test_no_dimension_is_the_origin(self, rng):
        frame = Frame("sculpt", np.ones(9), np.empty((0, 9)), True, None)
        assert net_points(frame, n_points=20, generator=rng).shape == (1, 0)


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("n_heads", [1, 2, 3])
def test_scores_are_regressions(rng, n_heads, affine):
    examples, _ = draw_examples(2, 3, D, 2.0, 100, 0, fit_intercept=affine, intercept_scale=1.0)
    problem = examples.problem()
    width = examples.query_width * D
    frame = Frame("sculpt", rng.standard_normal(width), rng.standard_normal((2, width)), True, None)
    points = rng.standard_normal((5, 2))
    scorer = _Tuples(problem, frame, points)
    tuples = np.array(list(itertools.combinations(range(5), n_heads)))
    scores = scorer.explained(tuples)
    for chosen, score in zip(tuples, scores, strict=True):
        heads = (frame.origin + points[chosen] @ frame.directions).reshape(n_heads, -1, D)
        state = problem.evaluate(heads.transpose(1, 0, 2).reshape(-1, n_heads * D))
        # The scorer's ridge is a millionth.
        assert score == pytest.approx(problem.label_power * (1.0 - state.error), rel=1e-4)


class TestBestTuples:
    def search(self, rng, max_tuples, n_best=2, n_heads=2, n_points=12):
        examples, layer = draw_examples(2, 3, D, 2.0, 400, 0)
        frame, coordinates = true_frame(examples, layer, rng)
        points = np.concatenate([rng.uniform(-8, 8, (n_points - 2, 1)), coordinates])
        found, n_tried = best_tuples(
            examples.problem(),
            frame,
            points,
            n_heads=n_heads,
            n_best=n_best,
            max_tuples=max_tuples,
            generator=rng,
        )
        return found, n_tried, coordinates

    def test_all_tuples_where_they_are_few(self, rng):
        found, n_tried, coordinates = self.search(rng, 100)
        assert n_tried == 66 and found.shape == (2, 2, 1)
        np.testing.assert_array_equal(np.sort(found[0].ravel()), np.sort(coordinates.ravel()))

    def test_exchange_where_they_are_many(self, rng):
        found, n_tried, coordinates = self.search(rng, 60, n_points=40)
        assert 60 <= n_tried <= 60 + 40
        found, n_tried, coordinates = self.search(rng, 700, n_points=40)
        assert n_tried <= 740 and len(found) <= 2
        np.testing.assert_allclose(np.sort(found[0].ravel()), np.sort(coordinates.ravel()))

    def test_more_heads_than_points(self, rng):
        found, _, _ = self.search(rng, 0, n_heads=4, n_points=3)
        assert found.shape[1:] == (4, 1)


class TestRefinement:
    def test_reaches_the_heads_in_their_hull(self, rng):
        examples, layer = draw_examples(3, 3, D, 2.0, 400, 0)
        frame, coordinates = true_frame(examples, layer, rng)
        start = coordinates + 0.3 * rng.standard_normal(coordinates.shape)
        problem = examples.problem()
        attention, error = refine_in_frame(problem, frame, start)
        truth = examples.units.attention_in(layer.attention)
        np.testing.assert_allclose(attention, truth, atol=1e-4)
        assert error < 1e-8 and error == pytest.approx(problem.evaluate(attention).error)

    def test_stays_in_the_frame(self, rng):
        examples, _ = draw_examples(2, 3, D, 2.0, 400, 0)
        frame = Frame("sculpt", rng.standard_normal(D * D), np.eye(D * D)[:2], True, None)
        attention, _ = refine_in_frame(examples.problem(), frame, rng.standard_normal((2, 2)))
        heads = attention.reshape(D, 2, D).transpose(1, 0, 2).reshape(2, -1)
        np.testing.assert_allclose((heads - frame.origin)[:, 2:], 0.0, atol=1e-12)

    def test_never_raises_the_error(self, rng):
        examples, _ = draw_examples(2, 3, D, 8.0, 200, 0)
        problem = examples.problem()
        frame = Frame("sculpt", np.zeros(D * D), rng.standard_normal((2, D * D)), True, None)
        for _ in range(5):
            start = 3 * rng.standard_normal((2, 2))
            heads = (start @ frame.directions).reshape(2, D, D).transpose(1, 0, 2).reshape(D, -1)
            assert refine_in_frame(problem, frame, start)[1] <= problem.evaluate(heads).error

    def test_a_frame_without_directions_is_its_origin(self, rng):
        examples, _ = draw_examples(1, 3, D, 2.0, 100, 0)
        frame = Frame("sculpt", rng.standard_normal(D * D), np.empty((0, D * D)), True, None)
        attention, error = refine_in_frame(examples.problem(), frame, np.empty((1, 0)))
        np.testing.assert_array_equal(attention, frame.origin.reshape(D, D))
        assert 0.0 < error <= 1.0


class TestHeldOutErrors:
    def test_are_of_a_regression_on_other_samples(self, rng):
        examples, layer = draw_examples(2, 3, D, 2.0, 300, 0, fit_intercept=True, noise_std=0.1)
        train, test = examples.first(200), examples.between(200, 300)
        attention = examples.units.attention_in(layer.attention, layer.key_bias)
        errors = held_out_errors(train.problem(), test.problem(), attention)
        assert errors.shape == (100,)
        fitted = train.problem().evaluate(attention).regression
        problem = test.problem()
        pooled = problem.rows.pooled(problem.rows.patterns(attention))
        predicted = pooled @ fitted.projection + fitted.intercept
        squares = (problem.labels - predicted).reshape(100, 3, D) ** 2
        np.testing.assert_allclose(errors, squares.mean(axis=(1, 2)), rtol=1e-10)

    def test_exact_heads_have_none(self):
        examples, layer = draw_examples(2, 3, D, 2.0, 300, 0)
        attention = examples.units.attention_in(layer.attention)
        train, test = examples.first(200), examples.between(200, 300)
        errors = held_out_errors(train.problem(), test.problem(), attention)
        assert errors.max() < 1e-20

    def test_overfitting_shows(self, rng):
        """The case that must fail: chance heads that explain the training rows explain no others."""
        examples, _ = draw_examples(2, 3, D, 2.0, 300, 0)
        few = examples.first(6)
        attention = rng.standard_normal((D, 3 * D))
        assert few.problem().evaluate(attention).error < 1e-6
        assert held_out_errors(few.problem(), examples.between(200, 300).problem(), attention).mean() > 0.5
