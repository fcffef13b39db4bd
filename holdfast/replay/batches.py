"""The batch of a step, kept such that every repetition of the step is given the same one."""

import logging
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from holdfast.digest.tensors import state_digest, tensor_digest
from holdfast.errors import ConfigError, UncorrectableFault
from holdfast.replay.made_batches import MadeBatch, check_made, opened, walk

_CHANGED = (
    "its batch was changed in place (work on a copy of its tensors in forward_backward; "
    "holdfast.replay.check_determinism finds what makes two runs of a step differ)"
)
_logger = logging.getLogger("holdfast.replay")
_said = False
_MAPPINGS = (dict, OrderedDict, defaultdict)


class KeptBatch:
    """A batch, with what is needed to notice that a pass has changed it.

    Items that a pass removes from the batch's lists and dicts, or exchanges in them, are put back
    by ``again``. Tensors and arrays are not copied: whether they were changed in place is seen by
    their version counters and digests.

    Args:
        batch: The argument of ``forward_backward``.

    Raises:
        ConfigError: It is or contains an iterator, which a repetition would find used up.
    """

    def __init__(self, batch: object) -> None:
        self._batch = batch
        self._contents: list[tuple[Any, Any]] = []
        self._leaves: list[object] = []
        for place, value in walk(batch):
            if isinstance(value, Iterator):
                raise _iterator(place, value)
            items = value.data if isinstance(value, UserDict) else value
            if type(items) is list or type(items) in _MAPPINGS:
                self._contents.append((items, items.copy()))
            elif not isinstance(items, tuple):
                self._leaves.append(items)
        self._marks = self._marked()

    def again(self) -> Any:
        """Return the batch with its containers as they were."""
        for container, items in self._contents:
            if type(container) is list:
                container[:] = items
            else:
                container.clear()
                container.update(items)
        return self._batch

    def digest(self) -> str:
        """Return a digest of the tensors, arrays and plain values that the batch contains."""
        return state_digest([_portrait(leaf) for leaf in self._leaves])

    def changed_in_place(self) -> bool:
        """Return True if a tensor or an array has changed since the step began."""
        return self._marks != self._marked()

    def check_unchanged(self) -> None:
        """Check, before a step is done again, that its batch is the one of the first time.

        Raises:
            UncorrectableFault: It was changed in place meanwhile.
        """
        if self.changed_in_place():
            raise UncorrectableFault(
                f"the step cannot be done again, because {_CHANGED}; restart, which restores the "
                "loader and reads the batch anew"
            )

    def check_made(self) -> None:
        """Compare its tensors with the digests that were made with it, if there are any."""
        check_made(self._leaves)

    def say_if_changed(self) -> None:
        """Warn once in a process that steps cannot be repeated."""
        global _said
        if not _said and self.changed_in_place():
            _said = True
            _logger.warning("a fault could not be repaired by repeating a step: %s", _CHANGED)

    def _marked(self) -> list[object]:
        return [_mark(leaf) for leaf in self._leaves]


def keep(batch: object) -> KeptBatch:
    """Return a batch as it is kept for repetitions; one that is kept already as it is."""
    if isinstance(batch, MadeBatch):  # of a loop that does without Guard.batches
        batch = opened(batch, lambda: None)
    return batch if isinstance(batch, KeptBatch) else KeptBatch(batch)


def _iterator(place: str, value: object) -> ConfigError:
    return ConfigError(
        f"{place} is a {type(value).__name__}: a step that is repeated would find it used up; draw "
        "the micro-batches before the step, micro_batches = [next(iterator) for _ in range(n)], "
        "and iterate over the list in forward_backward"
    )


def _mark(leaf: object) -> object:
    """Return what changes if a leaf is changed in place; cheap for tensors."""
    if isinstance(leaf, torch.Tensor):
        return None if leaf.is_inference() else leaf._version
    return state_digest(leaf) if isinstance(leaf, np.ndarray) and not leaf.dtype.hasobject else None


def _portrait(leaf: object) -> object:
    if isinstance(leaf, torch.Tensor):
        return tensor_digest(leaf)
    if isinstance(leaf, np.ndarray) and not leaf.dtype.hasobject:
        return leaf
    return leaf if isinstance(leaf, int | float | str | bytes) else type(leaf).__name__
