"""One file a claim; every run adds a row to ``bench/results/``."""
