"""The estimator: validate, run the stages in order, assign attributes."""

from __future__ import annotations

import warnings
from numbers import Integral, Real
from typing import Any, ClassVar

import numpy as np
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.metrics import r2_score
from sklearn.utils.validation import check_is_fitted

from ._documentation import DocumentationLink
from ._examples import Examples, make_examples
from ._forward import Array
from ._progress import SILENT, CallbackSupportMixin, Progress, fit_progress
from ._report import Stages
from ._threads import threads_of_blas
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
from ._verbosity import shown
from .layer import AttentionLayer, predict_readout
from .stages import (
    EXACT_AGREEMENT,
    Certificate,
    RefinedSum,
    Sculpture,
    certify,
    estimate_crude_sum,
    estimate_span,
    estimate_uncertainty,
    find_heads,
    polish,
    refine_sum,
    residual_of,
    sculpt,
)

# Samples of the early stages: for starts among others, for the only starts, for answers.
_SAMPLES_TO_START, _SAMPLES_TO_SUFFICE, _SAMPLES_TO_KEEP = 1000, 2000, 50_000


class MultiHeadAttentionLearner(CallbackSupportMixin, DocumentationLink, RegressorMixin, BaseEstimator):
    """Learn a multi-head attention layer from examples of its inputs and outputs.

    The model is ``F(X) = sum_i softmax(X Theta_i X^T + 1 (X u_i)^T) X W_i + 1 c^T``, the softmax row
    by row. The learner finds the number of heads and every head's attention matrix ``Theta_i``, key
    bias ``u_i`` and projection matrix ``W_i``, by the stages of Chen and Li [1]_ and a polish to machine
    precision. On data that no such layer made it gives the best one that it finds.

    Parameters
    ----------
    n_heads : "auto" or int >= 1, default="auto"
        Number of heads. "auto" counts them: spectral gaps propose, held-out error decides. Without
        noise that is the number that fits to rounding while one head fewer does not; with noise the
        smallest whose held-out error is within one standard error of the best. Give a number if you
        know it (faster), or to get the best fit with fewer heads than there are. Heads beyond what
        helps stay zero: without noise those that leave the fit exact, with noise those that lower
        the squared residual by less than about five noise variances for each of their numbers, as
        superfluous ones do.
    n_tokens : int >= 1, "features" or None, default=None
        How the columns of a 2-D `X` make tokens: that many tokens, one after the other; "features"
        makes every column a token of width one; None makes a row one token, and the model linear
        regression. A 3-D `X` brings its own tokens, and a number given is only checked.
    readout : {"tokens", "first", "mean"}, default="tokens"
        What `y` shows of the layer's output rows: all of them, the first token's, or their mean.
    fit_intercept : bool, default=True
        Whether to fit the key biases ``u_i`` and the output intercept ``c``. Without, tokens are not
        centred either. Set False if you know that the layer has none: fewer samples are needed.
    span : {"auto", "sculpt", "oracle", "moments"}, default="auto"
        Where the search for heads looks: in the affine hull that the certified rows sculpted, in the
        same found by membership queries only (at most 150 matrix entries, slow), in the span of the
        interaction moments, or, with "auto", in sculpted hull and moment span and from random starts,
        held-out samples deciding. Naming one source excludes all others, random starts too, unless the
        source has nothing to say.
    max_heads : int >= 1, default=16
        Largest number that "auto" tries. Never more than the equations can determine.
    stage_samples : int >= 1 or "auto", default="auto"
        Samples that the first four stages look at. Before a polish they only have to be roughly right,
        and their time is proportional to it: "auto" means 1000; 2000 if a source of the `span` is named,
        which then has to suffice; and 50,000 if nothing is polished. Raise it if `stages_` shows that few
        rows were certified.
    refine_fraction : float in (0, 1], default=0.005
        Smallest fraction of the rows, the best agreeing, that the sum of projections is refined on; at
        least six equations an unknown are kept. Smaller has less bias and needs more samples.
    refine_rounds : int >= 1, default=2
        Largest number of refinements; they end earlier where the rows agree no better.
    sculpt_fraction : float in (0, 1], default=0.05
        Fraction of the interior rows to certify, the best fitting first; at least twelve equations an
        unknown are kept if there are as many. Smaller certifies less and more surely.
    sculpt_interior : float in (0, 0.5), default=0.02
        Smallest entry of a certified row's pattern. Log-odds amplify errors by its inverse. From
        ``1 / n_tokens`` on no row is interior.
    sculpt_vertex : float in (0, 0.5), default=0.02
        Largest weight off one token with which a row is certified as a half-space instead.
    sculpt_margin : float > 0, default=2.0
        Log-odds taken off what such a row measures before it counts as certain for every head. Larger
        is safer and cuts less: with 2 no promise was broken on generic heads, with 1 one in a thousand;
        raise it where some heads' projections are much smaller than others'.
    sculpt_tolerance : float > 0, default=0.02
        Largest squared residual of a certified row relative to the label power. With noise, its
        share of the label power should stay below this, or nothing is certified.
    oracle_rounds : int >= 1, default=6
        Rounds of hit-and-run for ``span="oracle"``; each doubles what the last knew of the body's shape.
    heads_starts : int >= 1, default=20
        Random starts for a given number of heads; the search ends with the first exact fit, or when two
        starts end in the same place. More starts help with many heads close to the information limit.
    heads_net_points : int >= 2, default=64
        Points of the net in a span. The covering radius falls as ``points^(-1 / dimensions)``: the
        exponential price that [1]_ states.
    heads_max_tuples : int >= 1, default=2500
        Largest number of tuples of net points to regress on, for one span.
    polish : bool, default=True
        Whether to take the heads to machine precision (or to the least-squares solution, with noise).
        False is the algorithm of [1]_ alone, with heads to within tens of per cent.
    alpha : float >= 0, default=0.0
        Weight of the penalty ``alpha * sum_i (|W_i|^2 + |Theta_i|^2 + |u_i|^2)`` against the mean, over
        label rows, of the squared residual. Matrices are measured for tokens of (nearly) unit covariance
        and labels of unit power: ``|Theta_i|^2`` is then the mean squared score of independent query and
        key, ``|W_i|^2`` the label power that the head makes with hard attention, and `alpha` has no
        unit. The intercept is free. With independent Gaussian matrix entries of variance v and noise
        of variance s (relative to the labels'), ``alpha = s / v / n_rows`` is the Bayesian choice, so
        the best value falls with the number of samples; with one token and ``fit_intercept`` the fit is
        ridge regression on whitened features with a penalty of ``alpha * n_samples``. Use 0 without
        noise; with noise, search 1e-5 to 1e-1. Any positive value keeps scores finite where the best
        attention would be infinite. Heads are counted on held-out samples without the penalty.
    validation_fraction : float in (0, 1), default=0.1
        Share of the samples, at most 4096, that choose among candidates and count heads, fewer where
        samples are scarce. The search does not train on them, the polish does.
    tol : float > 0, default=1e-10
        Relative accuracy of the attention matrices at which the polish stops.
    max_iter : int >= 1, default=100
        Largest number of solver steps: of a start, and of each part of the polish.
    n_jobs : int or None, default=None
        Threads for passes over all samples, as in :class:`joblib.Parallel`; under
        ``joblib.parallel_config("dask")`` a cluster takes them. The result does not depend on it.
    random_state : int, RandomState, Generator or None, default=None
        Seeds starts, nets and the held-out split. Pass an int for the same result every time; a
        RandomState or Generator is advanced.
    verbose : int or bool, default=0
        1 shows a line for every stage, 2 also every candidate. The lines go to the logger
        ``"sklearn_mhal"``; for the time of the fit its level is lowered, and if no handler is set up
        anywhere, one that writes to stderr is. With 0 the lines are still there for whoever sets the
        logger's level.

    Attributes
    ----------
    layer_ : AttentionLayer
        The learned layer.
    attention_matrices_ : ndarray of shape (n_heads_, d, d)
        ``Theta_i``, queries on the left.
    projection_matrices_ : ndarray of shape (n_heads_, d, d_out)
        ``W_i``.
    key_bias_ : ndarray of shape (n_heads_, d)
        ``u_i``; zeros without `fit_intercept`.
    intercept_ : ndarray of shape (d_out,)
        ``c``; zeros without `fit_intercept`.
    n_heads_ : int
        Number of heads.
    n_tokens_ : int
        Tokens a sample.
    n_iter_ : int
        Solver steps of the polish; 1 without.
    stages_ : Mapping
        Every stage's result by name, in order: "crude_sum", "sculpt", "refine_sum", "span", "heads",
        "polish". Each has `seconds`, `message` and what it estimated; printed, they are a table.
    certificate_ : Certificate
        What the data proves about the layer: held-out error, spectrum of the information matrix, weak
        heads, distances to the sculpted body, and without noise a radius inside which no second
        solution lies. `certificate_.verdict` says it in a sentence.
    noise_std_ : float
        Standard deviation of the label noise, from the residual and its degrees of freedom.
    attention_std_errors_ : ndarray of shape (n_heads_, d, d) or None
        Standard errors of the attention matrices: asymptotic, for independent label noise, weights
        counting as repetitions. Zeros without noise; None where some parameter is not determined or
        the layer has more than 5000 attention parameters.
    projection_std_errors_ : ndarray of shape (n_heads_, d, d_out) or None
        The same for the projection matrices.
    key_bias_std_errors_ : ndarray of shape (n_heads_, d) or None
        The same for the key biases.
    intercept_std_errors_ : ndarray of shape (d_out,) or None
        The same for the intercept.
    n_features_in_ : int
        Columns of a 2-D `X`, the last axis of a 3-D one.
    feature_names_in_ : ndarray of shape (n_features_in_,)
        Defined only when the columns of `X` have names that are all strings.

    See Also
    --------
    AttentionLayer : The layer itself: forward map, patterns, standard transformer weights.
    BooleanAttentionSampler : Layers and examples to learn from.
    head_recovery_error : How far a learned layer is from the true one.
    TokenPositionEncoder : Appends positions to tokens, so that order can matter.
    sklearn.linear_model.Ridge : What this is with a single token.

    Notes
    -----
    What examples can tell. The order of the heads cannot be told. A single token a sample shows only the
    sum of the projections: the fit is linear regression and reports one head. Heads with equal attention
    matrices are one head with the sum of their projections, and are merged; asked for more heads than there
    are, the others stay zero. A head with zero projection does not show, nor does what attention does
    in directions that no token has; entries there are returned as zero.

    Fewer than ``n_heads * d * (d + 1 + d_out) + d_out`` numbers in `y` determine no layer; the fit then
    warns, and three times as many are a comfortable minimum. The warning, a
    :class:`~sklearn.exceptions.ConvergenceWarning`, also comes when the polish fell short of `tol`.

    The search for heads is exponential in their number in the worst case [1]_. A fit that did not find
    the layer shows it in ``stages_["heads"].held_out_error``, `score` and ``stages_["polish"].error``.

    Labels with three dimensions. What passes samples on whole, such as
    :class:`~sklearn.model_selection.GridSearchCV`, takes them. Metrics, scorers given by name and wrappers
    that look into `y`, such as :class:`~sklearn.compose.TransformedTargetRegressor` and
    :class:`~sklearn.multioutput.MultiOutputRegressor`, know two dimensions only and refuse the third in
    words of their own: give them ``y.reshape(len(y), -1)``; `predict` then returns that layout too.

    Memory beyond the data: a chunk of at most ``working_memory`` (:func:`sklearn.set_config`) or 8 MiB,
    whichever is less, for each thread; 50 bytes a sample while equal samples are looked for; the samples
    that are looked at together, which are `stage_samples`, at most 4096 held out and 128 times the least
    number that determines the layer, at ``8 k (4 d + m (3 d + 4 k + 3 d_out))`` bytes each, some of it
    twice; and for the certificate a few matrices with a row for every attention parameter, if those are
    at most 5000. Nothing else grows with the number of samples: 100,000 samples of 16 tokens stay under
    300 MiB. `predict` needs a chunk and its result.

    Threads: large problems use as many as BLAS may use when `fit` is called, whatever `n_jobs` is; results do
    not depend on their number.

    Progress: ``set_callbacks`` takes scikit-learn's callbacks, for instance
    :class:`sklearn.callback.ProgressBar`, which moves with the stages and the solver's steps.

    References
    ----------
    .. [1] S. Chen and Y. Li, "Provably learning a multi-head attention layer", STOC 2025,
       `arXiv:2402.04084 <https://arxiv.org/abs/2402.04084>`_.
    .. [2] G. H. Golub and V. Pereyra, "The differentiation of pseudo-inverses and nonlinear least
       squares problems whose variables separate", SIAM J. Numer. Anal. 10, 1973: the polish.

    Examples
    --------
    >>> from sklearn_mhal import MultiHeadAttentionLearner, make_boolean_attention
    >>> X, y = make_boolean_attention(n_samples=500, n_heads=2, n_tokens=3, n_features=6, random_state=0)
    >>> learner = MultiHeadAttentionLearner(n_tokens=3, random_state=0).fit(X, y)
    >>> learner.n_heads_
    2
    >>> learner.attention_matrices_.shape
    (2, 6, 6)
    >>> learner.score(X, y) > 1 - 1e-12
    True
    >>> learner.attention_weights(X[:1]).sum(axis=3).round(12)  # samples, heads, queries
    array([[[1., 1., 1.],
            [1., 1., 1.]]])
    """

    _parameter_constraints: ClassVar[dict[str, list[Any]]] = {
        "n_heads": [StrOptions({"auto"}), Interval(Integral, 1, None, closed="left")],
        "n_tokens": [None, StrOptions({"features"}), Interval(Integral, 1, None, closed="left")],
        "readout": [StrOptions({"tokens", "first", "mean"})],
        "fit_intercept": ["boolean"],
        "span": [StrOptions({"auto", "sculpt", "oracle", "moments"})],
        "max_heads": [Interval(Integral, 1, None, closed="left")],
        "stage_samples": [StrOptions({"auto"}), Interval(Integral, 1, None, closed="left")],
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
        stage_samples: int | str = "auto",
        refine_fraction: float = 0.005,
        refine_rounds: int = 2,
        sculpt_fraction: float = 0.05,
        sculpt_interior: float = 0.02,
        sculpt_vertex: float = 0.02,
        sculpt_margin: float = 2.0,
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
            What knows two dimensions only needs ``y.reshape(len(y), -1)``; see the class's Notes.
        sample_weight : array-like of shape (n_samples,), default=None

        Returns
        -------
        self
        """
        try:
            tokens, labels, layout = check_training_set(
                self,
                X,
                y,
                n_tokens=self.n_tokens,
                readout=self.readout,  # type: ignore[arg-type]
            )
            weights = check_weights(sample_weight, tokens)
            generator = as_generator(self.random_state)

            def fitted(layer: AttentionLayer) -> dict[str, Any]:
                return _attributes(layer, layout)

            with (
                threads_of_blas(),
                # OpenBLAS raises this flag for lanes of its kernels that hold nothing (numpy's issue
                # 24067); a layer with a number that is none cannot be made.
                np.errstate(invalid="ignore"),
                shown(self.verbose),
                fit_progress(self, X, y, sample_weight, n_tasks=6 + self.polish, fitted=fitted) as progress,
            ):
                examples = make_examples(
                    tokens,
                    labels,
                    readout=self.readout,  # type: ignore[arg-type]
                    fit_intercept=self.fit_intercept,
                    sample_weight=weights,
                    random_state=generator,
                )
                stages = self._learn(examples, generator, progress)
                self._assign(stages, layout)
        except BaseException:
            # Also on Ctrl-C: half a fit, or an old layer with new feature counts, is no fit.
            forget_fit(self)
            raise
        self._warn(examples)
        return self

    def _learn(
        self, examples: Examples, generator: np.random.Generator, progress: Progress = SILENT
    ) -> dict[str, Any]:
        """Call the stages in order; return their results by name."""
        some = examples.first(self._n_stage_samples())
        penalties = {"ridge": float(self.alpha), "attention_ridge": float(self.alpha)}
        with progress.task("crude_sum"):
            crude = estimate_crude_sum(some)
        refined, sculpture = self._sculpt(some, crude.internal, progress)
        n_heads = None if self.n_heads == "auto" else int(self.n_heads)
        with progress.task("span"):
            span = estimate_span(
                some,
                sculpture,
                source=self.span,  # type: ignore[arg-type]
                n_heads=n_heads,
                max_heads=n_heads or self.max_heads,
                oracle_rounds=self.oracle_rounds,
                generator=generator,
            )
        with progress.task("heads", n_steps=None) as finding:
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
                progress=finding,
            )
            finding.found(lambda: heads.layer)
        results: dict[str, Any] = {
            "crude_sum": crude,
            "sculpt": sculpture,
            "refine_sum": refined,
            "span": span,
            "heads": heads,
        }
        if self.polish and not finding.stopped:
            with progress.task("polish", n_steps=3) as polishing:
                polished = polish(
                    examples,
                    heads.attention,
                    tol=self.tol,
                    max_iter=self.max_iter,
                    noisy=not heads.exact,
                    n_idle=heads.n_idle,
                    n_jobs=self.n_jobs,
                    **penalties,
                    progress=polishing,
                )
                polishing.found(lambda: polished.layer)
            results["polish"] = polished
        last: Any = results.get("polish", heads)
        with progress.task("certificate"):
            residual = residual_of(examples, last, n_jobs=self.n_jobs)
            certificate = certify(
                examples, last.layer, last.attention, residual=residual, heads=heads, sculpture=sculpture
            )
            uncertainty = estimate_uncertainty(
                examples,
                last.attention,
                residual=residual,
                locally_identified=certificate.locally_identified,
            )
        results |= {"certificate": certificate, "uncertainty": uncertainty}
        return results

    def _n_stage_samples(self) -> int:
        if self.stage_samples != "auto":
            return int(self.stage_samples)
        if not self.polish:
            return _SAMPLES_TO_KEEP
        return _SAMPLES_TO_START if self.span == "auto" else _SAMPLES_TO_SUFFICE

    def _sculpt(self, examples: Examples, total: Array, progress: Progress) -> tuple[RefinedSum, Sculpture]:
        """Refine the sum until its agreeing rows agree no better, then sculpt."""
        with progress.task("refine_sum", n_steps=self.refine_rounds) as rounds:
            refined = refine_sum(examples, total, fraction=self.refine_fraction)
            stopped = rounds.step("round")
            for _ in range(self.refine_rounds - 1):
                if stopped or not refined.improved or refined.disagreement < EXACT_AGREEMENT:
                    break
                again = refine_sum(examples, refined.internal, fraction=self.refine_fraction)
                stopped = rounds.step("round")
                if again.disagreement > 0.9 * refined.disagreement:
                    break
                refined = again
        with progress.task("sculpt"):
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
        self.certificate_: Certificate = stages.pop("certificate")
        uncertainty = stages.pop("uncertainty")
        self.noise_std_ = uncertainty.noise_std
        self.attention_std_errors_ = uncertainty.attention
        self.projection_std_errors_ = uncertainty.projection
        self.key_bias_std_errors_ = uncertainty.key_bias
        self.intercept_std_errors_ = uncertainty.intercept
        last = stages.get("polish", stages["heads"])
        for name, value in _attributes(last.layer, layout).items():
            setattr(self, name, value)
        # Standard errors have the shapes of what they belong to; without them the pickle is padded.
        room = (
            0
            if uncertainty.attention is not None
            else sum(array.nbytes for array in vars(last.layer).values())
        )
        self.stages_ = Stages(stages, room=room)
        self.n_iter_ = stages["polish"].n_iter if "polish" in stages else 1

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
        return self._layout.restore(predict_readout(self.layer_, tokens, self._layout.readout))

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


def _attributes(layer: AttentionLayer, layout: Layout) -> dict[str, Any]:
    """Return what an estimator needs, besides the stages, to predict with a layer."""
    return {
        "layer_": layer,
        "attention_matrices_": layer.attention,
        "projection_matrices_": layer.projection,
        "key_bias_": layer.key_bias,
        "intercept_": layer.intercept,
        "n_heads_": layer.n_heads,
        "n_tokens_": layout.n_tokens,
        "_layout": layout,
    }
