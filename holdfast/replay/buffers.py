"""The buffers of a model, saved before a pass and put back before its repetition.

A buffer is copied only if it may have changed since it was copied last: large ones are copied again
once their version counter has moved, so that a frozen table costs one copy, not one a step. A pass
may also replace, resize, register or delete buffers, as caches that grow with the sequence do. Such
a pass often keeps a number beside them, as in ``self.cached_length = n``; therefore the numbers,
strings and tensors that are attributes of the same module are put back with them.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from holdfast.digest.tensors import tensor_digest

# Smaller buffers are always copied: it is cheap, and changes through ``.data`` count too.
SMALL_BYTES = 2**16
# Number of times that the bits of a large buffer are compared, before its counter is trusted.
PROOFS = 3

Key = tuple[str, str]  # name of the module, and of the buffer in it
# Buffers as they are sent to another rank, each with True if it is saved in ``state_dict``.
Values = dict[Key, tuple[torch.Tensor | None, bool]]

_PLAIN = (bool, int, float, complex, str, type(None), torch.Size, torch.Tensor)


@dataclass(frozen=True)
class _Saved:
    """One buffer: the tensor itself, and a copy of its values.

    Attributes:
        live: The tensor; None if the name is registered without one.
        copy: A copy of its values.
        version: Its version counter when they were copied; None if it has none.
        place: Its address, shape and dtype then.
        proofs: How often the bits were found unchanged with the counter; -1 if they once were not.
        fresh: True if ``copy`` was just made or compared, false if the counter was trusted.
    """

    live: torch.Tensor | None
    copy: torch.Tensor | None
    version: int | None
    place: object
    proofs: int = 0
    fresh: bool = True

    @classmethod
    def of(cls, live: torch.Tensor | None, before: "_Saved | None") -> "_Saved":
        if live is None:
            return cls(None, None, None, None)
        proofs = 0 if before is None or before.live is not live else before.proofs
        if before is not None and before.unmoved(live) and live.nbytes > SMALL_BYTES:
            if proofs >= PROOFS:
                return replace(before, fresh=False)
            if proofs >= 0 and _same_bits(live, before.copy):
                return replace(before, proofs=proofs + 1)
            proofs = -1
        return cls(live, live.detach().clone(), _version(live), _place(live), proofs)

    def unmoved(self, live: torch.Tensor) -> bool:
        """Return true if autograd has seen no change since the copy was made."""
        version = _version(live)
        known = version is not None and version == self.version
        return self.live is live and known and self.place == _place(live)

    def put_back(self) -> bool:
        """Put the values back; return false if they changed without autograd's knowledge.

        In this case nothing is put back, as the copy may be older than the pass.
        """
        live, copy = self.live, self.copy
        if live is None or copy is None:
            return True
        if not self.fresh and self.unmoved(live):
            return _same_bits(live, copy)
        _copy_into(live, copy)
        return True


# What was saved latest of each model, so that what has not changed is not copied again.
_latest: WeakKeyDictionary[nn.Module, dict[Key, _Saved]] = WeakKeyDictionary()


class Buffers:
    """The buffers of a model at one moment.

    Args:
        model: The model. The ``DistributedDataParallel`` around it does not count.
    """

    def __init__(self, model: nn.Module) -> None:
        inner = unwrapped(model)
        before, made = _latest.get(inner, {}), cast(dict[int, _Saved], {})
        self._saved: dict[Key, _Saved] = {}
        self._persistent: dict[Key, bool] = {}
        self._attributes: dict[str, dict[str, Any]] = {}
        for path, module in inner.named_modules():
            self._attributes[path] = vars(module).copy()
            for name, live in module._buffers.items():
                saved = made.get(id(live)) or _Saved.of(live, before.get((path, name)))
                self._saved[path, name] = made[id(live)] = saved
                self._persistent[path, name] = name not in module._non_persistent_buffers_set
        _latest[inner] = self._saved

    def values(self) -> Values:
        """Return the copies; they are not to be changed."""
        return {key: (saved.copy, self._persistent[key]) for key, saved in self._saved.items()}

    def restore(self, model: nn.Module) -> list[str]:
        """Put the buffers back as they were: registered, of the same shape, with the same values.

        Numbers, strings and tensors that are attributes of modules, such as counters, are restored
        as well.

        Returns:
            The names of buffers that have changed without autograd's knowledge, through ``.data``
            or by a fault. They are left as they are.
        """
        modules = dict(unwrapped(model).named_modules())
        _delete_others(modules, self._saved)
        for (path, name), saved in self._saved.items():
            module = modules[path]
            if module._buffers.get(name) is not saved.live or name not in module._buffers:
                _register(module, name, saved.live, persistent=self._persistent[path, name])
        for path, before in self._attributes.items():
            _restore_attributes(modules[path], before)
        return [".".join(filter(None, key)) for key, s in self._saved.items() if not s.put_back()]


def put_values(model: nn.Module, values: Values) -> None:
    """Give a model buffers of these values, for example those of another rank."""
    modules = dict(unwrapped(model).named_modules())
    _delete_others(modules, values)
    for (path, name), (value, persistent) in values.items():
        live = modules[path]._buffers.get(name)
        if value is not None and live is not None:
            _copy_into(live, value)
        else:
            fresh = None if value is None else value.detach().clone()
            _register(modules[path], name, fresh, persistent=persistent)


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model without the ``DistributedDataParallel`` around it."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def _delete_others(modules: Mapping[str, nn.Module], wanted: Mapping[Key, object]) -> list[Key]:
    """Delete the buffers that are not among those wanted; return their keys."""
    registered = [(path, name) for path, module in modules.items() for name in module._buffers]
    extra = [key for key in registered if key not in wanted]
    for path, name in extra:
        delattr(modules[path], name)
    return extra


def _register(
    module: nn.Module, name: str, value: torch.Tensor | None, *, persistent: bool
) -> None:
    """Register a buffer, in the place of the one or of the attribute that has its name."""
    if name not in module._buffers:
        vars(module).pop(name, None)
    module._buffers[name] = value
    change = set.discard if persistent else set.add
    change(module._non_persistent_buffers_set, name)


def _restore_attributes(module: nn.Module, before: Mapping[str, Any]) -> None:
    """Restore numbers, strings and tensors that are attributes of a module."""
    for name, value in _changed(vars(module), before):
        if name in before:
            vars(module)[name] = before[name]
        elif isinstance(value, _PLAIN):
            del vars(module)[name]
    for name, value in before.items():
        if isinstance(value, _PLAIN):
            vars(module).setdefault(name, value)


def _changed(now: Mapping[str, Any], before: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the plain attributes that are not the ones of before."""
    for name, value in list(now.items()):
        old = before.get(name)
        if value is not old and isinstance(value, _PLAIN) and isinstance(old, _PLAIN):
            yield name, value


def _copy_into(live: torch.Tensor, value: torch.Tensor) -> None:
    with torch.inference_mode(live.is_inference()), torch.no_grad():
        if (live.shape, live.dtype, live.device) == (value.shape, value.dtype, value.device):
            live.copy_(value)
        else:
            live.data = value.detach().clone()


def _version(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def _place(tensor: torch.Tensor) -> object:
    return tensor.data_ptr(), tensor.shape, tensor.dtype, tensor.device


def _same_bits(one: torch.Tensor, other: torch.Tensor | None) -> bool:
    # Of a copy, because memory that NumPy has seen cannot be resized by a later pass.
    return other is not None and tensor_digest(one.detach().clone()) == tensor_digest(other)
