"""Standard errors: their shapes, their scaling, and that they mean what they say."""

import numpy as np
import pytest

from sklearn_mhal import AttentionLayer, BooleanAttentionSampler, MultiHeadAttentionLearner
from sklearn_mhal._examples import make_examples
from sklearn_mhal._information import information, inverse_roots
from sklearn_mhal.metrics import match_heads
from sklearn_mhal.stages import estimate_uncertainty
from sklearn_mhal.stages import uncertainty as module

M, K, D = 2, 4, 6


def noisy(n=4000, noise=0.1, seed=0):
    sampler = BooleanAttentionSampler(M, K, D, attention_scale=2.0, random_state=seed)
    X, y = sampler.sample(n, as_tokens=True)
    std = noise * sampler.label_std_
    return X, y + std * np.random.default_rng(seed).standard_normal(y.shape), sampler.layer_, std


def fit(X, y, **settings):
    return MultiHeadAttentionLearner(M, random_state=0, **settings).fit(X, y)


@pytest.fixture(scope="module")
def fitted():
    X, y, layer, std = noisy()
    return fit(X, y), layer, std


def test_shapes(fitted):
    learner, _, _ = fitted
    for name in ("attention", "projection"):
        assert getattr(learner, f"{name}_std_errors_").shape == getattr(learner, f"{name}_matrices_").shape
    assert learner.key_bias_std_errors_.shape == (M, D) and learner.intercept_std_errors_.shape == (D,)
    assert np.all(learner.attention_std_errors_ > 0) and np.all(learner.intercept_std_errors_ > 0)


def test_noise_is_measured(fitted):
    learner, _, std = fitted
    # 96,000 labels give the deviation to 0.25 %.
    assert learner.noise_std_ == pytest.approx(std, rel=0.01)


def test_errors_are_as_large_as_they_are_said_to_be(fitted):
    learner, layer, _ = fitted
    order = match_heads(layer, learner.layer_)
    pairs = [
        (learner.attention_matrices_, layer.attention, learner.attention_std_errors_),
        (learner.projection_matrices_, layer.projection, learner.projection_std_errors_),
        (learner.key_bias_, layer.key_bias, learner.key_bias_std_errors_),
    ]
    scores = np.concatenate([((found[order] - true) / std[order]).ravel() for found, true, std in pairs])
    # 156 correlated scores of unit variance: their mean square is 1 within some 15 %.
    assert np.mean(scores**2) == pytest.approx(1.0, abs=0.45)
    # The case that must fail: half the standard errors would be four times off.
    assert np.mean((2 * scores) ** 2) > 1.45


def test_four_times_the_samples_halve_them(fitted):
    few, _, _ = fitted
    X, y, _, _ = noisy(n=16_000)
    many = fit(X, y)
    ratio = few.attention_std_errors_.mean() / many.attention_std_errors_.mean()
    assert ratio == pytest.approx(2.0, rel=0.1)


def test_weights_count_as_repetitions(fitted):
    learner, _, _ = fitted
    X, y, _, _ = noisy()
    twice = fit(X, y, alpha=0.0).fit(X, y, sample_weight=np.full(len(X), 2.0))
    np.testing.assert_allclose(
        twice.projection_std_errors_, learner.projection_std_errors_ / np.sqrt(2), rtol=0.01
    )


def test_without_noise_they_are_zero():
    sampler = BooleanAttentionSampler(M, K, D, random_state=0)
    learner = fit(*sampler.sample(400, as_tokens=True))
    assert learner.noise_std_ == pytest.approx(0.0, abs=1e-10)
    assert not learner.attention_std_errors_.any() and not learner.intercept_std_errors_.any()


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_a_free_direction_has_none():
    """A head that is asked for and stays zero determines no attention."""
    X, y, _, _ = noisy()
    learner = MultiHeadAttentionLearner(M + 2, random_state=0).fit(X, y)
    assert not learner.projection_matrices_[-1].any()
    assert learner.attention_std_errors_ is None and learner.projection_std_errors_ is None


class TestInformation:
    """The matrix against the derivative of the outputs, by differences in every parameter."""

    @pytest.fixture(params=["tokens", "first", "mean"])
    def small(self, request):
        layer = BooleanAttentionSampler(2, 3, 3, n_outputs=2, key_bias_scale=0.5, random_state=0).layer_
        rng = np.random.default_rng(0)
        X = rng.choice([-1.0, 1.0], (80, 3, 3))
        y = layer.predict(X)
        y = {"tokens": y, "first": y[:, :1], "mean": y.mean(axis=1, keepdims=True)}[request.param]
        examples = make_examples(
            X,
            y,
            readout=request.param,
            fit_intercept=True,
            sample_weight=rng.integers(1, 3, 80),
            random_state=0,
        )
        problem = examples.problem()
        attention = examples.units.attention_in(layer.attention, layer.key_bias)
        return problem, attention, problem.evaluate(attention).regression.projection

    def outputs(self, problem, attention, projection):
        rows = problem.rows
        pooled = rows.pooled(rows.patterns(attention))
        ones = np.ones(len(pooled)) if rows.row_scale is None else rows.row_scale
        return (np.concatenate([pooled, ones[:, None]], axis=1) @ projection).ravel()

    def matrix(self, problem, attention, projection):
        """J^T J of attention and projections, by central differences."""
        projection = np.concatenate([projection, np.zeros((1, projection.shape[1]))])
        parameters = [attention, projection]
        columns = []
        for which, matrix in enumerate(parameters):
            for at in np.ndindex(matrix.shape):
                ends = []
                for step in (1e-5, -1e-5):
                    moved = [part.copy() for part in parameters]
                    moved[which][at] += step
                    ends.append(self.outputs(problem, *moved))
                columns.append((ends[0] - ends[1]) / 2e-5)
        jacobian = np.stack(columns, axis=1)
        return jacobian.T @ jacobian

    def test_blocks(self, small):
        _, attention, projection = small
        found, expected = information(*small), self.matrix(*small)
        n, n_outputs = attention.size, projection.shape[1]
        # Differences of step 1e-5 are good to 1e-9 or so.
        close = {"rtol": 1e-6, "atol": 1e-6}
        np.testing.assert_allclose(found.attention, expected[:n, :n], **close)
        np.testing.assert_allclose(found.cross.reshape(n, -1), expected[:n, n:], **close)
        np.testing.assert_allclose(np.kron(found.gram, np.eye(n_outputs)), expected[n:, n:], **close)

    def test_roots_add_up_to_the_inverse(self, small):
        attention = small[1]
        expected = np.linalg.inv(self.matrix(*small)).diagonal()
        own, alone, carried = inverse_roots(information(*small))
        np.testing.assert_allclose((own**2).sum(axis=0), expected[: attention.size], rtol=1e-4)
        variances = (alone**2).sum(axis=0)[:, None] + (carried**2).sum(axis=0)
        np.testing.assert_allclose(variances.ravel(), expected[attention.size :], rtol=1e-4)

    def test_the_schur_complement_is_what_is_left_of_the_attention(self, small):
        attention = small[1]
        inverse = np.linalg.inv(self.matrix(*small))[: attention.size, : attention.size]
        schur = information(*small).schur()
        np.testing.assert_allclose(schur @ inverse, np.eye(attention.size), atol=1e-4)
        np.testing.assert_array_equal(schur, schur.T)


class TestAPartStandsForAll:
    def errors(self, examples, layer, multiple, monkeypatch):
        monkeypatch.setattr(module, "_PART", multiple)
        monkeypatch.setattr(module, "_LEAST_PART", 0)
        attention = examples.units.attention_in(layer.attention, layer.key_bias)
        found = estimate_uncertainty(examples, attention, residual=0.01, locally_identified=True)
        return found.n_samples, found.attention, found.projection

    def test_from_a_part_and_from_all(self, monkeypatch):
        layer = BooleanAttentionSampler(2, 4, 8, random_state=0).layer_
        X = np.random.default_rng(0).choice([-1.0, 1.0], (4000, 4, 8))
        examples = make_examples(X, layer.predict(X), fit_intercept=True, random_state=0)
        n_all, *every = self.errors(examples, layer, 10**6, monkeypatch)
        n_part, *part = self.errors(examples, layer, 64, monkeypatch)
        assert n_all == 4000 and n_part == 64 * examples.information_limit(2) < 600
        for one, other in zip(part, every, strict=True):
            # Measured within 1 %; the scatter of single entries, 3 %, averages out.
            assert np.mean(one / other) == pytest.approx(1.0, abs=0.02)

    def test_units_of_the_data(self, monkeypatch):
        """Tokens that are not white: the errors of the same layer in other coordinates."""
        layer = BooleanAttentionSampler(2, 3, 4, key_bias_scale=0.5, random_state=0).layer_
        rng = np.random.default_rng(0)
        X = rng.choice([-1.0, 1.0], (500, 3, 4))
        scale, shift = np.array([0.5, 1.0, 2.0, 4.0]), np.array([0.0, 3.0, -1.0, 0.5])
        # The same map on tokens x' = scale x + shift.
        attention = layer.attention / np.outer(scale, scale)
        moved = AttentionLayer(
            attention,
            layer.projection / scale[:, None],
            key_bias=layer.key_bias / scale - np.einsum("mij,i->mj", attention, shift),
        )
        found = []
        for tokens, truth in ((X, layer), (X * scale + shift, moved)):
            examples = make_examples(tokens, layer.predict(X), fit_intercept=True, random_state=0)
            found.append(self.errors(examples, truth, 10**6, monkeypatch)[1:])
        (theta, heads), (theta_moved, heads_moved) = found
        np.testing.assert_allclose(theta_moved * np.outer(scale, scale), theta, rtol=1e-8)
        np.testing.assert_allclose(heads_moved * scale[:, None], heads, rtol=1e-8)


@pytest.mark.parametrize("distribution", ["boolean", "zero_one"])
def test_as_many_features_as_32(distribution):
    layer = BooleanAttentionSampler(1, 3, 32, n_outputs=4, random_state=0).layer_
    sampler = BooleanAttentionSampler(
        n_tokens=3, layer=layer, token_distribution=distribution, random_state=0
    )
    X, y = sampler.sample(1500, as_tokens=True)
    examples = make_examples(X, y, fit_intercept=True, random_state=0)
    attention = examples.units.attention_in(layer.attention, layer.key_bias)
    found = estimate_uncertainty(examples, attention, residual=0.01, locally_identified=True)
    assert found.attention.shape == (1, 32, 32) and np.all(found.attention > 0)
    assert np.isfinite(found.attention).all() and np.isfinite(found.projection).all()
