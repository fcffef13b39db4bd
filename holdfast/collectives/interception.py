"""Interception of collectives, at the operators ``c10d::…`` by which every wrapper issues them.

What is sent is noted before the kernel runs, and what has arrived by the ``Work`` that is returned,
before anyone reads it. While nobody watches, the kernel is only called.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from holdfast.collectives.transfers import ALL, Transfer

Arrived = Callable[[], None]
Watcher = Callable[[str, dist.ProcessGroup, Callable[[], list[Transfer]]], Arrived | None]

watcher: Watcher | None = None  # is told of each collective; returns what to call when it has ended
striker: Watcher | None = None  # the same, of an injector
pending: "set[Awaited]" = set()
# C++ may wait for one that has ended here, as for the result of a functional collective, and holds
# only the C++ part of it, which would wait for ever without this one.
_ended: "deque[Awaited]" = deque(maxlen=2**14)
_library: Any = None
_lock = threading.RLock()


class Awaited(dist.Work):
    """A collective in flight; calls functions once it has ended, before who waits goes on."""

    def __init__(self, inner: dist.Work, arrived: Sequence[Arrived]) -> None:
        super().__init__()
        self._inner: dist.Work | None = inner
        self._arrived = arrived
        self._future: Any = None
        pending.add(self)  # C++ holds only the C++ part of it

    def wait(self, *timeout: Any) -> bool:
        """Wait until the collective has ended and is noted."""
        try:
            done = self._inner is None or self._inner.wait(*timeout)
        except BaseException:
            self.forget()
            raise
        self._end()
        return done

    def get_future(self) -> Any:
        """Return a future that is complete once the collective is noted."""
        if self._future is None and self._inner is not None:
            self._future = self._inner.get_future().then(self._end)
        return self._future

    def _end(self, future: Any = None) -> Any:
        with _lock:
            arrived, self._arrived = self._arrived, ()
            for each in arrived:
                each()
            self.forget()
        return future and future.value()

    def forget(self) -> None:
        """Note nothing of it any more."""
        with _lock:
            self._arrived = ()
            if self in pending:
                pending.discard(self)
                _ended.append(self)

    def is_completed(self) -> bool:
        """Return whether the collective has ended, and is noted."""
        done = self._inner is None or self._inner.is_completed()
        if done:
            self._end()
        return done

    def synchronize(self) -> None:
        """Have the current stream wait for the collective, and note it."""
        if self._inner is not None:
            self._inner.synchronize()
        self._end()

    def block_current_stream(self) -> None:
        """Have the current stream wait for the collective, and note it."""
        if self._inner is not None:
            self._inner.block_current_stream()
        self._end()

    def result(self) -> Any:
        """Return the tensors of the collective."""
        return [] if self._inner is None else self._inner.result()

    def exception(self) -> Any:
        """Return the error of the collective, if it has one."""
        return None if self._inner is None else self._inner.exception()

    def is_success(self) -> bool:
        """Return whether the collective has ended well."""
        return self._inner is None or self._inner.is_success()


def _listed(given: Any) -> Any:
    return [given] if isinstance(given, torch.Tensor) else given


def _by_rank(given: Any, group: Any, sizes: Sequence[int] = ()) -> dict[int, torch.Tensor]:
    """Return what belongs to each rank: tensors of a list, or parts of one tensor."""
    if isinstance(given, torch.Tensor):
        parts = given.split(list(sizes)) if sizes else given.reshape(-1).tensor_split(group.size())
        return dict(enumerate(parts))
    return dict(enumerate(given))


def _all_reduce(tensors: Any, group: Any, op: Any, *_: Any) -> list[Transfer]:
    return [Transfer({ALL: each}, {ALL: each}, op.op()) for each in tensors]


def _reduce_scatter(outputs: Any, inputs: Any, group: Any, op: Any, *_: Any) -> list[Transfer]:
    pairs = zip(_listed(outputs), _listed(inputs), strict=True)
    return [Transfer(_by_rank(given, group), {ALL: got}, op.op()) for got, given in pairs]


def _all_gather(outputs: Any, inputs: Any, group: Any, *_: Any) -> list[Transfer]:
    pairs = zip(_listed(outputs), _listed(inputs), strict=True)
    return [Transfer({ALL: given}, _by_rank(got, group)) for got, given in pairs]


def _broadcast(tensors: Any, group: Any, root: int, *_: Any) -> list[Transfer]:
    sends = group.rank() == root
    return [Transfer({ALL: each} if sends else {}, {root: each}) for each in tensors]


def _all_to_all(output: Any, given: Any, group: Any, *sizes: Any) -> list[Transfer]:
    got, sent, *_ = *sizes, (), ()  # lists of tensors have none
    return [Transfer(_by_rank(given, group, sent), _by_rank(output, group, got))]


_COALESCED = "reduce_scatter_tensor_coalesced_"
_OPS: dict[Callable[..., list[Transfer]], tuple[str, ...]] = {
    _all_reduce: ("allreduce_", "allreduce_coalesced_"),
    _reduce_scatter: ("reduce_scatter_", "_reduce_scatter_base_", _COALESCED),
    _all_gather: ("allgather_", "_allgather_base_", "allgather_into_tensor_coalesced_"),
    _broadcast: ("broadcast_",),
    _all_to_all: ("alltoall_", "alltoall_base_"),
}


def install() -> None:
    """Put the checks in front of the kernels of all devices, once in a process.

    Raises:
        AttributeError: This torch lacks one of the private functions that this needs.
    """
    global _library
    with _lock:
        if _library is None:
            # No device's kernel is at this key, and every call passes it, also below autograd.
            library = torch.library.Library("c10d", "IMPL")
            kernels = [
                (op, _intercepted(op, transfers)) for transfers, ops in _OPS.items() for op in ops
            ]
            for op, run in kernels:
                library.impl(op, run, "BackendSelect", with_keyset=True)
            _library = library


def _intercepted(op: str, transfers: Callable[..., list[Transfer]]) -> Any:
    # It releases the GIL, for which gloo's threads may wait with locks that the kernel takes.
    kernel, name = getattr(torch.ops.c10d, op).default._op_dk, transfers.__name__[1:]
    keys_of_devices = torch._C.DispatchKey.CPU, torch._C.DispatchKey.CUDA
    below = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)

    def run(keys: Any, *args: Any) -> Any:
        key = (keys & below).highestPriorityTypeId()
        told = [each for each in (watcher, striker) if each and key in keys_of_devices]
        if not told or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
            return kernel(key, *args)
        place = next(n for n, arg in enumerate(args) if isinstance(arg, torch.ScriptObject))
        group = dist.ProcessGroup.unbox(args[place])
        moved = partial(transfers, *args[:place], group, *args[place + 1 :])
        # The watcher notes what is given before a striker changes it, and what is got after.
        arrived = [each for each in [tell(name, group, moved) for tell in told] if each][::-1]
        result = kernel(key, *args)
        *tensors, work = result if isinstance(result, tuple) else (result,)
        if work is not None and arrived:
            work = dist.Work.boxed(Awaited(dist.Work.unbox(work), arrived))
        else:  # it has ended already
            for each in arrived:
                each()
        return (*tensors, work) if tensors else work

    return run
