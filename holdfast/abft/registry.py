"""Implementations of operators by device and dtype, in a declared order.

An operator registers its implementations, the preferred one first. :meth:`Operator.select` returns
the first one for a device and dtype, and raises if there is none or the one asked for by name is
unavailable; :func:`report` lists all of them, and why some cannot be used.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import wraps
from importlib.util import find_spec
from typing import Any, Generic, ParamSpec, TypeVar

import torch

from holdfast import native
from holdfast.errors import ConfigError

T = TypeVar("T")
P = ParamSpec("P")


def _always() -> str:
    return ""


def needs_native() -> str:
    """Return why the native core is unavailable, and what to do; empty if it is available."""
    return "" if native.core is not None else native.MISSING


def needs_triton() -> str:
    """Return why Triton's kernels are unavailable, and what to do; empty if they are available."""
    return "" if find_spec("triton") else "needs Triton: pip install 'torch-holdfast[triton]'"


@dataclass(frozen=True)
class Implementation(Generic[T]):
    """One way to compute an operator.

    Attributes:
        name: ``native``, ``reference`` or ``triton``.
        load: Imports and returns the implementation.
        devices, dtypes: Device types and dtypes that it supports; no dtypes means all.
        missing: Returns why it cannot be used now and what to do; empty if it can be used.
        enabled: False for implementations that are registered but never selected.
    """

    name: str
    load: Callable[[], T]
    devices: tuple[str, ...] = ("cpu",)
    dtypes: tuple[torch.dtype, ...] = ()
    missing: Callable[[], str] = _always
    enabled: bool = True

    def serves(self, device: str, dtype: torch.dtype | None) -> bool:
        """Return whether the implementation supports this device type and dtype."""
        fits = dtype is None or not self.dtypes or dtype in self.dtypes
        return device in self.devices and fits

    def obstacle(self) -> str:
        """Return why the implementation cannot be used now; empty if it can."""
        return self.missing() if self.enabled else "registered, not enabled yet"


class Operator(Generic[T]):
    """An operator and its implementations, the preferred one first."""

    def __init__(self, name: str, implementations: Iterable[Implementation[T]]) -> None:
        self.name = name
        self.implementations = tuple(implementations)
        _operators[name] = self

    def select(
        self, device: str = "cpu", dtype: torch.dtype | None = None, *, name: str | None = None
    ) -> T:
        """Return the preferred implementation for a device and dtype, or the one of that name.

        Raises:
            ConfigError: No implementation fits or the named one is unavailable; says what to do.
        """
        obstacles = []
        for each in self.implementations:
            if name not in (None, each.name) or not each.serves(device, dtype):
                continue
            if not (obstacle := each.obstacle()):
                return each.load()
            obstacles.append(f"{each.name}: {obstacle}")
        asked = f"{name or 'implementation'} for {dtype or 'any dtype'} on {device}"
        known = "; ".join(obstacles) or "choose one of " + ", ".join(
            f"{each.name} ({', '.join(each.devices)})" for each in self.implementations
        )
        raise ConfigError(f"{self.name} has no {asked}: {known}")


_operators: dict[str, Operator[Any]] = {}


def native_or_reference(
    name: str,
    native_one: Callable[..., T],
    reference: Callable[P, T],
    on_cuda: Implementation[Callable[..., T]] | None = None,
    device_of: Callable[[Any], torch.device] | None = None,
) -> Callable[P, T]:
    """Register an operator; return a function that calls the implementation to use.

    On CPU the native core's implementation is preferred. ``reference``, in plain torch, gives the
    returned function its signature and docstring. Other devices are served only if ``device_of`` is
    given, which returns the device that the first argument is on; on CUDA ``on_cuda`` serves.
    """
    operator: Operator[Callable[..., T]] = Operator(
        name,
        [
            Implementation("native", lambda: native_one, missing=needs_native),
            Implementation("reference", lambda: reference),
            *([] if on_cuda is None else [on_cuda]),
        ],
    )

    @wraps(reference)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        device = "cpu" if device_of is None else device_of(args[0]).type
        return operator.select(device)(*args, **kwargs)

    return call


@dataclass(frozen=True)
class Row:
    """One registered implementation of an operator, and the reason if it cannot be used."""

    operator: str
    implementation: str
    devices: tuple[str, ...]
    obstacle: str


def report() -> list[Row]:
    """List every implementation of the operators imported so far, in the order of preference."""
    return [
        Row(operator.name, each.name, each.devices, each.obstacle())
        for operator in _operators.values()
        for each in operator.implementations
    ]
