"""The examples as the stages see them: white tokens, centred labels, a fixed lot for each.

Three things are settled here so that no stage has to think of them.

*Units.* Tokens are mapped to ``z = (x - shift) T`` with (nearly) zero mean and unit covariance
and labels to unit power, chunk by chunk, so the data is never copied whole. The affine map is
closed under this change, and :meth:`Examples.layer` carries parameters back.

*Order.* A sample's lot is a hash of its contents and the seed. Splits and subsets follow the
lots, so the order of the samples does not matter.

*Weights.* Equal samples are merged and their weights added, samples of weight 0 are gone: a
sample of weight 2 is the sample given twice, in every stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from ._forward import Array, Readout, TokenRows
from ._memory import samples_per_chunk
from ._problem import Problem
from ._units import Units

Made = TypeVar("Made")

# Below this departure from zero mean and unit covariance tokens are left as they are: the
# solver's preconditioner absorbs it, and parameters keep the user's units.
_WHITE_ENOUGH = 0.1
# Directions of the token correlation matrix under this carry rounding noise, not tokens.
_RANK_TOLERANCE = 1e-10


@dataclass(frozen=True, eq=False, repr=False)
class Examples:
    """Samples of one layer with everything that the equations need.

    Build with :func:`make_examples`. All arrays are references to the caller's and never
    written to.
    """

    tokens: Array
    """(n, k, d), any numeric dtype."""
    labels: Array
    """(n, r, d_out) with r = k for ``readout="tokens"``, else 1."""
    readout: Readout
    order: Array
    """Positions of the distinct samples, by lot."""
    weights: Array | None
    """Weights along `order`, mean 1; None if all are equal."""
    total_weight: float
    """Of all samples together, as given: the number of samples, without weights."""
    units: Units

    @property
    def fit_intercept(self) -> bool:
        """Whether the map is affine: key biases and an intercept."""
        return self.units.fit_intercept

    @property
    def n_samples(self) -> int:
        """Number of distinct samples of positive weight."""
        return len(self.order)

    @property
    def n_tokens(self) -> int:
        """``k``."""
        return int(self.tokens.shape[1])

    @property
    def n_features(self) -> int:
        """``d``, less the directions in which no token varies."""
        return self.units.width

    @property
    def n_outputs(self) -> int:
        """``d_out``."""
        return int(self.labels.shape[2])

    @property
    def query_width(self) -> int:
        """Rows of the stacked attention: ``d``, or ``d + 1`` with key biases."""
        return self.n_features + int(self.fit_intercept)

    @property
    def equations_per_sample(self) -> int:
        """Numbers that one sample gives."""
        return int(self.labels.shape[1]) * self.n_outputs

    def n_unknowns(self, n_heads: int) -> int:
        """Return the number of parameters of a layer with that many heads.

        A single token a sample hides the attention altogether.
        """
        seen = self.query_width if self.n_tokens > 1 else 0
        per_head = self.n_features * (seen + self.n_outputs)
        return (n_heads if self.n_tokens > 1 else 1) * per_head + int(self.fit_intercept) * self.n_outputs

    def information_limit(self, n_heads: int) -> int:
        """Return the least number of samples whose equations outnumber the unknowns."""
        return -(-self.n_unknowns(n_heads) // self.equations_per_sample)

    def between(self, start: int, stop: int) -> Examples:
        """Return the samples whose lots rank from `start` to `stop`."""
        weights = None if self.weights is None else self.weights[start:stop]
        return replace(self, order=self.order[start:stop], weights=weights)

    def first(self, n_samples: int) -> Examples:
        """Return the samples with the smallest lots."""
        return self.between(0, n_samples)

    def pick(self, ranks: Array) -> Examples:
        """Return the samples of the given lot ranks."""
        weights = None if self.weights is None else self.weights[ranks]
        return replace(self, order=self.order[ranks], weights=weights)

    def white_tokens(self) -> Array:
        """Return the tokens in internal units, float64."""
        return self.units.tokens_in(self.tokens[self.order])

    def white_labels(self) -> Array:
        """Return the labels in internal units, unweighted, shape (n, r, d_out)."""
        return self.units.labels_in(self.labels[self.order])

    def problem(self, *, ridge: float = 0.0, attention_ridge: float = 0.0) -> Problem:
        """Return the least-squares problem of these samples, held in memory."""
        root_weights = None if self.weights is None else np.sqrt(self.weights)
        rows = TokenRows(
            self.white_tokens(),
            affine=self.fit_intercept,
            readout=self.readout,
            root_weights=root_weights,
        )
        labels = self.white_labels().reshape(rows.n_rows, self.n_outputs)
        if rows.row_scale is not None:
            labels *= rows.row_scale[:, None]
        power = float(rows.n_rows)
        return Problem(
            rows,
            labels,
            fit_intercept=self.fit_intercept,
            ridge=ridge * power,
            attention_ridge=attention_ridge * power,
        )

    def cached(self, name: str, make: Callable[[Examples], Made]) -> Made:
        """Return what `make` makes of these examples, the same object every time."""
        cache = self.__dict__.setdefault("_cache", {})
        if name not in cache:
            cache[name] = make(self)
        made: Made = cache[name]
        return made

    def chunk_size(self, n_heads: int) -> int:
        """Return how many samples, with their derivatives, a pass may hold at a time."""
        per_token = n_heads * (3 * self.n_features + 4 * self.n_tokens + 2 * self.n_outputs)
        per_sample = 8 * self.n_tokens * (per_token + 4 * self.n_features)
        return samples_per_chunk(per_sample, self.n_samples)

    def chunks(self, n_heads: int) -> Iterator[Examples]:
        """Yield all samples, a bounded number at a time: in memory order, or by lot if all at once.

        Lots make sums of the same samples equal to the last bit, wherever they lie.
        """
        size = self.chunk_size(n_heads)
        if size >= self.n_samples:
            yield self
            return
        ranks = np.argsort(self.order, kind="stable")
        for start in range(0, self.n_samples, size):
            yield self.pick(ranks[start : start + size])


def _lots(tokens: Array, labels: Array, seed: np.random.Generator) -> Array:
    """Hash every sample's contents to 64 bits, the same for any dtype that holds the same values."""
    n_samples = len(tokens)
    flat_tokens, flat_labels = tokens.reshape(n_samples, -1), labels.reshape(n_samples, -1)
    width = flat_tokens.shape[1] + flat_labels.shape[1]
    keys = seed.integers(2**63, size=width, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
    lots = np.empty(n_samples, dtype=np.uint64)
    size = samples_per_chunk(24 * width, n_samples)
    for start in range(0, n_samples, size):
        part = slice(start, start + size)
        # Adding zero turns -0.0 into 0.0, which compare equal and must hash equal.
        bits = np.concatenate([flat_tokens[part], flat_labels[part]], axis=1, dtype=np.float64) + 0.0
        words = bits.view(np.uint64)
        # The low bits of simple numbers are all zero, and a product only carries upwards.
        mixed = (words ^ (words >> np.uint64(32))) * keys
        mixed ^= mixed >> np.uint64(29)
        total = (mixed * keys).sum(axis=1, dtype=np.uint64)
        total ^= total >> np.uint64(32)
        lots[part] = total * np.uint64(0x9E3779B97F4A7C15)
    return lots


def _merge(lots: Array, sample_weight: Array | None) -> tuple[Array, Array | None]:
    """Return positions by lot and their weights, equal samples merged."""
    if sample_weight is None:
        order = np.argsort(lots, kind="stable")
        ranked = lots[order]
        new = np.concatenate([[True], ranked[1:] != ranked[:-1]])
        if new.all():
            return order, None
        weights = np.diff(np.append(np.flatnonzero(new), len(lots))).astype(np.float64)
        return order[new], weights / weights.mean()
    kept = np.flatnonzero(sample_weight > 0)
    order = kept[np.argsort(lots[kept], kind="stable")]
    ranked = lots[order]
    new = np.concatenate([[True], ranked[1:] != ranked[:-1]])
    weights = np.add.reduceat(sample_weight[order].astype(np.float64), np.flatnonzero(new))
    weights = weights / weights.mean()
    return order[new], None if np.all(weights == weights[0]) else weights


def _token_moments(examples: Examples) -> tuple[Array, Array]:
    """Return the weighted mean and covariance of the tokens.

    Summed about a token, so that a mean far larger than the deviations leaves them their digits.
    """
    d = examples.n_features
    total, moment, mass = np.zeros(d), np.zeros((d, d)), 0.0
    origin = examples.first(1).white_tokens()[0, 0]
    for chunk in examples.chunks(1):
        tokens = chunk.white_tokens() - origin
        weighted = tokens if chunk.weights is None else tokens * chunk.weights[:, None, None]
        total += weighted.sum(axis=(0, 1))
        moment += weighted.reshape(-1, d).T @ tokens.reshape(-1, d)
        mass += tokens.shape[1] * (len(tokens) if chunk.weights is None else float(chunk.weights.sum()))
    offset = total / mass
    return origin + offset, moment / mass - np.outer(offset, offset)


def _whitener(moment: Array) -> Array | None:
    """Return ``T`` with ``T^T moment T = I`` on the tokens' support, None if near enough.

    Symmetric where the tokens vary in every direction, else with a column for each that they do.
    """
    diagonal = np.einsum("ii->i", moment)
    if np.abs(moment - np.eye(len(moment))).max() <= _WHITE_ENOUGH:
        return None
    scale = np.where(diagonal > 0, np.sqrt(np.maximum(diagonal, 1e-300)), 1.0)
    values, vectors = np.linalg.eigh(moment / np.outer(scale, scale))
    kept = values > _RANK_TOLERANCE * max(float(values[-1]), 1e-300)
    roots = np.where(kept, 1.0 / np.sqrt(np.where(kept, values, 1.0)), 0.0)
    if kept.all():
        return (vectors * roots) @ vectors.T / scale[:, None]
    # Where no token varies at all, one direction stands for the others.
    kept[-1] = True
    return (vectors * roots)[:, kept] / scale[:, None]


def make_examples(
    tokens: Array,
    labels: Array,
    *,
    readout: Readout = "tokens",
    fit_intercept: bool = False,
    sample_weight: Array | None = None,
    random_state: Any = None,
) -> Examples:
    """Settle units, order and weights of some samples.

    Parameters
    ----------
    tokens : ndarray of shape (n, k, d)
    labels : ndarray of shape (n, r, d_out)
        ``r = k`` for ``readout="tokens"``, else 1.
    readout : {"tokens", "first", "mean"}
    fit_intercept : bool
        The affine map: key biases and an intercept.
    sample_weight : ndarray of shape (n,), default=None
        Non-negative, not all zero.
    random_state : int, Generator or None
        Seeds the lots.

    Returns
    -------
    examples : Examples
    """
    lots = _lots(tokens, labels, np.random.default_rng(random_state))
    order, weights = _merge(lots, sample_weight)
    n_features, n_outputs = tokens.shape[2], labels.shape[2]
    examples = Examples(
        tokens=tokens,
        labels=labels,
        readout=readout,
        order=order,
        weights=weights,
        total_weight=float(len(tokens) if sample_weight is None else sample_weight.sum()),
        units=Units(
            fit_intercept=fit_intercept,
            shift=np.zeros(n_features),
            whitener=None,
            label_shift=np.zeros(n_outputs),
            label_scale=1.0,
        ),
    )
    mean, covariance = _token_moments(examples)
    power = np.einsum("ii->i", covariance) + mean**2
    centred = fit_intercept and bool((np.abs(mean) > _WHITE_ENOUGH * np.sqrt(power)).any())
    shift = mean if centred else np.zeros(n_features)
    whitener = _whitener(covariance if centred else covariance + np.outer(mean, mean))
    if whitener is None and np.any(shift):
        whitener = np.eye(n_features)
    label_shift, label_scale = _label_units(examples)
    units = Units(
        fit_intercept=fit_intercept,
        shift=shift,
        whitener=whitener,
        label_shift=label_shift,
        label_scale=label_scale,
    )
    return replace(examples, units=units)


def _label_units(examples: Examples) -> tuple[Array, float]:
    """Return the mean label row and the root mean square about it (about zero without intercept)."""
    labels, order = examples.labels, examples.order
    weights = np.ones(len(order)) if examples.weights is None else examples.weights
    n_rows = labels.shape[1]
    mean = np.zeros(labels.shape[2])
    size = samples_per_chunk(24 * labels.shape[1] * labels.shape[2], len(order))
    parts = [slice(start, start + size) for start in range(0, len(order), size)]
    if examples.fit_intercept:
        for part in parts:
            mean += weights[part] @ labels[order[part]].sum(axis=1, dtype=np.float64)
        mean /= n_rows * weights.sum()
    power = 0.0
    for part in parts:
        centred = labels[order[part]] - mean
        power += float(weights[part] @ np.einsum("nro,nro->n", centred, centred))
    scale = np.sqrt(power / (n_rows * labels.shape[2] * weights.sum()))
    # A constant label leaves rounding noise about its mean; dividing by that would fit noise.
    floor = 1e-13 * float(np.abs(mean).max(initial=0.0))
    return mean, float(scale) if scale > floor else max(floor * 1e13, 1.0)
