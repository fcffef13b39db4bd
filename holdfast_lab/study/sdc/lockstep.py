"""Lock-step in one process: compares a pass with a recorded healthy one, submodule by submodule.

The measures are those of ``holdfast.replay.lockstep``, which compares two ranks. Every submodule
gets the healthy inputs, so that a mismatch is its own.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import nn

from holdfast.replay import Mismatches
from holdfast_lab.emulation.hooks import on_input_gradient, on_output
from holdfast_lab.emulation.places import Submodule, submodules
from holdfast_lab.emulation.profile import BACKWARD, FORWARD

Key = tuple[int, str]  # layer, direction and submodule such as "forward.attn"
Found = dict[Key, Mismatches]


class Reference:
    """The outputs and the input gradients of every submodule in a healthy pass."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._values: dict[Key, torch.Tensor] = {}

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Record the one pass that runs in the context."""

        def seen(key: Key, values: torch.Tensor) -> torch.Tensor:
            self._values[key] = values.detach().clone()
            return values

        with _watched(self._model, seen):
            yield

    @contextmanager
    def compared(self, found: Found) -> Iterator[None]:
        """Compare the pass in the context with the recorded one and overwrite each wrong value.

        A device has to be entered within this context, so that values are corrupted before they are
        compared.
        """

        def seen(key: Key, values: torch.Tensor) -> torch.Tensor:
            reference = self._values[key]
            found.setdefault(key, Mismatches(*_names(key))).add(reference, values.detach())
            return reference

        with _watched(self._model, seen):
            yield


def _names(key: Key) -> tuple[str, str]:
    layer, submodule = key
    direction, part = submodule.split(".")
    return f"blocks.{layer}.{part}", direction


@contextmanager
def _watched(model: nn.Module, seen: Callable[[Key, torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Replace each submodule's output and its input's gradient by ``seen(key, values)``."""

    def output(sub: Submodule, values: torch.Tensor) -> None:
        values.data.copy_(seen((sub.layer, f"{FORWARD}.{sub.part}"), values))

    def gradient(sub: Submodule, values: torch.Tensor) -> torch.Tensor:
        return seen((sub.layer, f"{BACKWARD}.{sub.part}"), values)

    with ExitStack() as stack:
        for sub in submodules(model):
            module = model.get_submodule(sub.name)
            stack.callback(on_output(module, partial(output, sub)).remove)
            stack.callback(on_input_gradient(module, partial(gradient, sub)).remove)
        yield
