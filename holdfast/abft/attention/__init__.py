"""Verified attention: fused tiles on a CPU, protection sections, and Triton kernels."""
