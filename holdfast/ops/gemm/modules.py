"""One number for each module of the process, whoever protects it: the first part of its sites."""

import itertools
import weakref

from torch import nn

_fresh = itertools.count(1)
_identifiers: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
_by_address: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()


def identifier(module: nn.Module) -> int:
    """The number of a module, from 1; given to it with the first call."""
    if module not in _identifiers:
        _identifiers[module] = next(_fresh)
        _by_address[id(module)] = module
    return _identifiers[module]


def identifier_at(address: int) -> int:
    """The number of the module with that ``id()``; 0 if it has none."""
    module = _by_address.get(address)
    return 0 if module is None else _identifiers[module]
