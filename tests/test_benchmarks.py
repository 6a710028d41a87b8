"""The benchmarks' own arithmetic: results that are kept, tables, ratios. What they measure is not tested."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "examples" / "benchmarks"


@pytest.fixture
def load(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    names = [path.stem for path in FOLDER.glob("*.py")]

    def load(name):
        return importlib.import_module(name)

    yield load
    for name in names:
        sys.modules.pop(name, None)


def test_results_are_kept_and_found_again(load, tmp_path):
    records = load("_records")
    path = tmp_path / "results" / "some.jsonl"
    kept = records.Records(path, ("name", "seed"))
    assert kept.find(name="a", seed=0) is None
    kept.add({"name": "a", "seed": 0, "value": 1.0})
    kept.add({"name": "a", "seed": 1, "value": 2.0})
    kept.add({"name": "a", "seed": 0, "value": 3.0})
    again = records.Records(path, ("name", "seed"))
    # Measured anew, the last counts.
    assert again.find(name="a", seed=0)["value"] == 3.0
    assert sorted(record["value"] for record in again) == [2.0, 3.0]
    assert len(path.read_text().splitlines()) == 3


def test_markdown(load):
    assert load("_records").markdown(["a", "b"], [["1", "2"]]) == "| a | b |\n| --- | --- |\n| 1 | 2 |"


def test_configurations_are_those_of_the_table(load):
    module = load("_configurations")
    generic = [item for item in module.CONFIGURATIONS if item.structure != "real"]
    assert len(module.CONFIGURATIONS) == 12 and len(generic) == 10
    for item in generic:
        sampler = item.sampler(0)
        assert sampler.layer_.attention.shape == (item.n_heads, item.n_features, item.n_features)
    assert module.chosen(["3"]) == module.chosen(["(4,4,16,2)"]) == [module.CONFIGURATIONS[3]]
    with pytest.raises(SystemExit, match="No configuration"):
        module.chosen(["(9,9,9,9)"])


def test_information_limit(load):
    module = load("limits")
    layer = module.FEW[0].sampler(0).layer_
    # 4 * 16 * (16 + 16) unknowns against 4 * 16 numbers a sample.
    assert module.information_limit(layer, 4) == 32


def test_exponents(load):
    module = load("scaling")
    sizes = [10, 100, 1000]
    assert module.exponent(sizes, [0.1, 1.0, 10.0]) == "1.00"
    assert module.exponent(sizes, [0.3, 0.3, 0.3]) in ("0.00", "-0.00")
    # Too small to tell.
    assert module.exponent(sizes, [0.0, 1.0, 10.0]) == ""


def test_a_point_of_the_scaling(load):
    point = {"n": 300, "m": 1, "k": 3, "d": 4, "s": 2.0}
    record = json.loads(json.dumps(load("scaling").measure(point, 1)))
    stages = {"crude_sum", "refine_sum", "sculpt", "span", "heads", "polish", "rest", "whole fit"}
    assert set(record["seconds"]) == set(record["memory"]) == stages
    assert record["error"] < 1e-10
    whole = record["seconds"].pop("whole fit")
    assert sum(record["seconds"].values()) == pytest.approx(whole)
    # Each stage's memory was told apart.
    assert all(value > 0 for value in record["memory"].values())


def test_a_fit_broken_down(load):
    module = load("breakdown")
    configuration = load("_configurations").Configuration("small", 2, 3, 5, 2.0, 300)
    record = json.loads(json.dumps(module.measure(configuration, given=True, n_threads=1, repeats=1)))
    parts = sum(record["solver"][f"{where}/{what}"] for where in module.SOLVING for what in module.KINDS)
    whole = sum(record["solver"][f"{where}/solver"] for where in module.SOLVING)
    # Parts of the solver, which is a part of its stages, which are parts of the fit.
    assert 0.0 < parts < whole < record["stages"]["heads"] + record["stages"]["polish"] < record["fit"]
    record |= {"configuration": "small", "given": True, "threads": 1}
    row = module.table([record], 1).splitlines()[-1]
    assert row.startswith("| small | given | ") and len(row.split("|")) == 16


def test_operations_of_a_product(load, monkeypatch):
    import numpy as np

    from sklearn_mhal._forward import TokenRows
    from sklearn_mhal._linearisation import Linearisation
    from sklearn_mhal._problem import Problem

    rng = np.random.default_rng(0)
    n, k, d, m, n_outputs = 7, 3, 4, 2, 5
    problem = Problem(TokenRows(rng.standard_normal((n, k, d))), rng.standard_normal((n * k, n_outputs)))
    linear = Linearisation(problem, problem.evaluate(rng.standard_normal((d, m * d))))
    # Forward: scores' change in two steps, then the outputs'; the projector; and all of it back.
    forward = n * k * (d * m * d + m * d * k + m * k * n_outputs)
    projector = 2 * n * k * m * d * n_outputs
    backward = n * k * (m * k * n_outputs + m * k * d + d * m * d)
    assert load("breakdown").operations(linear) == 2 * (forward + projector + backward)
