import subprocess
import sys

import numpy as np
import pytest

from sklearn_mhal import AttentionLayer, BooleanAttentionSampler, MultiHeadAttentionLearner
from sklearn_mhal.plotting import HeadCountDisplay, LayerDisplay, PatternDisplay, StageDisplay
from sklearn_mhal.stages.heads import EXACT

plt = pytest.importorskip("matplotlib.pyplot")


@pytest.fixture(autouse=True)
def _close_figures():
    yield
    plt.close("all")


@pytest.fixture(scope="module")
def fitted():
    sampler = BooleanAttentionSampler(3, 3, 6, n_outputs=5, attention_scale=1.0, random_state=0)
    X, y = sampler.sample(1000)
    return MultiHeadAttentionLearner(n_tokens=3, random_state=0).fit(X, y), sampler.layer_, X


def draw_all(learner, X, true_layer=None, **options):
    return [
        LayerDisplay.from_estimator(learner, true_layer=true_layer, **options),
        PatternDisplay.from_estimator(learner, X[:2], **options),
        HeadCountDisplay.from_estimator(learner, **options),
        StageDisplay.from_estimator(learner, true_layer=true_layer, **options),
    ]


def test_layer_display_shows_matched_heads_in_columns(fitted):
    learner, truth, _ = fitted
    display = LayerDisplay.from_estimator(learner, true_layer=truth)
    assert display.axes_.shape == (4, 3)
    images = [image.get_array() for image in display.images_]
    np.testing.assert_array_equal(images[:3], truth.attention)
    np.testing.assert_array_equal(images[6:9], truth.projection)
    # Learned to rounding, so a wrong match would show.
    np.testing.assert_allclose(images[3:6], truth.attention, atol=1e-9)
    np.testing.assert_allclose(images[9:], truth.projection, atol=1e-9)
    assert display.errors_.shape == (3,)
    assert 0 < display.errors_.max() < 1e-9


def test_colours_are_symmetric_and_shared(fitted):
    learner, truth, _ = fitted
    display = LayerDisplay.from_estimator(learner, true_layer=truth)
    limits = [image.get_clim() for image in display.images_]
    for group, part in ((limits[:6], "attention"), (limits[6:], "projection")):
        assert len(set(group)) == 1
        low, high = group[0]
        assert low == -high
        largest = max(np.abs(getattr(layer, part)).max() for layer in (truth, learner.layer_))
        assert high == pytest.approx(largest)


def test_layer_display_alone_has_two_rows_in_the_order_of_the_estimator(fitted):
    learner, _, _ = fitted
    display = LayerDisplay.from_estimator(learner, colorbar=False)
    assert display.axes_.shape == (2, 3)
    assert display.permutation_ is None
    assert len(display.figure_.axes) == 6
    np.testing.assert_array_equal([i.get_array() for i in display.images_[:3]], learner.attention_matrices_)


def test_layer_display_of_different_numbers_of_heads(fitted):
    learner, truth, _ = fitted
    fewer = AttentionLayer(truth.attention[:2], truth.projection[:2])
    display = LayerDisplay.from_estimator(learner, true_layer=fewer)
    assert display.axes_.shape == (4, 3)
    assert len(display.images_) == 10
    assert display.errors_ is None
    assert display.axes_[0, 0].get_title() == "head 0\nno match"


def test_layer_display_refuses_layers_of_other_sizes(fitted):
    learner, truth, _ = fitted
    with pytest.raises(ValueError, match="cannot be compared"):
        LayerDisplay(learner.layer_, true_layer=AttentionLayer(truth.attention, truth.projection[:, :, :2]))


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 1, 3), (2, 3, 1)])
def test_ticks_of_images_are_integers(shape):
    m, d, n_outputs = shape
    layer = AttentionLayer(np.ones((m, d, d)), np.ones((m, d, n_outputs)))
    display = LayerDisplay(layer).plot()
    display.figure_.canvas.draw()
    for panel in display.axes_.flat:
        for axis in (panel.xaxis, panel.yaxis):
            (low, high), ticks = sorted(axis.get_view_interval()), axis.get_majorticklocs()
            shown = ticks[(ticks >= low) & (ticks <= high)]
            assert len(shown) and np.all(shown == np.round(shown))


def test_layer_of_zeros_has_a_colour_scale():
    display = LayerDisplay(AttentionLayer(np.zeros((1, 2, 2)), np.zeros((1, 2, 2)))).plot()
    assert display.images_[0].get_clim() == (-1.0, 1.0)


def test_patterns_are_heads_by_samples_from_zero_to_one(fitted):
    learner, _, X = fitted
    display = PatternDisplay.from_estimator(learner, X[:4], sample_names=list("abcd"))
    assert display.axes_.shape == (3, 4)
    assert {image.get_clim() for image in display.images_} == {(0.0, 1.0)}
    expected = learner.attention_weights(X[:4])
    np.testing.assert_array_equal(display.images_[1 * 4 + 2].get_array(), expected[2, 1])
    assert [ax.get_title() for ax in display.axes_[0]] == list("abcd")


@pytest.mark.parametrize(
    ("shape", "names", "message"),
    [
        ((2, 3, 4), None, "must have shape"),
        ((2, 1, 3, 4), None, "must have shape"),
        ((0, 1, 3, 3), None, "must have shape"),
        ((25, 1, 2, 2), None, "25 samples are too many"),
        ((2, 1, 2, 2), ["one"], "must have 2 entries"),
    ],
)
def test_patterns_that_cannot_be_drawn(shape, names, message):
    with pytest.raises(ValueError, match=message):
        PatternDisplay(np.zeros(shape), sample_names=names)


def test_head_count_display_marks_the_gap_and_the_choice():
    display = HeadCountDisplay(
        singular_values=[8.0, 6.0, 2.0, 1.0],
        eigenvalues=[0.1, 0.4, 0.5],
        errors_by_count={1: 0.3, 2: 1e-12},
        n_heads=2,
        moment_count=2,
        sculpt_count=2,
    ).plot()
    moments, certified, held_out = display.axes_[0]
    labels = [ax.get_legend().get_texts()[-1].get_text() for ax in (moments, certified, held_out)]
    assert labels == ["gap 3: proposes 2 heads", "gap 4: proposes 2 heads", "chosen: 2"]
    # Two heads: the drop after the second singular value, the rise after the first eigenvalue.
    for ax, left in ((moments, 2), (certified, 1)):
        corners = ax.collections[0].get_paths()[0].vertices
        assert (corners[:, 0].min(), corners[:, 0].max()) == (left, left + 1)
    heights = moments.collections[0].get_paths()[0].vertices[:, 1]
    assert heights.max() / heights.min() == pytest.approx(3.0)
    chosen = held_out.lines[-1].get_xydata()
    np.testing.assert_array_equal(chosen, [[2, 1e-12]])
    assert any(line.get_ydata()[0] == EXACT for line in held_out.lines)


def test_head_count_display_without_gap_or_spectrum():
    display = HeadCountDisplay(
        singular_values=[], eigenvalues=[1.0, 1.1], errors_by_count={1: 0.01}, n_heads=1
    ).plot()
    moments, certified, held_out = display.axes_[0]
    assert moments.texts[0].get_text() == "not computed"
    assert certified.get_legend().get_texts()[0].get_text() == "no clear gap"
    assert not certified.collections
    assert not any(line.get_ydata()[0] == EXACT for line in held_out.lines)


def test_head_count_display_takes_the_spectra_of_the_stages(fitted):
    learner, _, _ = fitted
    display = HeadCountDisplay.from_estimator(learner)
    np.testing.assert_array_equal(display.singular_values, learner.stages_["span"].singular_values)
    np.testing.assert_array_equal(display.eigenvalues, learner.stages_["sculpt"].eigenvalues)
    assert display.errors_by_count == learner.stages_["heads"].errors_by_count
    assert display.n_heads == learner.n_heads_ == 3


def test_head_count_of_a_given_number_leaves_out_heads_that_stay_zero(fitted):
    _, truth, X = fitted
    y = truth.predict(X.reshape(len(X), 3, -1)).reshape(len(X), -1)
    learner = MultiHeadAttentionLearner(5, n_tokens=3, random_state=0).fit(X, y)
    display = HeadCountDisplay.from_estimator(learner)
    assert learner.n_heads_ == 5
    assert display.n_heads == 3 in display.errors_by_count


def test_head_count_of_exact_zeros_can_be_drawn():
    # One head leaves eigenvalues of exactly zero error; a logarithm must not see them.
    display = HeadCountDisplay(
        singular_values=[1.0, 0.0],
        eigenvalues=[0.0, 0.0],
        errors_by_count={1: 0.0},
        n_heads=1,
        moment_count=1,
    ).plot()
    display.figure_.canvas.draw()
    assert display.axes_[0, 1].texts[0].get_text() == "not computed"


def test_stage_display_has_a_bar_and_an_error_for_every_stage(fitted):
    learner, truth, _ = fitted
    display = StageDisplay.from_estimator(learner, true_layer=truth)
    time, error = display.axes_[0]
    assert [bar.get_width() for bar in time.patches] == [item.seconds for item in learner.stages_.values()]
    names = [label.get_text() for label in time.get_yticklabels()]
    assert names == [name.replace("_", " ") for name in learner.stages_]
    points = [line.get_xydata()[0] for line in error.lines if len(line.get_xydata())]
    assert len(points) == len(display.errors) == 6
    for value, place in points:
        assert value == display.errors[list(learner.stages_)[int(place)]].error
    assert not error.yaxis.get_tick_params()["labelleft"]


def test_stage_display_says_what_has_no_error(fitted):
    learner, truth, _ = fitted
    fewer = AttentionLayer(truth.attention[:1], truth.projection[:1])
    display = StageDisplay.from_estimator(learner, true_layer=fewer)
    texts = [text.get_text() for text in display.axes_[0, 1].texts]
    assert texts.count("another number of heads") == 2
    assert texts.count("nothing to compare") == 1
    assert StageDisplay.from_estimator(learner).axes_.shape == (1, 1)


def test_displays_draw_into_the_room_of_one_axes(fitted):
    learner, truth, X = fitted
    for index in range(4):
        figure, room = plt.subplots(1, 2)
        display = draw_all(learner, X, truth, ax=room[1])[index]
        assert display.figure_ is figure
        assert len(plt.get_fignums()) == 1
        left = min(ax.get_position().x0 for ax in display.axes_.flat)
        assert left > room[0].get_position().x1
        plt.close("all")


def test_displays_draw_into_axes_of_the_right_number(fitted):
    learner, _, X = fitted
    _, axes = plt.subplots(3, 2)
    display = PatternDisplay.from_estimator(learner, X[:2], ax=axes)
    assert display.axes_[2, 1] is axes[2, 1]
    with pytest.raises(ValueError, match="3 x 2 axes are needed, got 3"):
        PatternDisplay.from_estimator(learner, X[:2], ax=axes[:, 0])


def test_axes_without_a_grid_cannot_be_divided(fitted):
    learner, _, X = fitted
    loose = plt.figure().add_axes((0.1, 0.1, 0.8, 0.8))
    with pytest.raises(ValueError, match="grid of subplots"):
        PatternDisplay.from_estimator(learner, X[:2], ax=loose)
    # A single panel needs no division.
    assert StageDisplay.from_estimator(learner, ax=loose).axes_[0, 0] is loose


def test_plot_draws_again(fitted):
    learner, truth, X = fitted
    for display in draw_all(learner, X, truth):
        first = display.figure_
        assert display.plot() is display
        assert display.figure_ is not first
        assert display.figure_.axes


def test_labels_do_not_overlap(fitted):
    learner, truth, X = fitted
    for display in draw_all(learner, X, truth):
        display.figure_.canvas.draw()
        for first, second in zip(display.axes_[:, :-1].flat, display.axes_[:, 1:].flat, strict=True):
            assert first.get_tightbbox().x1 <= second.get_tightbbox().x0
        for first, second in zip(display.axes_[:-1].flat, display.axes_[1:].flat, strict=True):
            assert first.get_tightbbox().y0 >= second.get_tightbbox().y1


def test_estimator_must_be_fitted():
    from sklearn.exceptions import NotFittedError

    learner = MultiHeadAttentionLearner()
    for display in (LayerDisplay, HeadCountDisplay, StageDisplay):
        with pytest.raises(NotFittedError):
            display.from_estimator(learner)
    with pytest.raises(NotFittedError):
        PatternDisplay.from_estimator(learner, np.ones((1, 4)))


def test_missing_matplotlib_is_named_with_its_extra(fitted, monkeypatch):
    learner, _, X = fitted
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for display, arguments in (
        (LayerDisplay, ()),
        (PatternDisplay, (X[:2],)),
        (HeadCountDisplay, ()),
        (StageDisplay, ()),
    ):
        with pytest.raises(ImportError, match=rf"{display.__name__}.*sklearn-mhal\[plot\]"):
            display.from_estimator(learner, *arguments)
    with pytest.raises(ImportError, match=r"LayerDisplay.plot.*sklearn-mhal\[plot\]"):
        LayerDisplay(learner.layer_).plot()


def test_importing_does_not_import_matplotlib():
    code = "import sys, sklearn_mhal, sklearn_mhal.plotting; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0
