"""The options of the demo, ``python -m sklearn_mhal``."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Callable
from typing import Any

import numpy as np

from ._draws import STRUCTURES

_DESCRIPTION = (
    "Draw a random multi-head attention layer, show the learner nothing but examples of its inputs "
    "and outputs, and compare the heads it finds with the true ones. Without options: three heads, "
    "their number not told to the learner."
)

_EPILOG = """\
examples:
  python -m sklearn_mhal --heads 4 --tokens 4 --features 16 --scale 8
      four heads that look at little more than one token each
  python -m sklearn_mhal --heads 2 --n-heads 2 --noise 0.1 --samples 20000
      labels with 10 % noise, and the number of heads given

exit status:
  0  the layer was recovered; or there is noise: its error is shown, not judged
  1  the recovery error is above 1e-6 without noise
  2  the options do not fit together
"""


def _integer(smallest: int) -> Callable[[str], int]:
    """Return an argparse type: an integer from `smallest` on."""

    def parse(text: str) -> int:
        value = int(text)
        if value < smallest:
            raise argparse.ArgumentTypeError(f"must be at least {smallest}, got {value}")
        return value

    # argparse names the type in its message for text that is no integer at all.
    parse.__name__ = "integer"
    return parse


def _number(text: str) -> float:
    value = float(text)
    if not 0.0 <= value < np.inf:
        raise argparse.ArgumentTypeError(f"must be at least 0 and finite, got {text}")
    return value


_number.__name__ = "number"


def _n_heads(text: str) -> int | str:
    return text if text == "auto" else _integer(1)(text)


_n_heads.__name__ = "integer (or 'auto')"


def make_parser() -> argparse.ArgumentParser:
    """Return the parser."""
    parser = argparse.ArgumentParser(
        prog="python -m sklearn_mhal",
        description=textwrap.fill(_DESCRIPTION, 79),
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_layer_options(parser.add_argument_group("the layer"))
    _add_example_options(parser.add_argument_group("the examples"))
    learner = parser.add_argument_group("the learner")
    learner.add_argument(
        "--n-heads",
        type=_n_heads,
        default="auto",
        metavar="M",
        help="number of heads to look for, or auto to count them (default: auto)",
    )
    learner.add_argument(
        "-v", "--verbose", action="store_true", help="show every candidate that the search tries as well"
    )
    return parser


def _add_layer_options(group: Any) -> None:
    # The default sizes are small, and every stage of the paper has something to say at them.
    group.add_argument(
        "--heads", type=_integer(1), default=3, metavar="M", help="number of heads (default: 3)"
    )
    group.add_argument(
        "--tokens",
        type=_integer(2),
        metavar="K",
        help="tokens in a sample, at least 2 (default: 3; 2 with --structure parity)",
    )
    group.add_argument(
        "--features", type=_integer(1), default=10, metavar="D", help="width of a token (default: 10)"
    )
    group.add_argument(
        "--outputs",
        type=_integer(1),
        metavar="D_OUT",
        help="width of an output row (default: that of a token)",
    )
    group.add_argument(
        "--scale",
        type=_number,
        default=1.0,
        metavar="S",
        help="norm of the attention matrices: patterns are soft below 1 and nearly one-hot from 8 on "
        "(default: 1)",
    )
    group.add_argument(
        "--structure",
        choices=sorted(STRUCTURES),
        default="incoherent",
        metavar="NAME",
        help="how the heads are drawn: %(choices)s; parity is hard on purpose (default: incoherent)",
    )


def _add_example_options(group: Any) -> None:
    group.add_argument(
        "--samples", type=_integer(2), default=2000, metavar="N", help="number of examples (default: 2000)"
    )
    group.add_argument(
        "--noise",
        type=_number,
        default=0.0,
        metavar="SHARE",
        help="noise on the labels, in units of their standard deviation (default: 0)",
    )
    group.add_argument(
        "--seed",
        type=_integer(0),
        default=0,
        metavar="SEED",
        help="seed of layer, examples and learner (default: 0)",
    )


def parse_options(argv: list[str] | None) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    """Return the parser, for errors found later, and the options with their defaults filled in."""
    parser = make_parser()
    options = parser.parse_args(argv)
    if options.tokens is None:
        options.tokens = 2 if options.structure == "parity" else 3
    if options.outputs is None:
        options.outputs = options.features
    return parser, options
