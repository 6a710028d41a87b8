"""The estimator: validate, run the stages in order, assign attributes."""

from __future__ import annotations

import logging
import warnings
from numbers import Integral, Real
from typing import Any, ClassVar

import numpy as np
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.metrics import r2_score
from sklearn.utils.validation import check_is_fitted
from threadpoolctl import threadpool_limits

from ._examples import Examples, make_examples
from ._forward import Array
from ._report import Stages
from ._tokens import (
    Interval,
    Layout,
    StrOptions,
    as_generator,
    check_targets,
    check_tokens,
    check_training_set,
    check_weights,
    fit_context,
    forget_fit,
)
from .layer import AttentionLayer, predict_readout
from .stages import (
    EXACT_AGREEMENT,
    RefinedSum,
    Sculpture,
    estimate_crude_sum,
    estimate_span,
    find_heads,
    polish,
    refine_sum,
    sculpt,
)

logger = logging.getLogger("sklearn_mhal")


class MultiHeadAttentionLearner(RegressorMixin, BaseEstimator):
    """Learn a multi-head attention layer by the staged algorithm of Chen and Li."""

    _parameter_constraints: ClassVar[dict[str, list[Any]]] = {
        "n_heads": [StrOptions({"auto"}), Interval(Integral, 1, None, closed="left")],
        "n_tokens": [None, StrOptions({"features"}), Interval(Integral, 1, None, closed="left")],
        "readout": [StrOptions({"tokens", "first", "mean"})],
        "fit_intercept": ["boolean"],
        "span": [StrOptions({"auto", "sculpt", "oracle", "moments"})],
        "max_heads": [Interval(Integral, 1, None, closed="left")],
        "stage_samples": [Interval(Integral, 1, None, closed="left")],
        "refine_fraction": [Interval(Real, 0, 1, closed="right")],
        "refine_rounds": [Interval(Integral, 1, None, closed="left")],
        "sculpt_fraction": [Interval(Real, 0, 1, closed="right")],
        "sculpt_interior": [Interval(Real, 0, 0.5, closed="neither")],
        "sculpt_vertex": [Interval(Real, 0, 0.5, closed="neither")],
        "sculpt_margin": [Interval(Real, 0, None, closed="neither")],
        "sculpt_tolerance": [Interval(Real, 0, None, closed="neither")],
        "oracle_rounds": [Interval(Integral, 1, None, closed="left")],
        "heads_starts": [Interval(Integral, 1, None, closed="left")],
        "heads_net_points": [Interval(Integral, 2, None, closed="left")],
        "heads_max_tuples": [Interval(Integral, 1, None, closed="left")],
        "polish": ["boolean"],
        "alpha": [Interval(Real, 0, None, closed="left")],
        "validation_fraction": [Interval(Real, 0, 1, closed="neither")],
        "tol": [Interval(Real, 0, None, closed="neither")],
        "max_iter": [Interval(Integral, 1, None, closed="left")],
        "n_jobs": [None, Integral],
        "random_state": ["random_state", np.random.Generator],
        "verbose": ["verbose"],
    }

    def __init__(
        self,
        n_heads: Any = "auto",
        *,
        n_tokens: Any = None,
        readout: str = "tokens",
        fit_intercept: bool = True,
        span: str = "auto",
        max_heads: int = 16,
        stage_samples: int = 2000,
        refine_fraction: float = 0.005,
        refine_rounds: int = 2,
        sculpt_fraction: float = 0.02,
        sculpt_interior: float = 0.02,
        sculpt_vertex: float = 0.02,
        sculpt_margin: float = 1.0,
        sculpt_tolerance: float = 0.02,
        oracle_rounds: int = 6,
        heads_starts: int = 20,
        heads_net_points: int = 64,
        heads_max_tuples: int = 2500,
        polish: bool = True,
        alpha: float = 0.0,
        validation_fraction: float = 0.1,
        tol: float = 1e-10,
        max_iter: int = 100,
        n_jobs: int | None = None,
        random_state: Any = None,
        verbose: int | bool = 0,
    ) -> None:
        self.n_heads = n_heads
        self.n_tokens = n_tokens
        self.readout = readout
        self.fit_intercept = fit_intercept
        self.span = span
        self.max_heads = max_heads
        self.stage_samples = stage_samples
        self.refine_fraction = refine_fraction
        self.refine_rounds = refine_rounds
        self.sculpt_fraction = sculpt_fraction
        self.sculpt_interior = sculpt_interior
        self.sculpt_vertex = sculpt_vertex
        self.sculpt_margin = sculpt_margin
        self.sculpt_tolerance = sculpt_tolerance
        self.oracle_rounds = oracle_rounds
        self.heads_starts = heads_starts
        self.heads_net_points = heads_net_points
        self.heads_max_tuples = heads_max_tuples
        self.polish = polish
        self.alpha = alpha
        self.validation_fraction = validation_fraction
        self.tol = tol
        self.max_iter = max_iter
        self.n_jobs = n_jobs
        self.random_state = random_state
        self.verbose = verbose

    @fit_context(prefer_skip_nested_validation=True)
    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> MultiHeadAttentionLearner:
        """Learn the layer.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_tokens, n_features) or (n_samples, n_tokens * n_features)
        y : array-like
            ``(n, k, d_out)`` or ``(n, k * d_out)`` for ``readout="tokens"``, else ``(n,)`` or ``(n, d_out)``.
        sample_weight : array-like of shape (n_samples,), default=None

        Returns
        -------
        self
        """
        try:
            tokens, labels, layout = check_training_set(
                self, X, y, n_tokens=self.n_tokens, readout=self.readout  # type: ignore[arg-type]
            )
            weights = check_weights(sample_weight, tokens)
            generator = as_generator(self.random_state)
            with threadpool_limits(1, user_api="blas"):
                examples = make_examples(
                    tokens,
                    labels,
                    readout=self.readout,  # type: ignore[arg-type]
                    fit_intercept=self.fit_intercept,
                    sample_weight=weights,
                    random_state=generator,
                )
                stages = self._learn(examples, generator)
            self._assign(stages, layout)
        except BaseException:
            # Also on Ctrl-C: half a fit, or an old layer with new feature counts, is no fit.
            forget_fit(self)
            raise
        self._warn(examples)
        return self

    def _learn(self, examples: Examples, generator: np.random.Generator) -> dict[str, Any]:
        """Call the stages in order; return their results by name."""
        some = examples.first(self.stage_samples)
        penalties = {"ridge": float(self.alpha), "attention_ridge": float(self.alpha)}
        crude = estimate_crude_sum(some)
        refined, sculpture = self._sculpt(some, crude.internal)
        n_heads = None if self.n_heads == "auto" else int(self.n_heads)
        span = estimate_span(
            some,
            sculpture,
            source=self.span,  # type: ignore[arg-type]
            n_heads=n_heads,
            max_heads=n_heads or self.max_heads,
            oracle_rounds=self.oracle_rounds,
            generator=generator,
        )
        heads = find_heads(
            examples,
            span,
            n_heads=n_heads,
            max_heads=self.max_heads,
            n_starts=self.heads_starts,
            n_points=self.heads_net_points,
            max_tuples=self.heads_max_tuples,
            polish=self.polish,
            validation_fraction=self.validation_fraction,
            max_iter=self.max_iter,
            **penalties,
            generator=generator,
        )
        results = {
            "crude_sum": crude,
            "sculpt": sculpture,
            "refine_sum": refined,
            "span": span,
            "heads": heads,
        }
        if self.polish:
            results["polish"] = polish(
                examples, heads.attention, tol=self.tol, max_iter=self.max_iter, n_jobs=self.n_jobs, **penalties
            )
        return results

    def _sculpt(self, examples: Examples, total: Array) -> tuple[RefinedSum, Sculpture]:
        """Refine the sum until its agreeing rows agree no better, then sculpt."""
        refined = refine_sum(examples, total, fraction=self.refine_fraction)
        for _ in range(self.refine_rounds - 1):
            if not refined.improved or refined.disagreement < EXACT_AGREEMENT:
                break
            again = refine_sum(examples, refined.internal, fraction=self.refine_fraction)
            if again.disagreement > 0.9 * refined.disagreement:
                break
            refined = again
        sculpture = sculpt(
            examples,
            refined.internal,
            fraction=self.sculpt_fraction,
            interior=self.sculpt_interior,
            vertex=self.sculpt_vertex,
            margin=self.sculpt_margin,
            tolerance=self.sculpt_tolerance,
            max_heads=self.max_heads,
        )
        return refined, sculpture

    def _assign(self, stages: dict[str, Any], layout: Layout) -> None:
        self.stages_ = Stages(stages)
        last = stages.get("polish", stages["heads"])
        self.layer_: AttentionLayer = last.layer
        self.attention_matrices_ = self.layer_.attention
        self.projection_matrices_ = self.layer_.projection
        self.key_bias_ = self.layer_.key_bias
        self.intercept_ = self.layer_.intercept
        self.n_heads_ = self.layer_.n_heads
        self.n_tokens_ = layout.n_tokens
        self.n_iter_ = stages["polish"].n_iter if "polish" in stages else 1
        self._layout = layout

    def _warn(self, examples: Examples) -> None:
        """Say what is usable but short of what was asked."""
        polished = self.stages_.get("polish")
        unknowns = examples.n_unknowns(self.n_heads_)
        equations = examples.n_samples * examples.equations_per_sample
        if examples.n_tokens > 1 and equations < unknowns and not self.alpha > 0:
            message = (
                f"The layer is not identifiable: {examples.n_samples} distinct samples give {equations} "
                f"equations for the {unknowns} unknowns of {self.n_heads_} head"
                f"{'s' if self.n_heads_ > 1 else ''}, so this is one of many layers that fit. Give at least "
                f"{examples.information_limit(self.n_heads_)} samples, better three times as many, lower "
                "n_heads, or set alpha > 0."
            )
        elif polished is not None and not polished.converged:
            message = (
                f"polish: the estimated parameter error {polished.parameter_error:.1e} is above "
                f"tol={self.tol:g} after {polished.n_iter} steps. Raise max_iter, give more samples, set "
                "alpha > 0 (on noise the best attention may be infinite), or accept the fit if its score is "
                "good enough."
            )
        else:
            return
        warnings.warn(message, ConvergenceWarning, stacklevel=3)

    def predict(self, X: Any) -> Array:
        """Evaluate the learned layer, in the layout that y had in ``fit``.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_tokens, n_features) or (n_samples, n_tokens * n_features)

        Returns
        -------
        ndarray
            ``(n, k, d_out)``, ``(n, k * d_out)``, ``(n, d_out)`` or ``(n,)``.
        """
        check_is_fitted(self)
        tokens = check_tokens(self, X, self._layout)
        outputs = predict_readout(self.layer_, tokens, self.readout)  # type: ignore[arg-type]
        return self._layout.restore(outputs)

    def attention_weights(self, X: Any) -> Array:
        """Return the learned attention patterns.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_tokens, n_features) or (n_samples, n_tokens * n_features)

        Returns
        -------
        ndarray of shape (n_samples, n_heads, n_tokens, n_tokens)
        """
        check_is_fitted(self)
        return self.layer_.attention_weights(check_tokens(self, X, self._layout))

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """Return R^2, the mean over all output columns, for 2-D and 3-D y alike.

        Parameters
        ----------
        X : array-like
        y : array-like
            In any layout that ``fit`` accepts.
        sample_weight : array-like of shape (n_samples,), default=None

        Returns
        -------
        float
        """
        predicted = self.predict(X)
        truth = check_targets(y, self._layout)
        return float(r2_score(truth, predicted.reshape(len(predicted), -1), sample_weight=sample_weight))

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        tags.input_tags.three_d_array = True
        # Columns as tokens are interchangeable, up to the one that asks: a label that hangs on
        # one certain column is out of reach.
        tags.regressor_tags.poor_score = self.n_tokens not in (None, 1)
        return tags
