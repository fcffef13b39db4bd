"""One call of a module, computed again, forward and backward, and compared bit for bit.

Forward is computed again right after the call. In backward, hooks on those autograd nodes that the
call has made note the gradients that come in at its outputs, and digests of those that leave it,
for its inputs and parameters, before they are added to others. After the pass the graph of the
repetition is given the same gradients, and has to return the same.
"""

from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import ExitStack
from copy import deepcopy
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import Node, saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.hooks import RemovableHandle

from holdfast.digest.tensors import tensor_digests, tensors_digest
from holdfast.rng import rng_state, set_rng_state

Gradients = Sequence[torch.Tensor | None]
_sequence_nr: Callable[[], int] = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]
_VALUES = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


class NotRepeatableError(Exception):
    """A module cannot be computed again, for the reason that the message gives."""


class Graph:
    """The autograd nodes that a forward has made since a sequence number, always in one order.

    A cast of a parameter is none of them: autocast keeps it for later calls, whose gradients add up
    there.

    Attributes:
        ends: By place of a node, the numbers of its gradients that leave the module.
        feeds: For each output the place of its node, -1 without one, and its number there.
        inner: Places of output nodes to which nodes of the module pass gradients, too.
        form: What graphs of the same computation have in common.
    """

    def __init__(
        self,
        outputs: Sequence[torch.Tensor] = (),
        since: int = 0,
        parameters: Iterable[nn.Parameter] = (),
    ) -> None:
        order: dict[Node | None, int] = {}
        own = {id(each) for each in parameters}
        todo = [each.grad_fn for each in reversed(outputs)]
        while todo:
            node = todo.pop()
            # Nodes that accumulate gradients have the highest number.
            if not node or node in order or not since <= node._sequence_nr() < 2**63:
                continue
            if not _is_cast(node, own):
                order[node] = len(order)
                todo += [after for after, _ in reversed(node.next_functions)]
        self.nodes = [node for node in order if node]
        edges = [[order.get(f, -2 if f else -1) for f, _ in n.next_functions] for n in self.nodes]
        left = ([n for n, to in enumerate(each) if to == -2] for each in edges)
        self.ends = {place: numbers for place, numbers in enumerate(left) if numbers}
        self.feeds = [(order.get(each.grad_fn, -1), each.output_nr) for each in outputs]
        self.inner = {to for each in edges for to in each} & {p for p, _ in self.feeds if p >= 0}
        self.form = str([edges, self.feeds, [node.name() for node in self.nodes]])


def _is_cast(node: Node, parameters: Container[int]) -> bool:
    """Return whether a node casts one of the parameters, given by their ids."""
    if node.name() != "ToCopyBackward0":
        return False
    return id(getattr(node.next_functions[0][0], "variable", None)) in parameters


class Passed:
    """What passed through a graph in its first backward pass: ``given`` came in, ``left`` left."""

    def __init__(self, graph: Graph, device: str) -> None:
        self.given = dict[int, tuple[torch.Tensor | None, ...]]()  # by place of the node
        self.left = dict[tuple[int, int], str]()  # digests, by place and number
        self.cast, self.differentiable = dict[str, Any](), False
        self.error: Exception | None = None
        self._device, self._ends, self._task = device, graph.ends, -1
        fed, noted = {place for place, _ in graph.feeds if place >= 0}, self._noted
        self.handles: list[RemovableHandle] = [
            *(graph.nodes[p].register_prehook(partial(noted, self._came_in, p)) for p in fed),
            *(graph.nodes[p].register_hook(partial(noted, self._left, p)) for p in graph.ends),
        ]

    def _noted(self, note: Callable[..., None], *args: Any) -> None:
        try:
            note(*args)
        except Exception as error:  # it must not end the backward pass
            self.error = error

    def _came_in(self, place: int, gradients: Gradients) -> None:
        task = torch._C._current_graph_task_id()
        if self._task == -1:
            self._task, self.cast = task, _cast(self._device)
            self.differentiable = torch.is_grad_enabled()
        if task == self._task and place not in self.given:
            self.given[place] = tuple(None if g is None else _copy(g) for g in gradients)

    def _left(self, place: int, inputs: Gradients, _: Gradients) -> None:
        ends = self._ends[place]
        if torch._C._current_graph_task_id() == self._task and (place, ends[0]) not in self.left:
            left = {(place, n): g for n in ends if (g := inputs[n]) is not None}
            self.left |= zip(left, tensor_digests(left.values()), strict=True)


class _Copy(torch.autograd.Function):
    """Copies a tensor with its strides."""

    @staticmethod
    def forward(ctx: object, tensor: torch.Tensor) -> torch.Tensor:
        return _copy(tensor)

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class Call:
    """A call of a module without modules of its own, which is about to run.

    Its inputs are copied if it ``clones`` them, as it has to if the module changes them in place.
    All methods may raise NotRepeatableError.
    """

    def __init__(self, module: nn.Module, inputs: tuple[Any, Any], *, clones: bool) -> None:
        leaves, self._form = tree_flatten(inputs)
        self._live = _tensors("an input", leaves)
        self._needs = [each.requires_grad for each in self._live]
        # What the graph did not make, such as a batch, may be overwritten before backward.
        fixed = [not clones and each.grad_fn is not None for each in self._live]
        held = iter([e.detach() if f else _copy(e) for e, f in zip(self._live, fixed, strict=True)])
        self._leaves = [next(held) if isinstance(e, torch.Tensor) else e for e in leaves]
        self._module, self._before, self._clones = module, _copied(module), clones
        self._rng, self._versions = rng_state(), _versions(self._live)
        self._weights = _versions(list(module.parameters()))
        self._passed: Passed | None = None
        self._since = _sequence_nr()

    def returned(self, output: object) -> None:
        """Note what forward returned, before any hook changes it."""
        self._outputs = _tensors("a result", tree_flatten(output)[0])
        self._after = _versions(self._outputs)
        self._graph = Graph(self._outputs, self._since, self._module.parameters())
        self._device = next((each.device.type for each in self._outputs), "cpu")

    def changed(self) -> str:
        """Return what was changed in place: ``inputs`` by the module, or ``outputs`` by hooks."""
        if _versions(list(self._module.parameters())) != self._weights:
            raise NotRepeatableError("it changes its parameters")
        if not self._clones and _versions(self._live) != self._versions:
            return "inputs"
        return "outputs" if _versions(self._outputs) != self._after else ""

    def forward_digests(self) -> list[object]:
        """Return digests of what forward left: the module's, a repetition's, a second one's.

        If the first two are equal there is no third.
        """
        first = tensors_digest([*self._outputs, *self._module.buffers()])
        return _repeated(_cast(self._device), first, self._forward)

    def _forward(self) -> str:
        set_rng_state(self._rng)
        module, needs, fed = _copied(self._before), iter(self._needs), list(self._leaves)
        for place, each in enumerate(fed):
            if isinstance(each, torch.Tensor):
                fed[place] = each.detach().requires_grad_(next(needs))
        self._wanted = [e for e in (*fed, *module.parameters()) if getattr(e, "requires_grad", 0)]
        if self._clones:
            fed = [_Copy.apply(e) if isinstance(e, torch.Tensor) else e for e in fed]
        (args, kwargs), since = tree_unflatten(fed, self._form), _sequence_nr()
        self._again = _tensors("a result", tree_flatten(module.forward(*args, **kwargs))[0])
        self._graph_again = Graph(self._again, since, module.parameters())
        return tensors_digest([*self._again, *module.buffers()])

    def watch_backward(self) -> bool:
        """Prepare the comparison of backward; return False if the graphs have different forms."""
        graph, self._graph = self._graph, Graph()
        self._outputs, self._live, self._leaves = [], [], []
        same = graph.form == self._graph_again.form
        if graph.ends and self._wanted and same:
            self._passed = Passed(graph, self._device)
        else:
            self._again, self._graph_again = [], Graph()
        return same

    @property
    def is_watched(self) -> bool:
        """Whether backward is to be compared."""
        return self._passed is not None

    def has_passed(self) -> bool:
        """Return whether gradients have come in at its outputs, if backward is compared at all."""
        return self._passed is not None and bool(self._passed.given)

    def backward_digests(self) -> list[object]:
        """Return digests of the gradients that left, as ``forward_digests``, after the pass."""
        first = self._passed
        assert first is not None
        found = _repeated(first.cast, first.left, partial(self._backward, first))
        first.given.clear()
        return found

    def _backward(self, first: Passed) -> dict[tuple[int, int], str]:
        graph, given = self._graph_again, first.given
        for place in graph.inner & given.keys():
            # Its gradient is the sum of what comes from within and from outside of the module.
            graph.nodes[place].register_prehook(partial(lambda values, _: values, given[place]))
        again, more = Passed(graph, self._device), first.differentiable
        # A tensor that is returned twice is fed once: its gradient is the sum of both already.
        again_of = dict(zip(graph.feeds, self._again, strict=True))
        sums = {(p, n): g for p, n in again_of if p in given and (g := given[p][n]) is not None}
        outputs = [again_of[each] for each in sums]
        torch.autograd.grad(outputs, self._wanted, [*sums.values()], True, more, allow_unused=True)
        for handle in again.handles:
            handle.remove()
        for error in filter(None, (first.error, again.error)):
            raise error
        if first.left.keys() - again.left.keys():
            raise NotRepeatableError("its repetition has fewer gradients")
        # A pass may leave out gradients that nobody asked for.
        return first.left | {k: value for k, value in again.left.items() if k in first.left}


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy with the strides and the gaps of a tensor: some kernels round by them."""
    held = tensor.detach()
    copy = torch.empty_strided(held.shape, held.stride(), dtype=held.dtype, device=held.device)
    if held.numel():
        length = 1 + sum((n - 1) * s for n, s in zip(held.shape, held.stride(), strict=True))
        copy.as_strided((length,), (1,)).copy_(held.as_strided((length,), (1,)))
    return copy


def _copied(module: nn.Module) -> nn.Module:
    """Return a copy without hooks that shares only the memory of the parameters."""
    held, copy, known = vars(module), object.__new__(type(module)), dict[int, Any]()
    if "forward" in held or any(isinstance(each, nn.Module) for each in held.values()):
        raise NotRepeatableError("it refers to other modules, or its forward was replaced")
    for each in _tensors("a parameter", list(module.parameters())):
        known[id(each)] = each.detach().requires_grad_(each.requires_grad)
    _tensors("a buffer", list(module.buffers()))
    try:
        plain = {name: value for name, value in held.items() if "hook" not in name}
        vars(copy).update(deepcopy(plain, known))
    except Exception as error:
        raise NotRepeatableError(f"it cannot be copied: {error}") from error
    return copy


class _Alone(TorchDispatchMode):
    """Refuses collectives, in which the other ranks would not take part."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace:
            raise NotRepeatableError(f"it calls the collective {func}")
        return func(*args, **(kwargs or {}))


def _repeated(cast: dict[str, Any], first: object, repeat: Callable[[], object]) -> list[object]:
    """Repeat something once, or twice if it differs, apart from random state and other hooks."""
    with ExitStack() as stack:
        stack.callback(set_rng_state, rng_state())
        stack.enter_context(torch.autocast(**cast))
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:  # checkpointing
            stack.enter_context(saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t))
        if dist.is_available() and dist.is_initialized():
            stack.enter_context(_Alone())
        found = [first, repeat()]
        return found if found[0] == found[1] else [*found, repeat()]


def _cast(device: str) -> dict[str, Any]:
    """Return the arguments of the present autocast."""
    dtype, enabled = torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
    return {"device_type": device, "dtype": dtype, "enabled": enabled}


def _versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    return [each._version for each in tensors]


def _tensors(what: str, leaves: Sequence[object]) -> list[torch.Tensor]:
    """Return the tensors among values; other objects, and tensors of other kinds, are refused."""
    for each in leaves:
        plain = type(each) in (torch.Tensor, nn.Parameter, *_VALUES)
        if not plain or (isinstance(each, torch.Tensor) and each.layout != torch.strided):
            raise NotRepeatableError(f"{what} is a {type(each).__name__} that cannot be copied")
        if isinstance(each, torch.Tensor) and each.is_inference():
            raise NotRepeatableError(f"{what} was made in inference mode: writes are not counted")
    return [each for each in leaves if isinstance(each, torch.Tensor)]
