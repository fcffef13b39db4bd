"""Hooks on what a module computes: its output, and the gradient of its input."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.hooks import RemovableHandle


def on_output(module: nn.Module, act: Callable[[torch.Tensor], None]) -> RemovableHandle:
    """Call ``act(output)``, of the first tensor of a module's result, before any other hook."""

    def left(_: nn.Module, __: Any, result: Any) -> None:
        for leaf in tree_flatten(result)[0]:
            if _is_floating(leaf):
                act(leaf)
                break

    return module.register_forward_hook(left, prepend=True)


def on_input_gradient(
    module: nn.Module, act: Callable[[torch.Tensor], torch.Tensor]
) -> RemovableHandle:
    """Let ``act(gradient)`` stand for the gradient of a module's first input that has one.

    Of several such hooks the one registered last acts first, as its is the nearest to the module.
    """

    def entered(_: nn.Module, args: Any, kwargs: Any) -> Any:
        leaves, form = tree_flatten((args, kwargs))
        for number, leaf in enumerate(leaves):
            if _is_floating(leaf) and leaf.requires_grad:
                leaves[number] = _Gradient.apply(leaf, act)
                break
        return tree_unflatten(leaves, form)

    return module.register_forward_pre_hook(entered, with_kwargs=True)


class _Gradient(torch.autograd.Function):
    """Nothing in forward; in backward what ``act`` makes of the gradient."""

    @staticmethod
    def forward(
        ctx: Any, values: torch.Tensor, act: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        ctx.act = act
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.act(grads[0]), None


def _is_floating(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
