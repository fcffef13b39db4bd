"""Numbers that identify the modules of this process in site names, equal in all protections."""

import itertools
import weakref

import torch
from torch import nn

_fresh = itertools.count(1)
# Keyed by address: Dynamo guards on the keys of dictionaries, and weak keys may vanish at any time.
_numbers: dict[int, int] = {}


def identifier(module: nn.Module) -> int:
    """Return the number of a module, from 1; the first call assigns it."""
    number = _numbers.get(id(module))
    if number is not None:
        return number
    if torch.compiler.is_compiling():  # Dynamo would guard on weakref's internal state
        return int(torch.compiler.disable(_enrolled)(module))
    return _enrolled(module)


def identifier_at(address: int) -> int:
    """Return the number of the module with that ``id()``; 0 if it has none."""
    return _numbers.get(address, 0)


def _enrolled(module: nn.Module) -> int:
    number = _numbers[id(module)] = next(_fresh)
    weakref.finalize(module, _numbers.pop, id(module), None).atexit = False
    return number
