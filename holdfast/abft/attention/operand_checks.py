"""Checks of what a caller gives to the Triton attention."""

import torch

from holdfast.abft.triton.launch import check_operand

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LARGEST_WIDTH = 256


def check_operands(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Raise TypeError or ValueError if operands [batch, heads, L, d] are not supported."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_operand("attention", name, tensor, DTYPES)
        if tensor.dim() != 4:
            raise ValueError(
                f"attention: {name} has shape {tuple(tensor.shape)}: give [batch, heads, L, d]"
            )
        if (tensor.dtype, tensor.device) != (q.dtype, q.device):
            raise ValueError(
                f"attention: q is {q.dtype} on {q.device}, {name} is {tensor.dtype} on "
                f"{tensor.device}: convert one"
            )
    batch, heads, _, width = q.shape
    grouped = k.shape[1] > 0 and heads % k.shape[1] == 0
    if k.shape != v.shape or (k.shape[0], k.shape[3]) != (batch, width) or not grouped:
        raise ValueError(
            f"attention: q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} do not fit: "
            "give [batch, heads, Lq, d] and twice [batch, kv heads, Lk, d], kv heads dividing heads"
        )
    if not 0 < width <= LARGEST_WIDTH:
        raise ValueError(f"attention: heads have size {width}: use 1 to {LARGEST_WIDTH}")


def broadcast(mask: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Broadcast the mask to [batch, heads, Lq, Lk] without copying it."""
    shape = (*q.shape[:3], k.shape[2])
    if mask.requires_grad:
        raise ValueError("attention: the mask requires grad and gets none: detach it")
    if mask.dtype not in (torch.bool, *DTYPES):
        raise TypeError(
            f"attention: the mask is {mask.dtype}: use bool, float32, float16 or bfloat16"
        )
    if mask.device != q.device:
        raise ValueError(f"attention: the mask is on {mask.device}, q on {q.device}: bring it")
    try:
        return mask.expand(shape)
    except RuntimeError as error:
        raise ValueError(
            f"attention: a mask {tuple(mask.shape)} does not broadcast to {shape}"
        ) from error
