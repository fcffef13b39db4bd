"""The classes of operators that a step calls, and what a call of one has written."""

from typing import Any

import torch
from torch.utils import _pytree as pytree

PRODUCTS = MATMUL, ATTENTION, CONVOLUTION = "matmul", "attention", "convolution"
GATHER, COPY = "gather and scatter", "copy and layout"
POINTWISE, OPTIMIZER, COLLECTIVE, DATA = "pointwise", "optimizer", "collective", "data"

# The first class of which a word is in the operator's name, which ends in a point for this.
_WORDS = {
    ATTENTION: "scaled_dot_product _attention",
    CONVOLUTION: "convolution",
    MATMUL: "mm. addmv. :mv. :dot. _linear",
    "normalisation": "_norm",
    "softmax and loss": "softmax nll_loss mse_loss cross_entropy",
    GATHER: "embedding index gather scatter :take one_hot bincount",
    "reduction": ":sum :mean :amax :amin :max :min :var :std :all. :any. :prod argm cumsum topk "
    "sort pool vector_norm histc",
    COPY: "clone copy :cat stack zero ones fill full arange slice_ select_ pad_nd scalar_tensor "
    ":tri repeat split reshape contiguous new_ roll :flip",
}
CLASSES = (*_WORDS, POINTWISE, "other", OPTIMIZER, COLLECTIVE, DATA)


def class_of(func: Any) -> str:
    """Return the class of an operator of a pass; a backward operator is in that of its operator."""
    name, pointwise = f"{func._schema.name}.", torch.Tag.pointwise in func.tags
    for kind, words in _WORDS.items():
        if any(word in name for word in words.split()) and (kind == COPY or not pointwise):
            return kind
    return POINTWISE if pointwise or "_backward" in name else "other"


def written_by(func: Any, args: Any, kwargs: Any, result: Any) -> list[torch.Tensor]:
    """Return the tensors that a call has written; a view is not written, nor an empty tensor."""
    read = {_place(each) for each in _tensors((args, kwargs))}
    fresh = [] if ":empty" in func._schema.name or ":new_empty" in func._schema.name else result
    return overwritten_by(func, args, kwargs) + [
        e for e in _tensors(fresh) if _place(e) not in read
    ]


def overwritten_by(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Return the arguments that a call overwrites in place."""
    named = dict(zip((e.name for e in func._schema.arguments), args, strict=False)) | kwargs
    aliases = {e.name: e.alias_info for e in func._schema.arguments if e.alias_info is not None}
    return _tensors([value for n, value in named.items() if n in aliases and aliases[n].is_write])


def like(tensors: Any, target: torch.Tensor) -> torch.Tensor | None:
    """Return the first of nested tensors with the shape and dtype of a tensor."""
    shaped = (e for e in _tensors(tensors) if e.shape == target.shape and e.dtype == target.dtype)
    return next(shaped, None)


def _tensors(value: Any) -> list[torch.Tensor]:
    found = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return [each for each in found if each.layout is torch.strided and each.numel()]


def _place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
