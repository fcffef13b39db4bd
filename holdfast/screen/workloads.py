"""The workloads of a screening: the ops of a training step and of serving.

On CPU every product is verified by checksums as under ``protect(correction="detect")``, which
changes no result. On CUDA devices the same workloads run on torch's deterministic kernels and are
verified by repetition and comparison only; where products are verified on the device, the checks
that do so are given known answers.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from holdfast import events
from holdfast.abft.gemm.devices import BACKENDS, prepared_backend
from holdfast.abft.gemm.op import matmul
from holdfast.abft.gemm.self_test import failure
from holdfast.events import EventKind
from holdfast.nn import Attention, Int8EmbeddingBag, Int8Linear
from holdfast.screen.difference import Parts
from holdfast.screen.emulation import pass_site
from holdfast.screen.job import VARIANTS, Job, Scale, drawn
from holdfast.screen.memory import memory_jobs
from holdfast.screen.training import training_job

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CHECKS = "gemm.checks"
HEADS, HEAD_DIM = 4, 64
BAGS, BAG_SIZE, BAG_DIM = 256, 64, 64
CPU = torch.device("cpu")
Tensor = torch.Tensor


def make_jobs(scale: Scale, device: torch.device, memory_bytes: int) -> list[Job]:
    """Make every workload of a unit, in the order in which it computes them."""
    cuda = device.type == "cuda"
    return [
        *(gemm_job(name, scale, device) for name in DTYPES),
        *([checks_job(device)] if device.type in BACKENDS else []),
        *([] if cuda else [attention_job(scale)]),
        fused_attention_job(scale, device),
        int8_cuda_job(scale, device) if cuda else int8_job(scale),
        bag_job(scale, device),
        elementwise_job(scale, device),
        integer_job(scale, device),
        training_job(scale, device),
        *memory_jobs(scale, device, memory_bytes),
    ]


def op_names(device: str) -> list[str]:
    """List the names of the workloads of a device type, "cpu" or "cuda", without making them."""
    sections = ["attention.fp32"] if device == "cpu" else []
    checks = [CHECKS] if device in BACKENDS else []
    first = [*(f"gemm.{name}" for name in DTYPES), *checks, *sections, "sdpa.bf16", "gemm.int8"]
    rest = ["embedding_bag", "elementwise", "integer", "training", "digest", "memory.walking"]
    return [*first, *rest, "memory.random"]


def _normal(
    op: str, device: torch.device, *shapes: Sequence[int], dtype: torch.dtype = torch.float32
) -> list[list[Tensor]]:
    """Draw normal inputs of these shapes for each variant."""
    return drawn(
        op,
        device,
        lambda source: (torch.randn(*each, generator=source).to(dtype) for each in shapes),
    )


def _differentiated(
    compute: Callable[..., Tensor],
    inputs: Mapping[str, Tensor],
    grad: Tensor,
    parameters: Mapping[str, Tensor] | None = None,
) -> Parts:
    """Compute the output and the gradients of all inputs, and of the parameters it depends on."""
    leaves = {name: each.detach().requires_grad_() for name, each in inputs.items()}
    output = compute(*leaves.values())
    leaves |= parameters or {}
    grads = torch.autograd.grad(output, list(leaves.values()), grad)
    named = (f"grad_{name}" for name in leaves)
    return {"output": output.detach(), **dict(zip(named, grads, strict=True))}


def gemm_job(dtype: str, scale: Scale, device: torch.device) -> Job:
    """Make the workload C = A B with both gradients: three verified products."""
    op, size = f"gemm.{dtype}", scale.wide if dtype == "fp32" else scale.narrow
    product = matmul if device.type == "cpu" else torch.matmul

    def compute(a: Tensor, b: Tensor, grad: Tensor) -> Parts:
        return _differentiated(product, {"a": a, "b": b}, grad)

    inputs = _normal(op, device, *[(size, size)] * 3, dtype=DTYPES[dtype])
    return Job(op, compute, inputs, 6.0 * size**3, "flop")


def checks_job(device: torch.device) -> Job:
    """Make the workload of the checks of a device's products, on products of known answers."""

    def compute() -> Parts:
        wrong = failure(device, prepared_backend(device))
        if wrong:
            events.record(EventKind.SCREEN_FAULT, op=CHECKS, detail={"reason": wrong})
        passed = torch.tensor([float(not wrong)])
        pass_site(CHECKS, passed)
        return {"passed": passed}

    return Job(CHECKS, compute, [()] * VARIANTS, 1.0, "test")


def attention_job(scale: Scale) -> Job:
    """Make the workload of ``holdfast.nn.Attention``, forward and backward, causal."""
    op, width = "attention.fp32", HEADS * HEAD_DIM
    module = Attention(width, HEADS, causal=True, bias=False, correction="detect")
    weights = _normal(f"{op}.weights", CPU, *[(width, width)] * 4)[0]
    layers = (module.q_proj, module.k_proj, module.v_proj, module.out_proj)
    for layer, weight in zip(layers, weights, strict=True):
        layer.weight.data.copy_(weight / width**0.5)
    parameters = dict(module.named_parameters())

    def compute(x: Tensor, grad: Tensor) -> Parts:
        return _differentiated(module, {"x": x}, grad, parameters)

    inputs = _normal(op, CPU, *[(1, scale.tokens, width)] * 2)
    projections = 3 * 4 * 2.0 * scale.tokens * width**2
    return Job(op, compute, inputs, projections + 3 * 4.0 * scale.tokens**2 * width, "flop")


def fused_attention_job(scale: Scale, device: torch.device) -> Job:
    """Make the workload of fused ``scaled_dot_product_attention``, causal, bf16."""
    op, shape = "sdpa.bf16", (1, HEADS, scale.tokens, HEAD_DIM)
    attend = partial(F.scaled_dot_product_attention, is_causal=True)

    def compute(query: Tensor, key: Tensor, value: Tensor, grad: Tensor) -> Parts:
        return _differentiated(attend, {"query": query, "key": key, "value": value}, grad)

    inputs = _normal(op, device, *[shape] * 4, dtype=torch.bfloat16)
    # Causal: half of the pairs. Two products forward; seven backward, two of them recomputed.
    return Job(op, compute, inputs, 9.0 * HEADS * HEAD_DIM * scale.tokens**2, "flop")


def int8_job(scale: Scale) -> Job:
    """Make the workload of an int8 linear layer whose int32 rows are verified exactly."""
    op, inner, outer = "gemm.int8", 2 * scale.wide, scale.wide
    linear = nn.Linear(inner, outer, bias=False)
    linear.weight.data.copy_(_normal(f"{op}.weight", CPU, (outer, inner))[0][0])
    layer = Int8Linear.from_float(linear)
    inputs = _normal(op, CPU, (scale.narrow, inner))
    work = 2.0 * scale.narrow * inner * outer
    return Job(op, lambda x: {"output": layer(x)}, inputs, work, "flop")


def int8_cuda_job(scale: Scale, device: torch.device) -> Job:
    """Make the workload of a CUDA device's integer product, int8 times int8 in int32."""
    op, size = "gemm.int8", scale.wide

    def draw(source: torch.Generator) -> list[Tensor]:
        shape = (size, size)
        return [
            torch.randint(-128, 128, shape, generator=source, dtype=torch.int8) for _ in range(2)
        ]

    inputs = drawn(op, device, draw)
    return Job(op, lambda a, b: {"output": torch._int_mm(a, b)}, inputs, 2.0 * size**3, "flop")


def bag_job(scale: Scale, device: torch.device) -> Job:
    """Make the workload of pooled rows of an embedding table.

    On CPU the table has 8 bits and is verified by the rows' checksums; on CUDA devices it is fp32.
    """
    op, rows = "embedding_bag", scale.table_rows
    bag = nn.EmbeddingBag(rows, BAG_DIM, mode="sum")
    bag.weight.data.copy_(_normal(f"{op}.rows", CPU, (rows, BAG_DIM))[0][0])
    table = bag.to(device) if device.type == "cuda" else Int8EmbeddingBag.from_float(bag)
    bytes_per_element = 4.0 if device.type == "cuda" else 1.0
    inputs = drawn(
        op, device, lambda source: [torch.randint(0, rows, (BAGS, BAG_SIZE), generator=source)]
    )
    work = bytes_per_element * BAGS * BAG_SIZE * BAG_DIM
    return Job(op, lambda picked: {"output": table(picked).detach()}, inputs, work, "B")


def elementwise_job(scale: Scale, device: torch.device) -> Job:
    """Make the workload of a step's work outside products: norm, GELU, softmax and AdamW."""
    op, shape = "elementwise", (scale.narrow, 2 * scale.wide)

    def forward(x: Tensor) -> Tensor:
        normed = F.layer_norm(x, x.shape[-1:])
        probabilities = F.softmax(F.gelu(normed).to(torch.bfloat16).float(), -1)
        pass_site(op, probabilities.detach())
        return probabilities

    def compute(x: Tensor, grad: Tensor) -> Parts:
        parts = _differentiated(forward, {"x": x}, grad)
        return {**parts, "updated": _adamw(x, parts["grad_x"])}

    # About 12 passes, each of which reads and writes a matrix.
    work = 12 * 8.0 * shape[0] * shape[1]
    return Job(op, compute, _normal(op, device, shape, shape), work, "B")


def _adamw(weight: Tensor, grad: Tensor) -> Tensor:
    """Compute AdamW's first step without ``torch.optim``, which takes seconds to import Dynamo."""
    mean = torch.zeros_like(weight).lerp_(grad, 0.1)
    square = torch.zeros_like(weight).addcmul_(grad, grad, value=0.001)
    return (weight * (1 - 1e-5)).addcdiv_(mean / 0.1, (square / 0.001).sqrt() + 1e-8, value=-1e-3)


def integer_job(scale: Scale, device: torch.device) -> Job:
    """Make the workload of integers: a hash chain, a sort, a running sum, a gather."""
    op, count = "integer", scale.wide * scale.narrow // 4

    def compute(mixed: Tensor) -> Parts:
        for shift in (7, 13, 29):
            mixed = (mixed ^ (mixed >> shift)) * 0x9E3779B1 % 0x3FFFFFFFFFF
        pass_site(op, mixed)
        ordered, order = mixed.sort(stable=True)
        return {"sorted": ordered, "order": order, "sum": ordered.cumsum(0)[order]}

    inputs = drawn(
        op, device, lambda source: [torch.randint(0, 1 << 40, (count,), generator=source)]
    )
    return Job(op, compute, inputs, 8.0 * 12 * count, "B")
