"""Certifying rows and sculpting the body; what is certified is true."""

import numpy as np
import pytest
from bank import cosine, draw_examples, head_vectors

from sklearn_mhal import BooleanAttentionSampler
from sklearn_mhal._examples import make_examples
from sklearn_mhal.stages import estimate_crude_sum, refine_sum, sculpt


def sculpted(m, k, d, s, n, seed, *, sampler=(), **settings):
    examples, layer = draw_examples(m, k, d, s, n, seed, **dict(sampler))
    refined = refine_sum(examples, estimate_crude_sum(examples).internal)
    return examples, layer, sculpt(examples, refined.internal, **settings)


def true_sum(examples, layer):
    return layer.projection.sum(axis=0) / examples.units.label_scale


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(
    "teacher", [(2, 3, 6, 1.0), (2, 3, 8, 4.0), (3, 3, 10, 1.0), (2, 4, 10, 2.0), (3, 3, 8, 4.0)], ids=str
)
class TestBody:
    def test_holds_the_heads_and_their_average(self, teacher, seed):
        examples, layer, sculpture = sculpted(*teacher, 4000, seed)
        heads = head_vectors(examples, layer)
        assert sculpture.body.inside(heads).all()
        assert sculpture.body.inside(heads.mean(axis=0)[None]).all()
        assert all(sculpture.body.contains(attention) for attention in layer.attention)

    def test_does_not_hold_other_matrices(self, teacher, seed):
        examples, layer, sculpture = sculpted(*teacher, 4000, seed)
        heads = head_vectors(examples, layer)
        assert not sculpture.body.inside(np.vstack([-heads, 3 * heads])).any()
        chance = np.random.default_rng(seed).standard_normal((200, heads.shape[1]))
        chance *= 2 * np.linalg.norm(heads[0]) / np.linalg.norm(chance, axis=1, keepdims=True)
        assert not sculpture.body.inside(chance).any()

    def test_average_points_to_the_true_one(self, teacher, seed):
        _, layer, sculpture = sculpted(*teacher, 4000, seed)
        # The point of the hull that is nearest to zero is not its middle. Measured 0.77 and more.
        assert cosine(sculpture.average, layer.attention.mean(axis=0)) > 0.7


@pytest.mark.parametrize("affine", [False, True])
def test_a_single_head_is_the_body(affine):
    examples, layer = draw_examples(1, 4, 6, 2.0, 1000, 0, fit_intercept=affine, key_bias_scale=0.5 * affine)
    sculpture = sculpt(examples, refine_sum(examples, estimate_crude_sum(examples).internal).internal)
    head = head_vectors(examples, layer)[0]
    assert sculpture.n_heads == 1
    np.testing.assert_allclose(sculpture.body.centre, head, atol=1e-6)
    assert sculpture.body.contains(layer.attention[0], layer.key_bias[0])
    # Rounding is inside, a thousandth is not.
    assert not sculpture.body.inside(1.001 * head[None]).any()


@pytest.mark.parametrize(("teacher", "n"), [((2, 3, 6, 1.0), 10_000), ((2, 4, 10, 1.0), 5000)], ids=str)
@pytest.mark.parametrize("seed", [0, 1])
def test_a_clear_gap_counts_the_heads(teacher, n, seed):
    _, _, sculpture = sculpted(*teacher, n, seed)
    assert sculpture.n_heads == 2 and "proposes 2 head" in sculpture.message
    assert (np.diff(sculpture.eigenvalues) >= 0).all()


def test_many_heads_leave_no_gap():
    """The case that must fail: the gap alone does not count six heads, and none is claimed."""
    _, _, sculpture = sculpted(6, 4, 8, 4.0, 4000, 0)
    assert sculpture.n_heads is None and "proposes" not in sculpture.message


def test_equal_heads_are_one_to_the_spectrum():
    sampler = BooleanAttentionSampler(2, 3, 6, attention_scale=1.0, random_state=0)
    layer = sampler.layer_
    twice = type(layer)(layer.attention[[0, 0]], layer.projection)
    X = sampler.sample(1000, as_tokens=True)[0]
    examples = make_examples(X, twice.predict(X), random_state=0)
    sculpture = sculpt(examples, refine_sum(examples, estimate_crude_sum(examples).internal).internal)
    assert sculpture.n_heads == 1 and sculpture.body.contains(layer.attention[0])


class TestCertificates:
    """Certified rows share one pattern, as far as `tolerance` lets them differ."""

    def test_interior_rows_agree(self):
        examples, layer = draw_examples(2, 3, 8, 4.0, 4000, 0)
        loose = sculpt(examples, true_sum(examples, layer), tolerance=0.05, fraction=1.0)
        tight = sculpt(examples, true_sum(examples, layer), tolerance=0.001, fraction=1.0)
        assert loose.n_interior > tight.n_interior > 0
        assert loose.n_vertex >= tight.n_vertex > 0
        assert loose.body.slack > tight.body.slack

    def test_fraction_limits_interior_rows_only(self):
        examples, layer = draw_examples(2, 3, 8, 2.0, 10_000, 0)
        every, some = (sculpt(examples, true_sum(examples, layer), fraction=f) for f in (1.0, 0.1))
        assert some.n_interior == max(int(0.1 * every.n_interior), 12 * 64 // 2)
        assert some.n_vertex == every.n_vertex

    def test_thresholds_on_patterns(self):
        examples, layer = draw_examples(1, 3, 8, 4.0, 1000, 0)
        patterns = layer.attention_weights(examples.white_tokens())[:, 0]
        settings = {"fraction": 1.0, "interior": 0.1, "vertex": 0.05}
        found = sculpt(examples, true_sum(examples, layer), **settings)
        tokens = examples.white_tokens()
        equal = (tokens[:, :, None] == tokens[:, None]).all(axis=3).sum(axis=(1, 2)) > 3
        interior, vertex = patterns.min(axis=2) >= 0.1, patterns.max(axis=2) >= 0.95
        assert found.n_rows == 3 * examples.n_samples
        assert found.n_interior == interior[~equal].sum() and found.n_vertex == vertex[~equal].sum()

    def test_first_readout(self):
        examples, layer = draw_examples(2, 3, 6, 1.0, 10_000, 0)
        first = make_examples(examples.tokens, examples.labels[:, :1], readout="first", random_state=0)
        found = sculpt(first, true_sum(first, layer))
        assert found.n_rows == first.n_samples and found.body.inside(head_vectors(first, layer)).all()


class TestNothingCertified:
    """The cases that must fail say why, and raise nothing."""

    @pytest.mark.parametrize(
        ("k", "outputs", "words"),
        [(4, 3, "n_outputs=3 must exceed n_tokens - 1 = 3"), (1, 4, "a single token has no pattern")],
    )
    def test_no_pattern_to_see(self, k, outputs, words):
        examples, _ = draw_examples(2, k, 6, 1.0, 200, 0, n_outputs=outputs)
        found = sculpt(examples, estimate_crude_sum(examples).internal)
        assert words in found.message
        assert found.body is None and found.average is None and found.n_heads is None
        assert (found.n_interior, found.n_vertex, found.n_rows, len(found.eigenvalues)) == (0, 0, 0, 0)

    def test_noise(self):
        examples, _ = draw_examples(2, 3, 6, 1.0, 500, 0)
        noise = np.random.default_rng(0).standard_normal(examples.labels.shape)
        noisy = make_examples(examples.tokens, examples.labels + 30 * noise, random_state=0)
        found = sculpt(noisy, estimate_crude_sum(noisy).internal, tolerance=1e-6)
        assert found.body is None
        assert "the best residual" in found.message and "tolerance=1e-06" in found.message
        assert found.n_rows == 3 * noisy.n_samples
