"""The search over candidates: which sources are asked, and what held-out rows decide."""

import numpy as np
import pytest
from bank import draw_examples, head_vectors

from sklearn_mhal import head_recovery_error
from sklearn_mhal._progress import Progress
from sklearn_mhal.stages import Span, find_heads
from sklearn_mhal.stages.heads import EXACT, Candidate, Search
from sklearn_mhal.stages.span import Frame

K, D = 3, 6


@pytest.fixture(scope="module")
def drawn():
    return draw_examples(2, K, D, 2.0, 500, 0)


def hull(examples, layer):
    """The true affine hull as a frame."""
    heads = head_vectors(examples, layer)
    direction = heads[1:] - heads[:1]
    return Frame("sculpt", heads.mean(axis=0), direction / np.linalg.norm(direction), True, 2)


def chance(source="moments", affine=False, n_directions=2, seed=0):
    directions = np.linalg.qr(np.random.default_rng(seed).standard_normal((D * D, n_directions)))[0].T
    return Frame(source, np.zeros(D * D), directions, affine, 2)


def span_of(*frames, exclusive=False):
    return Span(
        source=frames[0].source if frames else "none",
        basis=np.empty((0, D, D)),
        origin=np.zeros((D, D)),
        singular_values=np.empty(0),
        n_heads=None,
        frames=frames,
        exclusive=exclusive,
        n_samples=0,
        message="",
    )


def find(examples, span, **settings):
    settings = {"n_heads": 2, "generator": np.random.default_rng(0), **settings}
    return find_heads(examples, span, **settings)


class TestWithoutPolish:
    def test_the_true_hull_holds_the_heads(self, drawn):
        examples, layer = drawn
        found = find(examples, span_of(hull(examples, layer), exclusive=True), polish=False)
        assert found.source == "sculpt" and found.n_tuples > 100
        # The tuple's refinement has one coordinate a head, and converges in a dozen steps.
        assert head_recovery_error(layer, found.layer) < 1e-3

    def test_the_better_frame_wins_on_held_out_rows(self, drawn):
        examples, layer = drawn
        for frames in [(hull(examples, layer), chance()), (chance(), hull(examples, layer))]:
            found = find(examples, span_of(*frames, exclusive=True), polish=False)
            assert found.source == "sculpt" and found.held_out_error < 1e-3

    def test_a_chance_frame_alone_loses(self, drawn):
        """The case that must fail."""
        examples, layer = drawn
        found = find(examples, span_of(chance(), exclusive=True), polish=False)
        assert found.source == "moments" and found.held_out_error > 0.1
        assert head_recovery_error(layer, found.layer) > 0.5


class TestWithPolish:
    @pytest.mark.parametrize("exclusive", [False, True])
    def test_a_frame_that_is_near_is_enough(self, drawn, exclusive):
        examples, layer = drawn
        found = find(examples, span_of(hull(examples, layer), exclusive=exclusive))
        assert found.held_out_error < EXACT
        assert found.source == ("sculpt" if exclusive else "random")

    def test_no_frame_leaves_random_starts(self, drawn):
        examples, layer = drawn
        for exclusive in (False, True):
            found = find(examples, span_of(exclusive=exclusive))
            assert found.source == "random" and head_recovery_error(layer, found.layer) < 1e-2

    def test_a_frame_that_is_too_small_is_not_asked(self):
        examples, layer = draw_examples(3, K, D, 2.0, 500, 0)
        small = chance("sculpt", affine=True, n_directions=1)
        assert small.for_heads(3) is None and small.for_heads(2) is not None
        found = find(examples, span_of(small), n_heads=3)
        assert found.source == "random" and head_recovery_error(layer, found.layer) < 1e-2


class TestHeldOut:
    def test_share_and_least_training_set(self, drawn):
        examples, _ = drawn
        seen = {}

        class Spy(Progress):
            def step(self, name, layer):
                seen["steps"] = seen.get("steps", 0) + 1
                return False

        found = find(examples, span_of(), progress=Spy())
        assert found.n_samples == examples.n_samples and seen["steps"] == found.n_candidates

    @pytest.mark.parametrize(("n", "expected"), [(400, 40), (30, 3), (10, 1), (1, 0)])
    def test_number_held_out(self, drawn, n, expected, monkeypatch):
        sizes = []
        original = Search.best

        def best(self, n_heads, n_starts=None):
            sizes.append((self.train.n_samples, self.test.n_samples))
            return original(self, n_heads, n_starts)

        monkeypatch.setattr(Search, "best", best)
        examples = drawn[0].first(n)
        find(examples, span_of(), n_heads=1, n_starts=1, max_iter=2)
        ((train, test),) = set(sizes)
        if n == 1:
            # The only sample has to do for both.
            assert (train, test) == (1, 1)
        else:
            assert (train, test) == (n - expected, expected)

    def test_errors_are_of_samples_not_trained_on(self):
        examples, _ = draw_examples(1, K, D, 2.0, 400, 0, noise_std=0.5)
        found = find(examples, span_of(), n_heads=1)
        noise = 0.25 / np.mean(examples.labels**2)
        assert found.held_out_error == pytest.approx(noise, rel=0.3)


def test_candidates_know_whether_they_are_exact():
    common = {"source": "random", "n_heads": 1, "attention": np.zeros((D, D)), "standard_error": 0.0}
    assert Candidate(held_out_error=EXACT / 2, **common).exact
    assert not Candidate(held_out_error=2 * EXACT, **common).exact


def test_layer_and_stacked_attention_are_the_same(drawn):
    examples, _ = drawn
    found = find(examples, span_of())
    stacked = examples.units.attention_in(found.layer.attention)
    np.testing.assert_allclose(stacked, found.attention, atol=1e-12)
    assert found.layer.n_heads == found.n_heads == 2


def test_more_heads_than_net_points(drawn):
    found = find(drawn[0], span_of(chance(n_directions=4)), n_heads=4, n_points=2)
    assert found.n_heads == 4 and found.held_out_error < EXACT
