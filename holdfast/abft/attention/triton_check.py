"""What the Triton attention accepts: every refusal says what was given and what to do."""

import torch

from holdfast.abft.attention.triton_launch import LARGEST_WIDTH
from holdfast.abft.attention.triton_tiles import FAULT

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def operands(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Q, K and V are those of one attention."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dtype not in DTYPES:
            names = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
            raise TypeError(
                f"attention: {name} is {tensor.dtype}; verified are {names}: convert it"
            )
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


def mask(given: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """The mask as [batch, heads, Lq, Lk], broadcast and not copied."""
    shape = (*q.shape[:3], k.shape[2])
    if given.requires_grad:
        raise ValueError("attention: the mask requires grad and gets none: detach it")
    if given.dtype not in (torch.bool, *DTYPES):
        raise TypeError(
            f"attention: the mask is {given.dtype}: use bool, float32, float16 or bfloat16"
        )
    if given.device != q.device:
        raise ValueError(f"attention: the mask is on {given.device}, q on {q.device}: bring it")
    try:
        return given.expand(shape)
    except RuntimeError as error:
        raise ValueError(
            f"attention: a mask {tuple(given.shape)} does not broadcast to {shape}"
        ) from error


def gradient(grad: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, q: torch.Tensor) -> None:
    """What backward is given is of the shapes that forward gave."""
    for name, tensor, shape, dtype in (
        ("grad", grad, q.shape, q.dtype),
        ("out", out, q.shape, q.dtype),
        ("lse", lse, q.shape[:3], torch.float32),
    ):
        fits = tensor.shape == shape and tensor.dtype == dtype and tensor.device == q.device
        if not fits:
            raise ValueError(
                f"attention: {name} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}: "
                f"give {dtype} {tuple(shape)} on {q.device}"
            )


def faults(tensor: torch.Tensor | None, device: torch.device) -> None:
    """Faults to inject: ``triton_types.Place`` each."""
    if tensor is None:
        return
    fits = tensor.dtype == torch.float32 and tensor.dim() == 2 and tensor.shape[1] == FAULT.value
    if not fits or tensor.device != device or not tensor.is_contiguous():
        raise ValueError(
            f"faults is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}: give contiguous "
            f"fp32 [F, {FAULT.value}] on {device}"
        )
