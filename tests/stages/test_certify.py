"""The certificate: what it says, what it must never say, and the numbers behind it."""

import dataclasses
import warnings

import numpy as np
import pytest
from sklearn.exceptions import ConvergenceWarning

from sklearn_mhal import AttentionLayer, BooleanAttentionSampler, MultiHeadAttentionLearner
from sklearn_mhal.stages import Certificate

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
