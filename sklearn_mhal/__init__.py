"""Learn a multi-head attention layer from examples of its inputs and outputs."""

from .datasets import BooleanAttentionSampler, make_boolean_attention
from .layer import AttentionLayer
from .metrics import head_recovery_error

__all__ = ["AttentionLayer", "BooleanAttentionSampler", "head_recovery_error", "make_boolean_attention"]
