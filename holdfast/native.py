"""The native core, or the loud news that it is absent.

``core`` is the compiled extension ``holdfast._C``, or None: then every op runs its plain-torch
reference, which finds and repairs the same faults at many times the cost.
"""

import os
import warnings
from types import ModuleType
from typing import cast

import torch  # also loads the libraries that the extension links against

DISABLE_VARIABLE = "HOLDFAST_PURE_PYTHON"


class NativeCoreMissing(UserWarning):
    """holdfast runs on its slow plain-torch references."""


def _load() -> ModuleType | None:
    try:
        if os.environ.get(DISABLE_VARIABLE) == "1":
            raise ImportError(f"{DISABLE_VARIABLE}=1 is set")
        from holdfast import _C
    except ImportError as error:
        warnings.warn(
            f"holdfast: the native core is not loaded ({error}); every check runs its plain-torch "
            "reference, correct but many times slower. Build it with: "
            "pip install --no-build-isolation --no-deps -e .",
            NativeCoreMissing,
            stacklevel=2,
        )
        return None
    return cast(ModuleType, _C)


core = _load()
ELEMENTS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)  # as csrc/reduce.h
