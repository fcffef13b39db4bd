"""A Guard under FSDP2: ``torchrun --nproc-per-node 2 -m examples.fsdp2 RUN_DIR``."""
