"""The convex body: membership, the point nearest to zero, what a pickle holds."""

import logging
import pickle
from dataclasses import replace

import numpy as np
import pytest

from sklearn_mhal._convex import ConvexProgramError
from sklearn_mhal._units import Units
from sklearn_mhal.stages import _body
from sklearn_mhal.stages._body import ConvexBody, most_half_spaces

D = 3


def plain_units(fit_intercept=False):
    return Units(
        fit_intercept=fit_intercept,
        shift=np.zeros(D),
        whitener=None,
        label_shift=np.zeros(1),
        label_scale=1.0,
    )


def make_body(seed=0, *, n_half_spaces=0, margin=1.0, slack=0.5, fit_intercept=False):
    """An ellipsoid with one long axis, and half-spaces that its centre times three is inside of."""
    rng = np.random.default_rng(seed)
    width = D + int(fit_intercept)
    vectors = np.linalg.qr(rng.standard_normal((width * D, width * D)))[0]
    values = np.concatenate([[1e-3], np.linspace(1.0, 2.0, width * D - 1)])
    centre = rng.standard_normal(width * D)
    queries, gaps = rng.standard_normal((n_half_spaces, width)), rng.standard_normal((n_half_spaces, D))
    scores = np.einsum("hp,pd,hd->h", queries, 3 * centre.reshape(width, D), gaps)
    gaps *= (np.sign(scores) * 2 * margin / np.abs(scores))[:, None]
    return ConvexBody(
        units=plain_units(fit_intercept),
        centre=centre,
        eigenvalues=values,
        eigenvectors=vectors,
        slack=slack,
        queries=queries,
        gaps=gaps,
        margins=np.full(n_half_spaces, margin),
    )


class TestMembership:
    @pytest.mark.parametrize("n_half_spaces", [0, 5])
    def test_is_by_definition(self, n_half_spaces):
        body = make_body(n_half_spaces=n_half_spaces, slack=6.0)
        points = 2 * body.centre + np.random.default_rng(1).standard_normal((500, D * D))
        moment = (body.eigenvectors * body.eigenvalues) @ body.eigenvectors.T
        expected = np.empty(500, dtype=bool)
        for at, point in enumerate(points):
            offset = point - body.centre
            expected[at] = offset @ moment @ offset <= body.slack**2
            for query, gap, margin in zip(body.queries, body.gaps, body.margins, strict=True):
                expected[at] &= query @ point.reshape(D, D) @ gap >= margin
        assert 0 < expected.sum() < 500
        np.testing.assert_array_equal(body.inside(points), expected)
        np.testing.assert_array_equal(body.violation(points) <= 1.0, expected)
        np.testing.assert_array_equal([body.contains(point.reshape(D, D)) for point in points], expected)

    def test_reaches_far_along_the_long_axis_only(self):
        body = make_body(slack=1.0)
        steps = 10.0 * body.eigenvectors.T
        assert list(body.inside(body.centre + steps)) == [True] + [False] * (D * D - 1)
        np.testing.assert_allclose(body.contradiction(body.centre + steps), 10 * np.sqrt(body.eigenvalues))

    def test_violation_of_a_half_space_is_its_missing_share(self):
        body = make_body(n_half_spaces=1, margin=2.0, slack=1e6)
        normal = body.normals[0] / (body.normals[0] @ body.normals[0])
        at = body.centre + (1.5 - body.normals[0] @ body.centre) * normal
        assert body.violation(at) == pytest.approx(1.25)

    def test_key_biases_count(self):
        body = make_body(fit_intercept=True)
        head = body.centre.reshape(D + 1, D)
        assert body.contains(head[:D], head[D]) and not body.contains(head[:D], head[D] + 1.0)
        assert not body.contains(head[:D])

    def test_asks_in_the_units_of_the_data(self):
        whitener = np.diag([1.0, 2.0, 4.0])
        body = replace(make_body(), units=replace(plain_units(), whitener=whitener))
        head = body.centre.reshape(D, D)
        assert body.contains(whitener @ head @ whitener) and not body.contains(head)

    def test_wrong_shape(self):
        with pytest.raises(ValueError, match=r"must have shape \(3, 3\), got \(2, 2\)"):
            make_body().contains(np.zeros((2, 2)))

    def test_representation_counts(self):
        assert repr(make_body(n_half_spaces=4)) == "ConvexBody(dimension=9, n_half_spaces=4)"


class TestAnchor:
    def test_without_half_spaces_is_the_centre(self):
        body = make_body()
        np.testing.assert_array_equal(body.anchor(), body.centre)

    def test_where_half_spaces_hold_is_the_centre(self):
        body = make_body(n_half_spaces=5)
        body = replace(body, margins=np.full(5, 0.5))
        assert body.violation(body.centre) <= 1.0
        np.testing.assert_array_equal(body.anchor(), body.centre)

    def test_where_half_spaces_cut_is_inside_of_them(self):
        body = make_body(n_half_spaces=5, margin=1.0)
        assert body.violation(body.centre) > 1.0
        anchor = body.anchor()
        assert (body.normals @ anchor >= body.margins * (1 - 1e-6)).all()
        np.testing.assert_array_equal(anchor, body.minimum_norm_point())

    def test_failure_of_the_program_leaves_the_centre(self, monkeypatch, caplog):
        def fail(**_):
            raise ConvexProgramError("sculpt", "nothing", "something", "Try again.")

        monkeypatch.setattr(_body, "minimum_norm_point", fail)
        body = make_body(n_half_spaces=5)
        with caplog.at_level(logging.INFO, "sklearn_mhal"):
            np.testing.assert_array_equal(body.anchor(), body.centre)
        for told in (caplog.text, body.obstacle):
            assert "The centre of the ellipsoid is used instead" in told
        with pytest.raises(ConvexProgramError, match="Try again"):
            body.minimum_norm_point()

    def test_contradicting_half_spaces_are_an_error_of_the_program(self):
        body = make_body(n_half_spaces=2)
        body = replace(body, queries=body.queries[[0, 0]], gaps=body.gaps[0] * np.array([[1.0], [-1.0]]))
        with pytest.raises(ConvexProgramError):
            body.minimum_norm_point()
        np.testing.assert_array_equal(body.anchor(), body.centre)


class TestMinimumNormPoint:
    def objective(self, body, point):
        weight = max(body.centre @ body.centre, 1.0) / body.slack**2
        return 0.5 * (point @ point + weight * body.contradiction(point) ** 2)

    @pytest.mark.parametrize("n_half_spaces", [0, 1, 6])
    def test_nothing_inside_the_half_spaces_is_nearer(self, n_half_spaces):
        body = make_body(n_half_spaces=n_half_spaces)
        point = body.minimum_norm_point()
        assert (body.normals @ point >= body.margins * (1 - 1e-6)).all()
        rng = np.random.default_rng(0)
        others = point + rng.standard_normal((2000, D * D)) * rng.choice([1e-3, 1e-2, 0.1, 1.0], (2000, 1))
        allowed = (others @ body.normals.T >= body.margins).all(axis=1)
        assert allowed.sum() > 50
        # The optimum is certified to a millionth.
        best = self.objective(body, point) * (1 - 2e-6)
        assert min(self.objective(body, other) for other in others[allowed]) >= best

    def test_goes_to_zero_along_what_nothing_holds(self):
        body = make_body(slack=0.1)
        free = body.eigenvectors[:, 0]
        held = replace(body, eigenvalues=np.concatenate([[0.0], body.eigenvalues[1:]]))
        assert abs(free @ held.minimum_norm_point()) < 1e-5 < abs(free @ body.centre)


class TestPickle:
    def test_comes_back(self):
        body = make_body(n_half_spaces=4)
        back = pickle.loads(pickle.dumps(body))
        for name in ("centre", "eigenvalues", "eigenvectors", "queries", "gaps", "margins"):
            np.testing.assert_array_equal(getattr(back, name), getattr(body, name))
        np.testing.assert_array_equal(back.anchor(), body.anchor())

    def test_size_does_not_depend_on_the_number_of_half_spaces(self):
        sizes = {len(pickle.dumps(make_body(n_half_spaces=n))) for n in (0, 3, most_half_spaces(D * D))}
        # Integers of one or two bytes tell the numbers.
        assert max(sizes) - min(sizes) <= 8

    @pytest.mark.parametrize(("dimension", "expected"), [(4, 64), (100, 1600), (1000, 2000)])
    def test_most_half_spaces(self, dimension, expected):
        assert most_half_spaces(dimension) == expected
