"""The workloads of a screening: the ops of a training step and of serving.

On CPU every product is verified by checksums as under ``protect(correction="detect")``, which
changes no result. On CUDA devices the same workloads run on torch's deterministic kernels and are
verified by repetition and comparison only.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from holdfast.abft.gemm.op import matmul
from holdfast.nn import Attention, Int8EmbeddingBag, Int8Linear
from holdfast.screen.difference import Parts
from holdfast.screen.emulation import pass_site
from holdfast.screen.job import VARIANTS, Job, Scale, generator
from holdfast.screen.memory import memory_jobs

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
HEADS, HEAD_DIM = 4, 64
BAGS, BAG_SIZE, BAG_DIM = 256, 64, 64
Tensors = Sequence[torch.Tensor]


def make_jobs(scale: Scale, device: torch.device, memory_bytes: int) -> list[Job]:
    """Make every workload of a unit, in the order in which it computes them."""
    cuda = device.type == "cuda"
    return [
        *(gemm_job(name, scale, device) for name in DTYPES),
        *([] if cuda else [attention_job(scale)]),
        fused_attention_job(scale, device),
        int8_cuda_job(scale, device) if cuda else int8_job(scale),
        bag_cuda_job(scale, device) if cuda else bag_job(scale),
        elementwise_job(scale, device),
        integer_job(scale, device),
        *memory_jobs(scale, device, memory_bytes),
    ]


def op_names(device: str) -> list[str]:
    """List the names of the workloads of a device type, "cpu" or "cuda", without making them."""
    sections = ["attention.fp32"] if device == "cpu" else []
    first = [*(f"gemm.{name}" for name in DTYPES), *sections, "sdpa.bf16", "gemm.int8"]
    rest = ["embedding_bag", "elementwise", "integer", "digest", "memory.walking"]
    return [*first, *rest, "memory.random"]


def _drawn(
    op: str, device: torch.device, *shapes: Sequence[int], dtype: torch.dtype
) -> list[Tensors]:
    """Draw normal inputs of these shapes for each variant."""
    inputs: list[Tensors] = []
    for variant in range(VARIANTS):
        source = generator(op, variant)
        made = [torch.randn(tuple(shape), generator=source) for shape in shapes]
        inputs.append([each.to(device, dtype) for each in made])
    return inputs


def _differentiated(
    compute: Callable[..., torch.Tensor], inputs: Tensors, grad: torch.Tensor, names: str
) -> Parts:
    """Compute the output and the gradients of all inputs."""
    leaves = [each.detach().requires_grad_() for each in inputs]
    output = compute(*leaves)
    grads = torch.autograd.grad(output, leaves, grad)
    named = (f"grad_{name}" for name in names.split())
    return {"output": output.detach(), **dict(zip(named, grads, strict=True))}


def gemm_job(dtype: str, scale: Scale, device: torch.device) -> Job:
    """Make the workload C = A B with both gradients: three verified products."""
    op, size = f"gemm.{dtype}", scale.wide if dtype == "fp32" else scale.narrow
    inputs = _drawn(op, device, *[(size, size)] * 3, dtype=DTYPES[dtype])
    product = matmul if device.type == "cpu" else torch.matmul

    def run(variant: int) -> Parts:
        a, b, grad = inputs[variant]
        return _differentiated(product, (a, b), grad, "a b")

    return Job(op, run, 6.0 * size**3, "flop")


def attention_job(scale: Scale) -> Job:
    """Make the workload of ``holdfast.nn.Attention``, forward and backward, causal."""
    op, width = "attention.fp32", HEADS * HEAD_DIM
    cpu = torch.device("cpu")
    shape = (1, scale.tokens, width)
    module = Attention(width, HEADS, causal=True, bias=False, correction="detect")
    weights = _drawn(f"{op}.weights", cpu, *[(width, width)] * 4, dtype=torch.float32)[0]
    for layer, weight in zip(
        (module.q_proj, module.k_proj, module.v_proj, module.out_proj), weights, strict=True
    ):
        layer.weight.data.copy_(weight / width**0.5)
    inputs = _drawn(op, cpu, shape, shape, dtype=torch.float32)
    parameters = dict(module.named_parameters())

    def run(variant: int) -> Parts:
        x, grad = inputs[variant]
        x = x.detach().requires_grad_()
        output = module(x)
        grads = torch.autograd.grad(output, (x, *parameters.values()), grad)
        names = ("grad_x", *(f"grad_{name}" for name in parameters))
        return {"output": output.detach(), **dict(zip(names, grads, strict=True))}

    projections = 3 * 4 * 2.0 * scale.tokens * width**2
    return Job(op, run, projections + 3 * 4.0 * scale.tokens**2 * width, "flop")


def fused_attention_job(scale: Scale, device: torch.device) -> Job:
    """Make the workload of fused ``scaled_dot_product_attention``, causal, bf16."""
    op, shape = "sdpa.bf16", (1, HEADS, scale.tokens, HEAD_DIM)
    inputs = _drawn(op, device, *[shape] * 4, dtype=torch.bfloat16)

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)

    def run(variant: int) -> Parts:
        *operands, grad = inputs[variant]
        return _differentiated(attend, operands, grad, "query key value")

    # Causal: half of the pairs. Two products forward; seven backward, two of them recomputed.
    return Job(op, run, 9.0 * HEADS * HEAD_DIM * scale.tokens**2, "flop")


def int8_job(scale: Scale) -> Job:
    """Make the workload of an int8 linear layer whose int32 rows are verified exactly."""
    op, inner, outer = "gemm.int8", 2 * scale.wide, scale.wide
    cpu = torch.device("cpu")
    linear = nn.Linear(inner, outer, bias=False)
    linear.weight.data.copy_(_drawn(f"{op}.weight", cpu, (outer, inner), dtype=torch.float32)[0][0])
    layer = Int8Linear.from_float(linear)
    inputs = _drawn(op, cpu, (scale.narrow, inner), dtype=torch.float32)

    def run(variant: int) -> Parts:
        return {"output": layer(inputs[variant][0])}

    return Job(op, run, 2.0 * scale.narrow * inner * outer, "flop")


def int8_cuda_job(scale: Scale, device: torch.device) -> Job:
    """Make the workload of a CUDA device's integer product, int8 times int8 in int32."""
    op, size = "gemm.int8", scale.wide
    inputs = [
        [
            torch.randint(-128, 128, (size, size), generator=source, dtype=torch.int8).to(device)
            for _ in range(2)
        ]
        for source in (generator(op, variant) for variant in range(VARIANTS))
    ]

    def run(variant: int) -> Parts:
        a, b = inputs[variant]
        return {"output": torch._int_mm(a, b)}

    return Job(op, run, 2.0 * size**3, "flop")


def _bag_inputs(scale: Scale) -> tuple[nn.EmbeddingBag, list[torch.Tensor]]:
    op, cpu = "embedding_bag", torch.device("cpu")
    bag = nn.EmbeddingBag(scale.table_rows, BAG_DIM, mode="sum")
    rows = _drawn(f"{op}.rows", cpu, (scale.table_rows, BAG_DIM), dtype=torch.float32)[0][0]
    bag.weight.data.copy_(rows)
    picked = [
        torch.randint(0, scale.table_rows, (BAGS, BAG_SIZE), generator=generator(op, variant))
        for variant in range(VARIANTS)
    ]
    return bag, picked


def bag_job(scale: Scale) -> Job:
    """Make the workload of pooled rows of an 8-bit table, verified by the rows' checksums."""
    bag, picked = _bag_inputs(scale)
    table = Int8EmbeddingBag.from_float(bag)

    def run(variant: int) -> Parts:
        return {"output": table(picked[variant])}

    return Job("embedding_bag", run, 1.0 * BAGS * BAG_SIZE * BAG_DIM, "B")


def bag_cuda_job(scale: Scale, device: torch.device) -> Job:
    """Make the workload of pooled fp32 rows on a CUDA device."""
    bag, picked = _bag_inputs(scale)
    weight, indices = bag.weight.detach().to(device), [each.to(device) for each in picked]

    def run(variant: int) -> Parts:
        return {"output": F.embedding_bag(indices[variant], weight, mode="sum")}

    return Job("embedding_bag", run, 4.0 * BAGS * BAG_SIZE * BAG_DIM, "B")


def elementwise_job(scale: Scale, device: torch.device) -> Job:
    """Make the workload of a step's work outside products: norm, GELU, softmax and AdamW."""
    op, shape = "elementwise", (scale.narrow, 2 * scale.wide)
    inputs = _drawn(op, device, shape, shape, dtype=torch.float32)

    def compute(x: torch.Tensor) -> torch.Tensor:
        normed = F.layer_norm(x, x.shape[-1:])
        probabilities = F.softmax(F.gelu(normed).to(torch.bfloat16).float(), -1)
        pass_site(op, probabilities.detach())
        return probabilities

    def run(variant: int) -> Parts:
        x, grad = inputs[variant]
        parts = _differentiated(compute, (x,), grad, "x")
        return {**parts, "updated": _adamw(x, parts["grad_x"])}

    # About 12 passes, each of which reads and writes a matrix.
    return Job(op, run, 12 * 8.0 * shape[0] * shape[1], "B")


def _adamw(weight: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """Compute AdamW's first step without ``torch.optim``, which takes seconds to import Dynamo."""
    mean = torch.zeros_like(weight).lerp_(grad, 0.1)
    square = torch.zeros_like(weight).addcmul_(grad, grad, value=0.001)
    return (weight * (1 - 1e-5)).addcdiv_(mean / 0.1, (square / 0.001).sqrt() + 1e-8, value=-1e-3)


def integer_job(scale: Scale, device: torch.device) -> Job:
    """Make the workload of integers: a hash chain, a sort, a running sum, a gather."""
    op, count = "integer", scale.wide * scale.narrow // 4
    inputs = [
        torch.randint(0, 1 << 40, (count,), generator=generator(op, variant)).to(device)
        for variant in range(VARIANTS)
    ]

    def run(variant: int) -> Parts:
        mixed = inputs[variant]
        for shift in (7, 13, 29):
            mixed = (mixed ^ (mixed >> shift)) * 0x9E3779B1 % 0x3FFFFFFFFFF
        pass_site(op, mixed)
        ordered, order = mixed.sort(stable=True)
        return {"sorted": ordered, "order": order, "sum": ordered.cumsum(0)[order]}

    return Job(op, run, 8.0 * 12 * count, "B")
