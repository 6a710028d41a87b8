import logging
import re
import subprocess
import sys
import warnings

import numpy as np
import pytest

import sklearn_mhal.__main__ as demo
from sklearn_mhal import BooleanAttentionSampler
from sklearn_mhal._demo_options import make_parser

SMALL = ["--heads", "2", "--tokens", "3", "--features", "5", "--samples", "300"]
STAGES = ["crude sum", "refine sum", "sculpt", "span", "heads", "polish", "certificate", "std errors"]


def stage_lines(text):
    """Return the number, name, seconds and error of every stage's line."""
    line = r"^  stage (\d)/8  (\w[\w ]*?) +(\d+\.\d{3})  (-|\S+|cos \S+) {2,}.+$"
    return re.findall(line, text, flags=re.MULTILINE)


def test_no_option_learns_three_heads_to_ten_digits(capsys):
    assert demo.main([]) == 0
    last = capsys.readouterr().out.rstrip().splitlines()[-1]
    heads, error = re.fullmatch(r"(\d) heads recovered: recovery error (\S+), \d+\.\d s", last).groups()
    assert heads == "3"
    assert float(error) <= 1e-10


def test_every_stage_has_a_line_with_its_error_as_it_ends(capsys):
    assert demo.main(SMALL) == 0
    before, after = capsys.readouterr().out.split("Errors are against the truth")
    lines = stage_lines(before)
    # Refined as long as that helps.
    assert [name for _, name, *_ in lines if name != "refine sum"] == [
        name for name in STAGES if name != "refine sum"
    ]
    numbers = {name: int(number) for number, name, *_ in lines}
    assert sorted(numbers.values()) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert numbers["crude sum"] == 1 and numbers["polish"] == 6
    errors = {name: error for _, name, _, error in lines}
    assert float(errors["polish"]) <= 1e-10
    assert float(errors["polish"]) < float(errors["heads"]) < 1e-2
    assert float(errors["polish"]) < float(errors["refine sum"]) < 1
    assert 0 <= float(errors["span"].removeprefix("cos ")) <= 1
    assert re.search(r"^  polish +relative, every head", after, flags=re.MULTILINE)


def test_lines_appear_while_the_fit_runs(capsys, monkeypatch):
    seen = []
    fit = demo.MultiHeadAttentionLearner.fit

    def watched(self, X, y):
        seen.append(len(stage_lines(capsys.readouterr().out)))
        fit(self, X, y)
        seen.append(len(stage_lines(capsys.readouterr().out)))

    monkeypatch.setattr(demo.MultiHeadAttentionLearner, "fit", watched)
    demo.main(SMALL)
    assert seen[0] == 0
    assert seen[1] >= 8


def test_table_shows_true_and_found_entries_of_every_head(capsys):
    demo.main([*SMALL, "--seed", "3"])
    text = capsys.readouterr().out
    layer = BooleanAttentionSampler(2, 3, 5, attention_scale=1.0, random_state=3).layer_
    rows = re.findall(r"^.{19}(true|found) +(\S+) +(?:(\S+e-\d+) +)?(.+)$", text, flags=re.MULTILINE)
    assert len(rows) == 8
    matrices = [matrix for pair in zip(layer.attention, layer.projection, strict=True) for matrix in pair]
    for index, matrix in enumerate(matrices):
        for kind, norm, error, entries in rows[2 * index : 2 * index + 2]:
            # The table has six decimals.
            np.testing.assert_allclose(float(norm), np.linalg.norm(matrix), atol=1e-6)
            np.testing.assert_allclose([*map(float, entries.split())], matrix.ravel()[:4], atol=1e-6)
            assert (error != "") == (kind == "found")


def test_wrong_number_of_heads_is_not_recovered(capsys):
    assert demo.main([*SMALL, "--n-heads", "1", "--seed", "2"]) == 1
    text = capsys.readouterr().out
    assert text.rstrip().splitlines()[-1].startswith("Not recovered: 1 head found, 2 are there")
    assert text.count("other count") == 2
    assert len(re.findall(r"^ {19}true|^.{8}(attention|projection) +found", text, flags=re.MULTILINE)) == 2


def test_layer_that_no_sample_count_determines_is_not_recovered(capsys):
    # Two samples of 15 labels against 100 unknowns.
    assert demo.main([*SMALL, "--samples", "2", "--n-heads", "2"]) == 1
    assert "Not recovered: recovery error" in capsys.readouterr().out


def test_noise_is_relative_to_the_labels_and_not_judged(capsys):
    assert demo.main([*SMALL, "--samples", "2000", "--noise", "0.05", "--n-heads", "2"]) == 0
    text = capsys.readouterr().out
    error = float(re.search(r"2 heads found in noise: recovery error (\S+),", text).group(1))
    assert 1e-4 < error < 0.2
    # Noise of 5 % of the labels' deviation is 0.25 % of their power, up to sampling.
    held_out = float(re.search(r"error\s+by\s+number\s+of\s+heads:.*?\b2:\s+(\S+?);", text, re.S).group(1))
    assert held_out == pytest.approx(0.05**2, rel=0.3)


def test_verbose_shows_candidates(capsys):
    demo.main(SMALL)
    quiet = capsys.readouterr().out
    demo.main([*SMALL, "-v"])
    verbose = capsys.readouterr().out
    assert "held-out error" in verbose
    assert len(verbose.splitlines()) > len(quiet.splitlines())


def test_log_is_left_as_it_was_and_warnings_become_lines(capsys, monkeypatch):
    logger = logging.getLogger("sklearn_mhal")
    before = logger.level, list(logger.handlers)
    fit = demo.MultiHeadAttentionLearner.fit

    def warning(self, X, y):
        warnings.warn("something is off", UserWarning, stacklevel=1)
        return fit(self, X, y)

    monkeypatch.setattr(demo.MultiHeadAttentionLearner, "fit", warning)
    demo.main(SMALL)
    assert "  warning: something is off\n" in capsys.readouterr().out
    assert (logger.level, logger.handlers) == before


def test_failing_fit_leaves_the_log_as_it_was(monkeypatch):
    logger = logging.getLogger("sklearn_mhal")
    before = logger.level, list(logger.handlers)

    def failing(self, X, y):
        raise KeyboardInterrupt

    monkeypatch.setattr(demo.MultiHeadAttentionLearner, "fit", failing)
    with pytest.raises(KeyboardInterrupt):
        demo.main(SMALL)
    assert (logger.level, logger.handlers) == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--heads", "0"], "--heads: must be at least 1, got 0"),
        (["--heads", "two"], "--heads: invalid integer value: 'two'"),
        (["--tokens", "1"], "--tokens: must be at least 2, got 1"),
        (["--noise", "-1"], "--noise: must be at least 0 and finite, got -1"),
        (["--scale", "nan"], "--scale: must be at least 0 and finite, got nan"),
        (["--n-heads", "many"], "--n-heads: invalid integer (or 'auto') value: 'many'"),
        (["--structure", "odd"], "--structure: invalid choice: 'odd'"),
        (["--structure", "parity", "--features", "3"], "n_features must be in [n_heads + 1, inf)"),
        (["--structure", "parity", "--tokens", "3"], "n_tokens must be 2"),
    ],
)
def test_options_that_cannot_be(options, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        demo.main(options)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_parity_needs_no_further_option(monkeypatch):
    tokens = []

    def stop(self, X, y):
        tokens.append(self.n_tokens)
        raise KeyboardInterrupt

    monkeypatch.setattr(demo.MultiHeadAttentionLearner, "fit", stop)
    for structure in ("parity", "incoherent"):
        with pytest.raises(KeyboardInterrupt):
            demo.main(["--structure", structure])
    assert tokens == [2, 3]


def test_help_names_every_option_with_its_default(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = make_parser().format_help()
    assert max(map(len, text.splitlines())) <= 80
    entries = [" ".join(entry.split()) for entry in text.split("\n  -")[2:-1]]
    names = [entry.split()[0].strip("-") for entry in entries]
    assert names == [
        *("heads", "tokens", "features", "outputs", "scale", "structure"),
        *("samples", "noise", "seed", "n-heads"),
    ]
    assert all("(default: " in entry for entry in entries)
    assert text.count("python -m sklearn_mhal --") == 2


def test_runs_as_a_module():
    command = [sys.executable, "-W", "error", "-m", "sklearn_mhal", *SMALL]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "2 heads recovered" in done.stdout.splitlines()[-1]
    done = subprocess.run([*command, "--n-heads", "1"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
