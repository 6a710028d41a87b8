"""Noise, misspecification, real-valued tokens: what the penalty means, what heads too few or many do."""

from __future__ import annotations

import itertools
import warnings
from functools import cache

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LinearRegression, Ridge
from sklearn.model_selection import GridSearchCV

from sklearn_mhal import AttentionLayer, BooleanAttentionSampler, MultiHeadAttentionLearner
from sklearn_mhal._examples import make_examples
from sklearn_mhal._solver import solve

# Of fits to noise the warning that ten digits were not reached says nothing here.
pytestmark = pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")


def read(y, readout):
    return {"tokens": y, "first": y[:, 0], "mean": y.mean(axis=1)}[readout]


def noisy(
    m, k, d, d_out, *, scale=2.0, noise, readout="tokens", tokens="gaussian", n=500, n_test=2000, seed=0
):
    """Return training and test samples of a layer with label noise, relative to the labels' spread."""
    sampler = BooleanAttentionSampler(
        m, k, d, n_outputs=d_out, attention_scale=scale, token_distribution=tokens, random_state=seed
    )
    X, y = sampler.sample(n + n_test, as_tokens=True)
    y = read(y, readout)
    y = y + noise * y.std() * np.random.default_rng(seed).standard_normal(y.shape)
    return (X[:n], y[:n]), (X[n:], y[n:])


def relative_error(learner, X, y):
    """Return the mean squared error and its standard error over samples, relative to the labels' variance."""
    squares = ((learner.predict(X) - y) ** 2).reshape(len(y), -1).mean(axis=1)
    power = np.mean((y - y.mean(axis=0)) ** 2)
    return squares.mean() / power, squares.std() / np.sqrt(len(y)) / power


def white(rng, n, k, d):
    """Tokens of zero mean and unit covariance in this very sample: the learner's own units are the data's."""
    X = rng.standard_normal((n * k, d))
    X -= X.mean(axis=0)
    return (X @ np.linalg.inv(np.linalg.cholesky(X.T @ X / len(X)).T)).reshape(n, k, d)


class TestAlpha:
    @pytest.fixture
    def standardised(self):
        rng = np.random.default_rng(0)
        X = white(rng, 200, 3, 4)
        layer = AttentionLayer(rng.standard_normal((2, 4, 4)) / 2, rng.standard_normal((2, 4, 3)))
        y = layer.predict(X) + 0.3 * rng.standard_normal((200, 3, 3))
        y -= y.mean(axis=(0, 1))
        return X, y / np.sqrt(np.mean(y**2))

    @pytest.mark.parametrize("readout", ["tokens", "first"])
    @pytest.mark.parametrize("alpha", [1e-3, 1e-1])
    def test_is_what_the_documentation_says(self, standardised, alpha, readout):
        """The fit is stationary for the mean squared residual of a row plus alpha times the squares."""
        X, y = standardised
        y = read(y, readout)
        y = y - y.mean(axis=tuple(range(y.ndim - 1)))
        y = y / np.sqrt(np.mean(y**2))
        model = MultiHeadAttentionLearner(2, readout=readout, alpha=alpha, max_iter=500, random_state=0)
        layer = model.fit(X, y).layer_
        residual = layer.predict(X)
        if readout == "tokens":
            residual -= y
        else:
            residual[:, 0] -= y
            residual[:, 1:] = 0.0
        n_rows = len(X) * (3 if readout == "tokens" else 1)
        gradient = layer.gradient_product(X, residual)
        for name in ("attention", "projection", "key_bias"):
            pull, penalty = getattr(gradient, name) / n_rows, alpha * getattr(layer, name)
            # Where the solver stops, a hundredth of what is left to go is nothing to the data.
            assert np.abs(pull + penalty).max() < 1e-3 * np.abs(penalty).max(), name
        np.testing.assert_allclose(gradient.intercept / n_rows, 0.0, atol=1e-10)

    def test_is_ridge_regression_for_a_single_token(self):
        rng = np.random.default_rng(0)
        X = white(rng, 60, 1, 5)
        y = X[:, 0] @ rng.standard_normal((5, 2)) + rng.standard_normal((60, 2))
        for alpha in (1e-3, 0.1, 10.0):
            ridge = Ridge(alpha=alpha * len(X)).fit(X[:, 0], y)
            model = MultiHeadAttentionLearner(alpha=alpha, random_state=0).fit(X[:, 0], y)
            np.testing.assert_allclose(model.predict(X[:, 0]), ridge.predict(X[:, 0]), atol=1e-10)

    @pytest.mark.parametrize("X_scale, y_scale", [(1e-4, 1e5), (1e3, 1e-6)])
    def test_has_no_unit(self, X_scale, y_scale):
        """Columns and labels in other units: the same fit."""
        (X, y), _ = noisy(2, 3, 4, 3, noise=0.3, n=300)
        model = MultiHeadAttentionLearner(2, alpha=0.01, random_state=0)
        # White tokens are taken as they are, so the units to compare with are not white either.
        expected = clone(model).fit(100.0 * X, y).predict(100.0 * X)
        found = clone(model).fit(X_scale * X, y_scale * y).predict(X_scale * X) / y_scale
        # Whether a slow last step is still taken is a matter of rounding.
        np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max())

    def test_more_shrinks_more(self):
        (X, y), _ = noisy(2, 3, 5, 2, noise=0.5, n=300)
        sizes, errors = [], []
        for alpha in (0.0, 1e-3, 1e-2, 0.1, 1.0, 1e3):
            model = MultiHeadAttentionLearner(2, alpha=alpha, random_state=0).fit(X, y)
            layer = model.layer_
            sizes.append(sum(np.sum(part**2) for part in (layer.attention, layer.projection, layer.key_bias)))
            errors.append(1 - model.score(X, y))
        assert np.all(np.diff(sizes) < 0) and np.all(np.diff(errors) > -1e-9)
        # In the end only the intercept, which is free, is left.
        np.testing.assert_allclose(model.predict(X), np.broadcast_to(y.mean(axis=(0, 1)), y.shape), atol=1e-2)

    def test_the_bayesian_choice_is_a_good_one(self):
        """Entries of variance v, noise of variance s: no multiple of s / v / n_rows does much better."""
        d, n = 6, 400
        sampler = BooleanAttentionSampler(
            2, 3, d, n_outputs=1, attention_scale=2.0, token_distribution="gaussian", random_state=0
        )
        X, y = sampler.sample(n + 2000, as_tokens=True)
        y = y[:, 0]
        y = y + 0.3 * y.std() * np.random.default_rng(0).standard_normal(y.shape)
        variance = np.mean(sampler.layer_.projection**2) / y.var()
        choice = 0.3**2 / 1.09 / variance / n
        errors = {}
        for factor in (0.0, 0.01, 0.1, 1.0, 10.0, 100.0):
            model = MultiHeadAttentionLearner(2, readout="first", alpha=factor * choice, random_state=0)
            errors[factor] = relative_error(model.fit(X[:n], y[:n]), X[n:], y[n:])
        best, standard_error = min(errors.values())
        assert errors[1.0][0] <= best + standard_error
        assert errors[1.0][0] < errors[0.0][0] and errors[1.0][0] < errors[100.0][0]

    def test_keeps_scores_finite_where_the_best_attention_is_infinite(self):
        """Labels that always choose the token with the larger first entry."""
        X = np.random.default_rng(0).standard_normal((300, 4, 3))
        y = X[np.arange(300), X[:, :, 0].argmax(axis=1)]
        learner = MultiHeadAttentionLearner(1, readout="mean", alpha=1e-4, random_state=0)
        with warnings.catch_warnings():
            warnings.simplefilter("error", ConvergenceWarning)
            learner.fit(X, y)
        assert np.linalg.norm(learner.key_bias_) < 50
        assert learner.score(X, y) > 0.98
        assert learner.attention_weights(X).max(axis=3).mean() > 0.8

    def test_rescues_a_fit_with_fewer_equations_than_unknowns(self):
        train, test = noisy(1, 3, 8, 1, noise=0.1, readout="first", n=60)
        errors = []
        for alpha in (0.0, 1e-3):
            learner = MultiHeadAttentionLearner(1, readout="first", alpha=alpha, random_state=0).fit(*train)
            errors.append(relative_error(learner, *test)[0])
        assert errors[1] < 0.85 * errors[0]


NOISY = [
    dict(m=3, k=4, d=6, d_out=6, noise=0.3, n=400),
    dict(m=3, k=4, d=6, d_out=6, noise=0.3, n=400, tokens="boolean"),
    dict(m=3, k=4, d=6, d_out=4, noise=0.3, n=800, readout="mean"),
    dict(m=2, k=3, d=6, d_out=3, noise=0.5, n=1000, readout="first", tokens="boolean"),
]


def identify(case):
    return f"{case['m']}-{case.get('readout', 'tokens')}-{case.get('tokens', 'gaussian')}"


@cache
def fit_counts(index):
    """Return fits of one case with every number of heads up to two too many, and its samples."""
    case = NOISY[index]
    train, test = noisy(**case)
    model = MultiHeadAttentionLearner(readout=case.get("readout", "tokens"), random_state=0)
    counts = range(1, case["m"] + 3)
    return {m: clone(model).set_params(n_heads=m).fit(*train) for m in counts}, train, test


@pytest.mark.parametrize("case", NOISY, ids=identify)
class TestNumberOfHeads:
    @pytest.fixture
    def fits(self, case):
        return fit_counts(NOISY.index(case))

    def test_held_out_error_falls_as_heads_are_added(self, fits, case):
        learners, _, test = fits
        held_out = [relative_error(learners[m], *test) for m in range(1, case["m"] + 1)]
        for (fewer, _), (more, standard_error) in itertools.pairwise(held_out):
            assert more < fewer - 3 * standard_error
        # With the true number the noise is all that is left, up to what its fit costs.
        floor = case["noise"] ** 2 / (1 + case["noise"] ** 2)
        assert held_out[-1][0] < 1.25 * floor

    def test_training_error_never_rises(self, fits, case):
        learners, train, _ = fits
        errors = [relative_error(learner, *train)[0] for learner in learners.values()]
        # The search is not exhaustive: a tenth of a percent is not a worse minimum.
        assert all(more <= 1.001 * fewer for fewer, more in itertools.pairwise(errors))

    def test_room_for_more_changes_nothing(self, fits, case):
        """Counted heads beyond the truth never cost more than a standard error: there are none."""
        learners, train, test = fits
        right, standard_error = relative_error(learners[case["m"]], *test)
        model = MultiHeadAttentionLearner(readout=case.get("readout", "tokens"), random_state=0)
        for most in (case["m"], case["m"] + 3):
            counted = clone(model).set_params(max_heads=most).fit(*train)
            assert counted.n_heads_ == case["m"]
            assert relative_error(counted, *test)[0] <= right + standard_error


@pytest.mark.parametrize(
    "case",
    [
        dict(m=1, k=3, d=6, d_out=2, noise=0.3, n=100),
        dict(m=2, k=3, d=6, d_out=3, noise=0.3, n=150, tokens="boolean"),
        dict(m=2, k=3, d=6, d_out=3, noise=1.0, n=300, tokens="boolean"),
        dict(m=2, k=3, d=6, d_out=3, noise=0.3, n=300, readout="first", tokens="boolean"),
        dict(m=2, k=4, d=6, d_out=2, noise=0.3, n=600, readout="mean", tokens="boolean"),
    ],
)
@pytest.mark.parametrize("alpha", [0.0, 1e-3])
@pytest.mark.parametrize("seed", [0, 1])
def test_given_heads_beyond_the_truth_never_hurt(case, alpha, seed):
    """By hand and on few samples, where each superfluous head would cost 5 % to 50 %."""
    train, test = noisy(**case, seed=seed)
    model = MultiHeadAttentionLearner(readout=case.get("readout", "tokens"), alpha=alpha, random_state=0)
    errors = []
    for n_heads in (case["m"], case["m"] + 3):
        fitted = clone(model).set_params(n_heads=n_heads).fit(*train)
        assert fitted.n_heads_ == n_heads
        errors.append(relative_error(fitted, *test))
    right, standard_error = errors[0]
    assert errors[1][0] <= right + standard_error


def test_a_weak_head_that_data_can_see_is_kept():
    """Heads of sizes 1, 1/3 and 1/9: given three, three are fitted from where the third one helps."""
    sampler = BooleanAttentionSampler(3, 4, 6, structure="multiscale", random_state=1)
    X, y = sampler.sample(4400, as_tokens=True)
    y = y + 0.3 * y.std() * np.random.default_rng(1).standard_normal(y.shape)
    errors = []
    for n_heads in (2, 3):
        fitted = MultiHeadAttentionLearner(n_heads, random_state=0).fit(X[:400], y[:400])
        assert fitted.stages_["heads"].n_idle == 0
        errors.append(relative_error(fitted, X[400:], y[400:]))
    assert errors[1][0] < errors[0][0] - 3 * errors[1][1]


@pytest.mark.parametrize("n_heads", [1, 2])
def test_too_few_heads_are_the_best_fit_with_that_many(n_heads):
    """None of thirty other starts, all samples from the first step on, ends lower."""
    (X, y), _ = noisy(3, 3, 4, 4, noise=0.2, n=300)
    learner = MultiHeadAttentionLearner(n_heads, random_state=0).fit(X, y)
    examples = make_examples(X, y, fit_intercept=True, random_state=0)
    problem, generator = examples.problem(), np.random.default_rng(1)
    shape = (examples.query_width, n_heads * 4)
    others = [solve(problem, generator.standard_normal(shape) * 0.3, tol=1e-6).error for _ in range(30)]
    # What stopping at steps of 1e-6 leaves.
    assert learner.stages_["polish"].error <= min(others) * (1 + 1e-6)


class TestMisspecification:
    """Labels that no attention layer makes."""

    def labels(self, kind, X, rng):
        if kind == "maximum":
            return (X @ rng.standard_normal((X.shape[2], 2))).max(axis=1)
        if kind == "of the mean token":
            weights = rng.standard_normal((X.shape[2], 8)), rng.standard_normal((8, 2))
            return np.tanh(X.mean(axis=1) @ weights[0] * 2) @ weights[1]
        if kind == "two layers":
            first = AttentionLayer(rng.standard_normal((2, 4, 4)), rng.standard_normal((2, 4, 4)))
            second = AttentionLayer(rng.standard_normal((2, 4, 4)), rng.standard_normal((2, 4, 2)))
            return second.predict(np.tanh(first.predict(X)) + X)[:, 0]
        raise AssertionError(kind)

    def scores(self, kind, readout):
        """Return the R^2 on other samples of linear regression on all columns and of 1, 2 and 4 heads."""
        rng = np.random.default_rng(0)
        X = rng.standard_normal((3000, 3, 4))
        y, n = self.labels(kind, X, rng), 1000
        linear = LinearRegression().fit(X[:n].reshape(n, -1), y[:n])
        scores = []
        for n_heads in (1, 2, 4):
            learner = MultiHeadAttentionLearner(n_heads, readout=readout, alpha=1e-4, random_state=0)
            scores.append(learner.fit(X[:n], y[:n]).score(X[n:], y[n:]))
        assert not learner.certificate_.identified
        return linear.score(X[n:].reshape(len(X) - n, -1), y[n:]), scores

    @pytest.mark.parametrize("kind, readout", [("maximum", "mean"), ("two layers", "first")])
    def test_better_than_linear_and_better_with_more_heads(self, kind, readout):
        linear, scores = self.scores(kind, readout)
        assert scores[0] < scores[1] < scores[2] and linear + 0.01 < scores[2]

    def test_where_attention_is_of_no_use_it_is_linear_regression(self):
        linear, scores = self.scores("of the mean token", "mean")
        assert min(scores) > linear - 0.03

    def test_a_grid_search_finds_a_penalty_that_helps(self):
        rng = np.random.default_rng(0)
        X = rng.standard_normal((1200, 3, 4))
        y = self.labels("two layers", X, rng) + rng.standard_normal((1200, 2))
        n = 200
        model = MultiHeadAttentionLearner(2, readout="first", heads_starts=4, random_state=0)
        search = GridSearchCV(model, {"alpha": [0.0, 1e-3, 1e-2, 1e-1]}, cv=3, error_score="raise")
        search.fit(X[:n], y[:n])
        assert search.best_params_["alpha"] > 0
        assert search.score(X[n:], y[n:]) > clone(model).fit(X[:n], y[:n]).score(X[n:], y[n:])


class TestRealValuedTokens:
    """Columns as they come: other means, scales, tails and correlations. No noise, so all digits."""

    def tokens(self, kind, rng, shape):
        X = rng.standard_normal(shape)
        if kind == "means and scales":
            return 50.0 + X * np.array([1e-3, 1.0, 20.0, 300.0])
        if kind == "heavy tails":
            return rng.standard_t(3, size=shape)
        if kind == "skewed":
            return rng.lognormal(size=shape)
        if kind == "correlated":
            return X @ (np.eye(4) + 0.9 * np.ones((4, 4)))
        return np.concatenate([X[:, :, :2], rng.integers(0, 5, size=(*shape[:2], 2))], axis=2)

    @pytest.mark.parametrize(
        "kind", ["means and scales", "heavy tails", "skewed", "correlated", "numbers and counts"]
    )
    def test_predictions_to_all_digits(self, kind):
        rng = np.random.default_rng(0)
        X = self.tokens(kind, rng, (900, 3, 4))
        spread = X.std(axis=(0, 1))
        layer = AttentionLayer(
            rng.standard_normal((2, 4, 4)) / 3 / np.outer(spread, spread),
            rng.standard_normal((2, 4, 3)) / spread[:, None],
            key_bias=rng.standard_normal((2, 4)) / 3 / spread,
            intercept=rng.standard_normal(3),
        )
        # Scores around the mean token: such as a model of these columns has, and not saturated.
        centred = layer.predict(X - X.mean(axis=(0, 1)))
        learner = MultiHeadAttentionLearner(random_state=0).fit(X[:600], centred[:600])
        assert learner.n_heads_ == 2
        size = np.abs(centred).max()
        np.testing.assert_allclose(learner.predict(X[600:]) / size, centred[600:] / size, atol=1e-8)
