"""Hooks on a module's output and on the gradient of its input."""

from collections.abc import Callable
from typing import TypeGuard

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.hooks import RemovableHandle


def on_output(module: nn.Module, act: Callable[[torch.Tensor], None]) -> RemovableHandle:
    """Call ``act`` with the first tensor of a module's result, before any other hook."""

    def left(_: nn.Module, __: object, result: object) -> None:
        for leaf in tree_flatten(result)[0]:
            if _is_floating(leaf):
                act(leaf)
                break

    return module.register_forward_hook(left, prepend=True)


def on_input_gradient(
    module: nn.Module, act: Callable[[torch.Tensor], torch.Tensor]
) -> RemovableHandle:
    """Replace the gradient of a module's first input that has one by ``act(gradient)``.

    Of several such hooks the one registered last acts first, because it is closest to the module.
    """

    def entered(
        _: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        leaves, form = tree_flatten((args, kwargs))
        for number, leaf in enumerate(leaves):
            if _is_floating(leaf) and leaf.requires_grad:
                view = leaf.view_as(leaf)  # its gradient is that of this module alone
                if view.requires_grad:  # False under no_grad
                    view.register_hook(act)
                leaves[number] = view
                break
        replaced: tuple[tuple[object, ...], dict[str, object]] = tree_unflatten(leaves, form)
        return replaced

    return module.register_forward_pre_hook(entered, with_kwargs=True)


def _is_floating(leaf: object) -> TypeGuard[torch.Tensor]:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
