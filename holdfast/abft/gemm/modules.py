"""Numbers of the process's modules, the same in every protection: the first part of a site."""

import itertools
import weakref

import torch
from torch import nn

_fresh = itertools.count(1)
# By address: of a dictionary with weak keys, which may shrink at any time, Dynamo makes guards that
# count on the order of its keys.
_numbers: dict[int, int] = {}


def identifier(module: nn.Module) -> int:
    """Return the number of a module, from 1; the first call assigns it."""
    number = _numbers.get(id(module))
    if number is not None:
        return number
    if torch.compiler.is_compiling():  # else Dynamo guards on what weakref keeps for itself
        return int(torch.compiler.disable(_enrolled)(module))
    return _enrolled(module)


def identifier_at(address: int) -> int:
    """Return the number of the module with that ``id()``; 0 if it has none."""
    return _numbers.get(address, 0)


def _enrolled(module: nn.Module) -> int:
    number = _numbers[id(module)] = next(_fresh)
    weakref.finalize(module, _numbers.pop, id(module), None).atexit = False
    return number
