"""Compiles the int8 pass: see compile_only.py."""

import torch
from compile_only import compile_only


def main() -> None:
    """Each output, with digits and with zero points of B."""
    from holdfast.abft.int8_gemm.triton import finish

    compile_only()
    c, vector = torch.zeros((4, 512), dtype=torch.int32), torch.zeros(576, dtype=torch.int32)
    operands = vector, vector.float(), vector.float()
    for dtype in (torch.uint8, torch.float32, torch.bfloat16):
        out = torch.empty((4, 512), dtype=dtype)
        finish(c, c[:, :3], c[:, 0], operands, vector, out, zero_point=3, relu=False, verify=True)


if __name__ == "__main__":
    main()
