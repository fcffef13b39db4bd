"""The native core, which is the compiled C++ extension ``holdfast._C``.

``core`` is the extension, or None if it is not built. Without it torch's own matmuls cannot be
intercepted, and holdfast's operators run reference implementations in plain torch, which detect and
repair the same faults at many times the cost.
"""

import os
import warnings
from types import ModuleType
from typing import cast

import torch  # importing torch also loads the libraries that the extension links against

from holdfast.errors import ConfigError

REMEDY = (
    "install a wheel that was built for this torch, or with a C++ compiler build it: in a checkout "
    "pip install --no-build-isolation --no-deps -e . or else pip install --no-build-isolation "
    "--no-deps --force-reinstall --no-binary torch-holdfast torch-holdfast"
)
DISABLE_VARIABLE = "HOLDFAST_PURE_PYTHON"
MISSING = (
    "the native core is not loaded: build it with pip install --no-build-isolation --no-deps -e . "
    "(in a checkout), or install a wheel for this torch"
)


class NativeCoreMissing(UserWarning):
    """Warning that torch's own products are not verified and operators run slow references."""


def _torch_of_build() -> str:
    """Return the version of torch that the extension was built for; empty if that is not known."""
    try:
        from holdfast import _built_for
    except ImportError:
        return ""
    return str(_built_for.TORCH)


def _check_torch(built: str, running: str) -> None:
    """Raise ImportError if torch's C++ interface may differ from that of the build."""
    if built and built.split(".")[:2] != running.split(".")[:2]:
        raise ImportError(f"it was built for torch {built}, and this is torch {running}")


def _load() -> ModuleType | None:
    try:
        if os.environ.get(DISABLE_VARIABLE) == "1":
            raise ImportError(f"{DISABLE_VARIABLE}=1 is set")
        _check_torch(_torch_of_build(), torch.__version__)
        from holdfast import _C
    except ImportError as error:
        warnings.warn(
            f"holdfast: the native core is not loaded ({error}); holdfast.protect cannot verify "
            "torch's own matrix products, and holdfast.matmul and holdfast.nn run plain-torch "
            f"references, correct but many times slower. Remedy: {REMEDY}",
            NativeCoreMissing,
            stacklevel=2,
        )
        return None
    return cast(ModuleType, _C)


def required() -> ModuleType:
    """Return the native core.

    Raises:
        ConfigError: The native core is not loaded; the message says how to build it.
    """
    if core is None:
        raise ConfigError(MISSING)
    return core


core = _load()


def agree(table: str, ours: object) -> None:
    """Check that a constant defined in both C++ and Python has the same value in both.

    The module that defines the Python constant calls this on import. The order of names counts,
    because C++ passes some of them as numbers. Without the native core nothing is checked.

    Args:
        table: Name of the constant in ``holdfast._C.tables()``.
        ours: Python's value: a tuple of names in the order of the C++ enum, or a number.

    Raises:
        ImportError: The values differ, as the core was built from other sources.
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
