"""Products of operands of every shape and layout, and outputs of every layout."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import torch
import torch.nn.functional as F
from gemm_strikes import Program, Results
from programs_layers import ROLES
from torch import nn

M, K, N = 3, 6, 5
BATCH = 2

Shape = tuple[int, ...]
Operand = Callable[[Shape], tuple[torch.Tensor, torch.Tensor]]  # the leaf, and the operand


def leaf(*shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A random tensor, of the default dtype if none is given, that wants its gradient."""
    return torch.randn(shape, dtype=dtype, requires_grad=True)


def viewed(
    shape: Shape, view: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """A leaf of a shape, and a view of it."""
    whole = leaf(*shape)
    return whole, view(whole)


def windows(shape: Shape) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows that overlap in memory, each one element further than the one before."""
    *lead, rows, columns = shape
    return viewed((*lead, rows + columns - 1), lambda whole: whole.unfold(-1, columns, 1))


def complex_part(name: str, shape: Shape) -> tuple[torch.Tensor, torch.Tensor]:
    """A part of a complex tensor, every second number of its memory."""
    whole = leaf(*shape, dtype=torch.complex64)
    return whole, getattr(whole.conj(), name)


def strided(shape: Shape) -> tuple[torch.Tensor, torch.Tensor]:
    """Every second row and every third column."""
    *lead, rows, columns = shape
    return viewed((*lead, 2 * rows, 3 * columns), lambda whole: whole[..., ::2, ::3])


def sliced(shape: Shape) -> tuple[torch.Tensor, torch.Tensor]:
    """A block out of the middle, off every alignment."""
    *lead, rows, columns = shape
    block = (..., slice(1, 1 + rows), slice(3, 3 + columns))
    return viewed((*lead, rows + 2, columns + 4), lambda whole: whole[block])


LAYOUTS: dict[str, Operand] = {
    "contiguous": lambda shape: viewed(shape, lambda whole: whole),
    "transposed": lambda shape: viewed((*shape[:-2], shape[-1], shape[-2]), lambda whole: whole.mT),
    "sliced": sliced,
    "strided": strided,
    "one row": lambda shape: viewed((*shape[:-2], 1, shape[-1]), lambda whole: whole.expand(shape)),
    "one column": lambda shape: viewed((*shape[:-1], 1), lambda whole: whole.expand(shape)),
    "one number": lambda shape: viewed((1,) * len(shape), lambda whole: whole.expand(shape)),
    "overlapping": windows,
    "negative view": lambda shape: viewed(shape, torch._neg_view),
    "real part": partial(complex_part, "real"),
    "conjugate's imaginary part": partial(complex_part, "imag"),
}
BATCH_LAYOUTS: dict[str, Operand] = LAYOUTS | {
    "one matrix": lambda shape: viewed((1, *shape[1:]), lambda whole: whole.expand(shape)),
    "batch in the middle": lambda shape: viewed(
        (shape[1], shape[0], shape[2]), lambda whole: whole.transpose(0, 1)
    ),
    "batch last": lambda shape: viewed(
        (shape[1], shape[2], shape[0]), lambda whole: whole.permute(2, 0, 1)
    ),
}


def seeded(output: torch.Tensor, *leaves: torch.Tensor) -> list[torch.Tensor]:
    """An output, and the gradients of leaves under an irregular seed."""
    seed = torch.linspace(-1.0, 1.4, output.numel()).reshape(output.shape).to(output.dtype)
    return [output.detach(), *torch.autograd.grad(output, leaves, seed)]


def outside(run: Callable[[], Results], op: str = "", calls: int = 1, *roles: str) -> Program:
    """A computation without a model, and the product it must be seen to run."""
    names = {f"(outside)/{op}/{role}": calls for role in roles or ("forward",)} if op else {}
    return Program(nn.Identity, lambda _: run(), names)


def of_layouts(left: Operand, right: Operand, lead: Shape) -> Program:
    """A product of two operands, each in a layout of its own."""

    def run() -> list[torch.Tensor]:
        a_leaf, a = left((*lead, M, K))
        b_leaf, b = right((*lead, K, N))
        return seeded(torch.matmul(a, b), a_leaf, b_leaf)

    return outside(run, "bmm" if lead else "mm", 1, *ROLES)


def layouts(layouts: dict[str, Operand], lead: Shape) -> Iterator[tuple[str, Program]]:
    """Each layout on the left, on the right, and on both sides."""
    op = "bmm" if lead else "mm"
    for (left, a), (right, b) in product(layouts.items(), repeat=2):
        if "contiguous" in (left, right) or left == right:
            yield f"{op}, {left} by {right}", of_layouts(a, b, lead)


def of_shapes(left: Shape, right: Shape) -> Program:
    """A product of contiguous operands, broadcast where they need it."""

    def run() -> list[torch.Tensor]:
        a, b = leaf(*left), leaf(*right)
        return seeded(torch.matmul(a, b), a, b)

    return outside(run)


BROADCASTS = [
    ((5, 1, 4, 3), (2, 3, 6)),
    ((2, 4, 3), (5, 1, 3, 6)),
    ((5, 2, 4, 3), (3, 6)),
    ((4, 3), (5, 2, 3, 6)),
    ((1, 4, 3), (2, 3, 6)),
    ((2, 1, 3), (3, 6)),
    ((2, 4, 3), (3, 1)),
    ((2, 4, 1), (1, 6)),
    ((1, 1, 1, 1), (1, 1)),
    ((3,), (3, 6)),
]

WANTS = [(True, False), (False, True), (True, True), (False, False)]


def wanting(op: str, wants: tuple[bool, bool]) -> Program:
    """A product of which only some operands want gradients."""
    lead = (BATCH,) if "bmm" in op else ()
    call = getattr(torch, op)

    def run() -> list[torch.Tensor]:
        a, b = torch.randn(*lead, M, K), torch.randn(*lead, K, N)
        wanted = [t.requires_grad_() for t, want in zip((a, b), wants, strict=True) if want]
        output = call(a, b) if op in ("mm", "bmm") else call(torch.randn(N), a, b)
        return seeded(output, *wanted) if wanted else [output]

    roles = ["forward", *(r for r, want in zip(ROLES[1:], wants, strict=True) if want)]
    return outside(run, op, 1, *roles)


WRITES = {
    "mm": lambda a, b, addend, out: torch.mm(a, b, out=out),
    "addmm": lambda a, b, addend, out: torch.addmm(addend, a, b, out=out),
    "addmm_": lambda a, b, addend, out: out.addmm_(a, b, beta=0.5),
}
# The shape of a buffer, and the part of it that a product is written to.
OUTPUTS: dict[str, tuple[Shape, Callable[[torch.Tensor], torch.Tensor]]] = {
    "its own memory": ((M, N), lambda whole: whole),
    "a transposed buffer": ((N, M), lambda whole: whole.mT),
    "rows of a buffer": ((2 * M, N), lambda whole: whole[1 : 1 + M]),
    "columns of a buffer": ((M, 2 * N), lambda whole: whole[:, 2 : 2 + N]),
    "every second column": ((M, 2 * N), lambda whole: whole[:, ::2]),
    "one matrix of many": ((4, M, N), lambda whole: whole[2]),
}


def written(op: str, output: str) -> Program:
    """A product written into a view of a buffer; the whole buffer is the result."""

    def run() -> list[torch.Tensor]:
        shape, part = OUTPUTS[output]
        whole = torch.randn(shape)
        WRITES[op](torch.randn(M, K), torch.randn(K, N), torch.randn(N), part(whole))
        return [whole]

    return outside(run, op.rstrip("_"))


def by_vector(call: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Program:
    """A matrix times a vector, forward and backward; the matrix's gradient is no product."""

    def run() -> Results:
        a, x = leaf(M, K), leaf(K)
        out = call(a, x)
        out.sum().backward()
        return [out, a.grad, x.grad]

    return outside(run, "addmv", 1, "forward", "grad_b")


def vector_into() -> list[torch.Tensor]:
    """Write into memory that is there, of every second element as well."""
    a, x, whole = torch.randn(M, K), torch.randn(K), torch.randn(2, M, 2)
    return [
        torch.mv(a, x, out=torch.randn(M)),
        torch.addmv(whole[1, :, 0], a, x, out=whole[0, :, 0]),
    ]


def gapped() -> list[torch.Tensor]:
    """Multiply an operand with gaps in its memory into an output far from it."""
    a, b, out = torch.randn(M, 2 * K)[:, ::2], torch.randn(K, N), torch.empty(M, N)
    return [torch.mm(a, b, out=out)]


BATCHES: dict[str, Program] = dict(layouts(BATCH_LAYOUTS, (BATCH,)))
SHAPES: dict[str, Program] = {
    **dict(layouts(LAYOUTS, ())),
    **{f"matmul {a} by {b}": of_shapes(a, b) for a, b in BROADCASTS},
    **{
        f"{op}, a wants {wants[0]}, b wants {wants[1]}": wanting(op, wants)
        for op, wants in product(("mm", "addmm", "bmm", "baddbmm"), WANTS)
    },
    **{f"{op} into {name}": written(op, name) for op, name in product(WRITES, OUTPUTS)},
    "mm of every second column into": outside(gapped, "mm"),
    "matrix by vector": by_vector(torch.mv),
    "matrix by vector, with an addend": by_vector(
        lambda a, x: torch.addmv(torch.ones(M), a, x, beta=0.5, alpha=-2)
    ),
    "matrix by vector, with one number": by_vector(
        lambda a, x: torch.addmv(torch.tensor(1.5), a, x)
    ),
    "batch by vector": outside(lambda: [torch.randn(2, M, K) @ torch.randn(K)], "addmv"),
    "linear of one output": outside(
        lambda: [F.linear(torch.randn(2, M, K), torch.randn(K))], "addmv"
    ),
    "matrix by vector into": outside(vector_into, "addmv", 2),
    "matrix by vector in place": outside(
        lambda: [torch.randn(M).addmv_(torch.randn(M, K), torch.randn(K), beta=0.5, alpha=-2)],
        "addmv",
    ),
    "linear, expanded input": outside(
        lambda: [
            F.linear(x, torch.randn(5, 6), torch.randn(5))
            for x in (torch.randn(1, 6).expand(4, 6), torch.randn(4, 1).expand(4, 6))
        ],
        "addmm",
        2,
    ),
    "linear, one-number bias": outside(
        lambda: [F.linear(torch.randn(3, 6), torch.randn(5, 6), torch.randn(1).expand(5))], "addmm"
    ),
}
