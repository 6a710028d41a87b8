import itertools
import pickle

import numpy as np
import pytest

from sklearn_mhal import AttentionLayer, BooleanAttentionSampler, make_boolean_attention
from sklearn_mhal._draws import BIASED_PROBABILITY, NEIGHBOUR_CORRELATION, STRUCTURES

DISTRIBUTIONS = ["boolean", "biased_bits", "zero_one", "repeated", "gaussian", "correlated_gaussian"]


def layer_parts(layer):
    return layer.attention, layer.projection, layer.key_bias, layer.intercept


def assert_same_layer(first, second):
    for one, other in zip(layer_parts(first), layer_parts(second), strict=True):
        np.testing.assert_array_equal(one, other)


def norms(matrices):
    return np.linalg.norm(matrices, axis=(1, 2))


def cosine(first, second):
    return np.sum(first * second) / np.linalg.norm(first) / np.linalg.norm(second)


def test_layouts_and_labels():
    sampler = BooleanAttentionSampler(3, 5, 7, n_outputs=2, random_state=0)
    flat = sampler.sample(11)
    tokens = BooleanAttentionSampler(3, 5, 7, n_outputs=2, random_state=0).sample(11, as_tokens=True)
    assert flat[0].shape == (11, 35) and flat[1].shape == (11, 10)
    assert tokens[0].shape == (11, 5, 7) and tokens[1].shape == (11, 5, 2)
    for two, three in zip(flat, tokens, strict=True):
        np.testing.assert_array_equal(two, three.reshape(11, -1))
    np.testing.assert_array_equal(tokens[1], sampler.layer_.predict(tokens[0]))


def test_defaults():
    sampler = BooleanAttentionSampler(random_state=0)
    layer = sampler.layer_
    assert (layer.n_heads, layer.n_features, layer.n_outputs) == (2, 8, 8)
    X, y = sampler.sample(3)
    assert X.shape == (3, 32) and X.dtype == np.int8 and y.dtype == np.float64
    assert not layer.key_bias.any() and not layer.intercept.any()


# Shapes whose bits fill neither a byte nor a 64-bit word.
@pytest.mark.parametrize("shape", [(3, 5), (1, 1), (9, 15)])
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_split_calls_continue_the_stream(distribution, shape):
    options = {"token_distribution": distribution, "noise_std": 0.5, "random_state": 3}
    whole = BooleanAttentionSampler(2, *shape, **options).sample(10)
    sampler = BooleanAttentionSampler(2, *shape, **options)
    parts = [sampler.sample(size) for size in (1, 4, 5)]
    np.testing.assert_array_equal(np.concatenate([X for X, _ in parts]), whole[0])
    # Rounding of the forward map only: sums over d and k terms of order 1.
    np.testing.assert_allclose(np.concatenate([y for _, y in parts]), whole[1], rtol=0, atol=1e-12)
    if shape != (1, 1):
        assert not np.array_equal(parts[1][0], parts[2][0][:4])


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_same_seed_same_everything(distribution):
    options = {"token_distribution": distribution, "key_bias_scale": 0.5, "intercept_scale": 1.0}
    first, second = (BooleanAttentionSampler(**options, random_state=5) for _ in range(2))
    assert_same_layer(first.layer_, second.layer_)
    for one, other in zip(first.sample(20), second.sample(20), strict=True):
        np.testing.assert_array_equal(one, other)
    third = BooleanAttentionSampler(**options, random_state=6)
    assert not np.array_equal(first.layer_.attention, third.layer_.attention)
    assert not np.array_equal(first.sample(20)[0], third.sample(20)[0])


def test_layer_tokens_and_noise_have_their_own_streams():
    plain = BooleanAttentionSampler(random_state=1)
    noisy = BooleanAttentionSampler(noise_std=0.3, random_state=1)
    gaussian = BooleanAttentionSampler(token_distribution="gaussian", n_tokens=6, random_state=1)
    biased = BooleanAttentionSampler(key_bias_scale=1.0, intercept_scale=2.0, random_state=1)
    assert_same_layer(plain.layer_, noisy.layer_)
    assert_same_layer(plain.layer_, gaussian.layer_)
    np.testing.assert_array_equal(plain.layer_.attention, biased.layer_.attention)
    np.testing.assert_array_equal(plain.layer_.projection, biased.layer_.projection)
    clean, dirty = plain.sample(5000), noisy.sample(5000)
    np.testing.assert_array_equal(clean[0], dirty[0])
    noise = dirty[1] - clean[1]
    # 160,000 independent values: the standard deviation is known to 0.0005 and 5 sigma are 0.003.
    assert noise.std() == pytest.approx(0.3, abs=0.003)
    assert abs(noise.mean()) < 0.004


def test_bias_and_intercept_scales():
    sampler = BooleanAttentionSampler(
        10, 4, 50, n_outputs=500, key_bias_scale=0.5, intercept_scale=3.0, random_state=0
    )
    # 500 values each: a standard deviation is known to 3 %, 5 sigma are 16 %.
    assert sampler.layer_.key_bias.std() == pytest.approx(0.5, rel=0.16)
    assert sampler.layer_.intercept.std() == pytest.approx(3.0, rel=0.16)


@pytest.mark.parametrize("noise_std", [0.0, 5.0])
@pytest.mark.parametrize("distribution", ["boolean", "repeated"])
def test_label_std_is_that_of_the_clean_labels_and_outside_the_stream(distribution, noise_std):
    options = {"token_distribution": distribution, "intercept_scale": 10.0, "random_state": 2}
    sampler = BooleanAttentionSampler(noise_std=noise_std, **options)
    label_std = sampler.label_std_
    assert label_std == BooleanAttentionSampler(**options).label_std_
    X, y = BooleanAttentionSampler(**options).sample(20_000)
    np.testing.assert_array_equal(sampler.sample(20_000)[0], X)
    pooled = np.sqrt(y.reshape(-1, 8).var(axis=0).mean())
    # Estimated from 4096 * 4 rows of 8 outputs: about 1 percent, as documented.
    assert label_std == pytest.approx(pooled, rel=0.03)


@pytest.mark.parametrize("scale", [0.5, 4.0])
@pytest.mark.parametrize("structure", ["incoherent", "low_rank", "correlated"])
def test_attention_norm_is_the_scale(structure, scale):
    layer = BooleanAttentionSampler(
        5, 4, 12, n_outputs=3, structure=structure, attention_scale=scale, random_state=0
    ).layer_
    np.testing.assert_allclose(norms(layer.attention), scale, rtol=1e-14)


def test_scale_is_the_standard_deviation_of_boolean_logits():
    sampler = BooleanAttentionSampler(2, 2, 10, attention_scale=3.0, random_state=0)
    X, _ = sampler.sample(40_000, as_tokens=True)
    logits = np.einsum("np,ipr,nr->in", X[:, 0], sampler.layer_.attention, X[:, 1])
    # 40,000 values with kurtosis about 3: known to 0.4 %, 5 sigma are 2 %.
    np.testing.assert_allclose(logits.std(axis=1), 3.0, rtol=0.02)


@pytest.mark.parametrize("structure", ["incoherent", "low_rank", "correlated"])
def test_projection_entries_have_variance_one_over_d(structure):
    layer = BooleanAttentionSampler(30, 4, 40, structure=structure, random_state=0).layer_
    mean_square = np.mean(layer.projection**2)
    # The common part of "correlated" is seen once only: 1,600 entries, 3.5 % of their variance.
    assert mean_square == pytest.approx(1 / 40, rel=0.12)


def test_low_rank_heads():
    for d, rank in [(12, 3), (7, 1), (2, 1)]:
        layer = BooleanAttentionSampler(3, 4, d, structure="low_rank", random_state=0).layer_
        for matrix in [*layer.attention, *layer.projection]:
            assert np.linalg.matrix_rank(matrix) == rank


def test_correlated_heads():
    layer = BooleanAttentionSampler(4, 4, 50, structure="correlated", random_state=0).layer_
    for i, j in itertools.combinations(range(4), 2):
        # The cosine of two 2,500-dimensional Gaussian matrices fluctuates by 1/50 around its mean.
        assert cosine(layer.attention[i], layer.attention[j]) == pytest.approx(0.5, abs=0.08)
        assert cosine(layer.projection[i], layer.projection[j]) == pytest.approx(0.5, abs=0.08)
    generic = BooleanAttentionSampler(2, 4, 50, random_state=0).layer_
    assert abs(cosine(*generic.attention)) < 0.1


def test_multiscale_heads():
    options = {"attention_scale": 8.0, "random_state": 0}
    layer = BooleanAttentionSampler(3, 4, 30, structure="multiscale", **options).layer_
    np.testing.assert_allclose(norms(layer.attention), [8.0, 4.0, 2.0], rtol=1e-14)
    equal = BooleanAttentionSampler(3, 4, 30, **options).layer_
    ratios = norms(layer.projection) / norms(equal.projection)
    np.testing.assert_allclose(ratios, [1, 8**-0.5, 1 / 8], rtol=1e-14)
    one = BooleanAttentionSampler(1, 4, 30, structure="multiscale", **options).layer_
    np.testing.assert_allclose(norms(one.attention), 8.0, rtol=1e-14)


@pytest.mark.parametrize("structure", sorted(STRUCTURES))
def test_one_head_and_one_output(structure):
    sampler = BooleanAttentionSampler(1, 2, 2, n_outputs=1, structure=structure, random_state=0)
    _, y = sampler.sample(50)
    assert y.shape == (50, 2) and np.isfinite(y).all() and y.std() > 0


@pytest.mark.parametrize("n_heads", [1, 2, 3, 5])
def test_parity_construction(n_heads):
    s = 1.5
    layer = BooleanAttentionSampler(
        n_heads, 2, 7, n_outputs=4, structure="parity", attention_scale=s, random_state=4
    ).layer_
    column = layer.attention[0, :, 0]
    subset = np.flatnonzero(column[1:]) + 1
    assert len(subset) == n_heads
    expected = np.zeros((n_heads, 7, 7))
    expected[:, subset, 0] = s
    expected[:, 0, 0] = s * np.arange(-n_heads + 1, n_heads, 2)
    np.testing.assert_array_equal(layer.attention, expected)
    w = -layer.projection[0, 0]
    assert np.linalg.norm(w) == pytest.approx(1.0)
    for i in range(n_heads):
        np.testing.assert_array_equal(layer.projection[i, 0], (-1) ** (i + 1) * w)
    assert not layer.projection[:, 1:].any()


def test_parity_subsets_differ_between_seeds_and_spare_the_first_coordinate():
    subsets = set()
    for seed in range(20):
        layer = BooleanAttentionSampler(2, 2, 6, structure="parity", random_state=seed).layer_
        subsets.add(tuple(np.flatnonzero(layer.attention[0, :, 0])))
    assert len(subsets) > 5
    assert all(subset[0] == 0 and len(subset) == 3 for subset in subsets)


def all_pairs_of_tokens(d):
    cube = np.array(list(itertools.product([-1, 1], repeat=2 * d)), dtype=np.int8)
    return cube.reshape(-1, 2, d)


@pytest.mark.parametrize("n_heads", [1, 2, 3, 4])
def test_parity_labels_are_a_parity(n_heads):
    # Over the whole cube, at a scale where a logit of 1 already gives a one-hot pattern.
    layer = BooleanAttentionSampler(
        n_heads, 2, 5, structure="parity", attention_scale=40.0, random_state=1
    ).layer_
    X = all_pairs_of_tokens(5)
    w = -layer.projection[0, 0]
    label = layer.predict(X)[:, 0] @ w
    query, other = X[:, 0], X[:, 1]
    subset = np.flatnonzero(layer.attention[0, 1:, 0]) + 1
    parity = query[:, subset].prod(axis=1)
    first = query[:, 0].astype(float)
    if n_heads % 2:
        expected = np.where(first != other[:, 0], -parity, -first)
    else:
        expected = np.where(first != other[:, 0], first * (1 - parity), 0.0)
    # exp(-2 * 40) is below rounding; the signed sum over m heads of size 1 is what is left.
    np.testing.assert_allclose(label, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("n_heads", [3, 4])
def test_parity_is_invisible_to_statistics_of_low_degree(n_heads):
    d = 5
    layer = BooleanAttentionSampler(
        n_heads, 2, d, structure="parity", attention_scale=40.0, random_state=1
    ).layer_
    X = all_pairs_of_tokens(d)
    label = layer.predict(X)[:, 0] @ -layer.projection[0, 0]
    bits = X.reshape(len(X), 2 * d).astype(float)
    first_coordinates = {0, d}
    largest = np.zeros(2 * d + 1)
    for degree in range(1, n_heads + 3):
        for monomial in itertools.combinations(range(2 * d), degree):
            if not set(monomial) <= first_coordinates:
                correlation = abs(np.mean(label * bits[:, monomial].prod(axis=1)))
                largest[degree] = max(largest[degree], correlation)
    # Averages of 1024 values of size 1, exact but for rounding.
    assert largest[:n_heads].max() < 1e-12
    visible = [n_heads, n_heads + 2] if n_heads % 2 else [n_heads + 1]
    assert all(largest[degree] == pytest.approx(0.5) for degree in visible)


def test_generic_layers_are_visible_to_linear_statistics():
    # The case that must fail: the same statistic finds an ordinary layer at once.
    layer = BooleanAttentionSampler(3, 2, 5, attention_scale=40.0, random_state=1).layer_
    X = all_pairs_of_tokens(5)
    label = layer.predict(X)[:, 0, 0]
    assert np.abs(np.einsum("nbj,n->bj", X[:, :, 1:], label) / len(X)).max() > 0.05


def test_token_distributions():
    # 96,000 values each; means and variances are known to 0.0033 and 0.005 or better.
    def tokens(distribution):
        sampler = BooleanAttentionSampler(2, 4, 6, token_distribution=distribution, random_state=0)
        return sampler.sample(4000, as_tokens=True)[0]

    for name, values, mean in [
        ("boolean", [-1, 1], 0.0),
        ("biased_bits", [-1, 1], 2 * BIASED_PROBABILITY - 1),
        ("zero_one", [0, 1], 0.5),
    ]:
        drawn = tokens(name)
        assert drawn.dtype == np.int8
        np.testing.assert_array_equal(np.unique(drawn), values)
        assert drawn.mean() == pytest.approx(mean, abs=0.017)
        # No bit of the underlying words is stuck or shared: every entry, every pair of entries.
        centred = drawn.reshape(4000, 24) - drawn.mean()
        correlation = centred.T @ centred / 4000 / centred.var()
        np.testing.assert_allclose(correlation, np.eye(24), atol=0.1)
    for name in ("gaussian", "correlated_gaussian"):
        drawn = tokens(name)
        assert drawn.dtype == np.float64
        covariance = np.cov(drawn.reshape(-1, 6).T)
        distance = np.abs(np.subtract.outer(np.arange(6), np.arange(6)))
        rho = NEIGHBOUR_CORRELATION if name == "correlated_gaussian" else 0.0
        np.testing.assert_allclose(covariance, rho**distance, atol=0.06)
        assert abs(drawn.mean()) < 0.03


@pytest.mark.parametrize(("d", "n_distinct"), [(1, 2), (3, 8), (4, 16), (5, 20), (70, 280)])
def test_repeated_tokens_come_from_a_small_vocabulary(d, n_distinct):
    sampler = BooleanAttentionSampler(2, 4, d, token_distribution="repeated", random_state=0)
    X, _ = sampler.sample(2000, as_tokens=True)
    distinct, counts = np.unique(X.reshape(-1, d), axis=0, return_counts=True)
    assert X.dtype == np.int8 and set(np.unique(X)) == {-1, 1}
    assert len(distinct) == n_distinct
    # Poisson-like counts with mean 8000 / n_distinct >= 28: six standard deviations.
    mean = 8000 / n_distinct
    assert np.abs(counts - mean).max() < 6 * np.sqrt(mean)


def test_own_layer():
    layer = BooleanAttentionSampler(3, 4, 5, n_outputs=2, key_bias_scale=1.0, random_state=0).layer_
    sampler = BooleanAttentionSampler(n_tokens=3, layer=layer, structure="parity", random_state=1)
    assert sampler.layer_ is layer
    X, y = sampler.sample(6, as_tokens=True)
    assert X.shape == (6, 3, 5)
    np.testing.assert_array_equal(y, layer.predict(X))


@pytest.mark.parametrize("make", [np.random.RandomState, np.random.default_rng])
def test_random_generators_are_seeds_and_advance(make):
    rng = make(3)
    first, second = (BooleanAttentionSampler(random_state=rng) for _ in range(2))
    assert not np.array_equal(first.layer_.attention, second.layer_.attention)
    again = BooleanAttentionSampler(random_state=make(3))
    assert_same_layer(first.layer_, again.layer_)
    np.testing.assert_array_equal(first.sample(5)[0], again.sample(5)[0])


def test_numpy_integers_are_integers_and_none_is_random():
    seeded = BooleanAttentionSampler(np.int64(2), np.int32(4), np.uint8(8), random_state=np.int64(7))
    plain = BooleanAttentionSampler(2, 4, 8, random_state=7)
    np.testing.assert_array_equal(seeded.sample(np.int64(3))[0], plain.sample(3)[0])
    unseeded = [BooleanAttentionSampler().layer_.attention for _ in range(2)]
    assert not np.array_equal(*unseeded)


def test_parameters_are_kept_and_shown():
    rng = np.random.RandomState(0)
    sampler = BooleanAttentionSampler(3, attention_scale=4, structure="correlated", random_state=rng)
    assert sampler.random_state is rng and sampler.attention_scale == 4 and sampler.n_outputs is None
    assert BooleanAttentionSampler.__name__ + "()" == repr(BooleanAttentionSampler())
    shown = repr(BooleanAttentionSampler(3, structure="correlated", random_state=0))
    assert shown == "BooleanAttentionSampler(n_heads=3, structure='correlated', random_state=0)"


def test_pickle_continues_the_stream():
    sampler = BooleanAttentionSampler(token_distribution="repeated", noise_std=0.1, random_state=0)
    sampler.sample(3)
    copy = pickle.loads(pickle.dumps(sampler))
    for one, other in zip(sampler.sample(5), copy.sample(5), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_heads": 0}, r"n_heads must be an integer in \[1, inf\), got 0"),
        ({"n_heads": 2.0}, "n_heads"),
        ({"n_heads": True}, "n_heads"),
        ({"n_tokens": 0}, "n_tokens"),
        ({"n_features": "8"}, "n_features"),
        ({"n_outputs": 0}, "n_outputs"),
        ({"attention_scale": -1.0}, r"attention_scale must be a real number in \[0, inf\)"),
        ({"attention_scale": np.nan}, "attention_scale"),
        ({"attention_scale": np.inf}, "attention_scale"),
        ({"noise_std": -0.1}, "noise_std"),
        ({"noise_std": None}, "noise_std"),
        ({"key_bias_scale": -1}, "key_bias_scale"),
        ({"intercept_scale": "1"}, "intercept_scale"),
        ({"structure": "random"}, "structure must be one of .*'parity'"),
        ({"structure": None}, "structure"),
        ({"token_distribution": "bool"}, "token_distribution must be one of .*'repeated'"),
        ({"layer": np.eye(3)}, "layer must be an AttentionLayer"),
        ({"random_state": -1}, "random_state"),
        ({"random_state": "seed"}, "random_state"),
        ({"random_state": 1.5}, "random_state"),
        ({"structure": "parity"}, "n_tokens must be 2"),
        ({"structure": "parity", "n_tokens": 2, "n_heads": 8}, r"n_features must be in \[n_heads \+ 1"),
    ],
)
def test_wrong_parameters(options, message):
    with pytest.raises(ValueError, match=message):
        BooleanAttentionSampler(**options)
    with pytest.raises(ValueError, match=message):
        make_boolean_attention(5, **options)


@pytest.mark.parametrize("n_samples", [0, -3, 2.5, None])
def test_wrong_number_of_samples(n_samples):
    with pytest.raises(ValueError, match=r"n_samples must be an integer in \[1, inf\)"):
        BooleanAttentionSampler(random_state=0).sample(n_samples)
    with pytest.raises(ValueError, match="n_samples"):
        make_boolean_attention(n_samples)


def test_function_form_is_the_sampler():
    options = {
        "n_heads": 3, "n_tokens": 2, "n_features": 6, "n_outputs": 4, "attention_scale": 1.0,
        "structure": "low_rank", "token_distribution": "gaussian", "noise_std": 0.2,
        "key_bias_scale": 0.5, "intercept_scale": 0.7, "random_state": 9,
    }  # fmt: skip
    sampler = BooleanAttentionSampler(**options)
    X, y, layer = make_boolean_attention(13, True, **options)
    assert_same_layer(layer, sampler.layer_)
    for one, other in zip((X, y), sampler.sample(13), strict=True):
        np.testing.assert_array_equal(one, other)
    X, y = make_boolean_attention(as_tokens=True, layer=layer)
    assert X.shape == (100, 4, 6) and y.shape == (100, 4, 4)
    assert isinstance(layer, AttentionLayer)
