"""The native core, and what to do where it is absent.

``core`` is the compiled extension ``holdfast._C``, or None: then torch's own products cannot be
intercepted, and holdfast's operators run their plain-torch references, which find and repair the
same faults at many times the cost.
"""

import os
import warnings
from types import ModuleType
from typing import cast

import torch  # also loads the libraries that the extension links against

from holdfast.errors import ConfigError

DISABLE_VARIABLE = "HOLDFAST_PURE_PYTHON"
MISSING = (
    "the native core is not loaded: build it with pip install --no-build-isolation --no-deps -e ."
)


class NativeCoreMissing(UserWarning):
    """Warning that torch's own products are not verified and operators run slow references."""


def _load() -> ModuleType | None:
    try:
        if os.environ.get(DISABLE_VARIABLE) == "1":
            raise ImportError(f"{DISABLE_VARIABLE}=1 is set")
        from holdfast import _C
    except ImportError as error:
        warnings.warn(
            f"holdfast: the native core is not loaded ({error}); holdfast.protect cannot verify "
            "torch's own matrix products, and holdfast.matmul and holdfast.nn run plain-torch "
            "references, correct but many times slower. Build it with: "
            "pip install --no-build-isolation --no-deps -e .",
            NativeCoreMissing,
            stacklevel=2,
        )
        return None
    return cast(ModuleType, _C)


def required() -> ModuleType:
    """Return the native core.

    Raises:
        ConfigError: it is not loaded, with how to build it.
    """
    if core is None:
        raise ConfigError(MISSING)
    return core


core = _load()


def agree(table: str, ours: object) -> None:
    """Compare a table that C++ and Python both have; nothing to do without the core.

    Whoever owns the Python side calls this where it is defined. The order of the entries counts,
    because C++ passes some of them as numbers.

    Args:
        table: its name in ``holdfast._C.tables()``.
        ours: what Python says: a tuple of names in the order of the C++ enum, or a number.

    Raises:
        ImportError: the core was built from other sources than these.
    """
    if core is None:
        return
    theirs = core.tables().get(table)
    if theirs != ours:
        raise ImportError(
            f"holdfast: the native core's table {table!r} is {theirs!r}, and Python's is {ours!r}: "
            "they come from different versions of holdfast. Build the core again with: "
            "pip install --no-build-isolation --no-deps -e ."
        )


ELEMENTS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
agree("elements", tuple(str(dtype).removeprefix("torch.") for dtype in ELEMENTS))
