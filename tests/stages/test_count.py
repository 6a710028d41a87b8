"""Counting heads: idle heads dropped, equal heads merged, noise allowed for."""

import numpy as np
import pytest
from bank import draw_examples

from sklearn_mhal import AttentionLayer, BooleanAttentionSampler, head_recovery_error
from sklearn_mhal._examples import make_examples
from sklearn_mhal.stages import Span, find_heads, polish
from sklearn_mhal.stages._count import _ladder
from sklearn_mhal.stages.heads import EXACT

K, D = 3, 6


def no_span(proposal=None):
    """A span stage that found nothing, so that only random starts are searched."""
    return Span(
        source="none",
        basis=np.empty((0, D, D)),
        origin=np.zeros((D, D)),
        singular_values=np.empty(0),
        n_heads=proposal,
        frames=(),
        exclusive=False,
        n_samples=0,
        message="",
    )


def examples_of(layer, n=400, seed=0, noise=0.0):
    rng = np.random.default_rng(seed)
    X = rng.choice([-1, 1], size=(n, K, D)).astype(np.int8)
    y = layer.predict(X)
    return make_examples(X, y + noise * rng.standard_normal(y.shape), random_state=seed)


def find(examples, *, proposal=None, seed=0, **settings):
    return find_heads(examples, no_span(proposal), generator=np.random.default_rng(seed), **settings)


def two_heads(seed=0):
    return BooleanAttentionSampler(2, K, D, attention_scale=2.0, random_state=seed).layer_


@pytest.mark.parametrize("m", [1, 2, 4])
@pytest.mark.parametrize("proposal", [None, 1, 3, 6])
def test_counts_from_any_proposal(m, proposal):
    """Too low a proposal is raised, too high a one lowered by dropping heads."""
    examples, layer = draw_examples(m, K, D, 2.0, 600, 0)
    found = find(examples, proposal=proposal)
    assert found.n_heads == m and found.held_out_error < EXACT
    assert head_recovery_error(layer, polish(examples, found.attention).layer) < 1e-8


def test_equal_heads_are_merged():
    layer = two_heads()
    twice = AttentionLayer(layer.attention[[0, 1, 0]], layer.projection[[0, 1, 1]])
    for proposal in (None, 3, 5):
        found = find(examples_of(twice), proposal=proposal)
        assert found.n_heads == 2
        merged = AttentionLayer(
            layer.attention, np.stack([layer.projection[0] + layer.projection[1], layer.projection[1]])
        )
        assert head_recovery_error(merged, found.layer) < 1e-2


@pytest.mark.parametrize("proposal", [None, 3])
def test_a_zero_head_is_dropped(proposal):
    layer = two_heads()
    idle = AttentionLayer(
        np.concatenate([layer.attention, np.ones((1, D, D))]),
        np.concatenate([layer.projection, np.zeros((1, D, D))]),
    )
    found = find(examples_of(idle), proposal=proposal)
    assert found.n_heads == 2 and head_recovery_error(layer, found.layer) < 1e-2


def test_no_head_at_all():
    layer = AttentionLayer(np.ones((1, D, D)), np.zeros((1, D, D)))
    found = find(examples_of(layer))
    assert found.n_heads == 1 and found.held_out_error == 0.0
    np.testing.assert_allclose(found.layer.projection, 0.0, atol=1e-12)


@pytest.mark.parametrize("noise", [0.02, 0.3])
@pytest.mark.parametrize("seed", [0, 1])
def test_noise_counts_what_it_can_tell(noise, seed):
    """The smallest number of heads within one standard error of the best, on enough samples."""
    examples = examples_of(two_heads(seed), n=3000, noise=noise, seed=seed)
    found = find(examples)
    assert found.n_heads == 2 and "noise or misfit remains" in found.message
    errors = found.errors_by_count
    assert errors[1] > errors[2] and set(errors) >= {1, 2, 3}


def test_pure_noise_needs_no_second_head():
    rng = np.random.default_rng(0)
    examples = make_examples(rng.choice([-1, 1], (1000, K, D)), rng.standard_normal((1000, K, 2)))
    found = find(examples)
    assert found.n_heads == 1 and found.held_out_error > 0.9


def test_given_number_is_kept():
    examples = examples_of(two_heads())
    for m in (1, 2):
        found = find(examples, n_heads=m)
        assert found.n_heads == m and set(found.errors_by_count) == {m} and not found.n_idle


@pytest.mark.parametrize("m", [3, 6])
def test_superfluous_heads_stay_zero(m):
    """As many as were asked for, the last of them zero before the polish and after it."""
    examples, layer = examples_of(two_heads()), two_heads()
    found = find(examples, n_heads=m)
    assert (found.n_heads, found.n_idle, found.layer.n_heads) == (m, m - 2, m)
    assert "stay zero" in found.message
    polished = polish(examples, found.attention, n_idle=found.n_idle)
    for result in (found.layer, polished.layer):
        assert not result.attention[2:].any() and not result.projection[2:].any()
    kept = AttentionLayer(polished.layer.attention[:2], polished.layer.projection[:2])
    assert head_recovery_error(layer, kept) < 1e-10


def test_with_noise_a_number_is_kept_unless_it_hurts():
    examples = examples_of(two_heads(), n=3000, noise=0.3)
    found = find(examples, n_heads=2)
    assert found.n_idle == 0
    few = examples_of(two_heads(), n=150, noise=0.3)
    found = find(few, n_heads=8)
    assert found.n_idle == 6
    assert found.errors_by_count[2] < 0.9 * found.errors_by_count[8]


def test_strides_reach_the_largest_number():
    assert _ladder(None, 16) == [1, 2, 4, 8, 16]
    assert _ladder(3, 16) == [3, 4, 8, 16]
    assert _ladder(None, 1) == [1] and _ladder(2, 2) == [2]
    assert _ladder(5, 12) == [5, 6, 12]


def test_one_head_too_few_is_told():
    """The case that must fail: the best single head of two leaves an error, and it is reported."""
    found = find(examples_of(two_heads()), n_heads=1)
    assert found.held_out_error > 1e-3 and "noise or misfit remains" in found.message


def test_no_more_heads_than_the_equations_allow():
    examples = examples_of(BooleanAttentionSampler(4, K, D, random_state=0).layer_, n=12)
    found = find(examples)
    # 12 samples give 216 equations, and each head has 72 unknowns.
    assert found.n_heads <= 2 and max(found.errors_by_count) <= 2


def test_max_heads_is_kept():
    examples, _ = draw_examples(4, K, D, 2.0, 600, 0)
    found = find(examples, max_heads=2)
    assert max(found.errors_by_count) == 2 and found.held_out_error > EXACT


def test_a_single_token_has_one_head():
    rng = np.random.default_rng(0)
    tokens, weights = rng.standard_normal((100, 1, D)), rng.standard_normal((D, 2))
    found = find(make_examples(tokens, tokens @ weights))
    assert found.n_heads == 1
    np.testing.assert_allclose(found.layer.projection[0], weights, atol=1e-10)


def test_seeded():
    examples = examples_of(two_heads(), noise=0.1)
    first, second, other = (find(examples, seed=seed) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first.attention, second.attention)
    assert not np.array_equal(first.attention, other.attention)
