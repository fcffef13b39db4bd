"""Scaled dot-product attention that is verified with or without ``protect``."""

import math
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import dropout

from holdfast.abft.attention.fused import FUSED, fused_attention
from holdfast.abft.gemm.op import SUPPORTED, autocast, matmul
from holdfast.errors import ConfigError
from holdfast.nn.masks import Positions, alibi, structural


def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
    enable_gqa: bool = False, *, window: int | None = None, alibi_slopes: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Compute ``softmax(scale · query keyᵀ + mask) value``, forward and backward verified.

    Args:
        query: [batch, H, Lq, E], or with fewer dimensions; fp64, fp32, bf16, fp16, or as autocast.
        key: [batch, H, Lk, E]. With ``enable_gqa`` its heads, and those of value, may divide H.
        value: [batch, H, Lk, Ev].
        attn_mask: bool, False where a key is not attended to, or fp32 or of the query's dtype and
            added to the scores; broadcastable to [batch, H, Lq, Lk]. ``is_causal`` adds to it.
        dropout_p: Probability of dropping a probability: outside of compiled graphs, of those that
            torch's function drops on CPU with the same random state.
        is_causal: Query i attends to keys 0 … i.
        scale: Factor of the scores; by default 1/√E.
        enable_gqa: Query head h reads key head h · heads of key // H.
        window: Query i attends only to keys less than ``window`` positions from i.
        alibi_slopes: [H] or [batch, H]: minus slope times distance is added to the scores.

    Returns:
        [batch, H, Lq, Ev], less the dimensions that query lacks; 0 where all keys are masked.

    Guarantees: without ``protect`` those of fused attention under it, or of ``holdfast.matmul``,
    with which attention is written out for a mask or slopes that require grad, and Ev ≠ E.
    ``torch.compile`` keeps the fused kernel as one operator. On CUDA ``fused_attention`` of
    ``holdfast.abft.attention.cuda`` runs (no dropout, fp64, nor gradients of masks; what stays
    suspect is only counted). Not covered: masks, the choice of what is dropped; where written out,
    softmax and dropout.

    Raises:
        TypeError: A dtype is not verified. ValueError: Shapes or options do not fit. ConfigError:
            The device, or dropout on it, is not supported. RuntimeError: A second derivative is
            asked for. UncorrectableFault: A fault persists (a ``Guard`` collects it).

    Source: FlashAttention's online softmax; ALiBi of Press, Smith and Lewis.
    """
    given = attn_mask, dropout_p, is_causal, scale, enable_gqa, window, alibi_slopes
    return _attend(0, query, key, value, *given)


def scaled_dot_product_attention_varlen(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor,
    *, dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
    enable_gqa: bool = False, window: int | None = None, alibi_slopes: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attend by ``scaled_dot_product_attention`` within each of several packed sequences.

    The last query of a sequence is at the position of its last key, as in torch's ``varlen_attn``.

    Args:
        query: [total queries, H, E].
        key: [total keys, H, E].
        value: [total keys, H, Ev].
        cu_seq_q: int [batch + 1], cumulative lengths from 0 on; a compiled graph breaks here.
        cu_seq_k: int [batch + 1], likewise of the keys.
        dropout_p: As there, and so are the next four.
        is_causal: See there.
        scale: See there.
        enable_gqa: See there.
        window: See there.
        alibi_slopes: [H] or [batch, H].

    Returns:
        [total queries, H, Ev].

    Guarantees, what is not covered and errors are those of ``scaled_dot_product_attention``.
    """
    _check_tensors(query=query, key=key, value=value, cu_seq_q=cu_seq_q, cu_seq_k=cu_seq_k)
    if {query.dim(), key.dim(), value.dim()} != {3}:
        shapes = [tuple(each.shape) for each in (query, key, value)]
        raise ValueError(f"packed sequences {shapes}: give [total length, H, E] of each")
    ends = cu_seq_q.tolist(), cu_seq_k.tolist()
    lengths = q, k = [[b - a for a, b in pairwise(each)] for each in ends]
    whole = [(each[:1], sum(of)) for each, of in zip(ends, lengths, strict=True)]
    fit = whole == [([0], len(query)), ([0], len(key))] and len(q) == len(k) and q != []
    if not fit or min(q + k) < 0 or cu_seq_q.is_floating_point() or cu_seq_k.is_floating_point():
        wrong = f"cumulative lengths {ends}: give integers, increasing from 0 to the total"
        raise ValueError(f"{wrong}, of at least one sequence")
    slopes, found = [alibi_slopes] * len(k), []
    if alibi_slopes is not None and alibi_slopes.dim() == 2:
        slopes = list(alibi_slopes)
        if len(slopes) != len(k):
            raise ValueError(f"alibi_slopes of {len(slopes)} sequences: there are {len(k)}")
    for *each, of_one in zip(query.split(q), key.split(k), value.split(k), slopes, strict=True):
        a, b, c = (x.transpose(0, 1) for x in each)
        options = None, dropout_p, is_causal, scale, enable_gqa, window, of_one
        found.append(_attend(b.shape[1] - a.shape[1], a, b, c, *options))
    return torch.cat(found, 1).transpose(0, 1)


def _check_tensors(**given: object) -> None:
    for name, each in given.items():
        if not isinstance(each, Tensor):
            raise TypeError(f"{name} is a {type(each).__name__}: give a tensor")


def _attend(
    first: int, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
    enable_gqa: bool = False, window: int | None = None, alibi_slopes: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attend from queries of which the first one is at position ``first``."""
    optional = {"attn_mask": attn_mask, "alibi_slopes": alibi_slopes}
    _check_tensors(query=q, key=k, value=v, **{n: t for n, t in optional.items() if t is not None})
    shape, mask, slopes = (*q.shape[:-1], v.shape[-1]), attn_mask, alibi_slopes
    q, k, v = _operands(q, k, v, enable_gqa)
    full, wide = (*q.shape[:3], k.shape[2]), torch.promote_types(q.dtype, torch.float32)
    if attn_mask is not None:
        mask = attn_mask
        mask = ~_four(mask) if mask.dtype is torch.bool else autocast(_four(mask))
        fits = all(n in (1, m) for n, m in zip(mask.shape, full, strict=True))
        if mask.dtype not in (torch.bool, torch.float32, q.dtype) or not fits:
            wrong = f"attn_mask {mask.dtype} {(*attn_mask.shape,)}: give bool, fp32 or {q.dtype}, "
            wrong += f"broadcastable to {full}"
            raise TypeError(wrong) if fits else ValueError(wrong)
    if slopes is not None and slopes.shape not in (full[1:2], full[:2]):
        raise ValueError(f"alibi_slopes {tuple(slopes.shape)}: give {full[1:2]} or {full[:2]}")
    if not isinstance(dropout_p, int | float) or not 0 <= dropout_p <= 1:
        raise ValueError(f"dropout_p = {dropout_p!r}: give a probability from 0 to 1")
    if window is not None and (type(window) is not int or window < 1):
        raise ValueError(f"window = {window!r}: give a whole number of at least 1")
    if scale is not None and not (isinstance(scale, int | float) and -math.inf < scale < math.inf):
        raise ValueError(f"scale = {scale!r}: give a finite number")
    if q.is_cuda and dropout_p > 0:
        raise ConfigError("dropout is not verified on CUDA: give dropout_p=0, or run on CPU")
    trained = any(each is not None and each.requires_grad for each in (mask, slopes))
    kernel = q.dtype in FUSED and not (dropout_p == 1 or trained or v.shape[-1] != q.shape[-1])
    limit = is_causal and first == 0 and (kernel or q.is_cuda)  # within the kernel
    at, scale = Positions(first, *full[2:]), q.shape[-1] ** -0.5 if scale is None else scale
    blocked = structural(at, is_causal and not limit, window)
    distances = None if slopes is None else alibi(at, slopes.to(wide), wide)
    given = [each.to(q.device) for each in (blocked, mask, distances) if each is not None]
    zero = torch.zeros((), dtype=wide, device=q.device)
    added = [torch.where(m, -math.inf, zero) if m.dtype is torch.bool else m for m in given]
    bias = _four(sum(added[1:], added[0])) if added else None
    if q.is_cuda:
        from holdfast.abft.attention import cuda

        return cuda.fused_attention(q, k, v, causal=limit, mask=bias, scale=scale)[0].reshape(shape)
    if kernel:
        return fused_attention(q, k, v, bias, limit, scale, dropout_p).reshape(shape)
    # As torch writes it out, so that dropout draws alike.
    groups, root = q.shape[1] // max(1, k.shape[1]), math.sqrt(abs(scale))
    of_k, of_v = (each.to(wide).repeat_interleave(groups, 1) for each in (k, v))
    with torch.autocast(q.device.type, enabled=False):
        scores = matmul(q.to(wide) * math.copysign(root, scale), of_k.mT * root)
        shares = torch.ops.aten._safe_softmax(scores if bias is None else scores + bias, -1)
        return matmul(dropout(shares, dropout_p), of_v).to(q.dtype).reshape(shape)


def _operands(q: Tensor, k: Tensor, v: Tensor, grouped: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return what autocast makes of the operands, in four dimensions; raise if they do not fit."""
    for each in (q, k, v):
        if each.dtype not in SUPPORTED or each.is_nested:
            raise TypeError(f"attention of {each.dtype}: convert it to dense, one of {SUPPORTED}")
        if each.device.type not in ("cpu", "cuda"):
            raise ConfigError(f"attention on {each.device}: it is verified on CPU and CUDA")
    given = q, k, v = autocast(q), autocast(k), autocast(v)
    fit = len({(t.dtype, t.device, t.dim()) for t in given}) == 1 and 2 <= q.dim() <= 4
    a, b, c = (_four(t).shape for t in given) if fit else (q.shape,) * 3
    heads = fit and (a[1] == b[1] or (grouped and b[1] > 0 and a[1] % b[1] == 0))
    if not heads or a[3] == 0 or (a[0], a[3], b[:3]) != (b[0], b[3], c[:3]):
        known = [(tuple(t.shape), t.dtype, t.device) for t in given]
        wanted = "[batch, H, Lq, E], [batch, H, Lk, E], [batch, H, Lk, Ev] of one dtype and device"
        raise ValueError(f"{known} do not fit: give {wanted}; fewer heads need enable_gqa=True")
    return _four(q), _four(k), _four(v)


def _four(tensor: Tensor) -> Tensor:
    return tensor[(None,) * (4 - tensor.dim())]
