"""A Guard under DDP: ``torchrun --nproc-per-node 2 -m examples.ddp RUN_DIR``."""
