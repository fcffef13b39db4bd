"""Pre-flight screening of a machine's cores and GPUs: loads each, and says healthy or suspect."""

from holdfast.screen.runner import Request, screen
from holdfast.screen.units import machine_units

__all__ = ["Request", "machine_units", "screen"]
