"""Modules with torch.nn's own signatures whose matrix products are verified."""

from holdfast.nn.attention import Attention
from holdfast.nn.cache import Cache
from holdfast.nn.frequencies import set_frequencies
from holdfast.nn.linear import Linear

__all__ = ["Attention", "Cache", "Linear", "set_frequencies"]
