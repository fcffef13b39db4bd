"""Listing of the matrix products that a model computes where nothing is verified.

These are the products on other devices than CPU, and those inside the operators of other packages
on any device.
"""

import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from holdfast.abft.coverage import SiteCoverage, unverified_device
from holdfast.abft.gemm.devices import CPU, PRODUCTS, intercept, is_intercepted
from holdfast.abft.gemm.unverified_ops import (
    OPAQUE,
    kernel_packages_loaded,
    opaque_functions,
    opaque_name,
    opaque_ops_loaded,
    product_name,
)

WATCHED = 3  # passes to watch on a device if they fail; the first that succeeds is the last
COMPILED = "(every product of compiled code)"


_elsewhere = threading.local()


@contextmanager
def listed_elsewhere() -> Iterator[None]:
    """Leave this thread's products out of the listing: who opens the context lists them."""
    _elsewhere.inside = True
    try:
        yield
    finally:
        _elsewhere.inside = False


class OtherDevices:
    """Names the products that a model computes where none is verified, once for each device.

    A dispatch mode, which changes no result, watches the first forward pass on a device; later
    passes cost a look at the devices of the inputs and of the first parameter or buffer. On CPU it
    does so only if operators of other packages are loaded. The autograd functions of such packages
    are found in the graph of the first output that has one.
    """

    def __init__(self, model: nn.Module, paths: dict[nn.Module, str]) -> None:
        self._model, self._paths = model, paths
        self._root, self._watched = paths[model], Counter[str]()  # passes by device
        self._done: set[torch.device] = set()  # nothing is to be watched on these any more
        self._owner, self._kind, self._name = _first_tensor(model)
        # Calls by device, path and op; the device of an operator of another package is empty.
        self._calls: Counter[tuple[str, str, str]] = Counter()
        self._walked = False  # the autograd functions that made an output were looked for
        self._listing: _Listing | None = None
        self._closed, self._lock = threading.Event(), threading.Lock()
        self._hooks = [
            model.register_forward_pre_hook(_Hook(self.begin), with_kwargs=True),
            model.register_forward_hook(_Hook(self.end), always_call=True),
        ]

    def begin(self, args: tuple[object, ...], kwargs: dict[str, object] | None = None) -> None:
        """Watch the pass that begins if it uses a device that was not watched yet.

        Torch calls a hook that another thread has just removed, without keyword arguments.
        """
        with torch._C.DisableTorchFunction():  # a mode of the program's sees no call of ours
            candidates = (*args, *(kwargs.values() if kwargs else ()), self._tensor())
            for each in candidates:
                if isinstance(each, torch.Tensor) and each.device not in self._done:
                    self._begin(candidates)
                    break

    def _tensor(self) -> object:
        """Return the first parameter of the model as it is now, or else its first buffer."""
        module: Any = self._model
        try:
            for name in self._owner:
                module = module._modules[name]
            found = getattr(module, self._kind)[self._name]
        except (AttributeError, KeyError):  # the model has none, or was changed
            found = None
        if found is not None:
            return found
        return next(chain(self._model.parameters(), self._model.buffers()), None)

    def _begin(self, candidates: tuple[object, ...]) -> None:
        with self._lock:  # one thread at a time begins to watch
            if not self._closed.is_set() and self._listing is None:
                self._watch(candidates)
            closed = self._closed.is_set()
        if closed:  # by another thread meanwhile
            self._end(None)

    def _watch(self, candidates: tuple[object, ...]) -> None:
        devices = {each.device for each in candidates if isinstance(each, torch.Tensor)}
        new = {each.type for each in devices if self._watched[each.type] < WATCHED}
        if not new:
            self._done |= devices
        for device in devices:  # the model may have been moved there since it was protected
            if device.type in new - {CPU}:
                intercept(device)
        if new == {CPU} and not opaque_ops_loaded():
            self._watched[CPU] += 1
        elif new and any(map(_is_compiled, self._paths)):  # a mode would keep it from compiling
            unseen = (each for each in new - {CPU} if not is_intercepted(each))
            self._calls.update((device, self._root, COMPILED) for device in unseen)
            self._watched |= dict.fromkeys(new, WATCHED)
        elif new:
            self._watched.update(new)
            self._listing = _Listing(self._paths, self._calls, new)

    def end(self, args: object, output: object) -> None:
        """End the watch, if there is one; a pass without a result counts as one that failed."""
        # A thread that watches sees its own listing without the lock.
        if self._listing is not None or (not self._walked and kernel_packages_loaded()):
            with torch._C.DisableTorchFunction():
                self._end(output)

    def _end(self, output: object) -> None:
        if not self._walked:
            functions = opaque_functions(output)
            self._walked = functions is not None
            for name, calls in (functions or {}).items():
                self._calls["", self._root, name] += calls
        with self._lock:
            listing = self._listing
            ours = listing is not None and listing.thread == threading.get_ident()
            self._listing = None if ours else listing
        if listing is not None and ours:
            listing.close()
            if output is not None:
                self._watched |= dict.fromkeys(listing.devices, WATCHED)
            if self._closed.is_set():
                self._hooks[-1].remove()

    def sites(self, listed: Collection[str] = ()) -> list[SiteCoverage]:
        """List the products that were seen; those of backward follow from them.

        Args:
            listed: Reasons for which products of compiled code are listed one by one.
        """
        return [
            SiteCoverage(f"{path}/{op}/forward", False, unverified(device, op), calls)
            for (device, path, op), calls in list(self._calls.items())
            if op != COMPILED or unverified_device(device) not in listed
        ]

    def close(self) -> None:
        """Remove the hooks, the last one with the pass that another thread watches, if one does."""
        self._closed.set()
        self._end(None)
        begin, end = self._hooks
        begin.remove()
        if self._listing is None:
            end.remove()


def unverified(device: str, op: str) -> str:
    """Return the reason to report for a product on a device; for an opaque operator, of none."""
    return f"{unverified_device(device, op)}; nor are its gradients" if device else OPAQUE


def _first_tensor(model: nn.Module) -> tuple[list[str], str, str]:
    """Return where the first parameter is, or the first buffer of a model without parameters.

    Returns:
        The names on the way to its module, the module's dictionary that holds it, and its name.
    """
    for kind in ("_parameters", "_buffers"):
        for path, module in model.named_modules():
            for name, tensor in getattr(module, kind).items():
                if tensor is not None:
                    return path.split(".") if path else [], kind, name
    return [], "_parameters", ""


def _is_compiled(module: nn.Module) -> bool:
    return module._compiled_call_impl is not None or hasattr(module, "_orig_mod")


def _tensors_of(values: object) -> list[torch.Tensor]:
    return [each for each in pytree.tree_leaves(values) if isinstance(each, torch.Tensor)]


def devices_of(values: object) -> set[str]:
    """Return the device types of the tensors in any nesting of lists and dictionaries."""
    return {each.device.type for each in _tensors_of(values)}


def _is_checked(op: Any, name: str, arguments: object) -> bool:
    """Return whether a product is one that the interception of a device wraps.

    Sparse and nested tensors have kernels of their own, and so have products of another dtype than
    their operands.
    """
    tensors = _tensors_of(arguments)
    dense = all(each.layout is torch.strided and not each.is_nested for each in tensors)
    return dense and name in PRODUCTS and op._overloadname in ("default", "out")


class _Hook:
    """Module hook that passes on the inputs of the module, or its inputs and its output."""

    def __init__(self, act: Callable[[Any, Any], None] | None) -> None:
        self._act = act

    def __call__(self, module: nn.Module, args: object, rest: object = None) -> None:
        if self._act is not None and not torch.compiler.is_compiling():
            self._act(args, rest)

    def __reduce__(self) -> tuple[object, ...]:
        return _Hook, (None,)  # of a copied or unpickled module, which is not protected


class _Listing(TorchDispatchMode):
    """Counts products that are not verified by the module that computes them, until closed."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let functions be compiled within the mode; else those without graph breaks would fail."""
        return True

    def __init__(
        self,
        paths: dict[nn.Module, str],
        calls: Counter[tuple[str, str, str]],
        devices: set[str],
    ) -> None:
        super().__init__()
        self._calls, self.devices, self.thread = calls, devices, threading.get_ident()
        self._running = [next(iter(paths.values()))]
        self._hooks = []
        for module, path in list(paths.items())[1:]:
            enter = module.register_forward_pre_hook(partial(self._enter, path))
            leave = module.register_forward_hook(self._leave, always_call=True)
            self._hooks += [enter, leave]
        self.__enter__()

    def _enter(self, path: str, *_: object) -> None:
        self._running.append(path)

    def _leave(self, *_: object) -> None:
        if len(self._running) > 1:
            self._running.pop()

    def __torch_dispatch__(
        self,
        func: Any,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        if getattr(_elsewhere, "inside", False):
            pass
        elif name := opaque_name(func, (args, kwargs)):
            self._calls["", self._running[-1], name] += 1
        elif name := product_name(func):
            checked = _is_checked(func, name, (args, kwargs))
            for device in devices_of((args, kwargs)) - {CPU}:
                if not checked or not is_intercepted(device):
                    self._calls[device, self._running[-1], name] += 1
        return func(*args, **(kwargs or {}))

    def close(self) -> None:
        """Stop watching."""
        self.__exit__(None, None, None)
        for hook in self._hooks:
            hook.remove()
