"""The certificate on the bank of teachers: identified, and its radius holds the truth.

All teachers: ``pytest -m slow tests/theory/test_certificate.py``.
"""

import numpy as np
import pytest
from bank import TEACHERS

from sklearn_mhal import BooleanAttentionSampler, MultiHeadAttentionLearner, head_recovery_error
from sklearn_mhal._examples import make_examples
from sklearn_mhal.metrics import match_heads

QUICK = TEACHERS[:3] + TEACHERS[4:6] + TEACHERS[22:23]


def distance(learner, X, y, truth, change=0.0):
    """Relative distance of all parameters from the true ones, in the units of the radii."""
    examples = make_examples(X, y, fit_intercept=True, random_state=np.random.default_rng(0))
    order = match_heads(learner.layer_, truth)
    true = examples.units.attention_in(truth.attention[order], truth.key_bias[order])
    found = learner.stages_["polish"].attention
    true = true + change * np.linalg.norm(true) / np.sqrt(true.size)
    problem = examples.first(500).problem()
    pairs = [(attention, problem.evaluate(attention).regression.projection) for attention in (true, found)]
    gap = [np.linalg.norm(one - other) for one, other in zip(*pairs, strict=True)]
    return np.hypot(*gap) / np.hypot(*(np.linalg.norm(part) for part in pairs[1]))


def check(teacher):
    X, y, truth = teacher.draw(0)
    learner = MultiHeadAttentionLearner(random_state=0).fit(X, y)
    found = learner.certificate_
    assert found.identified, found.verdict
    assert found.solution_radius < 1e-8
    # What rounding does to the distance itself is no error of the radius.
    assert distance(learner, X, y, truth) <= found.solution_radius + 1e-12
    assert distance(learner, X, y, truth) <= found.uniqueness_radius
    # The case that must fail: a layer that is farther from the truth than the radius says.
    assert distance(learner, X, y, truth, change=0.1) > found.uniqueness_radius


@pytest.mark.parametrize("teacher", QUICK, ids=str)
def test_identified_with_the_truth_inside_the_radius(teacher):
    check(teacher)


@pytest.mark.slow
@pytest.mark.parametrize("teacher", [t for t in TEACHERS if t not in QUICK], ids=str)
def test_identified_with_the_truth_inside_the_radius_on_all_others(teacher):
    check(teacher)


@pytest.mark.parametrize("m", [2, 3])
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_a_parity_that_is_not_found_is_not_called_identified(m, seed):
    """Labels of saturated attention are fitted by other layers to many digits; none is called the one."""
    sampler = BooleanAttentionSampler(m, 2, 8, structure="parity", attention_scale=2.0, random_state=seed)
    X, y = sampler.sample(1000, as_tokens=True)
    learner = MultiHeadAttentionLearner(m, max_iter=30, heads_starts=3, random_state=seed).fit(X, y)
    if head_recovery_error(sampler.layer_, learner.layer_) > 1e-6:
        assert not learner.certificate_.identified
        assert not learner.certificate_.verdict.startswith("identified")
    generic = BooleanAttentionSampler(m, 2, 8, attention_scale=2.0, random_state=seed)
    X, y = generic.sample(1000, as_tokens=True)
    found = MultiHeadAttentionLearner(m, random_state=seed).fit(X, y)
    assert head_recovery_error(generic.layer_, found.layer_) < 1e-8 and found.certificate_.identified
