"""Operands that healthy programs multiply, those that are hard for a threshold included."""

from collections.abc import Callable

import torch

Pair = tuple[torch.Tensor, torch.Tensor]
Make = Callable[[torch.Generator, torch.dtype, int, int, int], Pair]


def _normal(g: torch.Generator, rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=g)


def _heavy(g: torch.Generator, rows: int, columns: int) -> torch.Tensor:
    ratio = _normal(g, rows, columns) / _normal(g, rows, columns)
    return ratio.clamp(-20, 20)  # fp16 must not overflow


def _one_hot(g: torch.Generator, rows: int, columns: int) -> torch.Tensor:
    chosen = torch.randint(columns, (rows,), generator=g)
    return torch.nn.functional.one_hot(chosen, columns).float()


def _outlier(g: torch.Generator, m: int, k: int, factor: float) -> torch.Tensor:
    a = _normal(g, m, k)
    a[:, k // 3] *= factor
    return a


def _padded(g: torch.Generator, m: int, k: int) -> torch.Tensor:
    a = _normal(g, m, k)
    a[m // 2 :] = 0
    return a


def _subnormal(dtype: torch.dtype) -> float:
    """About a third of the smallest normal number's root: products underflow."""
    return float(torch.finfo(dtype).smallest_normal) ** 0.5 / 3


DISTRIBUTIONS: dict[str, Make] = {
    "normal": lambda g, t, m, k, n: (_normal(g, m, k), _normal(g, k, n)),
    "uniform": lambda g, t, m, k, n: (
        torch.rand(m, k, generator=g) * 2 - 1,
        torch.rand(k, n, generator=g) * 2 - 1,
    ),
    "all positive": lambda g, t, m, k, n: (
        torch.rand(m, k, generator=g),
        torch.rand(k, n, generator=g),
    ),
    "shifted normal": lambda g, t, m, k, n: (_normal(g, m, k) + 1, _normal(g, k, n) + 1),
    "heavy tails": lambda g, t, m, k, n: (_heavy(g, m, k), _heavy(g, k, n)),
    "constant 1 x 0.1": lambda g, t, m, k, n: (torch.ones(m, k), torch.full((k, n), 0.1)),
    "constant -3 x 1/3": lambda g, t, m, k, n: (
        torch.full((m, k), -3.0),
        torch.full((k, n), 1 / 3),
    ),
    "zeros": lambda g, t, m, k, n: (torch.zeros(m, k), _normal(g, k, n)),
    "repeated rows": lambda g, t, m, k, n: (_normal(g, 1, k).expand(m, k), _normal(g, k, n)),
    "repeated columns": lambda g, t, m, k, n: (_normal(g, m, k), _normal(g, k, 1).expand(k, n)),
    "one-hot": lambda g, t, m, k, n: (_one_hot(g, m, k), _normal(g, k, n)),
    "one-hot x constant": lambda g, t, m, k, n: (_one_hot(g, m, k), torch.full((k, n), 0.1)),
    "outlier channel 1e3": lambda g, t, m, k, n: (_outlier(g, m, k, 1e3), _normal(g, k, n)),
    "outlier channel 1e5": lambda g, t, m, k, n: (
        _outlier(g, m, k, 1e5 if t.itemsize > 2 or t == torch.bfloat16 else 3e3),
        _normal(g, k, n),
    ),
    "softmax rows": lambda g, t, m, k, n: (_normal(g, m, k).mul(4).softmax(-1), _normal(g, k, n)),
    "uniform attention": lambda g, t, m, k, n: (torch.full((m, k), 1 / k), _normal(g, k, n)),
    "causal softmax": lambda g, t, m, k, n: (
        _normal(g, m, k).masked_fill(torch.ones(m, k).triu(1).bool(), -torch.inf).softmax(-1),
        _normal(g, k, n),
    ),
    "padding rows": lambda g, t, m, k, n: (_padded(g, m, k), _normal(g, k, n)),
    "products underflow": lambda g, t, m, k, n: (
        torch.rand(m, k, generator=g).double() * _subnormal(t),
        torch.rand(k, n, generator=g).double() * _subnormal(t),
    ),
    "subnormal operand": lambda g, t, m, k, n: (
        torch.rand(m, k, generator=g).double() * torch.finfo(t).smallest_normal,
        _normal(g, k, n),
    ),
    "tiny gradients": lambda g, t, m, k, n: (_normal(g, m, k) * 1e-6, _normal(g, k, n)),
    "relu": lambda g, t, m, k, n: (_normal(g, m, k).relu(), _normal(g, k, n)),
    "cancelling": lambda g, t, m, k, n: (
        torch.ones(m, k),
        _normal(g, 1, n) * torch.tensor([1.0, -1.0]).repeat(k // 2 + 1)[:k, None],
    ),
}
