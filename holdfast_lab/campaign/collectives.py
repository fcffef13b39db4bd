"""Faults in what a collective sums or delivers."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from holdfast import events
from holdfast.collectives import interception
from holdfast.errors import ConfigError
from holdfast.events import EventKind
from holdfast.inject.models import fault_model


@contextmanager
def collective_fault(
    op: str,
    kind: str = "flip-30",
    *,
    given: bool = False,
    elements: int = 0,
    nth: int = 0,
    index: int = 0,
) -> Iterator[None]:
    """Let one collective go wrong on the ranks that open this context.

    Args:
        op: ``all_reduce``, ``reduce_scatter``, ``all_gather``, ``broadcast`` or ``all_to_all``.
        kind: A fault model for one element (``docs/campaigns.md``); ``"lost"`` for a quarter of the
            data that stays zero; ``"stale"`` for a buffer that keeps what was in it.
        given: True to change what this rank gives, after it was noted: all get a wrong sum.
        elements: Least number of elements that the collective moves.
        nth: Which of these collectives it is, from 0.
        index: Place of the (first) element.

    Raises:
        ConfigError: Another fault is being injected.
    """
    if interception.striker is not None:
        raise ConfigError("another fault in a collective is being injected: one at a time")
    seen = 0

    def strike(name: str, group: Any, moved: Callable[[], Any]) -> Callable[[], None] | None:
        nonlocal seen
        sides = [(each.given if given else each.got).values() for each in moved()]
        tensors = [tensor.data.view(-1) for side in sides for tensor in side]
        if name != op or sum(map(len, tensors)) < max(1, elements):
            return None
        seen += 1
        if seen != nth + 1:
            return None
        before = [tensor.clone() for tensor in tensors]

        def change() -> None:
            events.record(EventKind.INJECTED, op=op, detail={"fault": kind, "given": given})
            _change(tensors, before, kind, index)

        if given:
            change()
        return None if given else change

    interception.install()
    interception.striker = strike
    try:
        yield
    finally:
        interception.striker = None


def _change(tensors: list[torch.Tensor], before: list[torch.Tensor], kind: str, index: int) -> None:
    if kind == "stale":
        for tensor, old in zip(tensors, before, strict=True):
            tensor.copy_(old)
        return
    for tensor in tensors:
        if index < len(tensor):
            break
        index -= len(tensor)
    if kind == "lost":
        tensor[index : index + -(-len(tensor) // 4)] = 0
        return
    element = tensor[index : index + 1]
    element.copy_(
        fault_model(kind, tensor.dtype).corrupt(element[None].cpu(), torch.Generator())[0]
    )
