"""Hooks of torch that hold their owner weakly, and are not copied with what they hang on."""

import weakref
from collections.abc import Callable
from typing import Any


def weak_hook(method: Callable[..., Any]) -> "_WeakHook":
    """Return a hook that calls a bound method while its object lives, and then does nothing."""
    return _WeakHook(method)


class _WeakHook:
    """Calls a method that it does not keep alive; a copied or unpickled one does nothing."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = weakref.WeakMethod(method)

    def __call__(self, *args: Any) -> Any:
        method = self._method()
        return None if method is None else method(*args)

    def __reduce__(self) -> tuple[object, ...]:
        return _without_owner, ()


def _nothing(*_: object) -> None:
    """Do nothing, as the hook of a copied or unpickled object."""


def _without_owner() -> Callable[..., None]:
    return _nothing
