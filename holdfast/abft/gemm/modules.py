"""Numbers that identify the modules of this process in site names, equal in all protections.

A number is made from a name, so that a program that is started again gives its modules the same
numbers, and Inductor finds the graphs that contain them in its cache.
"""

import weakref
import zlib
from typing import Any

import torch
from torch import nn

NUMBERS = 2**31  # numbers are 1 to NUMBERS - 1
# Keyed by address: Dynamo guards on the keys of dictionaries, and weak keys may vanish at any time.
_numbers: dict[int, int] = {}
_taken: set[int] = set()  # also those of modules that are gone, whose counts remain


def identifier(module: nn.Module, name: str = "") -> int:
    """Return the number of a module, from 1; the first call assigns it.

    Args:
        module: Any module.
        name: What to make the number from: equal in every run of a program, and different for the
            modules of one model. The default is the module's type.
    """
    number = _numbers.get(id(module))
    if number is not None:
        return number
    if torch.compiler.is_compiling():  # Dynamo would guard on weakref's internal state
        return int(torch.compiler.disable(_enrolled)(module, name))
    return _enrolled(module, name)


def identifier_at(address: int) -> int:
    """Return the number of the module with that ``id()``; 0 if it has none."""
    return _numbers.get(address, 0)


def numbers_of(model: nn.Module) -> frozenset[int]:
    """Return the numbers of a model's modules that have one, and 0 for products outside of any."""
    return frozenset(identifier_at(id(module)) for module in model.modules()) | {0}


def _enrolled(module: nn.Module, name: str) -> int:
    number = zlib.crc32((name or type(module).__qualname__).encode()) % NUMBERS
    while number == 0 or number in _taken:
        number = (number + 1) % NUMBERS
    _taken.add(number)
    _numbers[id(module)] = number
    weakref.finalize(module, _numbers.pop, id(module), None).atexit = False
    return number


# Dynamo, which is not imported for this, leaves that frame to Python wherever it meets it: it would
# guard on the registry of weakref, which other threads change.
_frames: Any = torch._C._dynamo.eval_frame
_frames.set_code_exec_strategy(
    _enrolled.__code__,
    _frames._FrameExecStrategy(_frames._FrameAction.SKIP, _frames._FrameAction.DEFAULT),
)
