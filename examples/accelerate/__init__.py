"""A loop by Accelerate under a Guard: ``python -m examples.accelerate RUN_DIR``."""
