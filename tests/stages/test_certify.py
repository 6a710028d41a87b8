"""The certificate: what it says, what it must never say, and the numbers behind it."""

import dataclasses
import warnings

import numpy as np
import pytest
from sklearn.exceptions import ConvergenceWarning

from sklearn_mhal import AttentionLayer, BooleanAttentionSampler, MultiHeadAttentionLearner
from sklearn_mhal._examples import make_examples
from sklearn_mhal.stages import Certificate
from sklearn_mhal.stages._radii import _attention_norm, _constants, radii_of
from sklearn_mhal.stages._spectrum import spectrum_of
from sklearn_mhal.stages.certify import _distances

K, D = 4, 6


def sample(layer, n=600, seed=0, k=K):
    X = np.random.default_rng(seed).choice([-1.0, 1.0], (n, k, layer.n_features))
    return X, layer.predict(X)


def layer_of(m=2, seed=0, **settings):
    return BooleanAttentionSampler(m, K, D, random_state=seed, **settings).layer_


def certificate_of(X, y, **settings):
    with warnings.catch_warnings():
        # What is not identifiable may not converge, and says so.
        warnings.simplefilter("ignore", ConvergenceWarning)
        return MultiHeadAttentionLearner(random_state=0, **settings).fit(X, y).certificate_


@pytest.fixture(scope="module")
def generic():
    return certificate_of(*sample(layer_of()))


class TestFields:
    def test_all_that_is_promised(self, generic):
        assert isinstance(generic, Certificate) and generic.identified and generic.locally_identified
        assert generic.held_out_error < 1e-7 and generic.residual < 1e-16
        assert 0 < generic.smallest_eigenvalue < generic.largest_eigenvalue
        assert generic.n_unknowns == 2 * D * (D + 1 + D) + D < generic.n_equations == 600 * K * D
        assert 0 < generic.certified_fraction <= 1
        assert generic.head_distances.shape == generic.head_powers.shape == (2,)
        assert np.all(generic.head_distances >= 0) and generic.weak_heads == ()
        assert 0 < generic.solution_radius < 1e-8 < generic.uniqueness_radius

    def test_the_verdict_is_a_sentence_with_the_radius(self, generic):
        assert generic.verdict == generic.message
        assert generic.verdict.startswith("identified: all equations hold to rounding")
        assert f"{generic.solution_radius:.1e}" in generic.verdict and "\n" not in generic.verdict

    def test_is_frozen(self, generic):
        with pytest.raises(dataclasses.FrozenInstanceError):
            generic.identified = False

    def test_a_weak_head_is_named(self):
        layer = layer_of()
        faint = AttentionLayer(layer.attention, layer.projection * np.array([1.0, 0.01])[:, None, None])
        found = certificate_of(*sample(faint), n_heads=2)
        assert found.identified and len(found.weak_heads) == 1 and "weak" in found.verdict
        assert found.head_powers[found.weak_heads[0]] == found.head_powers.min()

    def test_an_estimated_spectrum_is_said_to_be_one(self):
        layer = BooleanAttentionSampler(4, K, 14, random_state=0).layer_
        found = certificate_of(*sample(layer, n=1500), n_heads=4)
        assert not found.spectrum_is_exact and "estimated spectrum" in found.verdict


class TestNeverIdentified:
    """Each is a layer whose parameters the data cannot tell; the generic one above can be told."""

    def test_a_duplicated_head(self):
        layer = layer_of()
        twice = AttentionLayer(layer.attention[[0, 1, 0]], layer.projection[[0, 1, 1]])
        found = certificate_of(*sample(twice), n_heads=3)
        assert not found.identified and found.verdict.startswith("not identified")

    def test_a_zero_head(self):
        layer = layer_of()
        idle = AttentionLayer(layer.attention, layer.projection * np.array([1.0, 0.0])[:, None, None])
        found = certificate_of(*sample(idle), n_heads=2)
        assert not found.identified and found.verdict.startswith("not identified")

    def test_more_heads_than_there_are(self):
        assert not certificate_of(*sample(layer_of()), n_heads=4).identified

    def test_a_single_token(self):
        found = certificate_of(*sample(layer_of(), k=1))
        assert not found.identified and "one token" in found.verdict

    @pytest.mark.parametrize("n", [2, 5])
    def test_fewer_equations_than_unknowns(self, n):
        found = certificate_of(*sample(layer_of(), n=n), n_heads=2)
        assert not found.identified and "fewer than" in found.verdict

    def test_constant_tokens(self):
        X, _ = sample(layer_of())
        X = np.broadcast_to(X[:, :1], X.shape).copy()
        assert not certificate_of(X, layer_of().predict(X), n_heads=2).identified
        everywhere = np.ones_like(X)
        assert not certificate_of(everywhere, layer_of().predict(everywhere), n_heads=1).identified

    def test_a_column_that_is_constant(self):
        X, _ = sample(layer_of())
        X[:, :, 0] = 1.0
        assert not certificate_of(X, layer_of().predict(X), n_heads=2).identified

    @pytest.mark.parametrize("noise", [1e-3, 0.3])
    def test_noise(self, noise):
        X, y = sample(layer_of(), n=1500)
        y = y + noise * np.random.default_rng(1).standard_normal(y.shape)
        found = certificate_of(X, y, n_heads=2)
        assert not found.identified and found.locally_identified
        assert found.solution_radius == np.inf and found.uniqueness_radius == 0
        assert found.verdict.startswith("not certain")

    def test_one_head_too_few(self):
        found = certificate_of(*sample(layer_of(3), n=1000), n_heads=2)
        assert not found.identified and found.residual > 1e-3


class TestWhatTheProofRestsOn:
    """Each constant against what it bounds, on equations small enough for their derivative to be formed."""

    @pytest.fixture(params=["tokens", "first", "mean"])
    def small(self, request):
        layer = BooleanAttentionSampler(2, 3, 3, n_outputs=2, key_bias_scale=0.5, random_state=0).layer_
        rng = np.random.default_rng(0)
        X = rng.standard_normal((120, 3, 3))
        y = layer.predict(X)
        y = {"tokens": y, "first": y[:, :1], "mean": y.mean(axis=1, keepdims=True)}[request.param]
        weights = rng.uniform(0.5, 2.0, len(X))
        examples = make_examples(
            X, y, readout=request.param, fit_intercept=True, sample_weight=weights, random_state=0
        )
        problem = examples.problem()
        attention = examples.units.attention_in(layer.attention, layer.key_bias)
        regression = problem.evaluate(attention).regression
        return problem, attention, np.concatenate([regression.projection, regression.intercept[None]])

    def outputs(self, problem, parameters, shapes):
        attention, projection = np.split(parameters, [np.prod(shapes[0])])
        rows = problem.rows
        pooled = rows.pooled(rows.patterns(attention.reshape(shapes[0])))
        design = np.concatenate([pooled, rows.row_scale[:, None]], axis=1)
        return (design @ projection.reshape(shapes[1])).ravel()

    def jacobian(self, problem, parameters, shapes):
        steps = 1e-6 * np.eye(len(parameters))
        ends = [self.outputs(problem, parameters + step, shapes) for step in steps]
        starts = [self.outputs(problem, parameters - step, shapes) for step in steps]
        return (np.array(ends) - np.array(starts)).T / 2e-6

    def constants(self, problem, attention, projection):
        return _constants(problem, attention, projection[:-1], spectrum_of(problem, attention))

    def flat(self, attention, projection):
        return np.concatenate([attention.ravel(), projection.ravel()]), (attention.shape, projection.shape)

    def test_smallest_singular_value(self, small):
        problem, *matrices = small
        values = np.linalg.svd(self.jacobian(problem, *self.flat(*matrices)), compute_uv=False)
        sigma, _, _ = self.constants(*small)
        # A lower bound; that it is not a void one is part of what makes the radii useful.
        assert 0.1 * values[-1] < sigma <= values[-1]

    def test_lipschitz_constant(self, small):
        """The derivative in several places nearby, in all directions at once."""
        problem, *matrices = small
        parameters, shapes = self.flat(*matrices)
        _, lipschitz, scale = self.constants(*small)
        rng = np.random.default_rng(1)
        here = self.jacobian(problem, parameters, shapes)
        ratios = []
        for _ in range(20):
            step = rng.standard_normal(len(parameters))
            step *= 1e-3 * scale / np.linalg.norm(step)
            there = self.jacobian(problem, parameters + step, shapes)
            ratios.append(np.linalg.norm(there - here, 2) / np.linalg.norm(step))
        # The case that must fail: a constant a thousand times smaller would be too small.
        assert 1e-3 * lipschitz < max(ratios) <= lipschitz

    def test_norm_of_the_derivative_in_the_attention(self, small):
        """What stands in for the coupling where matrices are not formed."""
        problem, *matrices = small
        jacobian = self.jacobian(problem, *self.flat(*matrices))[:, : matrices[0].size]
        bound = _attention_norm(problem, matrices[0], matrices[1][:-1])
        assert np.linalg.norm(jacobian, 2) ** 2 <= bound

    @pytest.mark.parametrize("size", [1e-14, 1e-12, 1e-10, 1e-8, 1e-6, 1e-4, 1e-2])
    def test_the_solution_is_inside_or_nothing_is_said(self, small, size):
        """Parameters that are off by a known amount: the radius is never smaller than that."""
        problem, attention, projection = small
        noise = np.random.default_rng(2).standard_normal(attention.shape)
        off = attention + size * np.linalg.norm(attention) / np.linalg.norm(noise) * noise
        regression = problem.evaluate(off).regression
        solution, uniqueness = radii_of(problem, off, regression.projection, spectrum_of(problem, off))
        distance = np.hypot(
            np.linalg.norm(off - attention), np.linalg.norm(regression.projection - projection[:-1])
        )
        distance /= np.hypot(np.linalg.norm(off), np.linalg.norm(regression.projection))
        assert distance <= solution
        # Close by something is proved, and what is proved shrinks; far away nothing is.
        assert np.isfinite(solution) == (uniqueness > 0) == (size < 1e-5)
        if size <= 1e-10:
            assert solution < 1e-7 < uniqueness


class TestDistancesFromTheBody:
    def test_zero_inside_and_growing_outside(self):
        sampler = BooleanAttentionSampler(2, 3, 6, attention_scale=1.0, random_state=0)
        X, y = sampler.sample(2000, as_tokens=True)
        learner = MultiHeadAttentionLearner(2, random_state=0).fit(X, y)
        assert learner.certificate_.head_distances.tolist() == [0.0, 0.0]
        body, attention = learner.stages_["sculpt"].body, learner.stages_["polish"].attention
        distances = [
            _distances(learner.stages_["sculpt"], attention + step, 6).max() for step in (0.0, 0.1, 0.2, 0.4)
        ]
        # The case that must fail: heads elsewhere are outside, the farther the more.
        assert distances[0] == 0 < distances[1] < distances[2] < distances[3]
        assert not body.contains(learner.attention_matrices_[0] + 0.4)

    def test_unknown_without_a_body(self):
        # As many outputs as differences of tokens: nothing can be certified.
        layer = BooleanAttentionSampler(2, K, D, n_outputs=3, random_state=0).layer_
        found = certificate_of(*sample(layer), n_heads=2)
        assert np.isnan(found.head_distances).all() and found.certified_fraction == 0.0
        assert found.identified


class TestWeakestDirection:
    def test_is_shared_among_generic_heads(self, generic):
        assert generic.weakest_direction.shape == (2,)
        assert generic.weakest_direction.sum() == pytest.approx(1.0)

    def test_names_a_head_without_projection(self):
        layer = layer_of()
        idle = AttentionLayer(layer.attention, layer.projection * np.array([1.0, 0.0])[:, None, None])
        found = certificate_of(*sample(idle), n_heads=2)
        assert found.weakest_direction.max() > 1 - 1e-6
        # The idle head stays zero and comes last.
        assert np.argmax(found.weakest_direction) == 1 and found.weak_heads == (1,)

    def test_names_a_faint_head(self):
        layer = layer_of()
        faint = AttentionLayer(layer.attention, layer.projection * np.array([1.0, 0.01])[:, None, None])
        found = certificate_of(*sample(faint), n_heads=2)
        assert (int(np.argmax(found.weakest_direction)),) == found.weak_heads


def test_more_samples_are_asked_where_a_few_leave_a_direction_free():
    """Projections of rank one and saturated rows: six times the information limit are not enough to tell."""
    sampler = BooleanAttentionSampler(1, 2, 8, structure="parity", random_state=0)
    X, y = sampler.sample(1000, as_tokens=True)
    found = certificate_of(X, y, n_heads=1)
    assert found.identified and found.n_samples > 64
    # The case that must fail: those few alone.
    assert not certificate_of(X[:40], y[:40], n_heads=1).identified
