"""The exponential wall: what a parity layer hides, and that not finding one is said.

More seeds, scales and heads: ``pytest -m slow tests/theory/test_hardness.py``. The growth itself is measured
by ``examples/benchmarks/hardness.py``.
"""

import itertools
import warnings

import numpy as np
import pytest
from sklearn.exceptions import ConvergenceWarning

from sklearn_mhal import BooleanAttentionSampler, MultiHeadAttentionLearner, head_recovery_error

K, D = 2, 8
# What counts as the layer, as in the benchmark.
FOUND = 1e-6


def fit(structure, m, s, seed, *, n=512, **settings):
    """Fit to examples of one layer, m given; return truth, learner and the error on new samples."""
    sampler = BooleanAttentionSampler(m, K, D, structure=structure, attention_scale=s, random_state=seed)
    X, y = sampler.sample(n)
    learner = MultiHeadAttentionLearner(**{"n_heads": m, **settings}, n_tokens=K, random_state=seed)
    with warnings.catch_warnings():
        # Fits that fell short warn; what they then say about themselves is what is tested.
        warnings.simplefilter("ignore", ConvergenceWarning)
        learner.fit(X, y)
    X_new, y_new = sampler.sample(500)
    error = np.mean((learner.predict(X_new) - y_new) ** 2) / np.mean(y_new**2)
    return sampler.layer_, learner, float(error)


def assert_not_called_identified(learner):
    certificate = learner.certificate_
    assert not certificate.identified
    assert certificate.verdict.startswith(("not identified", "not certain"))
    # Nothing proved, so no radius either.
    assert certificate.uniqueness_radius == 0.0 and np.isinf(certificate.solution_radius)


def largest_low_degree_correlation(layer, m):
    """Largest correlation of a label with a product of fewer than m bits, one of them from the hidden set.

    Exact, over all inputs: the tokens enter through query features and the difference of first features.
    """
    d = layer.n_features
    bits = np.array(list(itertools.product((-1, 1), repeat=2 * d)), dtype=np.int8)
    labels = layer.predict(bits.reshape(-1, 2, d))[:, 0]
    labels = labels / np.sqrt(np.mean(np.sum(labels**2, axis=1)))
    # In the first column of every head the rows of the hidden set are filled, and the first row.
    hidden = np.flatnonzero(np.abs(layer.attention[0, 1:, 0])) + 1
    largest = 0.0
    for degree in range(1, m):
        for chosen in itertools.combinations(range(2 * d), degree):
            if set(chosen) & set(hidden):
                product = bits[:, chosen].prod(axis=1)
                largest = max(largest, float(np.abs(product @ labels).max()) / len(bits))
    return largest


class TestWhatIsHidden:
    def test_the_set_shows_in_no_product_of_few_bits(self):
        sampler = BooleanAttentionSampler(3, 2, 5, structure="parity", attention_scale=6.0, random_state=0)
        # At finite scale correlations of the order of exp(-2 s) remain, here 6e-6.
        assert largest_low_degree_correlation(sampler.layer_, 3) < 1e-4

    def test_it_shows_where_the_attention_is_soft(self):
        """The case that must fail: soft thresholds are no signs."""
        sampler = BooleanAttentionSampler(3, 2, 5, structure="parity", attention_scale=0.3, random_state=0)
        assert largest_low_degree_correlation(sampler.layer_, 3) > 1e-2


class TestNeverIdentifiedUnlessFound:
    @pytest.mark.parametrize("s", [2.0, 4.0])
    def test_predicting_is_not_finding(self, s):
        """Two heads fit every label to rounding and are not the true ones: the verdict knows."""
        truth, learner, error = fit("parity", 2, s, 0)
        # A squared error: rounding, and what the steps before left.
        assert error < 1e-12
        assert head_recovery_error(truth, learner.layer_) > 0.01
        assert_not_called_identified(learner)

    @pytest.mark.parametrize("m", [3, 4])
    def test_a_search_that_got_nowhere(self, m):
        truth, learner, error = fit("parity", m, 2.0, 0, heads_starts=2, max_iter=20)
        assert error > FOUND
        assert head_recovery_error(truth, learner.layer_) > 0.01
        assert_not_called_identified(learner)

    def test_counting_does_not_help(self):
        """With the number of heads unknown the verdict is no bolder."""
        truth, learner, _ = fit("parity", 2, 2.0, 1, n_heads="auto", max_heads=2, heads_starts=3, n=256)
        assert head_recovery_error(truth, learner.layer_) > 0.01
        assert_not_called_identified(learner)

    def test_rounding_in_a_saturated_layer_does_not_end_the_fit(self):
        """Here the information has eigenvalues that rounding takes below zero, which Cholesky cannot bear."""
        truth, learner, _ = fit("parity", 3, 2.0, 0, n=1000, span="moments")
        assert head_recovery_error(truth, learner.layer_) > 0.01
        assert_not_called_identified(learner)

    @pytest.mark.parametrize("m", [1, 2, 4])
    def test_generic_layers_of_the_same_size_are_found_and_called_so(self, m):
        """The case beside it that must succeed, or a verdict that is always "no" would pass."""
        truth, learner, error = fit("incoherent", m, 2.0, 0)
        assert error < 1e-20
        assert head_recovery_error(truth, learner.layer_) < 1e-8
        assert learner.certificate_.identified
        assert learner.certificate_.verdict.startswith("identified")

    def test_one_parity_head_is_an_ordinary_layer(self):
        truth, learner, _ = fit("parity", 1, 2.0, 0)
        assert head_recovery_error(truth, learner.layer_) < 1e-8
        assert learner.certificate_.identified


@pytest.mark.slow
@pytest.mark.parametrize("m", range(1, 7))
@pytest.mark.parametrize("s", [2.0, 4.0])
@pytest.mark.parametrize("seed", range(3))
def test_never_identified_unless_found(m, s, seed):
    truth, learner, _ = fit("parity", m, s, seed, n=1024)
    if head_recovery_error(truth, learner.layer_) > FOUND:
        assert_not_called_identified(learner)
    generic, learner, _ = fit("incoherent", m, s, seed, n=1024)
    assert head_recovery_error(generic, learner.layer_) < 1e-8
    assert learner.certificate_.identified
