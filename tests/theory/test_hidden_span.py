"""Where the exponential wall stands: told the span, a parity layer is easy, and nothing leads to the span.

The paper's search, a net in a span and tuples of its points, finds parity layers as easily as generic ones
once it is told the span of their attention matrices. That span is one of as many as there are sets of m
features, and one that is wrong in two features or more fits no better than one that is wrong in all.

More heads and seeds: ``pytest -m slow tests/theory/test_hidden_span.py``.
"""

import itertools

import numpy as np
import pytest

from sklearn_mhal import BooleanAttentionSampler
from sklearn_mhal._examples import make_examples
from sklearn_mhal.stages._net import best_tuples, held_out_errors, net_points, refine_in_frame
from sklearn_mhal.stages.span import Frame

K = 2


class Case:
    """Examples of a layer and the paper's search in spans given; nothing leaves the span."""

    def __init__(self, structure, m, seed):
        self.m, self.d = m, 2 * m + 2
        sampler = BooleanAttentionSampler(m, K, self.d, structure=structure, random_state=seed)
        X, y = sampler.sample(900, as_tokens=True)
        self.layer, self.examples = sampler.layer_, make_examples(X, y, random_state=seed)
        self.train = self.examples.first(600).problem()
        self.test = self.examples.between(600, 900).problem()
        self.generator = np.random.default_rng(seed)

    def best_error(self, matrices):
        """The held-out error of the best tuple in the linear span of some matrices."""
        stacked = self.examples.units.attention_in(matrices)
        vectors = (
            stacked.reshape(len(stacked), len(matrices), -1).transpose(1, 0, 2).reshape(len(matrices), -1)
        )
        _, sizes, directions = np.linalg.svd(vectors, full_matrices=False)
        rank = int((sizes > 1e-8 * sizes[0]).sum())
        frame = Frame("given", np.zeros(vectors.shape[1]), directions[:rank], False, self.m)
        points = net_points(frame, n_points=16, generator=self.generator)
        tuples, _ = best_tuples(
            self.train, frame, points, n_heads=self.m, n_best=2, max_tuples=3000, generator=self.generator
        )
        refined = [refine_in_frame(self.train, frame, coordinates)[0] for coordinates in tuples]
        return min(held_out_errors(self.train, self.test, attention).mean() for attention in refined)

    def parity_span(self, n_right):
        """The span of the parity layers of a set that shares so many features with the true one."""
        hidden = np.flatnonzero(self.layer.attention[0, 1:, 0]) + 1
        others = np.setdiff1d(np.arange(1, self.d), hidden)
        matrices = np.zeros((2, self.d, self.d))
        matrices[0, self.generator.permutation(hidden)[:n_right], 0] = 1.0
        matrices[0, self.generator.permutation(others)[: self.m - n_right], 0] = 1.0
        matrices[1, 0, 0] = 1.0
        return matrices

    def partly_right(self, n_right):
        """The true attention matrices but for some that chance replaced."""
        matrices = self.layer.attention.copy()
        shape = (self.m - n_right, self.d, self.d)
        scale = np.linalg.norm(matrices[0]) / self.d
        matrices[n_right:] = scale * self.generator.standard_normal(shape)
        return matrices


def check_a_parity_layer(m, seed):
    case = Case("parity", m, seed)
    # Told the span, the labels are predicted.
    assert case.best_error(case.parity_span(m)) < 1e-3
    wrong = [case.best_error(case.parity_span(right)) for right in range(m - 1)]
    # The half of the power that the parity makes is not explained at all, however near: measured 0.45 to
    # 0.61, and more where six heads overfit. (With one feature missing it is 0.38 to 0.55, since a projection
    # can read that one off a token.)
    assert min(wrong) > 0.4


def check_a_generic_layer(m, seed):
    """The case beside it: the error falls with every direction that is right, so a search is led."""
    case = Case("incoherent", m, seed)
    errors = [case.best_error(case.partly_right(right)) for right in range(m + 1)]
    assert all(more < less for less, more in itertools.pairwise(errors))
    assert errors[-1] < 1e-3 and errors[-2] < 0.6 * errors[0]


@pytest.mark.parametrize("m", [3, 4])
def test_nothing_leads_to_the_span_of_a_parity_layer(m):
    check_a_parity_layer(m, 0)


def test_every_right_direction_shows_in_a_generic_layer():
    check_a_generic_layer(3, 0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("m", [3, 4, 5, 6])
def test_nothing_leads_to_the_span_with_other_seeds(m, seed):
    check_a_parity_layer(m, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("m", [3, 4])
def test_every_right_direction_shows_with_other_seeds(m, seed):
    check_a_generic_layer(m, seed)
