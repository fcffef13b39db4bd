"""The norm of all gradients, wherever they lie."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch.nn.utils import get_total_norm


def total_norm(gradients: Iterable[torch.Tensor]) -> torch.Tensor:
    """Their 2-norm, a plain 0-d tensor; of DTensors that of the whole, equal on all their ranks.

    As ``torch.nn.utils.get_total_norm``, which refuses plain tensors beside DTensors, and DTensors
    on several meshes.
    """
    alike: defaultdict[Any, list[torch.Tensor]] = defaultdict(list)
    for gradient in gradients:
        alike[getattr(gradient, "device_mesh", None)].append(gradient)
    norms = [_whole(get_total_norm(group)) for group in alike.values()]
    return norms[0] if len(norms) == 1 else get_total_norm(norms)


def _whole(norm: torch.Tensor) -> torch.Tensor:
    whole: torch.Tensor = getattr(norm, "full_tensor", lambda: norm)()
    return whole
