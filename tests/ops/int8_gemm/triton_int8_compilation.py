"""Compiles the int8 pass for a Hopper GPU, as a real call would; nothing is run."""

import sys
from pathlib import Path

import torch
from triton.runtime import driver

sys.path.insert(0, str(Path(__file__).parents[1] / "gemm"))
from triton_compilation import _compile_only, _Device


def main() -> None:
    """Each output, with digits and with zero points of B."""
    driver.set_active(_Device())
    _compile_only()
    from holdfast.ops.int8_gemm.triton import finish

    c, vector = torch.zeros((4, 512), dtype=torch.int32), torch.zeros(576, dtype=torch.int32)
    operands = vector, vector.float(), vector.float()
    for dtype in (torch.uint8, torch.float32, torch.bfloat16):
        out = torch.empty((4, 512), dtype=dtype)
        finish(c, c[:, :3], c[:, 0], operands, vector, out, zero_point=3, relu=False, verify=True)


if __name__ == "__main__":
    main()
