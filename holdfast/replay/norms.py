"""The norm of all gradients, of plain tensors and DTensors together."""

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch.nn.utils import get_total_norm


def total_norm(gradients: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the 2-norm of all gradients as a 0-d tensor, equal on all ranks of a DTensor.

    ``torch.nn.utils.get_total_norm`` refuses plain tensors beside DTensors and DTensors on several
    meshes, so that it is called for each mesh.
    """
    alike: defaultdict[object, list[torch.Tensor]] = defaultdict(list)
    for gradient in gradients:
        alike[getattr(gradient, "device_mesh", None)].append(gradient)
    norms = [_whole(get_total_norm(group)) for group in alike.values()]
    return norms[0] if len(norms) == 1 else get_total_norm(norms)


def _whole(norm: torch.Tensor) -> torch.Tensor:
    whole: torch.Tensor = getattr(norm, "full_tensor", lambda: norm)()
    return whole
