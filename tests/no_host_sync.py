"""A mode in which no op may make the host wait for the device."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class NoHostSync(TorchDispatchMode):
    """Fails on any op whose result the host must wait for, or whose shape depends on data."""

    FORBIDDEN = (
        "_local_scalar_dense",
        "item",
        "is_nonzero",
        "nonzero",
        "nonzero_static",
        "masked_select",
        "equal",
        "unique",
        "_unique2",
        "unique_consecutive",
        "bincount",
        "repeat_interleave",
    )

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func._schema.name.removeprefix("aten::")
        boolean_index = name == "index" and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        assert name not in self.FORBIDDEN, f"aten::{name} makes the host wait"
        assert not boolean_index, "a boolean index has a shape that depends on data"
        return func(*args, **(kwargs or {}))
