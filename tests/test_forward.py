import numpy as np
import pytest
from sklearn import config_context

from sklearn_mhal._forward import (
    TokenRows,
    softmax_inplace,
    stack_attention,
    token_chunks,
    unstack_attention,
)

READOUTS = ["tokens", "first", "mean"]
# Agreement "up to rounding": sums of fewer than 100 terms of order 1 to 10.
ROUNDING = {"rtol": 1e-12, "atol": 1e-12}

N, K, D, D_OUT, M = 7, 5, 4, 3, 2


def naive_rows(tokens, attention, projection, key_bias=None):
    """One output row per token, (n, k, d_out), by loops; `attention` is (m, d, d)."""
    rows = np.zeros((*tokens.shape[:2], projection.shape[2]))
    for s, sample in enumerate(tokens):
        for a, query in enumerate(sample):
            for i in range(len(attention)):
                scores = sample @ (attention[i].T @ query + (0 if key_bias is None else key_bias[i]))
                weights = np.exp(scores - scores.max())
                rows[s, a] += (weights / weights.sum()) @ sample @ projection[i]
    return rows


def read(rows, readout, root_weights):
    """Reduce and weight explicit rows (n, k, d_out), to one equation a line."""
    rows = {"tokens": rows, "first": rows[:, :1], "mean": rows.mean(axis=1, keepdims=True)}[readout]
    if root_weights is not None:
        rows = rows * root_weights[:, None, None]
    return rows.reshape(-1, rows.shape[2])


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@pytest.fixture
def parameters(rng):
    """Tokens, attention, projection, key bias, and a direction of the stacked attention."""
    return (
        rng.standard_normal((N, K, D)),
        rng.standard_normal((M, D, D)),
        rng.standard_normal((M, D, D_OUT)),
        rng.standard_normal((M, D)),
        rng.standard_normal((D + 1, M * D)),
    )


@pytest.fixture(params=[False, True], ids=["plain", "affine"])
def affine(request):
    return request.param


@pytest.fixture(params=[False, True], ids=["unweighted", "weighted"])
def root_weights(request):
    if not request.param:
        return None
    return np.sqrt([0.0, 1.0, 2.0, 0.5, 3.0, 1.0, 0.25])


def laid_out(parameters, affine, readout, root_weights):
    tokens, attention, projection, key_bias, direction = parameters
    rows = TokenRows(tokens, affine=affine, readout=readout, root_weights=root_weights)
    stacked = stack_attention(attention, key_bias if affine else None)
    return rows, stacked, projection.reshape(-1, D_OUT), direction[: len(stacked)]


def explicit(parameters, affine, step=0.0):
    """Rows of the layer moved by `step` along the direction."""
    tokens, attention, projection, key_bias, direction = parameters
    change, bias_change = unstack_attention(direction, D)
    bias = key_bias + step * bias_change if affine else None
    return naive_rows(tokens, attention + step * change, projection, bias)


def test_stacking_and_back(rng):
    attention, key_bias = rng.standard_normal((3, 4, 4)), rng.standard_normal((3, 4))
    for bias in (None, key_bias):
        stacked = stack_attention(attention, bias)
        assert stacked.shape == ((4 if bias is None else 5), 12) and stacked.flags.c_contiguous
        back, back_bias = unstack_attention(stacked, 4)
        np.testing.assert_array_equal(back, attention)
        np.testing.assert_array_equal(back_bias, np.zeros((3, 4)) if bias is None else bias)
    np.testing.assert_array_equal(stacked[:4, 4:8], attention[1])
    np.testing.assert_array_equal(stacked[4, 8:], key_bias[2])


def test_softmax(rng):
    logits = rng.standard_normal((6, 3, 4))
    expected = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    result = softmax_inplace(logits)
    assert result is logits
    np.testing.assert_allclose(result, expected, rtol=1e-14)


def test_softmax_of_huge_and_tied_logits():
    with np.errstate(over="raise", invalid="raise", divide="raise"):
        result = softmax_inplace(np.array([[1e4, -1e4, 1e4], [-1e4, -1e4 - 1, -2e4], [1e300, 0, -1e300]]))
    tail = 1 / (1 + np.e)
    expected = [[0.5, 0, 0.5], [1 - tail, tail, 0], [1, 0, 0]]
    np.testing.assert_allclose(result, expected, rtol=1e-12)


@pytest.mark.parametrize("readout", READOUTS)
def test_outputs(parameters, affine, readout, root_weights):
    rows, stacked, weights, _ = laid_out(parameters, affine, readout, root_weights)
    outputs = rows.pooled(rows.patterns(stacked)) @ weights
    assert outputs.shape == (rows.n_rows, D_OUT)
    np.testing.assert_allclose(outputs, read(explicit(parameters, affine), readout, root_weights), **ROUNDING)


@pytest.mark.parametrize("readout", READOUTS)
def test_patterns_and_values_give_the_outputs_too(parameters, affine, readout, root_weights):
    rows, stacked, weights, _ = laid_out(parameters, affine, readout, root_weights)
    patterns = rows.patterns(stacked)
    assert patterns.shape == (N, rows.n_queries * M, K)
    values = rows.values(weights)
    assert values.shape == (N, M * K, D_OUT)
    outputs = patterns.reshape(N, rows.n_queries, M * K) @ values
    if readout == "mean":
        outputs = outputs.sum(axis=1)
    np.testing.assert_allclose(outputs.reshape(-1, D_OUT), rows.pooled(patterns) @ weights, **ROUNDING)


@pytest.mark.parametrize("readout", READOUTS)
def test_forward_product_is_a_central_difference(parameters, affine, readout, root_weights):
    rows, stacked, weights, direction = laid_out(parameters, affine, readout, root_weights)
    product = rows.forward_product(direction, rows.patterns(stacked), rows.values(weights))
    step = 1e-5
    difference = explicit(parameters, affine, step) - explicit(parameters, affine, -step)
    expected = read(difference / (2 * step), readout, root_weights)
    # Truncation is step^2 times a third derivative of up to about 1e3; rounding 1e-15 / step.
    np.testing.assert_allclose(product, expected, rtol=1e-6, atol=1e-7)
    assert np.abs(product).max() > 0.1


@pytest.mark.parametrize("readout", READOUTS)
def test_products_reduce_those_of_all_tokens(parameters, affine, readout, root_weights):
    every, stacked, weights, direction = laid_out(parameters, affine, "tokens", None)
    full = every.forward_product(direction, every.patterns(stacked), every.values(weights))
    expected = read(full.reshape(N, K, D_OUT), readout, root_weights)
    rows, *_ = laid_out(parameters, affine, readout, root_weights)
    product = rows.forward_product(direction, rows.patterns(stacked), rows.values(weights))
    np.testing.assert_allclose(product, expected, **ROUNDING)


@pytest.mark.parametrize("readout", READOUTS)
def test_backward_product_is_the_adjoint(rng, parameters, affine, readout, root_weights):
    rows, stacked, weights, _ = laid_out(parameters, affine, readout, root_weights)
    patterns, values = rows.patterns(stacked), rows.values(weights)
    residual = rng.standard_normal((rows.n_rows, D_OUT))
    kept = residual.copy()
    gradient = rows.backward_product(residual, patterns, values)
    assert gradient.shape == stacked.shape
    for _ in range(3):
        direction = rng.standard_normal(stacked.shape)
        forwards = np.sum(residual * rows.forward_product(direction, patterns, values))
        # Both are sums of about 1e3 terms of order 10.
        assert np.sum(gradient * direction) == pytest.approx(forwards, rel=1e-11, abs=1e-11)
    np.testing.assert_array_equal(residual, kept)


def test_zero_weight_removes_a_sample(rng, parameters):
    tokens, attention, projection, *_ = parameters
    stacked, weights = stack_attention(attention), projection.reshape(-1, D_OUT)
    without = TokenRows(tokens[1:])
    rows = TokenRows(tokens, root_weights=np.array([0.0] + [1.0] * (N - 1)))
    residual = rng.standard_normal((N * K, D_OUT))
    gradient = rows.backward_product(residual, rows.patterns(stacked), rows.values(weights))
    expected = without.backward_product(residual[K:], without.patterns(stacked), without.values(weights))
    np.testing.assert_allclose(gradient, expected, **ROUNDING)


def test_products_leave_patterns_and_values_alone(rng, parameters):
    rows, stacked, weights, direction = laid_out(parameters, True, "mean", None)
    patterns, values = rows.patterns(stacked), rows.values(weights)
    kept_patterns, kept_values = patterns.copy(), values.copy()
    rows.pooled(patterns)
    rows.forward_product(direction, patterns, values)
    rows.backward_product(rng.standard_normal((rows.n_rows, D_OUT)), patterns, values)
    np.testing.assert_array_equal(patterns, kept_patterns)
    np.testing.assert_array_equal(values, kept_values)


def test_one_token_attends_to_itself(rng):
    rows = TokenRows(rng.standard_normal((N, 1, D)))
    stacked = rng.standard_normal((D, M * D))
    patterns = rows.patterns(stacked)
    np.testing.assert_array_equal(patterns, np.ones((N, M, 1)))
    direction = rng.standard_normal(stacked.shape)
    values = rows.values(rng.standard_normal((M * D, D_OUT)))
    np.testing.assert_array_equal(rows.forward_product(direction, patterns, values), 0)


@pytest.mark.parametrize("readout", READOUTS)
def test_single_precision(parameters, readout):
    rows, stacked, weights, direction = laid_out(parameters, True, readout, None)
    single = TokenRows(parameters[0], affine=True, readout=readout, dtype=np.float32)
    stacked32, weights32 = stacked.astype(np.float32), weights.astype(np.float32)
    patterns = single.patterns(stacked32)
    values = single.values(weights32)
    product = single.forward_product(direction.astype(np.float32), patterns, values)
    gradient = single.backward_product(product, patterns, values)
    assert {a.dtype for a in (patterns, values, product, gradient)} == {np.dtype(np.float32)}
    expected = rows.forward_product(direction, rows.patterns(stacked), rows.values(weights))
    # Scores of size 30 are rounded at 2e-6 in single precision, and derivatives reach 10.
    np.testing.assert_allclose(product, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("mebibytes", [1e-6, 0.01, 0.05, 1024])
def test_chunks_cover_the_samples_in_order(mebibytes):
    tokens = np.empty((101, 6, 8), dtype=np.int8)
    with config_context(working_memory=mebibytes):
        chunks = list(token_chunks(tokens, n_heads=4, n_outputs=8))
    np.testing.assert_array_equal(np.concatenate([np.arange(101)[chunk] for chunk in chunks]), np.arange(101))
    sizes = [chunk.stop - chunk.start for chunk in chunks]
    assert min(sizes) >= 1
    if mebibytes == 1e-6:
        assert sizes == [1] * 101
    else:
        # A sample's patterns alone take 8 * 4 * 6 * 6 bytes.
        assert max(sizes) * 8 * 4 * 36 <= mebibytes * 2**20
    assert (len(chunks) == 1) == (mebibytes == 1024)


def test_no_samples_no_chunks():
    assert list(token_chunks(np.empty((0, 6, 8)), n_heads=4, n_outputs=8)) == []
