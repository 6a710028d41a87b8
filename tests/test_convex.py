"""Convex programs: right where the answer is known, and never believed where it is wrong."""

import pickle

import cvxpy as cp
import numpy as np
import pytest
from scipy import linalg

from sklearn_mhal import _convex
from sklearn_mhal._convex import ConvexProgramError, minimum_norm_point
from sklearn_mhal._polyhedron import least_distance, make_polyhedron

# The solver leaves a squared norm uncertain by 1e-10, and so a point by 1e-5 of its norm.
POINT_RTOL = 1e-5


def random_body(rng, n_rows, n_variables, scale=1.0):
    """Half-spaces around a random point, and that point."""
    inside = scale * rng.standard_normal(n_variables)
    rows = rng.standard_normal((n_rows, n_variables))
    return rows, rows @ inside - scale * np.abs(rng.standard_normal(n_rows)), inside


@pytest.fixture
def program():
    """A program on a body that it can solve."""
    rows, margins, _ = random_body(np.random.default_rng(0), 30, 6)
    return lambda: minimum_norm_point(halfspaces=(rows, margins), stage="sculpt")


# Right answers


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_one_halfspace_projects_onto_its_boundary(scale):
    normal, anchor = np.array([1.0, -2.0, 2.0]), scale * np.array([0.5, 1.0, 0.0])
    result = minimum_norm_point(halfspaces=(normal[None], np.array([6.0 * scale])), anchor=anchor)
    expected = anchor + normal * (6.0 * scale - normal @ anchor) / (normal @ normal)
    np.testing.assert_allclose(result.point, expected, rtol=POINT_RTOL)
    assert result.value == pytest.approx(0.5 * np.sum((expected - anchor) ** 2), rel=1e-6)
    assert result.status == "optimal"
    assert "1 of 1" in result.message


def test_two_halfspaces_meet_in_a_corner():
    rows, margins = np.array([[1.0, 0.2, 0.0], [0.1, 1.0, 0.0]]), np.array([2.0, 3.0])
    result = minimum_norm_point(halfspaces=(rows, margins))
    np.testing.assert_allclose(result.point, linalg.pinv(rows) @ margins, rtol=POINT_RTOL, atol=1e-9)


def test_a_halfspace_behind_another_does_not_hold_the_point():
    rows, margins = np.array([[1.0, 0.0], [1.0, 0.1]]), np.array([2.0, 1.0])
    result = minimum_norm_point(halfspaces=(rows, margins))
    np.testing.assert_allclose(result.point, [2.0, 0.0], rtol=POINT_RTOL, atol=2.0 * POINT_RTOL)
    assert "1 of 2" in result.message


def test_an_anchor_inside_is_its_own_answer():
    rows, margins, inside = random_body(np.random.default_rng(1), 20, 5)
    result = minimum_norm_point(halfspaces=(rows, margins), anchor=inside)
    np.testing.assert_array_equal(result.point, inside)
    assert result.value == 0.0
    assert result.violation == 0.0


def test_least_squares_alone_is_ridge_regression():
    rng = np.random.default_rng(2)
    matrix, targets, weights = rng.standard_normal((40, 6)), rng.standard_normal(40), rng.random(40)
    anchor = rng.standard_normal(6)
    result = minimum_norm_point(least_squares=(matrix, targets, weights), anchor=anchor)
    gram = np.eye(6) + matrix.T @ (weights[:, None] * matrix)
    expected = linalg.solve(gram, anchor + matrix.T @ (weights * targets))
    np.testing.assert_allclose(result.point, expected, rtol=1e-10)
    cost = np.sum((expected - anchor) ** 2) + weights @ (matrix @ expected - targets) ** 2
    assert result.value == pytest.approx(0.5 * cost)


def test_least_squares_inside_halfspaces_meets_the_optimality_conditions():
    rng = np.random.default_rng(3)
    rows, margins, _ = random_body(rng, 30, 6)
    matrix, targets = rng.standard_normal((4, 6)), rng.standard_normal(4)
    point = minimum_norm_point(halfspaces=(rows, margins), least_squares=(matrix, targets, 5.0)).point
    gradient = point + 5.0 * matrix.T @ (matrix @ point - targets)
    active = rows @ point - margins < 1e-4
    multipliers, *_ = linalg.lstsq(rows[active].T, gradient)
    assert active.any()
    assert (multipliers > -1e-3).all()
    np.testing.assert_allclose(rows[active].T @ multipliers, gradient, atol=1e-3 * linalg.norm(gradient))


def test_equalities_hold_within_their_tolerance():
    rng = np.random.default_rng(4)
    matrix = rng.standard_normal((3, 8))
    targets, tolerance = rng.standard_normal(3), np.array([1e-1, 1e-4, 1e-8])
    result = minimum_norm_point(equalities=(matrix, targets, tolerance))
    misses = np.abs(matrix @ result.point - targets)
    # A millionth of the tolerance is what the module promises.
    assert (misses <= tolerance * (1.0 + 2e-6)).all()
    assert result.violation <= 1e-6


@pytest.mark.parametrize("shape", [(300, 100), (900, 20), (15, 200)])
def test_nearest_point_agrees_with_least_distance_programming(shape):
    rows, margins, _ = random_body(np.random.default_rng(5), *shape)
    result = minimum_norm_point(halfspaces=(rows, margins))
    expected, _ = least_distance(rows, margins)
    assert linalg.norm(result.point - expected) <= POINT_RTOL * linalg.norm(expected)


def test_rows_enter_as_cutting_planes_without_a_proposal(monkeypatch):
    # Where the proposal fails, the most violated rows come first, in batches.
    monkeypatch.setattr(
        _convex, "least_distance", lambda rows, margins: (np.zeros(rows.shape[1]), np.zeros(len(rows)))
    )
    solved = []
    solve = _convex._nearest
    monkeypatch.setattr(_convex, "_nearest", lambda body: solved.append(len(body.rows)) or solve(body))
    rows, margins, _ = random_body(np.random.default_rng(6), 1000, 10)
    result = minimum_norm_point(halfspaces=(rows, margins))
    monkeypatch.undo()
    assert len(solved) > 1
    assert max(solved) < 1000
    expected = minimum_norm_point(halfspaces=(rows, margins)).point
    np.testing.assert_allclose(result.point, expected, atol=2 * POINT_RTOL * linalg.norm(expected))


def test_rows_of_zeros_are_dropped_or_refused():
    rows = np.array([[0.0, 0.0], [1.0, 0.0]])
    np.testing.assert_allclose(
        minimum_norm_point(halfspaces=(rows, np.array([-1.0, 2.0]))).point, [2.0, 0.0], rtol=POINT_RTOL
    )
    with pytest.raises(ConvexProgramError, match="row of zeros"):
        minimum_norm_point(halfspaces=(rows, np.array([1e-9, 2.0])))


# Margins of every size in one body


@pytest.mark.parametrize("seed", range(5))
def test_margins_from_1e_6_to_1e6_are_each_met_on_their_own_scale(seed):
    rng = np.random.default_rng(seed)
    margins = 10.0 ** rng.uniform(-6, 6, 40)
    margins[:2] = 1e-6, 1e6
    rows = np.eye(8)[rng.integers(0, 8, 40)] * 10.0 ** rng.uniform(-2, 2, (40, 1))
    result = minimum_norm_point(halfspaces=(rows, margins))
    reached = rows @ result.point
    assert (reached >= margins * (1.0 - 2e-6)).all()
    needed = np.zeros(8)
    for row, margin in zip(rows, margins, strict=True):
        needed = np.maximum(needed, np.where(row > 0.0, margin / np.where(row > 0.0, row, 1.0), 0.0))
    np.testing.assert_allclose(result.point, needed, atol=POINT_RTOL * linalg.norm(needed))


def test_a_small_margin_missed_beside_a_large_one_is_seen_and_repaired():
    rows, margins = np.eye(2), np.array([1e6, 1e-6])
    body = make_polyhedron("sculpt", 2, None, (rows, margins))
    point = np.array([1e6, -1e-5])  # Far below what the solver can see next to 1e6.
    assert body.violations(point)[1] > 1.0
    repaired, violation = body.checked(point)
    # The norm 1e6 carries a rounding error of 1.4e-8, which is 1.4 % of this margin.
    assert repaired[1] >= 0.98e-6
    assert violation <= 1e-6


def test_a_small_margin_missed_on_its_own_scale_is_refused():
    body = make_polyhedron("sculpt", 2, None, (np.eye(2), np.array([1.0, 1e-6])))
    with pytest.raises(ConvexProgramError, match="of its own margin"):
        body.checked(np.array([1.0, -1e-4]))


def test_contradictory_small_margins_beside_a_large_one_are_refused():
    rows = np.array([[1.0, 0.0], [0.0, 1.0], [0.0, -1.0]])
    with pytest.raises(ConvexProgramError):
        minimum_norm_point(halfspaces=(rows, np.array([1.0, 1e-3, 1e-3])))


# Empty bodies


def test_an_empty_body_is_an_error_with_a_remedy():
    rows = np.array([[1.0, 0.0], [-1.0, 0.0]])
    with pytest.raises(ConvexProgramError, match=r"^sculpt: ") as caught:
        minimum_norm_point(halfspaces=(rows, np.array([1.0, 1.0])), stage="sculpt")
    assert "Lower the margins" in caught.value.remedy


# A solver that fails


def replace_solve(monkeypatch, after=None, **options):
    """Let cvxpy solve with other options, then spoil the outcome."""
    original = cp.Problem.solve

    def solve(self, **given):
        original(self, **{**given, **options})
        if after is not None:
            after(self)

    monkeypatch.setattr(cp.Problem, "solve", solve)


def test_a_solver_that_raises_is_named_and_chained(monkeypatch, program):
    def fail(self, **given):
        raise cp.error.SolverError("no factorisation")

    monkeypatch.setattr(cp.Problem, "solve", fail)
    with pytest.raises(ConvexProgramError, match="sculpt: the solver raised SolverError") as caught:
        program()
    assert isinstance(caught.value.__cause__, cp.error.SolverError)


def test_a_solver_that_stops_at_its_limit_is_not_believed(monkeypatch, program):
    # CLARABEL itself, stopped early: it fills the variables and raises nothing.
    replace_solve(monkeypatch, max_iter=2)
    with pytest.raises(ConvexProgramError, match="user_limit"):
        program()


@pytest.mark.parametrize("status", ["optimal_inaccurate", None])
def test_only_the_status_optimal_is_accepted(monkeypatch, program, status):
    monkeypatch.setattr(cp.Problem, "status", property(lambda self: status))
    with pytest.raises(ConvexProgramError, match=f"status is {status!r}; needed 'optimal'"):
        program()


def test_an_inaccurate_solution_raises_no_bare_warning(monkeypatch, program):
    # An accuracy out of reach: CLARABEL ends as "optimal_inaccurate", and cvxpy only warns.
    unreachable = {"tol_gap_abs": 1e-30, "tol_gap_rel": 1e-30, "tol_feas": 1e-30, "tol_ktratio": 1e-30}
    replace_solve(monkeypatch, **unreachable)
    with pytest.raises(ConvexProgramError, match="status is"):
        program()


def test_a_solver_that_returns_nothing_is_not_believed(monkeypatch, program):
    def forget(problem):
        for variable in problem.variables():
            variable.save_value(None)

    replace_solve(monkeypatch, forget)
    with pytest.raises(ConvexProgramError, match="returned no values"):
        program()


@pytest.mark.parametrize("factor", [0.5, 0.999, np.nan])
def test_a_point_called_optimal_outside_the_body_is_not_believed(monkeypatch, factor):
    replace_solve(monkeypatch, lambda problem: [v.save_value(v.value * factor) for v in problem.variables()])
    rows, margins, _ = random_body(np.random.default_rng(8), 30, 6)
    with pytest.raises(ConvexProgramError, match="called optimal"):
        minimum_norm_point(halfspaces=(rows, margins))


def test_a_feasible_point_that_is_not_optimal_is_not_believed(monkeypatch):
    replace_solve(monkeypatch, lambda problem: [v.save_value(v.value * 1.01) for v in problem.variables()])
    with pytest.raises(ConvexProgramError, match="bound its multipliers prove"):
        minimum_norm_point(halfspaces=(np.array([[1.0, 0.0]]), np.array([1.0])))


def test_a_point_as_near_as_the_true_one_with_a_large_residual_is_not_believed(monkeypatch):
    """On the sphere through the answer the objective is what it was: only the rows can tell."""
    rows, margins, _ = random_body(np.random.default_rng(9), 30, 6)
    honest = minimum_norm_point(halfspaces=(rows, margins))

    def turn(problem):
        for variable in problem.variables():
            sideways = linalg.null_space(variable.value[None])[:, 0] * linalg.norm(variable.value)
            variable.save_value(np.cos(0.1) * variable.value + np.sin(0.1) * sideways)

    replace_solve(monkeypatch, turn)
    with pytest.raises(ConvexProgramError, match="misses a row of unit norm by"):
        minimum_norm_point(halfspaces=(rows, margins))
    assert honest.violation <= 1e-6


def test_keyboard_interrupt_passes_through(monkeypatch, program):
    def interrupt(self, **given):
        raise KeyboardInterrupt

    monkeypatch.setattr(cp.Problem, "solve", interrupt)
    with pytest.raises(KeyboardInterrupt):
        program()


def test_a_failing_proposal_or_repair_changes_nothing(monkeypatch):
    def fail(*arguments):
        raise RuntimeError("Maximum number of iterations reached.")

    rows, margins, _ = random_body(np.random.default_rng(10), 40, 6)
    expected = minimum_norm_point(halfspaces=(rows, margins)).point
    monkeypatch.setattr("sklearn_mhal._polyhedron.nnls", fail)
    found = minimum_norm_point(halfspaces=(rows, margins)).point
    np.testing.assert_allclose(found, expected, atol=2 * POINT_RTOL * linalg.norm(expected))


def test_the_error_survives_pickling():
    error = pickle.loads(pickle.dumps(ConvexProgramError("sculpt", "found", "wanted", "Do this.")))
    assert str(error) == "sculpt: found; needed wanted. Do this."
    assert error.remedy == "Do this."


# Wrong arguments


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: minimum_norm_point(), "at least one matrix"),
        (lambda: minimum_norm_point(halfspaces=(np.ones(3), np.ones(1))), "at least one matrix"),
        (lambda: minimum_norm_point(halfspaces=(np.ones((2, 3)), np.ones(3))), "margins must have shape"),
        (lambda: minimum_norm_point(halfspaces=(np.array([[np.nan]]), np.ones(1))), "NaN or infinity"),
        (lambda: minimum_norm_point(equalities=(np.ones((1, 2)), np.ones(1), 0.0)), "tolerance"),
        (lambda: minimum_norm_point(least_squares=(np.ones((1, 2)), np.ones(1), -1.0)), "weights"),
    ],
)
def test_wrong_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
