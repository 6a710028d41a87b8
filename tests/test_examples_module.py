"""Units, lots and weights: what `make_examples` settles before any stage begins."""

import numpy as np
import pytest
from sklearn import config_context

from sklearn_mhal import AttentionLayer
from sklearn_mhal._examples import make_examples
from sklearn_mhal._forward import unstack_attention
from sklearn_mhal._memory import samples_per_chunk

N, K, D, D_OUT, M = 200, 3, 4, 5, 2
READOUTS = ["tokens", "first", "mean"]


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def draw_layer(rng, d=D, affine=True):
    return AttentionLayer(
        rng.standard_normal((M, d, d)) / d,
        rng.standard_normal((M, d, D_OUT)),
        key_bias=rng.standard_normal((M, d)) if affine else None,
        intercept=rng.standard_normal(D_OUT) if affine else None,
    )


def read(labels, readout):
    return {"tokens": labels, "first": labels[:, :1], "mean": labels.mean(axis=1, keepdims=True)}[readout]


def draw_tokens(rng, kind, d=D):
    tokens = rng.standard_normal((N, K, d))
    if kind == "correlated":
        tokens = tokens @ rng.standard_normal((d, d))
    if kind == "shifted":
        tokens = 0.1 * tokens + np.arange(1.0, d + 1)
    if kind == "wild":
        scales = np.geomspace(1e-3, 1e3, d)
        tokens = tokens @ rng.standard_normal((d, d)) * scales + 1.0 / scales
    return tokens


class TestUnits:
    @pytest.mark.parametrize("kind", ["white", "correlated", "shifted", "wild"])
    @pytest.mark.parametrize("affine", [False, True])
    def test_tokens_are_white(self, rng, kind, affine):
        tokens = draw_tokens(rng, kind)
        examples = make_examples(tokens, rng.standard_normal((N, K, D_OUT)), fit_intercept=affine)
        white = examples.white_tokens().reshape(-1, D)
        moment = white.T @ white / len(white)
        # Tokens within a tenth of white are left alone; whitened ones lose digits to their condition.
        tolerance = 0.11 if kind == "white" else 1e-6
        np.testing.assert_allclose(moment, np.eye(D), atol=tolerance)
        # A mean within a tenth of the size of the tokens is left alone, too.
        if affine and kind in ("shifted", "wild"):
            np.testing.assert_allclose(white.mean(axis=0), 0.0, atol=1e-6)

    @pytest.mark.parametrize("affine", [False, True])
    def test_labels_have_unit_power(self, rng, affine):
        labels = 7.0 * rng.standard_normal((N, K, D_OUT)) + 100.0
        white = make_examples(draw_tokens(rng, "white"), labels, fit_intercept=affine).white_labels()
        if affine:
            np.testing.assert_allclose(white.mean(axis=(0, 1)), 0.0, atol=1e-12)
        assert np.mean(white**2) == pytest.approx(1.0, rel=1e-12)

    @pytest.mark.parametrize("kind", ["white", "correlated", "shifted", "wild"])
    @pytest.mark.parametrize("affine", [False, True])
    def test_the_map_is_closed_under_the_change(self, rng, kind, affine):
        """In internal units the internal parameters predict the internal labels."""
        layer = draw_layer(rng, affine=affine)
        tokens = draw_tokens(rng, kind)
        if kind == "wild":
            # Logits of order one again, in terms of the tokens' own scale.
            layer = AttentionLayer(
                layer.attention * 1e-6, layer.projection, key_bias=layer.key_bias * 1e-3 * affine
            )
        labels = layer.predict(tokens)
        examples = make_examples(tokens, labels, fit_intercept=affine)
        stacked = examples.units.attention_in(layer.attention, layer.key_bias)
        problem = examples.problem()
        design = problem.rows.pooled(problem.rows.patterns(stacked))
        if affine:
            design = np.column_stack([design, np.ones(len(design))])
        residual = problem.labels - design @ np.linalg.lstsq(design, problem.labels, rcond=None)[0]
        # Wild tokens have condition 1e6, which the normal equations of the whitener square.
        assert np.abs(residual).max() < (1e-4 if kind == "wild" else 1e-10)

    @pytest.mark.parametrize("kind", ["white", "correlated", "shifted"])
    @pytest.mark.parametrize("affine", [False, True])
    def test_parameters_survive_the_round_trip(self, rng, kind, affine):
        layer, tokens = draw_layer(rng, affine=affine), draw_tokens(rng, kind)
        examples = make_examples(tokens, layer.predict(tokens), fit_intercept=affine)
        stacked = examples.units.attention_in(layer.attention, layer.key_bias)
        found = examples.problem().evaluate(stacked).regression
        back = examples.units.layer(stacked, found.projection, found.intercept)
        np.testing.assert_allclose(back.attention, layer.attention, atol=1e-9)
        np.testing.assert_allclose(back.key_bias, layer.key_bias, atol=1e-9)
        np.testing.assert_allclose(back.projection, layer.projection, atol=1e-7)
        np.testing.assert_allclose(back.intercept, layer.intercept, atol=1e-7)

    @pytest.mark.parametrize("affine", [False, True])
    def test_directions_without_tokens_are_dropped(self, rng, affine):
        """A duplicated and a constant column: the layer that comes back predicts the same."""
        narrow = draw_tokens(rng, "correlated", d=3)
        tokens = np.concatenate([narrow, narrow[..., :1], np.full((N, K, 1), 2.0)], axis=2)
        layer = draw_layer(rng, d=5, affine=affine)
        labels = layer.predict(tokens)
        examples = make_examples(tokens, labels, fit_intercept=affine)
        # Without intercept nothing is subtracted, so a constant column is a direction of its own.
        assert examples.n_features == (3 if affine else 4)
        attention, bias = layer.attention, layer.key_bias
        stacked = examples.units.attention_in(attention, bias)
        found = examples.problem().evaluate(stacked).regression
        back = examples.units.layer(stacked, found.projection, found.intercept)
        np.testing.assert_allclose(back.predict(tokens), labels, atol=1e-8)

    def test_sum_of_projections_comes_back(self, rng):
        layer, tokens = draw_layer(rng), draw_tokens(rng, "shifted")
        examples = make_examples(tokens, layer.predict(tokens), fit_intercept=True)
        stacked = examples.units.attention_in(layer.attention, layer.key_bias)
        found = examples.problem().evaluate(stacked).regression
        total = np.vstack([found.projection.reshape(M, D, D_OUT).sum(axis=0), found.intercept])
        np.testing.assert_allclose(examples.units.sum_out(total), layer.projection.sum(axis=0), atol=1e-7)

    def test_change_is_the_difference_of_layers(self, rng):
        examples = make_examples(
            draw_tokens(rng, "shifted"), rng.standard_normal((N, K, D_OUT)), fit_intercept=True
        )
        attention, step = rng.standard_normal((2, D + 1, M * D))
        projection, pstep = rng.standard_normal((2, M * D, D_OUT))
        intercept, istep = rng.standard_normal((2, D_OUT))
        before = examples.units.layer(attention, projection, intercept)
        after = examples.units.layer(attention + step, projection + pstep, intercept + istep)
        theta, heads, bias, offset = examples.units.change(step, np.vstack([pstep, istep]))
        np.testing.assert_allclose(theta, after.attention - before.attention, atol=1e-10)
        np.testing.assert_allclose(heads, after.projection - before.projection, atol=1e-10)
        np.testing.assert_allclose(bias, after.key_bias - before.key_bias, atol=1e-10)
        np.testing.assert_allclose(offset, after.intercept - before.intercept, atol=1e-10)

    def test_constant_labels_are_not_blown_up(self, rng):
        labels = np.full((N, K, D_OUT), 1e9) + rng.uniform(-1e-7, 1e-7, (N, K, D_OUT))
        examples = make_examples(draw_tokens(rng, "white"), labels, fit_intercept=True)
        assert np.abs(examples.white_labels()).max() < 1e-6


def same_samples(first, second):
    """Whether two sets of examples hold the same samples in the same ranks."""
    tokens = np.array_equal(first.tokens[first.order], second.tokens[second.order])
    return tokens and np.array_equal(first.labels[first.order], second.labels[second.order])


class TestLots:
    @pytest.fixture
    def data(self, rng):
        return rng.integers(-1, 2, size=(N, K, D)), rng.integers(-5, 6, size=(N, K, D_OUT)) / 4

    def test_order_of_samples_does_not_matter(self, rng, data):
        tokens, labels = data
        shuffled = rng.permutation(N)
        first = make_examples(tokens, labels, random_state=0)
        second = make_examples(tokens[shuffled], labels[shuffled], random_state=0)
        assert same_samples(first, second)
        assert same_samples(first.first(20), second.first(20))
        np.testing.assert_array_equal(first.units.label_scale, second.units.label_scale)

    @pytest.mark.parametrize("dtype", [np.int8, np.int64, np.float32, np.float64])
    def test_dtype_does_not_matter(self, data, dtype):
        tokens, labels = data
        examples = make_examples(tokens.astype(dtype), labels.astype(np.float32), random_state=0)
        assert same_samples(examples, make_examples(tokens, labels, random_state=0))
        assert examples.tokens.dtype == dtype

    @pytest.mark.parametrize("layout", ["F", "strided", "reversed"])
    def test_memory_layout_does_not_matter(self, data, layout):
        tokens, labels = data
        laid_out = {
            "F": lambda a: np.asfortranarray(a),
            "strided": lambda a: np.repeat(a, 2, axis=0)[::2],
            "reversed": lambda a: a[::-1].copy()[::-1],
        }[layout]
        examples = make_examples(laid_out(tokens), laid_out(labels), random_state=0)
        assert same_samples(examples, make_examples(tokens, labels, random_state=0))

    def test_minus_zero_is_zero(self, data):
        tokens, labels = (array.astype(np.float64) for array in data)
        negative = np.where(tokens == 0, -0.0, tokens), np.where(labels == 0, -0.0, labels)
        assert np.signbit(negative[0]).sum() > np.signbit(tokens).sum()
        examples = make_examples(*negative, random_state=0)
        assert same_samples(examples, make_examples(tokens, labels, random_state=0))

    def test_working_memory_does_not_matter(self, data):
        tokens, labels = data
        with config_context(working_memory=1e-4):
            examples = make_examples(tokens, labels, random_state=0)
        assert same_samples(examples, make_examples(tokens, labels, random_state=0))

    def test_seeds_draw_different_lots(self, data):
        first, second = (make_examples(*data, random_state=seed) for seed in (0, 1))
        assert not np.array_equal(first.order, second.order)
        np.testing.assert_array_equal(np.sort(first.order), np.sort(second.order))

    def test_lots_are_even(self):
        """Every bit of every input moves a sample: the first half is a fair draw."""
        tokens = np.array([[[a, b, c]] for a in (-1, 1) for b in (-1, 1) for c in range(64)], dtype=np.int8)
        labels = np.zeros((256, 1, 1))
        drawn = np.zeros(256)
        for seed in range(400):
            drawn[make_examples(tokens, labels, random_state=seed).first(128).order] += 1
        # 400 fair coins each: standard deviation 10, and the largest of 256 is within five of them.
        assert np.abs(drawn - 200).max() < 50


class TestWeights:
    def test_equal_samples_are_merged(self, rng):
        tokens, labels = rng.standard_normal((6, K, D)), rng.standard_normal((6, K, D_OUT))
        repeated = np.array([0, 1, 1, 2, 3, 3, 3, 4, 5])
        examples = make_examples(tokens[repeated], labels[repeated], random_state=0)
        once = make_examples(tokens, labels, random_state=0)
        assert examples.n_samples == 6 and once.weights is None and examples.total_weight == 9
        assert same_samples(examples, once)
        np.testing.assert_allclose(
            examples.weights, np.array([1, 2, 1, 3, 1, 1])[once.order] / 1.5, rtol=1e-15
        )

    def test_weights_add_up(self, rng):
        tokens, labels = rng.standard_normal((4, K, D)), rng.standard_normal((4, K, D_OUT))
        repeated = np.array([0, 1, 1, 2, 3])
        weights = np.array([2.0, 0.5, 1.5, 0.0, 4.0])
        examples = make_examples(tokens[repeated], labels[repeated], sample_weight=weights, random_state=0)
        assert examples.n_samples == 3 and examples.total_weight == 8.0
        kept = {tuple(tokens[i].ravel()): w for i, w in zip([0, 1, 3], [2.0, 2.0, 4.0], strict=True)}
        for rank, position in enumerate(examples.order):
            found = kept[tuple(examples.tokens[position].ravel())]
            assert examples.weights[rank] == pytest.approx(found / (8 / 3), rel=1e-15)

    def test_weights_that_turn_out_equal_are_none(self, rng):
        tokens, labels = rng.standard_normal((4, K, D)), rng.standard_normal((4, K, D_OUT))
        assert make_examples(tokens, labels, sample_weight=np.full(4, 0.3)).weights is None

    @pytest.mark.parametrize("readout", READOUTS)
    @pytest.mark.parametrize("affine", [False, True])
    def test_units_and_problems_see_repetitions(self, rng, readout, affine):
        tokens, labels = draw_tokens(rng, "shifted"), read(rng.standard_normal((N, K, D_OUT)), readout)
        weights = rng.integers(0, 4, N)
        common = {"readout": readout, "fit_intercept": affine, "random_state": 0}
        weighted = make_examples(tokens, labels, sample_weight=weights.astype(float), **common)
        repeated = (np.repeat(array, weights, axis=0) for array in (tokens, labels))
        repeated = make_examples(*repeated, **common)
        np.testing.assert_array_equal(weighted.units.shift, repeated.units.shift)
        np.testing.assert_array_equal(weighted.units.whitener, repeated.units.whitener)
        assert weighted.units.label_scale == repeated.units.label_scale
        attention = rng.standard_normal((D + affine, M * D))
        errors = [examples.problem(ridge=0.1).evaluate(attention).error for examples in (weighted, repeated)]
        assert errors[0] == errors[1]


class TestSelections:
    @pytest.fixture
    def examples(self, rng):
        weights = rng.uniform(0.5, 2.0, N)
        return make_examples(
            rng.standard_normal((N, K, D)), rng.standard_normal((N, K, D_OUT)), sample_weight=weights
        )

    def test_between_first_and_pick(self, examples):
        for selection, ranks in [
            (examples.between(10, 30), np.arange(10, 30)),
            (examples.first(7), np.arange(7)),
            (examples.pick(np.array([5, 3, 199])), np.array([5, 3, 199])),
            (examples.between(190, 1000), np.arange(190, 200)),
        ]:
            assert selection.n_samples == len(ranks)
            np.testing.assert_array_equal(selection.order, examples.order[ranks])
            np.testing.assert_array_equal(selection.weights, examples.weights[ranks])
            np.testing.assert_array_equal(selection.white_tokens(), examples.white_tokens()[ranks])
            assert selection.tokens is examples.tokens

    @pytest.mark.parametrize("mebibytes", [1e-6, 0.002, 0.05, 1024])
    def test_chunks_hold_every_sample_once(self, examples, mebibytes):
        with config_context(working_memory=mebibytes):
            chunks = list(examples.chunks(M))
        orders = [chunk.order for chunk in chunks]
        np.testing.assert_array_equal(np.sort(np.concatenate(orders)), np.arange(N))
        if len(chunks) > 1:
            # In memory order, so that a file is read once and forwards.
            np.testing.assert_array_equal(np.concatenate(orders), np.arange(N))
        if mebibytes == 1e-6:
            assert len(chunks) == N
        assert (len(chunks) == 1) == (mebibytes == 1024)
        weights = np.concatenate([chunk.weights for chunk in chunks])
        ranked = np.empty(N)
        ranked[np.concatenate(orders)] = weights
        np.testing.assert_array_equal(ranked[examples.order], examples.weights)

    def test_nothing_is_written_to(self, rng):
        tokens, labels = draw_tokens(rng, "shifted"), rng.standard_normal((N, K, D_OUT))
        weights = rng.uniform(0.0, 2.0, N)
        for array in (tokens, labels, weights):
            array.flags.writeable = False
        examples = make_examples(tokens, labels, fit_intercept=True, sample_weight=weights)
        assert examples.tokens is tokens and examples.labels is labels
        problem = examples.problem()
        problem.labels += 1.0
        problem.rows.tokens += 1.0


class TestCounting:
    @pytest.mark.parametrize(("affine", "unknowns"), [(False, 3 * 4 * (4 + 5)), (True, 3 * 4 * (5 + 5) + 5)])
    @pytest.mark.parametrize("readout", READOUTS)
    def test_unknowns_and_information_limit(self, rng, affine, unknowns, readout):
        labels = read(rng.standard_normal((N, K, D_OUT)), readout)
        tokens = rng.standard_normal((N, K, D))
        examples = make_examples(tokens, labels, readout=readout, fit_intercept=affine)
        per_sample = (K if readout == "tokens" else 1) * D_OUT
        assert examples.equations_per_sample == per_sample
        assert examples.n_unknowns(3) == unknowns
        assert examples.information_limit(3) == int(np.ceil(unknowns / per_sample))

    def test_a_single_token_hides_the_attention(self, rng):
        examples = make_examples(rng.standard_normal((N, 1, D)), rng.standard_normal((N, 1, D_OUT)))
        assert examples.n_unknowns(1) == examples.n_unknowns(7) == D * D_OUT

    @pytest.mark.parametrize("readout", READOUTS)
    def test_problem_is_that_of_the_layer(self, rng, readout):
        layer, tokens = draw_layer(rng), rng.standard_normal((N, K, D))
        labels = read(layer.predict(tokens), readout)
        weights = rng.uniform(0.5, 2.0, N)
        examples = make_examples(
            tokens, labels, readout=readout, fit_intercept=True, sample_weight=weights, random_state=0
        )
        stacked = examples.units.attention_in(layer.attention, layer.key_bias)
        state = examples.problem().evaluate(stacked)
        # The sum of 3000 squares of rounding errors over a label power of as much.
        assert state.error < 1e-24
        attention, bias = unstack_attention(stacked, examples.n_features)
        assert attention.shape == (M, D, D) and bias.shape == (M, D)


class TestMemory:
    @pytest.mark.parametrize(
        ("mebibytes", "bytes_per_sample", "n_samples", "expected"),
        [
            (1, 2**10, 10**6, 1024),
            (1, 2**10, 100, 100),
            (1e-9, 2**10, 100, 1),
            (1024, 2**10, 10**6, 8 * 1024),  # Beyond eight MiB products leave the cache.
        ],
    )
    def test_samples_per_chunk(self, mebibytes, bytes_per_sample, n_samples, expected):
        with config_context(working_memory=mebibytes):
            assert samples_per_chunk(bytes_per_sample, n_samples) == expected
