"""Checks of the numbers that plans are made from; each returns the value or raises ConfigError."""

from math import inf

from holdfast.errors import ConfigError


def at_least(name: str, value: int, least: int) -> int:
    """Check that a count is not below a bound."""
    if value < least:
        raise ConfigError(f"{name} = {value} must be at least {least}")
    return value


def at_least_0(name: str, value: float) -> float:
    """Check that a number is finite and not negative."""
    if not 0.0 <= value < inf:
        raise ConfigError(f"{name} = {value} must be finite and at least 0")
    return value


def above_0(name: str, value: float) -> float:
    """Check that a number is finite and positive."""
    if not 0.0 < value < inf:
        raise ConfigError(f"{name} = {value} must be finite and above 0")
    return value


def share(name: str, value: float) -> float:
    """Check that a number is between 0 and 1, both included."""
    if not 0.0 <= value <= 1.0:
        raise ConfigError(f"{name} = {value} must be from 0 to 1")
    return value
