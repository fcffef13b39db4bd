"""Lightning's Trainer with ``HoldfastCallback``: ``python -m examples.lightning RUN_DIR``."""
