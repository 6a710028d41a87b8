"""Learn a multi-head attention layer from examples of its inputs and outputs.

The staged, geometric algorithm of Chen and Li (arXiv 2402.04084) behind a scikit-learn estimator:
rows on which all heads agree sculpt a convex body around the attention matrices, a search in
its span finds the heads with a linear regression for the projections, and held-out rows count
them. A Levenberg-Marquardt polish then takes every parameter to machine precision.
"""

from .datasets import BooleanAttentionSampler, make_boolean_attention
from .encoding import TokenPositionEncoder
from .layer import AttentionLayer
from .learner import MultiHeadAttentionLearner
from .metrics import head_recovery_error

__all__ = [
    "AttentionLayer",
    "BooleanAttentionSampler",
    "MultiHeadAttentionLearner",
    "TokenPositionEncoder",
    "head_recovery_error",
    "make_boolean_attention",
]
