"""Progress through scikit-learn's callbacks, verbosity through logging, and how results print."""

from __future__ import annotations

import logging
import pickle
import re
import threading
from contextlib import contextmanager

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.callback import ProgressBar, ScoringMonitor
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from sklearn_mhal import MultiHeadAttentionLearner, _documentation, make_boolean_attention
from sklearn_mhal._verbosity import shown
from sklearn_mhal.stages import polish

TASKS = ["crude_sum", "refine_sum", "sculpt", "span", "heads", "polish", "certificate"]


class Recorder:
    """A callback that remembers the names of tasks that began and ended, and who was fitted then."""

    def __init__(self, stop_after=None):
        self.began, self.ended, self.events, self.fitted = [], [], [], {}
        self.stop_after = stop_after

    def setup(self, estimator, context):
        self.events.append("setup")

    def teardown(self, estimator, context):
        self.events.append("teardown")

    def on_fit_task_begin(self, estimator, context):
        self.began.append(self.path(context))

    def on_fit_task_end(self, estimator, context, *, X=None, y=None, metadata=None, fitted_estimator=None):
        path = self.path(context)
        self.ended.append(path)
        self.metadata = metadata
        if fitted_estimator is not None:
            self.fitted.setdefault(path, []).append(fitted_estimator.score(X, y))
        return path == self.stop_after

    @staticmethod
    def path(context):
        names = []
        while context is not None:
            names.append(context.task_name)
            context = context.parent
        return "/".join(reversed(names))


@contextmanager
def no_handlers():
    """As in a program that sets up no logging; pytest's own handlers come after fixtures."""
    logger = logging.getLogger("sklearn_mhal")
    before = logger.propagate, logger.handlers
    logger.propagate, logger.handlers = False, []
    try:
        yield logger
    finally:
        logger.propagate, logger.handlers = before


@pytest.fixture(scope="module")
def data():
    return make_boolean_attention(400, n_heads=2, n_tokens=3, n_features=5, noise_std=0.1, random_state=0)


@pytest.fixture(scope="module")
def clean():
    return make_boolean_attention(300, n_heads=2, n_tokens=3, n_features=5, random_state=0)


def learner(**settings):
    return MultiHeadAttentionLearner(**{"n_heads": 2, "n_tokens": 3, "random_state": 0} | settings)


@pytest.fixture(scope="module")
def stages(clean):
    return learner().fit(*clean).stages_


@pytest.fixture(scope="module")
def recorded(data):
    recorder = Recorder()
    estimator = learner().set_callbacks(recorder).fit(*data, sample_weight=np.ones(len(data[0])))
    return recorder, estimator


class TestCallbacks:
    def test_tasks_are_the_stages_in_the_order_they_run(self, recorded):
        recorder, _ = recorded
        assert [path for path in recorder.ended if path.count("/") == 1] == [f"fit/{name}" for name in TASKS]
        assert recorder.began[0] == "fit" and recorder.ended[-1] == "fit"
        assert sorted(recorder.began) == sorted(recorder.ended)
        assert recorder.events == ["setup", "teardown"]

    def test_every_solver_step_of_the_polish_is_told(self, recorded):
        recorder, estimator = recorded
        steps = [path for path in recorder.ended if path.startswith("fit/polish/") and path.endswith("/step")]
        assert len(steps) == estimator.n_iter_ > 1

    def test_every_candidate_is_told(self, recorded):
        recorder, _ = recorded
        assert recorder.ended.count("fit/heads/candidate") >= 1

    def test_tasks_from_the_heads_on_come_with_a_fitted_estimator(self, recorded, data):
        recorder, estimator = recorded
        final = estimator.score(*data)
        assert recorder.fitted["fit"] == recorder.fitted["fit/polish"] == [final]
        # The last steps are shorter than the tolerance.
        assert recorder.fitted["fit/polish/more samples/step"][-1] == pytest.approx(final, abs=1e-9)
        assert recorder.fitted["fit/heads"][0] > 0.9
        assert not {"fit/crude_sum", "fit/refine_sum", "fit/sculpt", "fit/span"} & set(recorder.fitted)

    def test_weights_come_as_metadata(self, recorded):
        recorder, _ = recorded
        np.testing.assert_array_equal(recorder.metadata["sample_weight"], 1.0)

    def test_callbacks_change_no_parameter(self, recorded, data):
        _, estimator = recorded
        plain = learner().fit(*data, sample_weight=np.ones(len(data[0])))
        np.testing.assert_array_equal(plain.attention_matrices_, estimator.attention_matrices_)

    def test_without_polish_there_is_no_polish_task(self, clean):
        recorder = Recorder()
        learner(polish=False, span="moments").set_callbacks(recorder).fit(*clean)
        assert "fit/heads" in recorder.ended and "fit/polish" not in recorder.ended

    def test_stopping_after_the_heads_leaves_out_the_polish(self, clean):
        estimator = learner().set_callbacks(Recorder("fit/heads")).fit(*clean)
        assert "polish" not in estimator.stages_
        np.testing.assert_array_equal(
            estimator.attention_matrices_, estimator.stages_["heads"].layer.attention
        )

    # Stopped is short of the tolerance, and the learner says so.
    @pytest.mark.filterwarnings("ignore:polish:sklearn.exceptions.ConvergenceWarning")
    @pytest.mark.parametrize("part", ["few samples", "more samples"])
    def test_stopping_at_a_step_ends_that_part_of_the_polish(self, data, clean, part):
        recorder = Recorder(f"fit/polish/{part}/step")
        learner().set_callbacks(recorder).fit(*(clean if part == "few samples" else data))
        assert recorder.ended.count(f"fit/polish/{part}/step") == 1

    @pytest.mark.filterwarnings("ignore:polish:sklearn.exceptions.ConvergenceWarning")
    def test_stopping_on_all_samples(self):
        X, y = make_boolean_attention(
            3000, n_heads=1, n_tokens=3, n_features=4, n_outputs=3, noise_std=0.1, random_state=0
        )
        recorder = Recorder("fit/polish/all samples/step")
        estimator = learner(n_heads=1).set_callbacks(recorder).fit(X, y)
        assert recorder.ended.count("fit/polish/all samples/step") == 1
        assert estimator.stages_["polish"].message.startswith("stopped by a callback")
        assert estimator.score(X, y) > 0.9

    def test_stopping_a_candidate_ends_the_search_with_the_best_so_far(self, data):
        recorder = Recorder("fit/heads/candidate")
        learner().set_callbacks(recorder).fit(*data)
        assert recorder.ended.count("fit/heads/candidate") == 1

    def test_a_failing_stage_is_torn_down_and_nothing_is_fitted(self, clean, monkeypatch):
        def interrupt(*args, **kwargs):
            raise KeyboardInterrupt

        monkeypatch.setattr("sklearn_mhal.learner.find_heads", interrupt)
        recorder = Recorder()
        estimator = learner().set_callbacks(recorder)
        with pytest.raises(KeyboardInterrupt):
            estimator.fit(*clean)
        assert recorder.events == ["setup", "teardown"]
        assert recorder.began[-1] == "fit/heads" and recorder.ended[-1] == "fit/span"
        assert not [name for name in vars(estimator) if name.endswith("_")]
        monkeypatch.undo()
        assert estimator.fit(*clean).score(*clean) > 0.999999

    def test_a_failing_callback_leaves_nothing_fitted(self, clean):
        class Failing(Recorder):
            def on_fit_task_end(self, estimator, context):
                raise OSError("the callback's own error")

        estimator = learner().set_callbacks(Failing())
        with pytest.raises(OSError, match="the callback's own error"):
            estimator.fit(*clean)
        assert not hasattr(estimator, "layer_")

    def test_clone_and_set_params_keep_them(self, clean):
        recorder = Recorder()
        clone(learner().set_callbacks(recorder)).set_params(n_heads=1).fit(*clean)
        assert recorder.ended[-1] == "fit"

    def test_fitted_with_callbacks_can_be_pickled(self, clean):
        estimator = learner().set_callbacks(ScoringMonitor(scoring="r2")).fit(*clean)
        copy = pickle.loads(pickle.dumps(estimator))
        np.testing.assert_array_equal(copy.predict(clean[0]), estimator.predict(clean[0]))

    def test_not_a_callback(self):
        with pytest.raises(TypeError, match="FitCallback protocol"):
            learner().set_callbacks(print)

    def test_stages_need_nobody_listening(self, clean):
        """Each stage runs on its own, told to nobody."""
        estimator = learner().fit(*clean)
        assert polish.__wrapped__.__kwdefaults__["progress"].step("anything") is False
        assert estimator.score(*clean) > 0.999999


class TestProgressBar:
    # rich draws on the standard output; the bars' names are scikit-learn's.
    def test_bars_for_the_fit_and_the_parts_of_the_polish(self, data, capsys):
        pytest.importorskip("rich")
        learner().set_callbacks(ProgressBar()).fit(*data)
        drawn = capsys.readouterr().out
        for name in ("fit", "heads #4", "polish #5", "more samples #0"):
            assert re.search(rf"MultiHeadAttentionLearner - {name} .*100%", drawn)

    def test_in_a_pipeline_in_a_grid_search(self, clean, capsys):
        pytest.importorskip("rich")
        pipeline = make_pipeline(StandardScaler(), learner())
        grid = {"multiheadattentionlearner__n_heads": [1, 2]}
        search = GridSearchCV(pipeline, grid, cv=2).set_callbacks(ProgressBar(max_propagation_depth=None))
        search.fit(*clean)
        drawn = capsys.readouterr().out
        assert "GridSearchCV - fit" in drawn
        assert "MultiHeadAttentionLearner - fit" in drawn
        assert "MultiHeadAttentionLearner - polish #5" in drawn


class TestVerbose:
    def messages(self, caplog, clean, **settings):
        caplog.clear()
        learner(**settings).fit(*clean)
        return [record.levelno for record in caplog.records if record.name == "sklearn_mhal"]

    def test_levels(self, caplog, clean):
        assert self.messages(caplog, clean, verbose=0) == []
        told = self.messages(caplog, clean, verbose=1)
        assert len(told) >= 6 and set(told) == {logging.INFO}
        assert logging.DEBUG in self.messages(caplog, clean, verbose=2)
        assert logging.getLogger("sklearn_mhal").level == logging.NOTSET

    def test_who_sets_up_logging_hears_it_anyway(self, caplog, clean):
        with caplog.at_level(logging.INFO, logger="sklearn_mhal"):
            assert len(self.messages(caplog, clean, verbose=0)) >= 6

    def test_never_less_than_what_is_set_up(self, caplog, clean):
        with caplog.at_level(logging.DEBUG):
            assert logging.DEBUG in self.messages(caplog, clean, verbose=1)

    def test_without_any_handler_it_goes_to_stderr(self, clean, capsys):
        with no_handlers() as logger:
            learner(verbose=1).fit(*clean)
            assert logger.handlers == []
        captured = capsys.readouterr()
        assert captured.out == ""
        assert len(captured.err.splitlines()) >= 6
        assert captured.err.startswith("[sklearn_mhal] estimate_crude_sum")

    def test_an_interrupted_fit_puts_everything_back(self):
        with no_handlers() as logger:
            with pytest.raises(KeyboardInterrupt), shown(2):
                raise KeyboardInterrupt
            assert logger.handlers == [] and logger.level == logging.NOTSET

    def test_two_fits_at_once(self):
        """The one that ends first takes nothing from the other."""
        other_in, other_out = threading.Event(), threading.Event()

        def other():
            with shown(2):
                other_in.set()
                other_out.wait()

        # A failing assertion must not leave pytest waiting for the thread.
        thread = threading.Thread(target=other, daemon=True)
        with no_handlers() as logger:
            with shown(1):
                assert logger.level == logging.INFO
                thread.start()
                other_in.wait()
                assert logger.level == logging.DEBUG
            assert logger.level == logging.DEBUG and len(logger.handlers) == 1
            other_out.set()
            thread.join()
            assert logger.handlers == [] and logger.level == logging.NOTSET


class TestRepresentations:
    def test_stages_print_as_a_table(self, stages):
        head, *rows = repr(stages).splitlines()
        assert head.split() == ["stage", "seconds", "found"]
        assert [row.split()[0] for row in rows] == list(stages)
        for row, result in zip(rows, stages.values(), strict=True):
            assert f"{result.seconds:.3f}  {result.message}" in row
        # Columns: every message starts where the heading does.
        starts = {row.index(result.message) for row, result in zip(rows, stages.values(), strict=True)}
        assert starts == {head.index("found")}

    def test_stages_are_a_table_in_a_notebook(self, stages):
        html = stages._repr_html_()
        assert html.count("<tr>") == html.count("</tr>") == 1 + len(stages)
        assert "<th>seconds</th>" in html
        assert stages["polish"].message in html

    def test_messages_are_escaped(self, stages):
        class Result:
            seconds, message = 0.0, "a < b & c"

        html = type(stages)({"<x>": Result})._repr_html_()
        assert "a &lt; b &amp; c" in html and "<td>&lt;x&gt;</td>" in html

    def test_stages_are_a_read_only_mapping(self, stages):
        assert list(stages)[:5] == ["crude_sum", "sculpt", "refine_sum", "span", "heads"]
        with pytest.raises(TypeError):
            stages["heads"] = None

    @pytest.fixture
    def no_site(self, monkeypatch, tmp_path):
        monkeypatch.setattr(_documentation, "published_site", lambda: "")
        monkeypatch.setattr(_documentation, "_BUILT", tmp_path)

    def test_links_to_the_published_documentation(self, no_site, monkeypatch):
        monkeypatch.setattr(_documentation, "published_site", lambda: "https://example.org/docs/")
        page = "https://example.org/docs/generated/sklearn_mhal.MultiHeadAttentionLearner.html"
        html = learner()._repr_html_()
        assert f'href="{page}"' in html
        # Every parameter links to its own description, which is read from the docstring.
        assert html.count(f'href="{page}#') >= len(learner().get_params())
        assert "Largest number that &quot;auto&quot; tries" in html

    def test_links_to_the_site_built_in_the_checkout(self, no_site, tmp_path):
        page = tmp_path / "generated" / "sklearn_mhal.MultiHeadAttentionLearner.html"
        page.parent.mkdir()
        page.touch()
        assert f'href="{page.as_uri()}"' in learner()._repr_html_()
        assert f'href="{page.as_uri()}"' in make_pipeline(learner())._repr_html_()

    def test_no_link_where_there_is_no_site(self, no_site):
        assert learner()._get_doc_link() == ""
        assert "href=" not in learner()._repr_html_()

    @pytest.mark.parametrize(
        "urls, site",
        [
            (["Source, https://a.org", "documentation, https://b.org/x"], "https://b.org/x"),
            (["Source, https://a.org"], ""),
            (None, ""),
        ],
    )
    def test_the_address_is_the_installed_package_s(self, monkeypatch, urls, site):
        class Metadata:
            def get_all(self, name):
                return urls if name == "Project-URL" else None

        monkeypatch.setattr(_documentation.metadata, "metadata", lambda name: Metadata())
        assert _documentation.published_site.__wrapped__() == site

    def test_not_installed(self, monkeypatch):
        def missing(name):
            raise _documentation.metadata.PackageNotFoundError(name)

        monkeypatch.setattr(_documentation.metadata, "metadata", missing)
        assert _documentation.published_site.__wrapped__() == ""
