"""The solver: regression, derivatives of the eliminated problem, preconditioners, and how starts end."""

import numpy as np
import pytest

from sklearn_mhal import AttentionLayer, BooleanAttentionSampler
from sklearn_mhal._forward import TokenRows, stack_attention
from sklearn_mhal._linearisation import Linearisation, Subspace
from sklearn_mhal._problem import Problem, factorise, regress
from sklearn_mhal._solver import solve, steps

M, K, D, D_OUT = 2, 4, 3, 5
READOUTS = ["tokens", "first", "mean"]


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def make_problem(rng, *, readout="tokens", affine=False, weighted=False, n=40, noise=0.3, **penalties):
    """A problem whose labels come from a layer and noise, and a position away from that layer."""
    tokens = rng.standard_normal((n, K, D))
    layer = AttentionLayer(
        rng.standard_normal((M, D, D)),
        rng.standard_normal((M, D, D_OUT)),
        key_bias=rng.standard_normal((M, D)) if affine else None,
        intercept=rng.standard_normal(D_OUT) if affine else None,
    )
    labels = layer.predict(tokens)
    labels = {"tokens": labels, "first": labels[:, :1], "mean": labels.mean(axis=1, keepdims=True)}[readout]
    labels = labels + noise * rng.standard_normal(labels.shape)
    root_weights = np.sqrt(rng.uniform(0.5, 2.0, n)) if weighted else None
    rows = TokenRows(tokens, affine=affine, readout=readout, root_weights=root_weights)
    labels = labels.reshape(rows.n_rows, D_OUT)
    if weighted:
        labels = labels * rows.row_scale[:, None]
    problem = Problem(rows, labels, fit_intercept=affine, **penalties)
    truth = stack_attention(layer.attention, layer.key_bias if affine else None)
    return problem, truth, 0.5 * rng.standard_normal(truth.shape)


class TestRegression:
    @pytest.mark.parametrize("weighted", [False, True])
    @pytest.mark.parametrize("fit_intercept", [False, True])
    @pytest.mark.parametrize("ridge", [0.0, 0.7])
    def test_is_least_squares(self, rng, weighted, fit_intercept, ridge):
        pooled, labels = rng.standard_normal((30, 6)), rng.standard_normal((30, D_OUT))
        scale = rng.uniform(0.5, 2.0, 30) if weighted else None
        found = regress(pooled, labels, row_scale=scale, fit_intercept=fit_intercept, ridge=ridge)
        design = pooled
        if fit_intercept:
            design = np.column_stack([pooled, np.ones(30) if scale is None else scale])
        # The intercept is not penalised.
        penalty = np.zeros((6, design.shape[1]))
        penalty[:, :6] = np.sqrt(ridge) * np.eye(6)
        expected = np.linalg.lstsq(
            np.vstack([design, penalty]), np.vstack([labels, np.zeros((6, D_OUT))]), rcond=None
        )[0]
        # Normal equations of a matrix of condition 10, refined once.
        np.testing.assert_allclose(found.projection, expected[:6], rtol=1e-12, atol=1e-13)
        intercept = expected[6] if fit_intercept else np.zeros(D_OUT)
        np.testing.assert_allclose(found.intercept, intercept, rtol=1e-12, atol=1e-13)
        np.testing.assert_allclose(found.residual, labels - design @ expected, atol=1e-12)
        loss = np.sum(found.residual**2) + ridge * np.sum(expected[:6] ** 2)
        assert found.loss == pytest.approx(loss, rel=1e-12)

    def test_basis_spans_the_design(self, rng):
        pooled = rng.standard_normal((30, 6))
        found = regress(pooled, pooled[:, :D_OUT], row_scale=None, fit_intercept=True, ridge=0.0)
        basis = found.orthonormal()
        np.testing.assert_allclose(basis.T @ basis, np.eye(7), atol=1e-12)
        np.testing.assert_allclose(basis @ (basis.T @ pooled), pooled, atol=1e-12)

    def test_equal_heads_share_the_projection(self, rng):
        pooled, labels = rng.standard_normal((30, 3)), rng.standard_normal((30, D_OUT))
        found = regress(np.hstack([pooled, pooled]), labels, row_scale=None, fit_intercept=False, ridge=0.0)
        expected = np.linalg.lstsq(pooled, labels, rcond=None)[0]
        # The floor on the diagonal decides the share; 1e-14 of it is what it costs.
        np.testing.assert_allclose(found.projection[:3] + found.projection[3:], expected, atol=1e-6)

    def test_factor_of_a_singular_matrix_exists(self):
        factor = factorise(np.ones((4, 4)))
        np.testing.assert_allclose(factor @ factor.T, np.ones((4, 4)), atol=1e-8)
        assert np.isfinite(factorise(np.zeros((3, 3)))).all()


class TestProblem:
    @pytest.mark.parametrize("weighted", [False, True])
    def test_error_without_penalties_is_the_unexplained_share(self, rng, weighted):
        problem, truth, _ = make_problem(rng, affine=True, weighted=weighted, noise=0.0)
        # A sum of 800 squares that rounding of 1e-15 each enters.
        assert problem.evaluate(truth).error < 1e-25
        constant = Problem(problem.rows, problem.labels * 0.0 + 3.0, fit_intercept=False)
        assert constant.evaluate(truth).error <= 1.0

    def test_label_power_is_about_the_mean_with_an_intercept(self, rng):
        problem, _, _ = make_problem(rng, affine=True)
        centred = problem.labels - problem.labels.mean(axis=0)
        assert problem.label_power == pytest.approx(np.sum(centred**2), rel=1e-12)
        without = Problem(problem.rows, problem.labels, fit_intercept=False)
        assert without.label_power == pytest.approx(np.sum(problem.labels**2), rel=1e-12)

    def test_penalties_enter_the_error(self, rng):
        problem, _, start = make_problem(rng, ridge=2.0, attention_ridge=3.0)
        state = problem.evaluate(start)
        regression = state.regression
        loss = np.sum(regression.residual**2) + 2.0 * np.sum(regression.projection**2)
        expected = (loss + 3.0 * np.sum(start**2)) / problem.label_power
        assert state.error == pytest.approx(expected, rel=1e-12)

    def test_penalised_takes_means_over_rows(self, rng):
        problem, _, start = make_problem(rng)
        softened = problem.penalised(0.1, 0.2)
        assert (softened.ridge, softened.attention_ridge) == (0.1 * 160, 0.2 * 160)
        assert softened.evaluate(start).error > problem.evaluate(start).error


def squares(problem, attention):
    """The objective that remains when the projections are eliminated."""
    return problem.evaluate(attention).error * problem.label_power


@pytest.mark.parametrize("penalties", [{}, {"ridge": 0.5, "attention_ridge": 0.8}], ids=["plain", "ridge"])
@pytest.mark.parametrize("weighted", [False, True], ids=["unweighted", "weighted"])
@pytest.mark.parametrize("affine", [False, True], ids=["plain", "affine"])
@pytest.mark.parametrize("readout", READOUTS)
def test_gradient_is_that_of_the_eliminated_problem(rng, readout, affine, weighted, penalties):
    problem, _, at = make_problem(rng, readout=readout, affine=affine, weighted=weighted, **penalties)
    linear = Linearisation(problem, problem.evaluate(at))
    step = 1e-5
    for _ in range(3):
        direction = rng.standard_normal(at.shape)
        difference = squares(problem, at + step * direction) - squares(problem, at - step * direction)
        # The gradient is of minus half the objective: the way down.
        expected = -difference / (4.0 * step)
        # Truncation step^2 times a third derivative, rounding 1e-13 / step.
        assert np.vdot(linear.gradient, direction) == pytest.approx(expected, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("readout", READOUTS)
def test_products_are_of_the_projected_jacobian(rng, readout):
    problem, _, at = make_problem(rng, readout=readout, affine=True, weighted=True)
    state = problem.evaluate(at)
    linear = Linearisation(problem, state)
    outputs = [
        problem.rows.pooled(problem.rows.patterns(at + h * direction)) @ state.regression.projection
        for direction in np.eye(at.size).reshape(-1, *at.shape)
        for h in (1e-6, -1e-6)
    ]
    jacobian = (np.array(outputs[::2]) - np.array(outputs[1::2])) / 2e-6
    basis = state.regression.orthonormal()
    free = (jacobian - basis @ (basis.T @ jacobian)).reshape(at.size, -1)
    direction = rng.standard_normal(at.shape)
    expected = (free @ (free.T @ direction.ravel())).reshape(at.shape)
    scale = np.abs(expected).max()
    # Differences are good to 1e-9, single precision to 1e-6 after sums of a hundred terms.
    np.testing.assert_allclose(linear.exact_product(direction), expected, atol=1e-7 * scale)
    np.testing.assert_allclose(linear.product(direction), expected, atol=1e-5 * scale)


def explicit_block(problem, state):
    """The sum of ``C C^T`` over rows, by loops."""
    projection = state.regression.projection.reshape(M, D, D_OUT)
    patterns = state.patterns.reshape(problem.rows.n_samples, -1, M, K)
    block = np.zeros((M * D, M * D))
    for s, tokens in enumerate(problem.rows.tokens):
        weight = 1.0 if problem.rows.root_weights is None else problem.rows.root_weights[s] ** 2
        for row in patterns[s]:
            means = row @ tokens
            covariances = np.einsum("ib,bd,be->ide", row, tokens, tokens) - means[:, :, None] * means[:, None]
            stacked = np.concatenate(list(covariances @ projection))
            block += weight * stacked @ stacked.T
    return block


@pytest.mark.parametrize(("readout", "n"), [("tokens", 4), ("first", 18)])
@pytest.mark.parametrize("weighted", [False, True])
def test_preconditioner_block_is_the_sum_over_rows(rng, readout, n, weighted):
    # So few rows that every output of each is used.
    problem, _, at = make_problem(rng, readout=readout, weighted=weighted, n=n)
    state = problem.evaluate(at)
    block = Linearisation(problem, state).block
    np.testing.assert_allclose(block, explicit_block(problem, state), rtol=1e-10, atol=1e-10)


def test_preconditioner_block_through_some_outputs_is_close(rng):
    problem, _, at = make_problem(rng, n=400)
    state = problem.evaluate(at)
    block, exact = Linearisation(problem, state).block, explicit_block(problem, state)
    # One of five outputs of 1600 rows: a standard error of a few per cent.
    assert 0.0 < np.linalg.norm(block - exact) < 0.1 * np.linalg.norm(exact)


def test_subspace_makes_the_preconditioner_exact(rng):
    root = rng.standard_normal((12, 12))
    matrix = root @ root.T + np.eye(12)
    known = Subspace((3, 4))
    # Three conjugate directions, by Gram-Schmidt in the matrix's inner product.
    directions = []
    for _ in range(3):
        direction = rng.standard_normal(12)
        for other in directions:
            direction -= other * (other @ matrix @ direction) / (other @ matrix @ other)
        directions.append(direction)
        image = matrix @ direction
        known.collect(direction.reshape(3, 4), image.reshape(3, 4), float(direction @ image))
    vector = rng.standard_normal((3, 4))
    np.testing.assert_array_equal(known.precondition(vector, lambda v: 0.1 * v), 0.1 * vector)
    known.use()
    solved = np.linalg.solve(matrix, vector.ravel())
    preconditioned = known.precondition(vector, lambda v: 0.1 * v).ravel()
    # Single precision of a matrix of condition 50.
    for direction in directions:
        exact = direction @ matrix @ solved
        assert direction @ matrix @ preconditioned == pytest.approx(exact, rel=1e-3, abs=1e-3)
    known.clear()
    np.testing.assert_array_equal(known.precondition(vector, lambda v: 0.1 * v), 0.1 * vector)


def test_subspace_drops_what_it_has_no_room_for(rng):
    known = Subspace((1000, 1000))
    assert known.capacity == 16
    for _ in range(20):
        known.collect(np.ones((1000, 1000)), np.ones((1000, 1000)), 1e6)
    assert known.n_collected == 16


def exact_problem(seed=0, n=120, n_heads=2, **sampler):
    source = BooleanAttentionSampler(n_heads, 4, 6, random_state=seed, **sampler)
    X, y = source.sample(n, as_tokens=True)
    rows = TokenRows(X)
    return Problem(rows, y.reshape(rows.n_rows, -1)), stack_attention(source.layer_.attention)


class TestSolve:
    def start(self, problem, seed=1):
        shape = (6, len(problem.evaluate(np.zeros((6, 12))).regression.projection))
        return 0.05 * np.random.default_rng(seed).standard_normal(shape)

    def test_reaches_rounding(self):
        problem, truth = exact_problem()
        solution = solve(problem, self.start(problem), tol=1e-12)
        assert solution.converged and solution.parameter_error <= 1e-12
        # Heads may come in either order.
        found = [solution.attention, np.hstack([solution.attention[:, 6:], solution.attention[:, :6]])]
        assert min(np.abs(attention - truth).max() for attention in found) < 1e-11
        assert solution.error < 1e-22 and solution.n_products >= solution.n_steps > 0

    def test_estimates_its_own_error(self):
        problem, truth = exact_problem()
        start = self.start(problem)
        checked = 0
        for state, estimate, _, _ in steps(problem, start):
            swapped = np.hstack([state.attention[:, 6:], state.attention[:, :6]])
            distance = min(np.linalg.norm(a - truth) for a in (state.attention, swapped))
            relative = distance / np.linalg.norm(truth)
            if state.error < 1e-4:
                checked += 1
                # An estimate from the contraction, so within a modest factor; rounding ends it.
                assert relative < 10 * estimate + 1e-13
            if estimate < 1e-12:
                break
        assert checked >= 2

    def test_every_accepted_step_lowers_the_loss(self, rng):
        problem, _, start = make_problem(rng, affine=True, ridge=0.1, attention_ridge=0.1)
        errors = [state.error for state, *_ in steps(problem, start)]
        assert len(errors) > 3 and (np.diff(errors[:-1]) < 0).all()

    def test_hopeless_start_is_abandoned(self):
        problem, _ = exact_problem(n_heads=3)
        solution = solve(problem, self.start(problem), give_up_above=1e-7)
        assert "abandoned" in solution.message and not solution.converged
        # One head too few leaves at least a thousandth of the labels on any generic layer.
        assert solution.error > 1e-3 and solution.n_steps < 60

    def test_stops_inside_the_basin(self):
        problem, _ = exact_problem()
        solution = solve(problem, self.start(problem), stop_below=1e-6)
        assert 1e-16 < solution.error < 1e-6 and "basin" in solution.message

    def test_max_iter_is_kept(self):
        problem, _ = exact_problem()
        solution = solve(problem, self.start(problem), max_iter=3)
        assert solution.n_steps == 3 and not solution.converged and "max_iter=3" in solution.message

    def test_a_callback_may_stop_it(self):
        problem, _ = exact_problem()
        seen = []

        def on_step(attention, projection, intercept):
            seen.append((attention.shape, projection.shape, intercept.shape))
            return len(seen) == 2

        solution = solve(problem, self.start(problem), on_step=on_step)
        assert solution.n_steps == 2 and "callback" in solution.message
        assert seen == [((6, 12), (12, 6), (6,))] * 2

    def test_noise_converges_by_its_standard_errors(self, rng):
        problem, truth, _ = make_problem(rng, n=400, noise=0.3)
        solution = solve(problem, truth + 0.05 * rng.standard_normal(truth.shape), tol=1e-15, max_iter=60)
        assert solution.converged and solution.parameter_error > 1e-15
        # At a minimum the gradient vanishes against what one standard error would make of it.
        linear = Linearisation(problem, problem.evaluate(solution.attention))
        noise = np.sqrt(solution.error * problem.label_power / problem.labels.size)
        information = np.sqrt(np.trace(linear.block) * np.trace(problem.query_moment) / truth.size)
        assert np.sqrt(np.mean(linear.gradient**2)) < 0.1 * noise * information

    def test_zero_labels_need_no_step(self):
        problem, _ = exact_problem()
        nothing = Problem(problem.rows, np.zeros_like(problem.labels))
        solution = solve(nothing, self.start(nothing))
        assert solution.converged and solution.error == 0.0 and not solution.projection.any()

    def test_saturated_attention_stays_finite(self):
        problem, truth = exact_problem()
        solution = solve(problem, 1e4 * truth, max_iter=5)
        assert np.isfinite(solution.attention).all() and np.isfinite(solution.error)
