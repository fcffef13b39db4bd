"""The state of a rank as values that stock tools load: tensors and plain Python types."""

from typing import Any

import numpy as np
import torch

from holdfast.snapshot.layout.dtensors import LocalShard
from holdfast.snapshot.layout.manifest import Manifest, Opaque

# A rank's number, its manifest and its buffer.
State = tuple[int, Manifest, torch.Tensor]


def stock(value: Any) -> Any:
    """Return a value in types that ``torch.load(weights_only=True)`` accepts."""
    if isinstance(value, Opaque):
        value = value.arguments[0] if len(value.arguments) == 1 else value.arguments
    if isinstance(value, LocalShard):
        return value.tensor
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, torch.Size):
        return value
    if isinstance(value, dict):
        return type(value)((key, stock(item)) for key, item in value.items())
    if isinstance(value, list | tuple | set | frozenset):
        items = [stock(item) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    return value
