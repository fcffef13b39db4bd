"""Counterparts of functions of ``torch.nn.functional`` that are verified without ``protect``."""

from holdfast.nn.functional.attention import (
    scaled_dot_product_attention,
    scaled_dot_product_attention_varlen,
)

__all__ = ["scaled_dot_product_attention", "scaled_dot_product_attention_varlen"]
