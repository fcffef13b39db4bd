"""Which operators are matrix products, or may hide some, without being verified by holdfast."""

import sys
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils import _pytree as pytree

# Names of aten's products, beside those that ``product_name`` knows by a part of the name. Without
# autograd a dispatch mode sees some before torch decomposes them.
_PRODUCTS = frozenset(
    {
        *("mv", "addmv", "dot", "vdot", "matmul", "linalg_matmul", "linalg_multi_dot"),
        *("linalg_vecdot", "chain_matmul", "inner", "tensordot", "linear", "mkldnn_linear"),
        *("bilinear", "_trilinear", "einsum", "outer", "addr", "kron", "cdist", "_cdist_forward"),
        *("_scaled_mm_v2", "_scaled_grouped_mm_v2", "_addmm_activation", "_mixed_dtypes_linear"),
        *("_weight_int4pack_mm_for_cpu", "_weight_int4pack_mm_with_scales_and_zeros"),
        *(
            "_dyn_quant_matmul_4bit",
            "_sparse_semi_structured_linear",
            "_transformer_encoder_layer_fwd",
        ),
        *("_conv_depthwise2d", "_slow_conv2d_forward", "slow_conv3d_forward", "thnn_conv2d"),
        *("_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "_cudnn_rnn", "miopen_rnn"),
        *("mkldnn_rnn_layer", "lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell"),
        *("rnn_tanh_cell", "rnn_relu_cell"),
    }
)
# Namespaces of the operators that come with torch or with holdfast.
_OWN_NAMESPACES = frozenset(
    {
        *("aten", "prims", "prim", "holdfast", "c10d", "c10d_functional", "_c10d_functional"),
        *("_c10d_functional_autograd", "_dtensor", "_inductor_test", "_native", "_quantized"),
        *("_test", "debug_mode_ops", "debugprims", "export", "flex_lib", "fsdp", "inductor"),
        *("inductor_prims", "mkl", "mkldnn", "mkldnn_prepacked", "onednn", "onnx"),
        *("onnx_symbolic", "profiler", "quantization", "quantized", "quantized_decomposed"),
        *("rngprims", "sparse", "static_runtime", "streams", "symm_mem", "_inductor_debug"),
        *("bucketing", "cplib", "device_mesh", "pippy"),
    }
)
# Packages whose autograd functions call kernels without an operator of torch's in between.
KERNEL_PACKAGES = frozenset(
    {
        *("flash_attn", "flash_attn_interface", "liger_kernel", "transformer_engine"),
        *("bitsandbytes", "xformers", "torchao", "fla", "mamba_ssm", "causal_conv1d", "apex"),
        *("unsloth", "deep_gemm", "fbgemm_gpu"),
    }
)
# Their autograd functions that call torch's own products, which are covered or listed themselves.
_TRANSPARENT = frozenset({"torchao::matmul_with_hp_or_float8_args"})
OPAQUE = "opaque operator: holdfast cannot see the products in its kernels"


def product_name(op: Any) -> str:
    """Return the name of an aten product without its namespace; empty for other operators."""
    space, _, name = op.name().partition("::")
    name = name.split(".")[0].rstrip("_")
    by_part = name.endswith("mm") or name.startswith(("conv", "slow_conv"))
    known = by_part or name in _PRODUCTS or "attention" in name or "convolution" in name
    return name if space == "aten" and known else ""


def opaque_name(op: Any, arguments: object) -> str:
    """Return the name of an operator that may hide products; empty for other operators.

    These are the operators of other packages that take a tensor of floating-point values, and
    torch's own higher-order ones for attention and for a user's Triton kernels.

    Args:
        op: Any operator.
        arguments: Its arguments, in any nesting of lists and dictionaries.
    """
    name = str(op.name())
    if isinstance(op, torch._ops.HigherOrderOperator):
        return name if "attention" in name or "triton_kernel" in name else ""
    name = name.split(".")[0]
    return name if name.split("::")[0] not in _OWN_NAMESPACES and _floating(arguments) else ""


def _floating(arguments: object) -> bool:
    tensors = (each for each in pytree.tree_leaves(arguments) if isinstance(each, torch.Tensor))
    return any(each.is_floating_point() for each in tensors)


def opaque_ops_loaded() -> bool:
    """Return whether operators of other packages, or any of ``KERNEL_PACKAGES``, are loaded."""
    names: Iterable[str] = torch._C._dispatch_get_all_op_names()
    spaces = {name.split("::")[0] for name in names}
    return kernel_packages_loaded() or not spaces <= _OWN_NAMESPACES


def kernel_packages_loaded() -> bool:
    """Return whether any of ``KERNEL_PACKAGES`` is loaded."""
    return not sys.modules.keys().isdisjoint(KERNEL_PACKAGES)


def opaque_functions(output: object) -> Counter[str] | None:
    """Count the autograd functions of ``KERNEL_PACKAGES`` that made an output, by name.

    Args:
        output: What a model returned; tensors are looked for in lists, dictionaries and the
            output classes that are registered with pytree.

    Returns:
        The counts; None if no such package is loaded yet or the output has no autograd graph, so
        that a later output is to be looked at.
    """
    if not kernel_packages_loaded():
        return None
    tensors = [x for x in pytree.tree_leaves(output) if isinstance(x, torch.Tensor)]
    waiting = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    if not waiting:
        return None
    seen, found = set(waiting), Counter[str]()
    while waiting:
        node = waiting.pop()
        function = getattr(node, "_forward_cls", None)
        package = getattr(function, "__module__", "").split(".")[0]
        if function is not None and package in KERNEL_PACKAGES:
            name = f"{package}::{function.__qualname__}"
            found[name] += name not in _TRANSPARENT
        new = {parent for parent, _ in node.next_functions if parent is not None} - seen
        seen |= new
        waiting += new
    return +found
