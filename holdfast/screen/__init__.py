"""Pre-flight screening of a machine's cores and GPUs: loads each, and says healthy or suspect."""
