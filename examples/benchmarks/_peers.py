"""What one would run otherwise: Adam in torch, and L-BFGS, on the squared error of the same layer.

Both are told the number of heads, and whether there are biases. Both get labels of unit power and start from
random heads of a size that was tried out. Neither is charged for looking at its own recovery error.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from scipy.optimize import minimize

from sklearn_mhal import AttentionLayer, head_recovery_error

Array = np.ndarray[Any, np.dtype[Any]]
THRESHOLDS = (1e-4, 1e-6, 1e-8)
LEARNING_RATES = (3e-3, 1e-2, 3e-2)
# The threshold that decides which setting has won.
DECISIVE = 1e-6
# Steps of a schedule that is chosen in advance; doubled where that is not enough.
_N_STEPS = 3000
# A schedule that takes this share of the cap is the last.
_NEARLY = 0.9
# Schedules to choose from afterwards: from this share of the cap on, each twice as long as the one before.
_SHORTEST_SCHEDULE = 1 / 256
_STEPS_BETWEEN_LOOKS = 10
# Of sizes 0.1 to 3 and batches of 64 to 1024, these were the fastest on three configurations.
_INITIAL_ATTENTION, _INITIAL_PROJECTION = 1.0, 1.0
_BATCH = 256


class Model(torch.nn.Module):
    """The same map, for training: all heads in one batched product.

    Parameters
    ----------
    truth : AttentionLayer
        Gives the sizes, and whether there are key biases and an intercept; nothing else of it is used.
    """

    def __init__(self, truth: AttentionLayer, dtype: torch.dtype, seed: int) -> None:
        super().__init__()
        m, d, n_outputs = truth.projection.shape
        rng = np.random.default_rng(seed)
        self.sizes = m, d, n_outputs
        attention = rng.standard_normal((d, m * d)) * (_INITIAL_ATTENTION / d)
        projection = rng.standard_normal((m * d, n_outputs)) * (_INITIAL_PROJECTION / np.sqrt(m * d))
        self.attention = torch.nn.Parameter(torch.tensor(attention, dtype=dtype))
        self.projection = torch.nn.Parameter(torch.tensor(projection, dtype=dtype))
        self.affine = bool(np.any(truth.key_bias) or np.any(truth.intercept))
        if self.affine:
            self.key_bias = torch.nn.Parameter(torch.zeros(m * d, dtype=dtype))
            self.intercept = torch.nn.Parameter(torch.zeros(n_outputs, dtype=dtype))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map (n, k, d) to (n * k, d_out)."""
        m, d, _ = self.sizes
        n, k, _ = tokens.shape
        queries = tokens.reshape(n * k, d) @ self.attention
        if self.affine:
            queries = queries + self.key_bias
        scores = torch.bmm(queries.view(n, k * m, d), tokens.transpose(1, 2))
        pooled = torch.bmm(torch.softmax(scores, dim=-1), tokens).view(n * k, m * d)
        if self.affine:
            return torch.addmm(self.intercept, pooled, self.projection)
        return pooled @ self.projection

    def layer(self, label_scale: float) -> AttentionLayer:
        """Return what has been learned, in the units of the labels."""
        m, d, _ = self.sizes

        def numbers(parameter: torch.nn.Parameter) -> Array:
            return parameter.detach().numpy().astype(np.float64)

        attention = numbers(self.attention).reshape(d, m, d).transpose(1, 0, 2)
        projection = numbers(self.projection).reshape(m, d, -1) * label_scale
        if not self.affine:
            return AttentionLayer(attention, projection)
        return AttentionLayer(
            attention,
            projection,
            key_bias=numbers(self.key_bias).reshape(m, d),
            intercept=numbers(self.intercept) * label_scale,
        )


@dataclass
class Outcome:
    """When the recovery error first fell under each threshold; what never happened is missing."""

    setting: str
    seconds: dict[float, float] = field(default_factory=dict)
    error: float = float("inf")
    """The smallest seen."""
    spent: float = 0.0


class _Watch:
    """A clock that stands still while the recovery error is looked at."""

    def __init__(self, truth: AttentionLayer, label_scale: float, outcome: Outcome, limit: float) -> None:
        self.truth, self.label_scale, self.outcome, self.limit = truth, label_scale, outcome, limit
        self.began, self.paused = time.perf_counter(), 0.0

    def elapsed(self) -> float:
        return time.perf_counter() - self.began - self.paused

    def look(self, model: Model) -> bool:
        """Note the thresholds that have been reached; return whether all have been, or time is up."""
        now = self.elapsed()
        looked = time.perf_counter()
        self.outcome.spent = now
        try:
            error = head_recovery_error(self.truth, model.layer(self.label_scale))
        except ValueError:
            # Parameters that are no numbers any more.
            return True
        if now <= self.limit:
            self.outcome.error = min(self.outcome.error, error)
            for threshold in THRESHOLDS:
                if error < threshold:
                    self.outcome.seconds.setdefault(threshold, now)
        self.paused += time.perf_counter() - looked
        return now > self.limit or error < THRESHOLDS[-1]


def _in_units(X: Array, y: Array, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, float]:
    scale = float(np.sqrt(np.mean(np.square(y))))
    labels = torch.tensor(y.reshape(-1, y.shape[2]) / scale, dtype=dtype)
    return torch.tensor(X, dtype=dtype), labels, scale


def adam_run(
    X: Array,
    y: Array,
    truth: AttentionLayer,
    *,
    learning_rate: float,
    limit: float,
    seed: int,
    n_steps: int | None = None,
    schedule: float = np.inf,
) -> Outcome:
    """Run Adam with a cosine schedule of `n_steps` steps or of `schedule` seconds, or until `limit`."""
    tokens, labels, scale = _in_units(X, y, torch.float32)
    n, k, _ = tokens.shape
    labels = labels.view(n, k, -1)
    size = min(n, _BATCH)
    model = Model(truth, torch.float32, seed)
    optimiser = torch.optim.Adam(model.parameters(), lr=learning_rate, fused=True)
    shuffler = torch.Generator().manual_seed(seed)
    length = f"{schedule:.2g} s" if n_steps is None else f"{n_steps} steps"
    outcome = Outcome(f"rate {learning_rate:g}, {length}")
    watch = _Watch(truth, scale, outcome, limit)
    step = 0
    while True:
        order = torch.randperm(n, generator=shuffler)
        for at in range(0, n - size + 1, size):
            rows = order[at : at + size]
            optimiser.zero_grad(set_to_none=True)
            residual = model(tokens[rows]) - labels[rows].view(size * k, -1)
            residual.square().mean().backward()
            optimiser.step()
            step += 1
            done = min(watch.elapsed() / schedule if n_steps is None else step / n_steps, 1.0)
            optimiser.param_groups[0]["lr"] = learning_rate * 0.5 * (1.0 + np.cos(np.pi * done))
            if step % _STEPS_BETWEEN_LOOKS == 0 and watch.look(model):
                return outcome
            if step == n_steps:
                return outcome


def adam(X: Array, y: Array, truth: AttentionLayer, *, cap: float, seed: int) -> Outcome:
    """Return Adam at its best over learning rates, its schedule chosen in advance.

    All runs start from the same heads. A schedule that gets nowhere at any rate is doubled, as one would do,
    the last one as long as the cap allows. A run is stopped once it has taken longer than the best one until
    the decisive threshold, since it cannot win any more.
    """
    best = Outcome("none")
    n_steps, spent = _N_STEPS, 0.0
    while DECISIVE not in best.seconds and spent < _NEARLY * cap:
        for rate in LEARNING_RATES:
            limit = best.seconds.get(DECISIVE, cap)
            run = adam_run(X, y, truth, learning_rate=rate, n_steps=n_steps, limit=limit, seed=seed)
            spent = max(spent, run.spent)
            best = min(best, run, key=_rank)
        n_steps = int(n_steps * min(2.0, cap / spent))
    return best


def adam_fitted(X: Array, y: Array, truth: AttentionLayer, *, cap: float, seed: int) -> Outcome:
    """Return Adam at its best over learning rates and over lengths of the schedule, known afterwards.

    Lengths double up to the cap, and end with the one after the first that has won.
    """
    best = Outcome("none")
    schedule, extra = cap * _SHORTEST_SCHEDULE, 2
    while schedule <= cap * (1.0 + 1e-9) and extra:
        for rate in LEARNING_RATES:
            limit = min(best.seconds.get(DECISIVE, cap), schedule)
            run = adam_run(X, y, truth, learning_rate=rate, schedule=schedule, limit=limit, seed=seed)
            best = min(best, run, key=_rank)
        extra -= DECISIVE in best.seconds
        schedule *= 2.0
    return best


def _rank(outcome: Outcome) -> tuple[float, ...]:
    never = float("inf")
    order = (DECISIVE, *(threshold for threshold in THRESHOLDS if threshold != DECISIVE))
    return (*(outcome.seconds.get(threshold, never) for threshold in order), outcome.error)


class _TimeIsUp(Exception):
    pass


def _lbfgs_run(
    X: Array, y: Array, truth: AttentionLayer, *, n_samples: int, cap: float, seed: int
) -> Outcome:
    """Run L-BFGS in double precision on some of the samples, from one start after the other."""
    tokens, labels, scale = _in_units(X[:n_samples], y[:n_samples], torch.float64)
    outcome = Outcome(f"{n_samples} samples")
    watch = _Watch(truth, scale, outcome, cap)
    start = 0
    while watch.elapsed() < cap:
        model = Model(truth, torch.float64, 1000 * seed + start)
        start += 1
        if _descend(model, tokens, labels, watch):
            break
    return outcome


def _descend(model: Model, tokens: torch.Tensor, labels: torch.Tensor, watch: _Watch) -> bool:
    """Minimise from one start; return whether that was the last one."""
    parameters = list(model.parameters())
    done = False

    def assign(vector: Array) -> None:
        torch.nn.utils.vector_to_parameters(torch.from_numpy(vector), parameters)

    def loss(vector: Array) -> tuple[float, Array]:
        if watch.elapsed() > watch.limit:
            raise _TimeIsUp
        assign(vector)
        value = (model(tokens) - labels).square().mean()
        gradients = torch.autograd.grad(value, parameters)
        return float(value.detach()), torch.cat([gradient.reshape(-1) for gradient in gradients]).numpy()

    def look(vector: Array) -> None:
        nonlocal done
        assign(vector)
        if watch.look(model):
            done = True
            raise StopIteration

    start = torch.nn.utils.parameters_to_vector(parameters).detach().numpy().copy()
    options = {"maxiter": 10**6, "maxfun": 10**7, "ftol": 0.0, "gtol": 1e-14, "maxcor": 30}
    try:
        minimize(loss, start, jac=True, method="L-BFGS-B", callback=look, options=options)
    except _TimeIsUp:
        return True
    return done


def lbfgs(X: Array, y: Array, truth: AttentionLayer, *, cap: float, seed: int) -> Outcome:
    """Return L-BFGS at its best on all samples and on ten times as many as the unknowns need."""
    m, d, n_outputs = truth.projection.shape
    enough = 10 * -(-m * d * (d + 1 + n_outputs) // (X.shape[1] * n_outputs))
    best = Outcome("none")
    for n_samples in sorted({min(enough, len(X)), len(X)}):
        limit = best.seconds.get(DECISIVE, cap)
        run = _lbfgs_run(X, y, truth, n_samples=n_samples, cap=limit, seed=seed)
        best = min(best, run, key=_rank)
    return best


def warm_up(n_threads: int) -> None:
    """Set torch's threads and let it load whatever it loads when first used."""
    from sklearn_mhal import BooleanAttentionSampler

    torch.set_num_threads(n_threads)
    sampler = BooleanAttentionSampler(2, 3, 4, random_state=0)
    X, y = sampler.sample(300, as_tokens=True)
    adam_run(X, y, sampler.layer_, learning_rate=1e-2, schedule=0.5, limit=0.5, seed=0)
    lbfgs(X, y, sampler.layer_, cap=0.5, seed=0)


Peer = Callable[..., Outcome]
