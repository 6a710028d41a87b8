"""Sample a layer, learn it from its examples alone, compare: ``python -m sklearn_mhal``."""

from __future__ import annotations

import argparse
import logging
import shutil
import sys
import textwrap
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from . import AttentionLayer, BooleanAttentionSampler, MultiHeadAttentionLearner, head_recovery_error
from ._demo_options import parse_options
from ._forward import Array
from ._stage_errors import StageError, stage_error, stage_errors
from .metrics import match_heads

# Without noise a larger recovery error means that the layer was not found.
_FOUND = 1e-6
_N_ENTRIES = 4
_MAX_WIDTH = 100

# The functions that log a line when they end, and their stages.
_STAGE_OF_FUNCTION = {
    "estimate_crude_sum": "crude_sum",
    "sculpt": "sculpt",
    "refine_sum": "refine_sum",
    "estimate_span": "span",
    "find_heads": "heads",
    "polish": "polish",
    "certify": "certificate",
    "estimate_uncertainty": "std errors",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo.

    Parameters
    ----------
    argv : sequence of str or None
        Options; None takes them from the command line.

    Returns
    -------
    int
        Exit status: 0, or 1 if a layer without noise was not recovered.
    """
    parser, options = parse_options(None if argv is None else list(argv))
    try:
        sampler = _make_sampler(options)
    except ValueError as error:
        parser.error(str(error))
    truth = sampler.layer_
    X, y = sampler.sample(options.samples)
    learner = MultiHeadAttentionLearner(
        options.n_heads, n_tokens=options.tokens, random_state=options.seed, verbose=options.verbose
    )
    _print_task(options)
    start = time.perf_counter()
    print(f"{'':13}{'stage':<12}{'seconds':>7}  {'error':<11}  found")
    with _live(truth, logging.DEBUG if options.verbose else logging.INFO):
        learner.fit(X, y)
    seconds = time.perf_counter() - start
    print("\nErrors are against the truth, which no stage has seen:")
    for name, found in stage_errors(learner.stages_, truth).items():
        print(f"  {_spaced(name):<12}{'cosine' if found.is_angle else 'relative'}, {found.compared}")
    _print_heads(truth, learner.layer_)
    return _print_verdict(truth, learner.layer_, noisy=options.noise > 0, seconds=seconds)


def _make_sampler(options: argparse.Namespace) -> BooleanAttentionSampler:
    """Return a sampler with the noise in units of the labels."""

    def make(noise_std: float) -> BooleanAttentionSampler:
        return BooleanAttentionSampler(
            options.heads,
            options.tokens,
            options.features,
            n_outputs=options.outputs,
            attention_scale=options.scale,
            structure=options.structure,
            noise_std=noise_std,
            random_state=options.seed,
        )

    clean = make(0.0)
    return make(options.noise * clean.label_std_) if options.noise else clean


class _Progress(logging.Handler):
    """Prints a line as soon as a stage ends: its seconds, its error, what it found."""

    def __init__(self, truth: AttentionLayer) -> None:
        super().__init__()
        self._truth = truth
        self._seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        arguments = record.args if isinstance(record.args, tuple) else ()
        stage = _STAGE_OF_FUNCTION.get(str(arguments[0])) if len(arguments) == 3 else None
        if stage is None:
            _print_wrapped(" " * 7, record.getMessage())
            return
        if stage not in self._seen:
            self._seen.append(stage)
        progress = f"{self._seen.index(stage) + 1}/{len(_STAGE_OF_FUNCTION)}"
        error = _error_text(stage_error(stage, vars(record)["result"], self._truth))
        head = f"  stage {progress}  {_spaced(stage):<12}{arguments[1]:7.3f}  {error:<11}  "
        _print_wrapped(head, str(arguments[2]))


@contextmanager
def _live(truth: AttentionLayer, level: int) -> Iterator[None]:
    """Show the package's log, and the warnings at its end, while the context lasts."""
    logger = logging.getLogger("sklearn_mhal")
    handler, before = _Progress(truth), logger.level
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        with warnings.catch_warnings(record=True) as raised:
            warnings.simplefilter("always")
            yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
    for warning in raised:
        _print_wrapped("  warning: ", str(warning.message))


def _print_wrapped(head: str, text: str) -> None:
    width = min(shutil.get_terminal_size().columns, _MAX_WIDTH)
    lines = textwrap.fill(text, width, initial_indent=head, subsequent_indent=" " * len(head))
    # Flushed: a stage's line is to be there when the stage ends, in a pipe too.
    print(lines, flush=True)


def _spaced(name: str) -> str:
    return name.replace("_", " ")


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _print_task(options: argparse.Namespace) -> None:
    m, k, d, d_out = options.heads, options.tokens, options.features, options.outputs
    sizes = ", ".join(map(_plural, (m, k, d, d_out), ("head", "token", "feature", "output")))
    noise = f"noise {options.noise:g} of their deviation" if options.noise else "no noise"
    told = "to be found" if options.n_heads == "auto" else f"given as {options.n_heads}"
    print(f"Layer     {sizes}; {options.structure}, scale {options.scale:g}")
    print(f"Examples  {options.samples} of {k * d_out} labels each, {noise}; seed {options.seed}")
    print(f"Unknowns  {m * d * (d + d_out)} matrix entries; number of heads {told}\n", flush=True)


def _error_text(error: StageError | None) -> str:
    if error is None:
        return "-"
    if np.isinf(error.error):
        return "other count"
    return f"cos {error.cosine:.3f}" if error.is_angle else f"{error.error:.1e}"


def _print_heads(truth: AttentionLayer, learned: AttentionLayer) -> None:
    """Print the heads beside each other, or one after another where their numbers differ."""
    print(f"\n{'':25}{'norm':>9}  {'rel. error':>10}  first entries")
    if truth.n_heads == learned.n_heads:
        for head, partner in enumerate(match_heads(truth, learned)):
            _print_head(f"head {head}", (truth, head), (learned, int(partner)))
        return
    for head in range(truth.n_heads):
        _print_head(f"head {head}", (truth, head), None)
    for head in range(learned.n_heads):
        _print_head("", None, (learned, head))


def _print_head(
    name: str, true_head: tuple[AttentionLayer, int] | None, found_head: tuple[AttentionLayer, int] | None
) -> None:
    for part in ("attention", "projection"):
        truth = None if true_head is None else getattr(true_head[0], part)[true_head[1]]
        found = None if found_head is None else getattr(found_head[0], part)[found_head[1]]
        label = f"{name:<8}{part:<11}"
        if truth is not None:
            print(_matrix_line(label + "true", truth, ""))
            label = " " * len(label)
        if found is not None:
            error = "" if truth is None else f"{_relative_error(truth, found):.1e}"
            print(_matrix_line(label + "found", found, error))
        name = ""


def _matrix_line(label: str, matrix: Array, error: str) -> str:
    entries = " ".join(f"{value:9.6f}" for value in matrix.ravel()[:_N_ENTRIES])
    return f"{label:<25}{np.linalg.norm(matrix):9.6f}  {error:>10}  {entries}"


def _relative_error(truth: Array, estimate: Array) -> float:
    return float(np.linalg.norm(estimate - truth) / (np.linalg.norm(truth) or 1.0))


def _print_verdict(truth: AttentionLayer, learned: AttentionLayer, *, noisy: bool, seconds: float) -> int:
    """Print the last line; return the exit status."""
    error = head_recovery_error(truth, learned)
    heads = _plural(truth.n_heads, "head")
    if np.isinf(error):
        verdict = f"Not recovered: {_plural(learned.n_heads, 'head')} found, {truth.n_heads} are there"
    elif noisy:
        verdict = f"{heads} found in noise: recovery error {error:.1e}"
    elif error <= _FOUND:
        verdict = f"{heads} recovered: recovery error {error:.1e}"
    else:
        verdict = f"Not recovered: recovery error {error:.1e}"
    print(f"\n{verdict}, {seconds:.1f} s")
    return 0 if noisy or error <= _FOUND else 1


if __name__ == "__main__":
    sys.exit(main())
