"""The norm of all gradients, of plain, sparse and distributed tensors together, and clipping."""

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch.nn.utils import clip_grads_with_norm_, get_total_norm


def total_norm(gradients: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the 2-norm of all gradients as a 0-d tensor, equal on all ranks of a DTensor.

    ``torch.nn.utils.get_total_norm`` refuses plain tensors beside DTensors and DTensors on several
    meshes, so that it is called for each mesh. Of a sparse gradient the summed values count.
    """
    alike: defaultdict[object, list[torch.Tensor]] = defaultdict(list)
    for gradient in gradients:
        values = gradient.coalesce().values() if gradient.is_sparse else gradient
        alike[getattr(gradient, "device_mesh", None)].append(values)
    norms = [_whole(get_total_norm(group)) for group in alike.values()]
    return norms[0] if len(norms) == 1 else get_total_norm(norms)


def clip_gradients(
    parameters: Iterable[torch.nn.Parameter], max_norm: float, norm: torch.Tensor
) -> None:
    """Scale gradients of a known norm down to ``max_norm``, as ``clip_grads_with_norm_`` does.

    torch clips dense gradients only. Sparse ones are multiplied by the same factor.
    """
    parameters = list(parameters)
    sparse = [p.grad for p in parameters if p.grad is not None and p.grad.is_sparse]
    dense = [p for p in parameters if p.grad is None or not p.grad.is_sparse]
    clip_grads_with_norm_(dense, max_norm, norm)
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for gradient in sparse:
        gradient._values().mul_(factor.to(gradient.device))


def _whole(norm: torch.Tensor) -> torch.Tensor:
    whole: torch.Tensor = getattr(norm, "full_tensor", lambda: norm)()
    return whole
