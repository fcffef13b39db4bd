"""Fault-injection campaigns on a small ResNet: ``python -m examples.injection``."""
