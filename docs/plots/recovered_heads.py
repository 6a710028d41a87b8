"""The picture of the start page: true heads above, learned heads below."""

from sklearn_mhal import BooleanAttentionSampler, MultiHeadAttentionLearner
from sklearn_mhal.plotting import LayerDisplay

sampler = BooleanAttentionSampler(n_heads=4, n_tokens=4, n_features=10, random_state=3)
learner = MultiHeadAttentionLearner(n_tokens=4, random_state=0).fit(*sampler.sample(2000))
LayerDisplay.from_estimator(learner, true_layer=sampler.layer_)
