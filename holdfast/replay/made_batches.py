"""Digests of a batch that are made with it, and compared where it is used."""

from collections import Counter, UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.weak import WeakIdKeyDictionary

from holdfast import events
from holdfast.digest.tensors import raw_bytes, state_digest
from holdfast.errors import ConfigError, UncorrectableFault
from holdfast.events import EventKind
from holdfast.memory import WIDEST_FAULT_BYTES

# Containers are looked into so deep, and so many of their items altogether.
_DEPTH, _ITEMS = 3, 1000


@dataclass(frozen=True)
class MadeBatch:
    """A batch on its way from the loader to the Guard, with digests of its tensors by place."""

    batch: Any
    digests: Mapping[str, str]

    def pin_memory(self) -> "MadeBatch":
        """Return the same in pinned memory; torch's ``DataLoader`` calls it."""
        from torch.utils.data._utils.pin_memory import pin_memory

        return MadeBatch(pin_memory(self.batch), self.digests)


class DigestedCollate:
    """A ``collate_fn`` whose batches are digested where they are made, in a worker of the loader.

    ``Guard.batches`` compares the digests, and yields the batches as the function made them. The
    Guard compares their tensors again before each pass. If some have changed in memory, the event
    ``batch_fault`` names them. Guarantees and what is not covered: ``docs/fault_model.md``.

    Args:
        collate: Makes a batch of samples, by default as torch does. Tensors and NumPy arrays are
            found in nested lists, tuples and dicts; arrays of Python objects are left out.

    Raises:
        ConfigError: Later, in the loader, if a batch has no tensor that can be found.
        UncorrectableFault: Later, in ``batches`` or a step, if the same batch cannot be made again.
    """

    def __init__(self, collate: Callable[[Any], Any] | None = None) -> None:
        self._collate = collate

    def __call__(self, samples: Any) -> MadeBatch:
        """Make a batch of samples."""
        from torch.utils.data import default_collate

        batch = (self._collate or default_collate)(samples)
        arrays = ((place, value) for place, value in walk(batch) if _is_array(value))
        digests = {place: state_digest(value) for place, value in arrays}
        if not digests:
            raise ConfigError(
                f"DigestedCollate found no tensor in a batch of {type(batch).__name__}: let the "
                "collate function return tensors in lists, tuples or dicts"
            )
        return MadeBatch(batch, digests)


def _is_array(value: object) -> bool:
    """Return whether a value has a digest that is the same in every process."""
    is_plain = isinstance(value, np.ndarray) and not value.dtype.hasobject
    return is_plain or isinstance(value, torch.Tensor)


_Again = Callable[[], MadeBatch | None]
# Of a tensor: its place in the batch, its digest, its version, and what makes the batch again.
_known: Any = WeakIdKeyDictionary()
_in_a_row = Counter[str]()  # by place, batches one after another that have changed before use
_met: Any = WeakIdKeyDictionary()  # whether a tensor has been found changed before, once looked at

EDITS = 3  # batches one after another whose change is taken for an edit of the program
_EDITED = (
    "the program seems to change it through NumPy or .data, which torch does not see: do that in "
    "the collate function, or by operations of torch; else"
)


def opened(made: MadeBatch, again: _Again) -> Any:
    """Compare a batch with its digests, repair it if ``again`` can, and return it as it is used."""
    values = dict(walk(made.batch))
    arrays = [(values[place], place, digest) for place, digest in made.digests.items()]
    _repair(arrays, again)
    for value, place, digest in arrays:
        if isinstance(value, torch.Tensor) and not value.is_inference():
            _known[value] = place, digest, value._version, again
    return made.batch


def check_made(leaves: Iterable[object]) -> None:
    """Compare those tensors of a batch that have digests, unless the program has changed them."""
    for leaf in leaves if len(_known) else ():
        if isinstance(leaf, torch.Tensor) and leaf in _known:
            place, digest, version, again = _known[leaf]
            if leaf._version == version:
                changed = state_digest(leaf) != digest
                if not changed and leaf not in _met:
                    _in_a_row[place] = 0
                elif changed and not _met.get(leaf):
                    _in_a_row[place] += 1
                _met[leaf] = changed or bool(_met.get(leaf))
                if changed:
                    _repair([(leaf, place, digest)], again, used=True)


def _is_edited(place: str, value: torch.Tensor, made: torch.Tensor) -> bool:
    """Return whether a change looks like one of the program: wide, or in each batch."""
    if (value.shape, value.dtype) != (made.shape, made.dtype):
        return True
    differ = raw_bytes(value) != raw_bytes(made)
    changed = differ.view(-1, value.itemsize).any(1).nonzero()
    wide = value.itemsize * int(changed[-1] - changed[0] + 1) > WIDEST_FAULT_BYTES
    most = value.numel() > 1 and 2 * len(changed) > value.numel()
    return wide or most or _in_a_row[place] >= EDITS


def _repair(arrays: list[tuple[Any, str, str]], again: _Again, *, used: bool = False) -> None:
    """Replace arrays, with their places and digests, that have changed by those of a new batch.

    What the program may have changed meanwhile, as the batch is ``used``, is not undone.
    """
    changed = [each for each in arrays if state_digest(each[0]) != each[2]]
    if not changed:
        return
    reason, fresh = "the loader cannot make it again", dict[str, Any]()
    try:
        if (made := again()) is not None:
            reason, fresh = "the loader made another one", dict(walk(made.batch))
    except Exception as error:
        reason = f"making it again failed: {error!r}"
    left = list[str]()
    for value, place, digest in changed:
        new: Any = fresh.get(place)
        if used and state_digest(new) == digest and _is_edited(place, value, new):
            left, reason = [*left, place], _EDITED
        elif state_digest(new) == digest:
            # Through .data, as the program has not changed it.
            (value.data.copy_ if isinstance(value, torch.Tensor) else partial(np.copyto, value))(
                new
            )
        elif state_digest(new) != state_digest(value):  # else the digest was wrong
            left.append(place)
    rung, names = "" if left else "recompute", [place for _, place, _ in changed]
    detail = {"tensors": names, "reason": reason if left else ""}
    events.record(EventKind.BATCH_FAULT, op=names[0], detector="digest", rung=rung, detail=detail)
    if left:
        _in_a_row.clear()
        raise UncorrectableFault(
            f"{', '.join(left)} changed in memory after the loader had made the batch, and "
            f"{reason}{' ' if reason is _EDITED else ': '}restart, which restores the loader and "
            "reads the batch anew"
        )


def walk(batch: object) -> Iterator[tuple[str, Any]]:
    """Yield the batch and what it contains, with the place of each, containers first."""
    todo = [("batch", batch, 0)]
    for place, value, depth in todo:
        yield place, value
        if depth == _DEPTH:
            continue
        if isinstance(value, dict | UserDict):
            inside = [(f"{place}[{key!r}]", item) for key, item in list(value.items())[:_ITEMS]]
        elif isinstance(value, list | tuple):
            inside = [(f"{place}[{n}]", item) for n, item in enumerate(value[:_ITEMS])]
        else:
            continue
        room = _ITEMS - len(todo)
        todo += [(below, item, depth + 1) for below, item in inside[: max(0, room)]]
