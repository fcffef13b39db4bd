"""What is measured and shown on a CUDA device, in stages: ``python -m bench.gpu``."""
