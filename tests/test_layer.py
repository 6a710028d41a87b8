import copy
import pickle
import warnings

import numpy as np
import pytest
from sklearn import config_context

from sklearn_mhal import AttentionLayer

PARTS = ("attention", "projection", "key_bias", "intercept")


def make_layer(rng, m=3, d=4, d_out=2, affine=True, scale=1.0):
    bias = {"key_bias": rng.standard_normal((m, d)), "intercept": rng.standard_normal(d_out)}
    attention = scale * rng.standard_normal((m, d, d))
    return AttentionLayer(attention, rng.standard_normal((m, d, d_out)), **(bias if affine else {}))


def moved(layer, direction, step):
    new = {name: getattr(layer, name) + step * getattr(direction, name) for name in PARTS}
    return AttentionLayer(new.pop("attention"), new.pop("projection"), **new)


def inner(first, second):
    return sum(np.sum(getattr(first, name) * getattr(second, name)) for name in PARTS)


def naive_forward(layer, X):
    """The formula of the class docstring, one score at a time."""
    n, k, _ = X.shape
    X = X.astype(float)
    outputs = np.zeros((n, k, layer.n_outputs))
    patterns = np.zeros((n, layer.n_heads, k, k))
    for s in range(n):
        for a in range(k):
            outputs[s, a] += layer.intercept
            for i in range(layer.n_heads):
                scores = [
                    float(X[s, a] @ layer.attention[i] @ X[s, b] + layer.key_bias[i] @ X[s, b])
                    for b in range(k)
                ]
                weights = np.exp(np.array(scores) - max(scores))
                weights /= weights.sum()
                patterns[s, i, a] = weights
                for b in range(k):
                    outputs[s, a] += weights[b] * (X[s, b] @ layer.projection[i])
    return outputs, patterns


# Agreement "up to rounding" below: sums of fewer than 100 terms of order 1 to 10.
ROUNDING = {"rtol": 1e-12, "atol": 1e-12}


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("shape", [(1, 2, 3, 4), (3, 5, 4, 2), (2, 1, 6, 6), (4, 3, 1, 1)])
def test_forward_map_and_patterns_are_the_formula(shape, affine):
    m, k, d, d_out = shape
    rng = np.random.default_rng(0)
    layer = make_layer(rng, m, d, d_out, affine)
    X = rng.standard_normal((6, k, d))
    outputs, patterns = naive_forward(layer, X)
    np.testing.assert_allclose(layer.predict(X), outputs, **ROUNDING)
    np.testing.assert_allclose(layer.attention_weights(X), patterns, **ROUNDING)


def test_patterns_are_distributions_over_the_last_axis():
    rng = np.random.default_rng(1)
    layer = make_layer(rng, scale=5.0)
    weights = layer.attention_weights(rng.standard_normal((20, 6, 4)))
    assert weights.shape == (20, 3, 6, 6)
    assert (weights >= 0).all()
    np.testing.assert_allclose(weights.sum(axis=-1), 1.0, rtol=1e-14)


def test_permuted_tokens_permute_outputs_and_patterns():
    rng = np.random.default_rng(2)
    layer, X = make_layer(rng), rng.standard_normal((5, 4, 4))
    order = [2, 0, 3, 1]
    np.testing.assert_allclose(layer.predict(X[:, order]), layer.predict(X)[:, order], **ROUNDING)
    shuffled = layer.attention_weights(X)[:, :, order][..., order]
    np.testing.assert_allclose(layer.attention_weights(X[:, order]), shuffled, **ROUNDING)


@pytest.mark.parametrize("name", PARTS)
def test_derivative_product_is_a_central_difference(name):
    rng = np.random.default_rng(3)
    layer, other, X = make_layer(rng), make_layer(rng), rng.standard_normal((7, 5, 4))
    zero = moved(layer, layer, -1.0)
    direction = {part: getattr(other if part == name else zero, part) for part in PARTS}
    direction = AttentionLayer(direction.pop("attention"), direction.pop("projection"), **direction)
    product = layer.derivative_product(X, direction)
    step = 1e-5
    difference = moved(layer, direction, step).predict(X) - moved(layer, direction, -step).predict(X)
    # Truncation is step^2 times a third derivative of up to about 1e3 here; rounding 1e-15 / step.
    np.testing.assert_allclose(product, difference / (2 * step), rtol=1e-6, atol=1e-7)
    assert np.abs(product).max() > 0.1


def test_derivative_product_is_linear():
    rng = np.random.default_rng(4)
    layer, one, two = (make_layer(rng) for _ in range(3))
    X = rng.standard_normal((5, 3, 4))
    combined = layer.derivative_product(X, moved(one, two, -2.5))
    separate = layer.derivative_product(X, one) - 2.5 * layer.derivative_product(X, two)
    np.testing.assert_allclose(combined, separate, **ROUNDING)


@pytest.mark.parametrize("shape", [(1, 2, 3, 4), (3, 5, 4, 2), (2, 1, 6, 6)])
def test_gradient_product_is_the_adjoint(shape):
    m, k, d, d_out = shape
    rng = np.random.default_rng(5)
    layer, direction = make_layer(rng, m, d, d_out), make_layer(rng, m, d, d_out)
    X, residual = rng.standard_normal((9, k, d)), rng.standard_normal((9, k, d_out))
    forwards = np.sum(residual * layer.derivative_product(X, direction))
    backwards = inner(layer.gradient_product(X, residual), direction)
    assert forwards == pytest.approx(backwards, rel=1e-12)


def explicit_multi_head(X, weights, biases, n_heads):
    """A transformer's layer as it is written down: project, split, attend, join, project."""
    q, k, v = (X @ weights[name].T + biases[name] for name in ("query", "key", "value"))
    joined = []
    for part in zip(*(np.split(array, n_heads, axis=-1) for array in (q, k, v)), strict=True):
        scores = part[0] @ part[1].transpose(0, 2, 1) / np.sqrt(part[0].shape[-1])
        shifted = np.exp(scores - scores.max(axis=-1, keepdims=True))
        joined.append(shifted / shifted.sum(axis=-1, keepdims=True) @ part[2])
    return np.concatenate(joined, axis=-1) @ weights["output"].T + biases["output"]


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("n_heads", "width", "d", "d_out"), [(1, 5, 4, 3), (3, 6, 6, 6), (4, 8, 5, 7)])
def test_standard_transformer_layer(n_heads, width, d, d_out, with_bias):
    rng = np.random.default_rng(6)
    weights = {name: rng.standard_normal((width, d)) for name in ("query", "key", "value")}
    weights["output"] = rng.standard_normal((d_out, width))
    biases = {name: rng.standard_normal(len(w)) * with_bias for name, w in weights.items()}
    given = {f"{name}_bias": bias for name, bias in biases.items()} if with_bias else {}
    layer = AttentionLayer.from_projections(**weights, n_heads=n_heads, **given)
    assert (layer.n_heads, layer.n_features, layer.n_outputs) == (n_heads, d, d_out)
    X = rng.standard_normal((8, 5, d))
    expected = explicit_multi_head(X, weights, biases, n_heads)
    np.testing.assert_allclose(layer.predict(X), expected, **ROUNDING)


def test_each_bias_of_a_transformer_layer_may_be_missing():
    rng = np.random.default_rng(7)
    weights = {name: rng.standard_normal((4, 4)) for name in ("query", "key", "value", "output")}
    X = rng.standard_normal((8, 3, 4))
    for only in weights:
        biases = {name: rng.standard_normal(4) * (name == only) for name in weights}
        layer = AttentionLayer.from_projections(**weights, n_heads=2, **{f"{only}_bias": biases[only]})
        np.testing.assert_allclose(layer.predict(X), explicit_multi_head(X, weights, biases, 2), **ROUNDING)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"n_heads": 3}, "n_heads=3 does not divide the 4 rows of query"),
        ({"n_heads": 0}, "n_heads=0"),
        ({"key": np.zeros((6, 4))}, "key must have shape"),
        ({"value": np.zeros((4, 5))}, "value must have shape"),
        ({"output": np.zeros((4, 5))}, "output must have shape"),
        ({"query": np.zeros(4)}, "query must have shape"),
        ({"query_bias": np.zeros(3)}, "query_bias must have shape"),
        ({"key_bias": np.zeros(3)}, "key_bias must have shape"),
        ({"value_bias": np.zeros((4, 1))}, "value_bias must have shape"),
        ({"output_bias": np.zeros(3)}, "output_bias must have shape"),
        ({"value": np.full((4, 4), np.nan)}, "value contains NaN"),
    ],
)
def test_wrong_transformer_weights(changed, message):
    arguments = {name: np.ones((4, 4)) for name in ("query", "key", "value", "output")}
    with pytest.raises(ValueError, match=message):
        AttentionLayer.from_projections(**{"n_heads": 2, **arguments, **changed})


@pytest.mark.parametrize("size", [1e4, 1e8])
def test_huge_logits(size):
    rng = np.random.default_rng(8)
    layer = make_layer(rng, scale=size)
    # Entries of 1 and -1 make every score of order `size`; equal tokens tie at any size.
    X = rng.choice([-1, 1], size=(50, 6, 4)).astype(np.int8)
    residual = rng.standard_normal((50, 6, 2))
    with warnings.catch_warnings(), np.errstate(over="raise", invalid="raise", divide="raise"):
        warnings.simplefilter("error")
        outputs, weights = layer.predict(X), layer.attention_weights(X)
        product = layer.derivative_product(X, make_layer(rng))
        gradient = layer.gradient_product(X, residual)
    expected = naive_forward(layer, X)
    assert np.isfinite(product).all()
    assert all(np.isfinite(getattr(gradient, name)).all() for name in PARTS)
    # A score is rounded at size * 1e-16, and so is the pattern.
    tolerance = 100 * size * np.finfo(float).eps
    np.testing.assert_allclose(outputs, expected[0], rtol=0, atol=max(tolerance, 1e-12))
    np.testing.assert_allclose(weights, expected[1], rtol=0, atol=max(tolerance, 1e-12))


def test_adding_a_constant_to_all_scores_changes_nothing():
    # A constant token feature adds the same score to every token, however large.
    rng = np.random.default_rng(9)
    layer, X = make_layer(rng, d=4), rng.integers(-1, 2, (10, 5, 4)).astype(float)
    X[..., 0] = 1.0
    key_bias = layer.key_bias.copy()
    key_bias[:, 0] += 1e4
    shifted = AttentionLayer(layer.attention, layer.projection, key_bias=key_bias, intercept=layer.intercept)
    # Scores of 1e4 are rounded at 2e-12.
    np.testing.assert_allclose(shifted.predict(X), layer.predict(X), rtol=0, atol=1e-10)


def test_chunks_change_nothing():
    rng = np.random.default_rng(10)
    layer, direction = make_layer(rng), make_layer(rng)
    X, residual = rng.standard_normal((23, 5, 4)), rng.standard_normal((23, 5, 2))

    def everything():
        gradient = layer.gradient_product(X, residual)
        return [
            layer.predict(X),
            layer.attention_weights(X),
            layer.derivative_product(X, direction),
            *(getattr(gradient, name) for name in PARTS),
        ]

    whole = everything()
    # One sample at a time, then a few (a sample needs about 3 kB).
    for mebibytes in (1e-6, 0.02):
        with config_context(working_memory=mebibytes):
            for part, expected in zip(everything(), whole, strict=True):
                np.testing.assert_allclose(part, expected, **ROUNDING)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int64, bool, np.float32, np.float16])
def test_numeric_types_are_read_as_numbers(dtype):
    rng = np.random.default_rng(11)
    layer = make_layer(rng)
    X = rng.integers(0, 2, (9, 5, 4)).astype(dtype)
    exact = X.astype(np.float64)
    for method in ("predict", "attention_weights"):
        result = getattr(layer, method)(X)
        assert result.dtype == np.float64
        np.testing.assert_array_equal(result, getattr(layer, method)(exact))
    residual = rng.standard_normal((9, 5, 2))
    np.testing.assert_array_equal(
        layer.gradient_product(X, residual).attention, layer.gradient_product(exact, residual).attention
    )


@pytest.mark.parametrize("order", ["C", "F"])
def test_inputs_are_only_read(order):
    rng = np.random.default_rng(12)
    layer, direction = make_layer(rng), make_layer(rng)
    X = np.asarray(rng.standard_normal((9, 5, 4)), order=order)
    residual = np.asarray(rng.standard_normal((9, 5, 2)), order=order)
    contiguous, kept = np.ascontiguousarray(X), residual.copy()
    X.flags.writeable = residual.flags.writeable = False
    np.testing.assert_array_equal(layer.predict(X), layer.predict(contiguous))
    layer.attention_weights(X)
    layer.derivative_product(X, direction)
    layer.gradient_product(X, residual)
    np.testing.assert_array_equal(X, contiguous)
    np.testing.assert_array_equal(residual, kept)


def test_memory_mapped_tokens(tmp_path):
    rng = np.random.default_rng(13)
    layer = make_layer(rng)
    X = rng.choice([-1, 1], size=(9, 5, 4)).astype(np.int8)
    np.save(tmp_path / "tokens.npy", X)
    mapped = np.load(tmp_path / "tokens.npy", mmap_mode="r")
    np.testing.assert_array_equal(layer.predict(mapped), layer.predict(X))


def test_lists_and_no_samples():
    layer = make_layer(np.random.default_rng(14))
    assert layer.predict([[[1, 2, 3, 4]]]).shape == (1, 1, 2)
    empty = np.empty((0, 5, 4))
    assert layer.predict(empty).shape == (0, 5, 2)
    assert layer.attention_weights(empty).shape == (0, 3, 5, 5)
    assert layer.derivative_product(empty, layer).shape == (0, 5, 2)
    assert not layer.gradient_product(empty, np.empty((0, 5, 2))).attention.any()


def test_parameters_are_copies_and_read_only():
    attention, projection = np.ones((1, 2, 2)), np.ones((1, 2, 3))
    layer = AttentionLayer(attention, projection)
    attention[:] = 7
    assert layer.attention.max() == 1
    for name in PARTS:
        assert getattr(layer, name).dtype == np.float64
        with pytest.raises(ValueError, match="read-only"):
            getattr(layer, name)[...] = 0
    with pytest.raises(AttributeError):
        layer.attention = attention
    assert repr(layer) == "AttentionLayer(n_heads=1, n_features=2, n_outputs=3)"
    np.testing.assert_array_equal(layer.key_bias, np.zeros((1, 2)))
    np.testing.assert_array_equal(layer.intercept, np.zeros(3))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_copies_and_pickles(duplicate):
    layer = make_layer(np.random.default_rng(15))
    other = duplicate(layer)
    for name in PARTS:
        np.testing.assert_array_equal(getattr(other, name), getattr(layer, name))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((np.ones((2, 2)), np.ones((1, 2, 2))), "attention must have shape"),
        ((np.ones((1, 2, 3)), np.ones((1, 2, 2))), "attention matrices must be square"),
        ((np.ones((2, 2, 2)), np.ones((1, 2, 2))), "projection must have shape"),
        ((np.ones((1, 2, 2)), np.ones((1, 3, 2))), "projection must have shape"),
        ((np.ones((1, 2, 2)), np.ones((2, 2))), "projection must have shape"),
        ((np.full((1, 2, 2), np.nan), np.ones((1, 2, 2))), "attention contains NaN"),
        ((np.ones((1, 2, 2)), np.full((1, 2, 2), np.inf)), "projection contains NaN or infinity"),
    ],
)
def test_wrong_parameters(arguments, message):
    with pytest.raises(ValueError, match=message):
        AttentionLayer(*arguments)


@pytest.mark.parametrize("name", ["key_bias", "intercept"])
def test_wrong_biases(name):
    for value in (np.ones(3), np.ones((2, 2)), np.ones((1, 5))):
        with pytest.raises(ValueError, match=f"{name} must have shape"):
            AttentionLayer(np.ones((1, 2, 2)), np.ones((1, 2, 4)), **{name: value})


@pytest.mark.parametrize("method", ["predict", "attention_weights", "derivative_product", "gradient_product"])
@pytest.mark.parametrize("shape", [(5, 4), (5, 3, 3), (5, 3, 5), (5,), (1, 5, 3, 4), (5, 0, 4)])
def test_wrong_tokens(method, shape):
    layer = make_layer(np.random.default_rng(16))
    extra = {"derivative_product": [layer], "gradient_product": [np.zeros((5, 3, 2))]}.get(method, [])
    with pytest.raises(ValueError, match=r"X must have shape \(n_samples, n_tokens, 4\)"):
        getattr(layer, method)(np.zeros(shape), *extra)


def test_tokens_that_are_no_numbers():
    layer = make_layer(np.random.default_rng(17))
    for dtype in (object, str, complex):
        with pytest.raises(ValueError, match="X must be numeric"):
            layer.predict(np.ones((2, 3, 4)).astype(dtype))


def test_wrong_residual_and_direction():
    rng = np.random.default_rng(18)
    layer, X = make_layer(rng), rng.standard_normal((6, 5, 4))
    for shape in [(6, 5, 1), (6, 5), (5, 5, 2), (30, 2)]:
        with pytest.raises(ValueError, match="residual must have shape"):
            layer.gradient_product(X, np.zeros(shape))
    for m, d, d_out in [(2, 4, 2), (3, 5, 2), (3, 4, 1)]:
        with pytest.raises(ValueError, match="direction must have the shape of"):
            layer.derivative_product(X, make_layer(rng, m, d, d_out))
