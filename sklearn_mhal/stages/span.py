"""Stage 4: the span of the attention matrices, from three sources.

``"sculpt"``: the longest axes of the convex body (stage 2), through its centre: the affine hull.
``"oracle"``: the same by asking the body nothing but membership (section 5 of the paper).
``"moments"``: the leading singular directions of the interaction moments: a linear span.

Heads are then searched inside a *frame*, an origin and a few directions, never in all of
R^(d x d). A source that has nothing certain to say yields no frame and says why.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from .._examples import Examples
from .._forward import Array
from ._agreement import no_agreement
from ._body import ConvexBody
from ._moments import moment_span
from ._oracle import hit_and_run
from ._result import StageResult, timed
from .sculpt import Sculpture

SpanSource = Literal["auto", "sculpt", "oracle", "moments"]

# A drop between singular values below this is what noise makes of equal ones.
_CLEAR_DROP = 1.35
# One hit-and-run step costs one product with a D x D matrix a chain; beyond this many
# coordinates the spectrum answers the same question thousands of times faster.
_ORACLE_LIMIT = 150


@dataclass(frozen=True, eq=False)
class Frame:
    """Where heads are searched: ``origin + coordinates @ directions``."""

    source: str
    origin: Array
    """(D,), internal units."""
    directions: Array
    """(r, D), orthonormal, the most certain first."""
    affine: bool
    """Whether the frame is an affine hull (m heads need m - 1 directions) or a linear span (m)."""
    n_heads: int | None
    """The count that this source proposes; None if it sees no clear gap."""

    def for_heads(self, n_heads: int) -> Frame | None:
        """Return the frame that many heads need, None if this one is too small."""
        needed = n_heads - 1 if self.affine else n_heads
        if len(self.directions) < needed:
            return None
        return Frame(self.source, self.origin, self.directions[:needed], self.affine, self.n_heads)


@dataclass(frozen=True, kw_only=True, eq=False)
class Span(StageResult):
    """The span and where it came from."""

    source: str
    """Which source `basis` is from; "none" if no source had anything to say."""
    basis: Array
    """(r, d, d): directions in the units of the data, orthonormal."""
    origin: Array
    """(d, d): a point of the hull; zeros for a linear span."""
    singular_values: Array
    """Of the interaction moments, descending; empty if they were not computed."""
    n_heads: int | None
    """The proposed number of heads; None if no source sees a clear gap."""
    frames: tuple[Frame, ...] = field(repr=False)
    """Every source's frame, for the search."""
    exclusive: bool
    """Whether the user named one source, so that no other may be used."""


@timed
def estimate_span(
    examples: Examples,
    sculpture: Sculpture | None,
    *,
    source: SpanSource = "auto",
    n_heads: int | None = None,
    max_heads: int = 8,
    oracle_rounds: int = 6,
    generator: np.random.Generator,
) -> Span:
    """Estimate the span from one source, or from the cheap ones ("auto": sculpt and moments).

    Parameters
    ----------
    examples : Examples
    sculpture : Sculpture or None
        Stage 2's result.
    source : {"auto", "sculpt", "oracle", "moments"}
        Which source to ask; see Notes for where each suffices.
    n_heads : int or None
        How many directions `basis` shows; None: as many as proposed.
    max_heads : int
        Largest count proposed.
    oracle_rounds : int
        Rounds of hit-and-run; each doubles what the last one knew of the body's shape.
    generator : numpy.random.Generator

    Returns
    -------
    Span

    Notes
    -----
    Where one source alone leads to ten digits after the polish, from 2000 samples without noise
    (``tests/theory/test_span_sources.py``; elsewhere it may still):

    - "sculpt": ``d_out >= k`` (with fewer outputs a pattern fits every row), heads whose
      projections have comparable size, up to four of them. The directions themselves are close
      (cosine 0.9 and more) for two heads at scales up to 4 and three at scale 1.
    - "oracle": the same body, asked by membership alone, so the same regime with at most 150
      coordinates. The walk agrees with the spectrum to 0.1 radian from six rounds on, and takes
      seconds in 36 coordinates and half a minute in 64 with half-spaces.
    - "moments": three tokens or more, any number of outputs and of heads (tried up to six), heads of
      comparable size. The directions themselves are close (cosine 0.9) from about 20,000 samples.

    Outside these a source that cannot say anything yields no frame and says why.
    """
    frames: list[Frame] = []
    notes: list[str] = []
    values = np.empty(0)
    body = None if sculpture is None else sculpture.body
    if source in ("auto", "sculpt"):
        _add(frames, notes, "sculpt", _sculpted_frame(body, sculpture, max_heads))
    if source == "oracle":
        found = _oracle_frame(body, max_heads, oracle_rounds, generator)
        _add(frames, notes, "oracle", found)
    if source in ("auto", "moments"):
        frame, values = _moment_frame(examples, max_heads, generator)
        _add(frames, notes, "moments", frame)
    proposals = [frame for frame in frames if frame.n_heads is not None]
    # The moments see every row and the spectrum only agreeing ones: where both count, the
    # moments' count is the safer one.
    chosen = proposals[-1] if proposals else frames[-1] if frames else None
    count = chosen.n_heads if chosen is not None else None
    if chosen is not None and count is not None:
        notes.append(f"{chosen.source} proposes {count} head{'s' if count > 1 else ''}")
    basis, origin = _shown(examples, chosen, n_heads or count or max_heads)
    n_shown = n_heads or max_heads
    room = 8 * max(n_shown - len(basis), 0) * examples.units.n_features**2
    if body is None and source != "moments" and no_agreement(examples) is None:
        dimension = examples.query_width * examples.n_features
        room += 8 * dimension * min(max_heads, dimension)
    return Span(
        source="none" if chosen is None else chosen.source,
        basis=basis,
        origin=origin,
        singular_values=values,
        n_heads=count,
        frames=tuple(frames),
        exclusive=source != "auto",
        n_samples=examples.n_samples,
        message="; ".join(notes) if notes else "no source has anything to say",
        room=room,
    )


def _add(frames: list[Frame], notes: list[str], name: str, found: Frame | str) -> None:
    if isinstance(found, str):
        notes.append(f"{name} has nothing to say: {found}")
    else:
        frames.append(found)


def _sculpted_frame(body: ConvexBody | None, sculpture: Sculpture | None, max_heads: int) -> Frame | str:
    if body is None or sculpture is None:
        return "no row was certified"
    directions = body.eigenvectors[:, : max_heads - 1].T
    return Frame("sculpt", body.anchor(), directions, True, sculpture.n_heads)


def _oracle_frame(
    body: ConvexBody | None, max_heads: int, n_rounds: int, generator: np.random.Generator
) -> Frame | str:
    if body is None:
        return "no row was certified"
    dimension = len(body.centre)
    if dimension > _ORACLE_LIMIT:
        return f"{dimension} coordinates are more than hit-and-run can walk ({_ORACLE_LIMIT})"
    start = body.anchor()
    if body.violation(start) > 1.0:
        violation = float(body.violation(start))
        return f"no point inside the body was found (violation {violation:.2g}, inside is 1)"
    points = hit_and_run(
        body.inside,
        start,
        n_chains=4 * dimension,
        n_steps=2 * dimension,
        n_rounds=n_rounds,
        generator=generator,
    )
    centre = points.mean(axis=0)
    _, spread, directions = np.linalg.svd(points - centre, full_matrices=False)
    leading = spread[: max_heads + 1] ** 2
    drops = leading[:-1] / np.maximum(leading[1:], 1e-300)
    # A single head's body has no long axis at all.
    count = int(np.argmax(drops)) + 2 if len(drops) and drops.max() >= 2.0 else None
    return Frame("oracle", centre, directions[: max_heads - 1], True, count)


def _moment_frame(
    examples: Examples, max_heads: int, generator: np.random.Generator
) -> tuple[Frame | str, Array]:
    if examples.n_tokens < 3:
        return "two tokens give no pair besides the query's own", np.empty(0)
    found = moment_span(examples, n_directions=max_heads, generator=generator)
    directions = found.basis
    if examples.fit_intercept:
        directions = np.concatenate([directions, np.zeros((len(directions), 1, examples.n_features))], axis=1)
    directions = directions.reshape(len(directions), -1)
    values = found.singular_values
    drops = values[:-1] / np.maximum(values[1:], 1e-12 * max(float(values[0]), 1e-300))
    count = int(np.argmax(drops)) + 1 if len(drops) and drops.max() >= _CLEAR_DROP else None
    return Frame("moments", np.zeros(directions.shape[1]), directions, False, count), values


def _shown(examples: Examples, frame: Frame | None, n_heads: int) -> tuple[Array, Array]:
    """Return the frame's directions and origin in the units of the data, directions orthonormal."""
    width, d = examples.n_features, examples.units.n_features
    if frame is None:
        return np.empty((0, d, d)), np.zeros((d, d))
    needed = n_heads - 1 if frame.affine else n_heads
    directions = frame.directions[:needed]
    origin = examples.units.attention_out(frame.origin.reshape(-1, width))[0][0]
    if not len(directions):
        return np.empty((0, d, d)), origin
    blocks = directions.reshape(len(directions), -1, width).transpose(1, 0, 2)
    stacked = blocks.reshape(-1, len(directions) * width)
    flat = examples.units.attention_out(stacked)[0].reshape(len(directions), -1)
    return np.linalg.qr(flat.T)[0].T.reshape(-1, d, d), origin
