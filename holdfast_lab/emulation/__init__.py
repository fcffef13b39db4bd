"""Emulated faulty devices, with the failure profiles of the unhealthy nodes in the SDC study."""

from holdfast_lab.emulation.device import UnhealthyDevice

__all__ = ["UnhealthyDevice"]
