"""Code that the Triton kernels of all operators share: launching, argument checks, tolerances."""

try:
    import triton  # noqa: F401
except ImportError as error:
    raise ImportError(
        "holdfast's CUDA kernels need Triton 3.6 or newer (Linux): pip install "
        "'torch-holdfast[triton]'; without it products on CUDA are not verified"
    ) from error
