"""A convex program that fails in the middle of a fit, whichever source of the span the fit relies on."""

from __future__ import annotations

import cvxpy as cp
import pytest

from sklearn_mhal import BooleanAttentionSampler, MultiHeadAttentionLearner, head_recovery_error

# What the package promises of a noise-free layer.
EXACT = 1e-10


def raises(original, problem, **given):
    raise cp.error.SolverError("no factorisation")


def returns_user_limit(original, problem, **given):
    return original(problem, **{**given, "max_iter": 2})


def returns_inaccurate(original, problem, **given):
    unreachable = dict.fromkeys(("tol_gap_abs", "tol_gap_rel", "tol_feas", "tol_ktratio"), 1e-30)
    return original(problem, **{**given, **unreachable})


def returns_none(original, problem, **given):
    original(problem, **given)
    for variable in problem.variables():
        variable.save_value(None)


def is_interrupted(original, problem, **given):
    raise KeyboardInterrupt


FAULTS = [raises, returns_user_limit, returns_inaccurate, returns_none]


@pytest.fixture(scope="module")
def data():
    """Attention hard enough for half-spaces to cut the centre off, so that a program must be solved."""
    sampler = BooleanAttentionSampler(2, 3, 5, n_outputs=6, attention_scale=8.0, random_state=0)
    return *sampler.sample(600, as_tokens=True), sampler.layer_


@pytest.fixture
def break_the_solver(monkeypatch):
    """Return a function that makes every convex program fail, and the list of programs that did."""
    original, broken = cp.Problem.solve, []

    def install(fault):
        def solve(self, **given):
            broken.append(self)
            return fault(original, self, **given)

        monkeypatch.setattr(cp.Problem, "solve", solve)
        return broken

    return install


def learner(span="auto", **settings):
    return MultiHeadAttentionLearner(2, span=span, oracle_rounds=1, random_state=0, **settings)


@pytest.mark.parametrize("span", ["auto", "sculpt", "oracle", "moments"])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_the_fit_goes_on_and_says_so(data, break_the_solver, fault, span):
    X, y, truth = data
    broken = break_the_solver(fault)
    model = learner(span).fit(X, y)
    assert broken
    assert head_recovery_error(truth, model.layer_) < EXACT
    message = model.stages_["sculpt"].message
    assert "sculpt: the solver" in message or "sculpt: the convex solver" in message
    assert "instead" in message


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_the_stages_alone_as_well(data, break_the_solver, fault):
    """Without polish everything rests on the spans; it gets no worse than random starts would be."""
    X, y, _ = data
    whole = learner("sculpt", polish=False).fit(X, y).score(X, y)
    break_the_solver(fault)
    broken = learner("sculpt", polish=False).fit(X, y).score(X, y)
    assert broken > 0.5 * whole


def test_an_interrupt_in_the_solver_is_no_fault_to_fall_back_from(data, break_the_solver):
    X, y, _ = data
    model = learner().fit(X, y)
    assert break_the_solver(is_interrupted) == []
    with pytest.raises(KeyboardInterrupt):
        model.fit(X, y)
    assert not [name for name in vars(model) if name.endswith("_")]


def test_a_working_solver_is_not_complained_of(data):
    X, y, _ = data
    body = learner().fit(X, y).stages_["sculpt"].body
    assert body.obstacle == ""
    assert body.violation(body.anchor()) <= 1.0 < body.violation(body.centre)
