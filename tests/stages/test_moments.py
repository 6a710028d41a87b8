"""The interaction moments against an operator that is formed by loops."""

import numpy as np
import pytest
from bank import draw_examples, head_vectors
from sklearn import config_context

from sklearn_mhal._examples import make_examples
from sklearn_mhal.stages import _moments
from sklearn_mhal.stages._moments import moment_span

N, K, D, D_OUT = 40, 4, 3, 2


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def read(labels, readout):
    return {"tokens": labels, "first": labels[:, :1], "mean": labels.mean(axis=1, keepdims=True)}[readout]


def draw(rng, readout="tokens", weighted=False, affine=False):
    tokens = rng.standard_normal((N, K, D))
    labels = read(rng.standard_normal((N, K, D_OUT)), readout)
    weights = rng.uniform(0.5, 2.0, N) if weighted else None
    return make_examples(
        tokens, labels, readout=readout, fit_intercept=affine, sample_weight=weights, random_state=0
    )


def explicit_operator(examples):
    """The operator of the module's formula, formed, as a (d d) x (d d_out) matrix, up to a factor."""
    tokens, labels = examples.white_tokens(), examples.white_labels()
    weights = np.ones(len(tokens)) if examples.weights is None else examples.weights
    averaged = examples.readout == "mean"
    n_rows = K if averaged else labels.shape[1]
    design, targets, root = [], [], []
    for s in range(len(tokens)):
        for a in range(labels.shape[1]):
            query = tokens[s].mean(axis=0) if averaged else tokens[s, a]
            design.append(np.concatenate([query, tokens[s].sum(axis=0), [1.0]]))
            targets.append(labels[s, a])
            root.append(np.sqrt(weights[s]))
    design, targets, root = np.array(design), np.array(targets), np.array(root)[:, None]
    linear = np.linalg.lstsq(root * design, root * targets, rcond=None)[0]
    residual = (targets - design @ linear).reshape(labels.shape)
    operator = np.zeros((D, D, D, D_OUT))
    for s in range(len(tokens)):
        for a in range(n_rows):
            y = residual[s, 0] if averaged else residual[s, a]
            for b in range(K):
                for other in range(K):
                    if a not in (b, other) and b != other:
                        x = tokens[s]
                        operator += weights[s] * np.einsum("p,r,s,c->prsc", x[a], x[other], x[b], y)
    return operator.reshape(D * D, D * D_OUT)


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("readout", ["tokens", "first", "mean"])
def test_singular_values_and_span(rng, readout, weighted, affine):
    examples = draw(rng, readout, weighted, affine)
    operator = explicit_operator(examples)
    # With all six columns the randomised decomposition is exact.
    found = moment_span(examples, n_directions=6, generator=np.random.default_rng(1))
    left, values, _ = np.linalg.svd(operator)
    # Sums of some thousand terms in single precision.
    np.testing.assert_allclose(found.singular_values, values[:6], atol=1e-5 * values[0])
    basis = found.basis.reshape(6, -1)
    np.testing.assert_allclose(basis @ basis.T, np.eye(6), atol=1e-8)
    for r in (1, 3):
        expected = left[:, :r] @ left[:, :r].T
        # Over the gap between the values, a few tenths of the largest.
        np.testing.assert_allclose(basis[:r].T @ basis[:r], expected, atol=1e-4)


@pytest.mark.parametrize("readout", ["tokens", "first", "mean"])
def test_products_are_those_of_the_operator(rng, readout):
    examples = draw(rng, readout, weighted=True)
    operator = explicit_operator(examples)
    linear = _moments._linear_part(examples, readout == "mean")
    (block,) = _moments._blocks(examples, linear, 4)
    right, left = rng.standard_normal((D, D_OUT, 4)), rng.standard_normal((D, D, 4))
    product = _moments._right_product(block, right).reshape(D * D, 4)
    expected = operator @ right.reshape(-1, 4)
    # The block's tokens and residuals are in single precision.
    np.testing.assert_allclose(product, expected, atol=1e-6 * np.abs(expected).max())
    product = _moments._left_product(block, left).reshape(D * D_OUT, 4)
    expected = operator.T @ left.reshape(-1, 4)
    np.testing.assert_allclose(product, expected, atol=1e-6 * np.abs(expected).max())


def test_linear_labels_leave_nothing(rng):
    tokens = rng.standard_normal((N, K, D))
    labels = tokens @ rng.standard_normal((D, D_OUT)) + tokens.sum(axis=1, keepdims=True)[..., :D_OUT] + 3.0
    examples = make_examples(tokens, labels)
    found = moment_span(examples, n_directions=2, generator=rng)
    assert found.singular_values.max() < 1e-8


@pytest.mark.parametrize("mebibytes", [0.01, 1024])
def test_chunks_do_not_matter(rng, mebibytes, monkeypatch):
    examples = draw(rng, weighted=True)
    whole = moment_span(examples, n_directions=3, generator=np.random.default_rng(1))
    if mebibytes < 1:
        monkeypatch.setattr(_moments, "_KEPT_BYTES", 0)
    with config_context(working_memory=mebibytes):
        parts = moment_span(examples, n_directions=3, generator=np.random.default_rng(1))
    # Added in another order, in single precision.
    np.testing.assert_allclose(parts.singular_values, whole.singular_values, rtol=1e-5)
    # Singular vectors that differ by a sign are the same.
    cosines = np.einsum("rpq,rpq->r", parts.basis, whole.basis)
    np.testing.assert_allclose(np.abs(cosines), 1.0, atol=1e-7)


def span_cosine(m, k, d, s, n, seed, **sampler):
    """Cosine of the true head that is furthest from the span of m directions, and the values."""
    examples, layer = draw_examples(m, k, d, s, n, seed, **sampler)
    found = moment_span(examples, n_directions=m, generator=np.random.default_rng(seed))
    heads = head_vectors(examples, layer)
    seen = heads @ found.basis.reshape(m, -1).T
    return (np.linalg.norm(seen, axis=1) / np.linalg.norm(heads, axis=1)).min(), found.singular_values


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("teacher", [(2, 4, 12, 2.0), (4, 4, 16, 2.0), (4, 4, 16, 8.0)], ids=str)
def test_span_of_incoherent_heads(teacher, seed):
    cosine, values = span_cosine(*teacher, 10_000, seed)
    # Measured 0.85 to 0.96; chance directions give the root of m over d squared, 0.13.
    assert cosine > 0.8
    drops = values[:-1] / values[1:]
    assert np.argmax(drops) == teacher[0] - 1 and drops.max() > 1.3


def test_span_of_low_rank_heads_misleads():
    """The case that must fail: what is seen is symmetric in two of the token's roles."""
    assert span_cosine(4, 4, 12, 2.0, 10_000, 0, structure="low_rank")[0] < 0.8


def test_shape_of_few_directions(rng):
    found = moment_span(draw(rng), n_directions=50, generator=rng)
    # No more directions than the smaller side of the operator has.
    assert found.basis.shape == (D * D_OUT, D, D) and found.singular_values.shape == (D * D_OUT,)
