"""Counterparts of ``torch.nn`` modules whose matrix products are verified."""

from holdfast.nn import functional as functional
from holdfast.nn.attention import Attention
from holdfast.nn.cache import Cache
from holdfast.nn.frequencies import set_frequencies
from holdfast.nn.int8_embedding_bag import FrozenEmbeddingBag, Int8EmbeddingBag, pool_bags
from holdfast.nn.int8_linear import Int8Linear
from holdfast.nn.int8_pt2e import from_pt2e
from holdfast.nn.int8_quantized import Int8QuantizedLinear
from holdfast.nn.linear import Linear
from holdfast.nn.tbe import from_tbe

__all__ = [
    "Attention",
    "Cache",
    "FrozenEmbeddingBag",
    "Int8EmbeddingBag",
    "Int8Linear",
    "Int8QuantizedLinear",
    "Linear",
    "from_pt2e",
    "from_tbe",
    "pool_bags",
    "set_frequencies",
]
