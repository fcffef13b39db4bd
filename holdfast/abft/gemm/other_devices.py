"""Listing of the matrix products that a model computes on devices where nothing is verified."""

import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from holdfast.abft.coverage import SiteCoverage, unverified_device

# Names of aten's products. Without autograd a mode sees some before torch decomposes them.
PRODUCTS = frozenset(
    {
        *("mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot", "matmul"),
        *("linear", "einsum", "outer", "addr", "kron", "_int_mm", "_scaled_mm", "convolution"),
        *("_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "_cudnn_rnn", "lstm", "gru"),
    }
)
WATCHED = 3  # passes to watch on a device if they fail; the first that succeeds is the last
COMPILED = "(every product of compiled code)"
_CPU = frozenset({"cpu"})
ATTENTION = "scaled_dot_product"  # part of the names of all fused kernels


class OtherDevices:
    """Names the products that a model computes elsewhere than on CPU, once for each device.

    A dispatch mode, which changes no result, watches the first forward pass on a device; later
    passes cost a look at the devices of the inputs and of the first parameter.
    """

    def __init__(self, model: nn.Module, paths: dict[nn.Module, str]) -> None:
        self._model, self._paths = model, paths
        self._root, self._watched = paths[model], Counter[str]()  # passes by device
        self._calls: Counter[tuple[str, str, str]] = Counter()  # of a device, path and op
        self._listing: _Listing | None = None
        self._hooks = [
            model.register_forward_pre_hook(_Hook(self.begin), with_kwargs=True),
            model.register_forward_hook(_Hook(self.end, result=True), always_call=True),
        ]

    def begin(self, inputs: tuple[tuple[object, ...], dict[str, object]]) -> None:
        """Watch the pass that begins if it uses a device that was not watched yet."""
        if self._listing is not None:
            return
        args, kwargs = inputs
        candidates = (*args, *kwargs.values(), next(self._model.parameters(), None))
        devices = {each.device.type for each in candidates if isinstance(each, torch.Tensor)}
        if devices <= _CPU:
            return
        new = {each for each in devices - _CPU if self._watched[each] < WATCHED}
        if new and any(map(_is_compiled, self._paths)):  # a mode would keep it from being compiled
            self._calls.update((device, self._root, COMPILED) for device in new)
            self._watched |= dict.fromkeys(new, WATCHED)
        elif new:
            self._watched.update(new)
            self._listing = _Listing(self._paths, self._calls, new)

    def end(self, output: object) -> None:
        """End the watch, if there is one; a pass without a result counts as one that failed."""
        listing = self._listing
        if listing is not None and listing.thread == threading.get_ident():
            self._listing = None
            listing.close()
            if output is not None:
                self._watched |= dict.fromkeys(listing.devices, WATCHED)

    def sites(self) -> list[SiteCoverage]:
        """List the products that were seen; those of backward follow from them."""
        return [
            SiteCoverage(
                f"{path}/{op}/forward",
                False,
                f"{unverified_device(device)}; nor are its gradients",
                calls,
            )
            for (device, path, op), calls in list(self._calls.items())
        ]

    def close(self) -> None:
        """Remove the hooks."""
        self.end(None)
        for hook in self._hooks:
            hook.remove()


def _is_compiled(module: nn.Module) -> bool:
    return module._compiled_call_impl is not None or hasattr(module, "_orig_mod")


class _Hook:
    """Module hook that passes on the inputs or the output of the module."""

    def __init__(self, act: Callable[[Any], None] | None, *, result: bool = False) -> None:
        self._act, self._result = act, result

    def __call__(self, module: nn.Module, args: object, rest: object = None) -> None:
        if self._act is not None and not torch.compiler.is_compiling():
            # Without keywords where another thread protects or leaves during the pass.
            self._act(rest if self._result else (args, rest or {}))

    def __reduce__(self) -> tuple[object, ...]:
        return _Hook, (None,)  # of a copied or unpickled module, which is not protected


class _Listing(TorchDispatchMode):
    """Counts products on other devices than CPU by the module that computes them, until closed."""

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
        name = func._schema.name.split("::")[-1].rstrip("_")
        if name in PRODUCTS or ATTENTION in name:
            tensors = [x for x in pytree.tree_leaves(args) if isinstance(x, torch.Tensor)]
            for device in {each.device.type for each in tensors} - {"cpu"}:
                self._calls[device, self._running[-1], name] += 1
        return func(*args, **(kwargs or {}))

    def close(self) -> None:
        """Stop watching."""
        self.__exit__(None, None, None)
        for hook in self._hooks:
            hook.remove()
