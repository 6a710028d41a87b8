import warnings

import numpy as np
import pytest

from sklearn_mhal import AttentionLayer, BooleanAttentionSampler, head_recovery_error
from sklearn_mhal.metrics import match_heads


def draw_layer(n_heads=4, seed=0, **options):
    return BooleanAttentionSampler(n_heads, 4, 6, n_outputs=3, random_state=seed, **options).layer_


def reorder(layer, order):
    return AttentionLayer(
        layer.attention[order],
        layer.projection[order],
        key_bias=layer.key_bias[order],
        intercept=layer.intercept,
    )


def replace(layer, **parts):
    names = ("attention", "projection", "key_bias", "intercept")
    values = {name: parts.get(name, getattr(layer, name)) for name in names}
    return AttentionLayer(values.pop("attention"), values.pop("projection"), **values)


def test_reordered_heads_are_matched_and_have_no_error():
    layer = draw_layer(5)
    order = np.array([3, 0, 4, 1, 2])
    shuffled = reorder(layer, order)
    assert head_recovery_error(layer, shuffled) == 0.0
    np.testing.assert_array_equal(match_heads(layer, shuffled), np.argsort(order))
    np.testing.assert_array_equal(shuffled.attention[match_heads(layer, shuffled)], layer.attention)


@pytest.mark.parametrize("part", ["attention", "projection"])
def test_error_is_the_largest_relative_frobenius_error(part):
    layer = draw_layer(3)
    changed = getattr(layer, part).copy()
    changed[0] *= 1.001
    rng = np.random.default_rng(0)
    step = rng.standard_normal(changed[1].shape)
    changed[1] += 0.02 * np.linalg.norm(changed[1]) * step / np.linalg.norm(step)
    error = head_recovery_error(layer, reorder(replace(layer, **{part: changed}), [2, 0, 1]))
    assert error == pytest.approx(0.02, rel=1e-12)


def test_error_is_relative_to_the_first_argument():
    layer = draw_layer(1)
    larger = replace(layer, attention=4 * layer.attention)
    assert head_recovery_error(layer, larger) == pytest.approx(3.0)
    assert head_recovery_error(larger, layer) == pytest.approx(0.75)


def test_different_shapes_are_infinitely_wrong_and_cannot_be_matched():
    layer = draw_layer(3)
    fewer = reorder(layer, [0, 1])
    narrower = AttentionLayer(layer.attention, layer.projection[:, :, :2])
    smaller = AttentionLayer(layer.attention[:, :5, :5], layer.projection[:, :5])
    for other in (fewer, narrower, smaller):
        assert head_recovery_error(layer, other) == np.inf
        assert head_recovery_error(other, layer) == np.inf
        with pytest.raises(ValueError, match="same shapes"):
            match_heads(layer, other)


def test_zero_true_matrix_has_an_absolute_error():
    layer = draw_layer(2)
    attention = layer.attention.copy()
    attention[1] = 0
    true = replace(layer, attention=attention)
    assert head_recovery_error(true, true) == 0.0
    attention = attention.copy()
    attention[1, 0, :2] = 3e-3, 4e-3
    assert head_recovery_error(true, replace(layer, attention=attention)) == pytest.approx(5e-3)


def test_lost_head_does_not_take_the_partner_of_a_recovered_one():
    # Head 1 is small and its estimate huge, so the huge estimate would be relatively nearer
    # to head 0, at the price of losing the exact match.
    attention, projection = np.stack([np.eye(2), 0.01 * np.eye(2)]), np.ones((2, 2, 2))
    learned = np.stack([np.full((2, 2), 1e6), np.eye(2)])
    true_layer, learned_layer = AttentionLayer(attention, projection), AttentionLayer(learned, projection)
    np.testing.assert_array_equal(match_heads(true_layer, learned_layer), [1, 0])
    assert head_recovery_error(true_layer, learned_layer) > 1e7


def test_affine_parts_count_only_on_request():
    layer = draw_layer(3, key_bias_scale=1.0, intercept_scale=1.0)
    key_bias = layer.key_bias.copy()
    key_bias[1] *= 1.25
    other_bias = reorder(replace(layer, key_bias=key_bias), [2, 0, 1])
    other_intercept = replace(layer, intercept=1.5 * layer.intercept)
    assert head_recovery_error(layer, other_bias) == 0.0
    assert head_recovery_error(layer, other_intercept) == 0.0
    assert head_recovery_error(layer, other_bias, include_affine=True) == pytest.approx(0.25)
    assert head_recovery_error(layer, other_intercept, include_affine=True) == pytest.approx(0.5)
    plain = draw_layer(3)
    shifted = replace(plain, intercept=[0.0, 3e-3, 4e-3])
    assert head_recovery_error(plain, shifted, include_affine=True) == pytest.approx(5e-3)


def test_heads_that_differ_in_their_key_bias_only():
    layer = AttentionLayer(np.ones((2, 3, 3)), np.ones((2, 3, 1)), key_bias=[[1, 0, 0], [0, 2, 0]])
    swapped = reorder(layer, [1, 0])
    np.testing.assert_array_equal(match_heads(layer, swapped, include_affine=True), [1, 0])
    assert head_recovery_error(layer, swapped, include_affine=True) == 0.0


@pytest.mark.parametrize("scale", [1e-8, 1e4, 1e8])
def test_scale_neither_overflows_nor_changes_the_error(scale):
    layer = draw_layer(3, attention_scale=8.0)
    large = AttentionLayer(scale * layer.attention, scale * layer.projection)
    other = AttentionLayer(1.1 * large.attention, large.projection)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert head_recovery_error(large, other) == pytest.approx(0.1)
        assert np.isfinite(head_recovery_error(layer, large))
        assert np.isfinite(head_recovery_error(large, layer))
