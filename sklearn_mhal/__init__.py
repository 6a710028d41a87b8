"""Learn a multi-head attention layer from examples of its inputs and outputs."""

from .layer import AttentionLayer

__all__ = ["AttentionLayer"]
